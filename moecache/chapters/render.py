"""From executed chapters to the book.

The pages of the book are gathered in one folder (static pages with their numbers filled in, the table of
claims, the assembled chapters, the reference from the docstrings), Jupyter Book renders them with every
warning an error, the built pages are checked, and only then does the result take the place of the book that
was there.

It does not know how chapters are run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat

from moecache.chapters.assemble import Page, announce, assemble
from moecache.chapters.check_pages import faults
from moecache.chapters.fill import fill
from moecache.chapters.source import find_chapters
from moecache.chapters.study import Job

_STRICT = ("-W", "-n", "--keep-going")
_JUPYTER_BOOK = "import sys; from jupyter_book.cli.main import main; sys.exit(main())"


class BookFailed(RuntimeError):
    """The book could not be built; the message says why."""


def make_book(root: Path, jobs: Sequence[Job], *, is_part: bool = False) -> Path:
    """Build the book from the executed chapters of some jobs.

    Parameters
    ----------
    root : Path
        The clone.
    jobs : sequence of Job
        Chapters that have been run.
    is_part : bool
        Whether chapters are missing: then numbers and links that lead to them may be missing too.

    Returns
    -------
    Path
        The first page.

    Raises
    ------
    BookFailed
        For a warning of the builder, a broken link, a page that loads from the network, an image without
        words.
    ValueError
        If a page needs a value that no chapter gives.
    """
    pages = assemble_chapters(root, jobs)
    sources = gather(root, pages, is_part=is_part)
    site = render(sources, root / "build" / "site", is_strict=not is_part)
    target = root / "book" / "_build" / "html"
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    site.replace(target)
    return target / "index.html"


def assemble_chapters(root: Path, jobs: Sequence[Job]) -> dict[str, Page]:
    """Write the pages of some jobs, and the values of their prose, to ``book/chapters``."""
    folder = root / "book" / "chapters"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pages = {}
    for job in jobs:
        page = assemble(job.chapter, nbformat.read(job.target, as_version=4), job.edition.profile)
        nbformat.write(page.notebook, folder / job.target.name)
        pages[job.chapter.number] = page
    if any(job.edition.results_mode == "stored" for job in jobs):
        for chapter in find_chapters(root / "notebooks").values():
            if chapter.is_pending:
                nbformat.write(announce(chapter), folder / f"{chapter.path.stem}.ipynb")
    values = {number: page.values for number, page in pages.items()}
    (folder / "values.json").write_text(json.dumps(values, indent=1) + "\n")
    return pages


def gather(root: Path, pages: Mapping[str, Page], *, is_part: bool) -> Path:
    """Copy the book's sources to one folder, with the numbers of the static pages filled in."""
    folder = root / "build" / "book"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "book", folder, ignore=shutil.ignore_patterns("_build", "values.json"))
    if not is_part:
        _write_claims(folder, root)
    values = {f"{number}.{name}": value for number, page in pages.items() for name, value in page.values.items()}
    for path in folder.rglob("*.md"):
        name = str(path.relative_to(folder))
        path.write_text(fill(path.read_text(), values, name, missing="(not run)" if is_part else None))
    _write_reference(folder)
    return folder


def render(sources: Path, output: Path, *, is_strict: bool = True) -> Path:
    """Render gathered sources and check the pages; return the folder of HTML."""
    shutil.rmtree(output, ignore_errors=True)
    arguments = ["build", sources, "--path-output", output, "-q", *(_STRICT if is_strict else ())]
    done = _run([sys.executable, "-c", _JUPYTER_BOOK, *arguments])
    site = output / "_build" / "html"
    if done.returncode != 0 or not site.exists():
        raise BookFailed(f"Jupyter Book did not build without warnings:\n{_told(done)}")
    wrong = faults(site) if is_strict else []
    if wrong:
        raise BookFailed("the built pages are not as they must be:\n" + "\n".join(wrong))
    return site


def _write_claims(folder: Path, root: Path) -> None:
    """Write the table of claims over the page that stands for it, where the book has one."""
    if find_spec("moecache.claims") is None or not (folder / "claims.md").exists():
        return
    done = _run([sys.executable, "-m", "moecache.claims"], values=root / "book" / "chapters" / "values.json")
    if done.returncode != 0:
        raise BookFailed(f"the table of claims could not be made:\n{_told(done)}")
    (folder / "claims.md").write_text(done.stdout)


def _write_reference(folder: Path) -> None:
    """Write the pages of the API reference beside their index, where the book has one."""
    if not (folder / "reference" / "README.md").exists():
        return
    done = _run([sys.executable, "-m", "moecache.api_pages", folder / "reference"])
    if done.returncode != 0:
        raise BookFailed(f"the reference could not be written:\n{_told(done)}")


def _run(command: Sequence[Any], values: Path | None = None) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    environment = os.environ | {"NO_COLOR": "1"} | ({} if values is None else {"MOECACHE_VALUES": str(values)})
    return subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environment)


def _told(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return "\n".join(lines[-30:])
