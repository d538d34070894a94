"""The pages of the reference as files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from moecache.api_pages.command_line import write_command_line
from moecache.api_pages.contents import PAGES, Part, ReferencePage, find, full_name
from moecache.api_pages.docstrings import read
from moecache.api_pages.objects import Linked, links, write
from moecache.policy import PRESETS, Policy


def write_pages(folder: Path) -> list[Path]:
    """Write every page and return their paths; the folder is made.

    Raises
    ------
    ValueError : a docstring that cannot be read, with the name of what it describes.
    """
    names = [name for page in PAGES for name in page.names]
    linked = links(names)
    # By identity, since a tuple or a number may be equal to a constant by chance.
    constants = {id(value): name for name in names if isinstance(value := find(name), Policy) or value is PRESETS}
    texts = {page.file: page_text(page, linked, constants) for page in PAGES} | {"command_line": write_command_line()}
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (folder / f"{file}.md").write_text(text)
    return [folder / f"{file}.md" for file in texts]


def page_text(page: ReferencePage, linked: Linked, constants: dict[int, str]) -> str:
    """One page's Markdown."""
    parts = [_part_text(part, linked, constants) for part in page.parts]
    return "\n\n".join([f"# {page.title}", page.purpose, *parts]) + "\n"


def _part_text(part: Part, linked: Linked, constants: dict[int, str]) -> str:
    idea = linked(read(import_module(f"moecache.{part.module}")).prose) if part.module else ""
    objects = [write(full_name(name), find(name), linked, constants) for name in part.names]
    return "\n\n".join(filter(None, [f"## {part.heading}", idea, *objects]))
