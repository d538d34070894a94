"""`python -m moecache.reference {texts,tokenizer,train,export,evaluate,record}`: make a reference model again, step by step."""

from __future__ import annotations

import argparse
import json

from moecache.reference.settings import MODELS_FOLDER


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m moecache.reference", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts", help="build the texts from the pinned packages and check them")
    texts.add_argument("--write-manifest", action="store_true", help="write the manifest instead of checking it")
    commands.add_parser("tokenizer", help="train the tokenizer on the training texts")
    train = commands.add_parser("train", help="train, or go on training from the last checkpoint")
    train.add_argument("--tokens", type=float, default=40e6, help="stop after so many tokens (default 40e6)")
    train.add_argument("--branch-decay", type=float, metavar="FRACTION", help="branch off with a falling rate")
    export = commands.add_parser("export", help="write a run's weights and card into a model folder")
    export.add_argument("--run", required=True, help="training run, for example reference-512-decay-1300")
    export.add_argument("--note", action="append", default=[], help="a line for the card's notes; may be repeated")
    evaluate = commands.add_parser("evaluate", help="held-out loss per domain, tasks solved, routing figures")
    record = commands.add_parser("record", help="record a router trace of held-out documents")
    record.add_argument("--out", required=True, help="file to write (.safetensors)")
    for command, num_documents in ((evaluate, 175), (record, 35)):
        command.add_argument("--documents", type=int, default=num_documents, help="number of held-out documents")
    for command in (export, evaluate, record):
        command.add_argument("--directory", help="model folder (default data/models/reference-512)")
    return parser


def _texts(arguments: argparse.Namespace) -> None:
    from moecache.reference.texts import build_texts

    build_texts(write_manifest=arguments.write_manifest)


def _tokenizer(_arguments: argparse.Namespace) -> None:
    from moecache.reference.tokenizer import make_tokenizer

    make_tokenizer(MODELS_FOLDER / "reference-512" / "tokenizer.json")


def _train(arguments: argparse.Namespace) -> None:
    from moecache.reference.train import train

    train(int(arguments.tokens), decay_fraction=arguments.branch_decay)


def _export(arguments: argparse.Namespace) -> None:
    from moecache.reference.export import export, write_card

    print(f"weights in {export(arguments.run, directory=arguments.directory)}")
    print(f"card in {write_card(directory=arguments.directory, notes=arguments.note)}")


def _evaluate(arguments: argparse.Namespace) -> None:
    from moecache.reference.evaluate import evaluate

    print(json.dumps(evaluate(directory=arguments.directory, num_documents=arguments.documents), indent=1))


def _record(arguments: argparse.Namespace) -> None:
    from moecache.record import record
    from moecache.reference import held_out_documents, load_model

    documents = held_out_documents(arguments.documents, directory=arguments.directory)
    source = {key: [getattr(d, key) for d in documents] for key in ("name", "domain", "cluster")}
    model = load_model(directory=arguments.directory)
    record(model, [d.tokens for d in documents], progress=True, source={"documents": source}).save(arguments.out)
    print(f"trace of {len(documents)} documents in {arguments.out}")


COMMANDS = {
    "texts": _texts,
    "tokenizer": _tokenizer,
    "train": _train,
    "export": _export,
    "evaluate": _evaluate,
    "record": _record,
}


def main() -> None:
    """Run one command; a mistake of the caller is answered in one line."""
    arguments = _parser().parse_args()
    try:
        COMMANDS[arguments.command](arguments)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
