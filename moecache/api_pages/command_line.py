"""The page of the command line: what `moecache --help` and the help of each subcommand say."""

from __future__ import annotations

import argparse
from functools import partial

from moecache.cli import parsers

WIDTH = 88  # columns of a block of code on a page


def write_command_line() -> str:
    """The page's Markdown."""
    whole, *others = parsers().items()
    parts = [
        "# Command line",
        "Each command says the same itself, with `--help`. Commands that need notebooks or stored results run in a clone.",
        _block(whole[1]),
        *(f"## moecache {name}\n\n{_block(parser)}" for name, parser in others),
    ]
    return "\n\n".join(parts) + "\n"


def _block(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = partial(argparse.HelpFormatter, width=WIDTH)
    return f"```text\n{parser.format_help().strip()}\n```"
