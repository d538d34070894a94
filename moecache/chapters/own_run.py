"""One chapter with parameters of one's own, as one page that stands by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import nbformat

from moecache.chapters.assemble import assemble
from moecache.chapters.execute import run_chapter
from moecache.chapters.page import to_html
from moecache.chapters.source import Chapter, ChapterError
from moecache.frame_file import replace_file


def run_with(chapter: Chapter, given: Mapping[str, str], profile: str, target: Path, folder: Path) -> Path:
    """Run a chapter with changed parameters and write its page.

    Parameters
    ----------
    chapter : Chapter
    given : mapping of str to str
        Parameters as words of the command line; the others are the profile's.
    profile : str
        ``quick`` or ``full``.
    target : Path
        The page; written when it is complete.
    folder : Path
        Where the executed notebook goes.

    Raises
    ------
    ChapterError
        For a parameter that does not exist or has another type; the message lists those that exist.
    ChapterFailed
        If the chapter did not run to its end.
    """
    if not target.parent.is_dir():
        raise ChapterError(f"there is no folder {target.parent} for {target.name}: make it first")
    known = {parameter.name: parameter for parameter in chapter.parameters}
    # An unknown name goes on as it is: `values` says which names there are.
    changes = {name: known[name].read(text) if name in known else text for name, text in given.items()}
    parameters = chapter.values(profile, changes)
    mark = hashlib.sha256(json.dumps(parameters).encode()).hexdigest()[:8]
    executed = folder / f"{chapter.path.stem}-{mark}.ipynb"
    run_chapter(chapter, parameters, executed, results_mode="auto")
    label = profile if parameters == chapter.values(profile) else "own"
    page = assemble(chapter, nbformat.read(executed, as_version=4), label)
    replace_file(target, to_html(page.notebook, chapter.title))
    return target
