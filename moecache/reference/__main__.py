"""`python -m moecache.reference {texts,tokenizer,train}`: make a reference model again, step by step."""

from __future__ import annotations

import argparse

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
    return parser


def main() -> None:
    """Run one command."""
    arguments = _parser().parse_args()
    if arguments.command == "texts":
        from moecache.reference.texts import build_texts

        build_texts(write_manifest=arguments.write_manifest)
    elif arguments.command == "tokenizer":
        from moecache.reference.tokenizer import make_tokenizer

        make_tokenizer(MODELS_FOLDER / "reference-512" / "tokenizer.json")
    elif arguments.command == "train":
        from moecache.reference.train import train

        train(int(arguments.tokens), decay_fraction=arguments.branch_decay)


if __name__ == "__main__":
    main()
