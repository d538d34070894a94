"""Run the study: every stale chapter, then the book.

pytask decides what is stale by the content of the source, its parameters, the package and the data, and
runs two chapters at a time; one that measures time runs by itself, after the others. There are three
editions: ``quick`` and ``full`` measure on this machine, ``stored`` shows the committed results at the full
parameters and measures nothing. Interrupting stops the chapters that run; those that were complete stay
complete.

It does not know how a notebook is executed or a page rendered.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moecache.chapters import execute
from moecache.chapters.source import Chapter, ChapterError, find_chapters

NUM_WORKERS = 2
_PACKAGE = Path(__file__).resolve().parents[1]
_MACHINERY = ("chapters", "claims", "cli.py", "api_pages")
_positions: queue.SimpleQueue[int] = queue.SimpleQueue()
for _place in range(NUM_WORKERS):
    _positions.put(_place)


@dataclass(frozen=True)
class Edition:
    """A way to run all chapters: the profile of their parameters, and which results they may show."""

    name: str
    profile: str
    results_mode: str


EDITIONS = {
    "quick": Edition("quick", "quick", "own"),
    "full": Edition("full", "full", "own"),
    "stored": Edition("stored", "full", "stored"),
}


@dataclass(frozen=True)
class Job:
    """One chapter to run in one edition."""

    chapter: Chapter
    edition: Edition
    target: Path
    dependencies: tuple[Path, ...]

    @property
    def work(self) -> str:
        """Everything beside files that the outcome depends on, as text that can be hashed."""
        return json.dumps([self.edition.results_mode, self.chapter.values(self.edition.profile)])

    def run(self) -> None:
        """Run the chapter and say how long it took."""
        position = _positions.get()
        try:
            parameters = self.chapter.values(self.edition.profile)
            execute.run_chapter(self.chapter, parameters, self.target, results_mode=self.edition.results_mode, position=position)
            print(f"[moecache] {self.target.stem}: {_seconds(self.target)}", flush=True)
        finally:
            _positions.put(position)


class StudyFailed(RuntimeError):
    """At least one chapter failed; the message names each with its last lines."""


def find_jobs(root: Path, edition: Edition, only: Sequence[str] = ()) -> list[Job]:
    """Return the jobs of an edition: all chapters that it can show, or those whose numbers are given."""
    chapters = find_chapters(root / "notebooks")
    unknown = set(only) - set(chapters)
    if unknown:
        raise ChapterError(f"no chapter {', '.join(sorted(unknown))}; there are {', '.join(chapters)}")
    shown = {n: c for n, c in chapters.items() if not (c.is_pending and edition.results_mode == "stored")}
    without = [number for number in only if number not in shown]
    if without:
        raise ChapterError(f"no full run of chapter {', '.join(without)} is stored yet; `moecache run {without[0]}` measures it in small")
    inputs = tuple(_inputs(root, edition))
    folder = root / "build" / "chapters" / edition.name
    return [
        Job(chapter, edition, folder / f"{chapter.path.stem}.ipynb", (chapter.path, *inputs))
        for number, chapter in shown.items()
        if not only or number in only
    ]


def jobs_of_this_session() -> list[Job]:
    """Return the jobs that `run_chapters` asked pytask for; by default the quick edition's."""
    asked = {"root": str(_PACKAGE.parent), "edition": "quick", "only": []}
    asked |= json.loads(os.environ.get("MOECACHE_STUDY", "{}"))
    return find_jobs(Path(asked["root"]), EDITIONS[asked["edition"]], asked["only"])


def run_chapters(root: Path, edition: Edition, only: Sequence[str] = ()) -> list[Job]:
    """Run every stale chapter of an edition.

    Raises
    ------
    StudyFailed
        If a chapter failed; the others have been run.
    KeyboardInterrupt
        If the user stopped it.
    """
    jobs = find_jobs(root, edition, only)
    os.environ["MOECACHE_STUDY"] = json.dumps({"root": str(root), "edition": edition.name, "only": list(only)})
    is_alone = [job.chapter.is_alone for job in jobs]
    rounds = [("together", NUM_WORKERS)] * (not all(is_alone)) + [("alone", 1)] * any(is_alone)
    with _stopping_chapters():
        failures = [told for marker, num_workers in rounds for told in _build(root, marker, num_workers)]
    if failures:
        raise StudyFailed("\n\n".join(failures))
    _report(jobs)
    return jobs


def _inputs(root: Path, edition: Edition) -> Iterator[Path]:
    """Return what every chapter may depend on: the package without its showing parts, and the data."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.relative_to(_PACKAGE).parts[0] not in _MACHINERY:
            yield path
    yield _PACKAGE / "chapters" / "display.py"
    for path in sorted((root / "data").rglob("*")):
        is_result = "results" in path.relative_to(root / "data").parts
        if path.is_file() and (edition.results_mode == "stored" or not is_result):
            yield path


def _build(root: Path, marker: str, num_workers: int) -> list[str]:
    """Let pytask run the tasks with a marker; return what failed."""
    import pytask

    tasks = root / "notebooks" / "task_chapters.py"
    _forget(tasks)
    session = pytask.build(
        paths=tasks,
        marker_expression=marker,
        n_workers=num_workers,
        parallel_backend="threads",
        capture="no",
        verbose=0,
        show_traceback=False,
        disable_warnings=True,
    )
    return list(_failures(session))


def _forget(path: Path) -> None:
    """Have a module of tasks imported anew: pytask takes one that it has imported and collected already as one without tasks."""
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(path)]:
        del sys.modules[name]


def _failures(session: Any) -> Iterator[str]:
    for report in [*session.collection_reports, *session.execution_reports]:
        if report.exc_info is not None and "SKIP" not in str(report.outcome):
            yield str(report.exc_info[1])


@contextmanager
def _stopping_chapters() -> Iterator[None]:
    """Pass an interruption on to the running chapters, whoever sent it, and raise it here when they have ended."""
    stopped: list[int] = []

    def stop(number: int, frame: Any) -> None:
        stopped.append(number)
        execute.interrupt_all()
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if stopped:
            raise KeyboardInterrupt


def _report(jobs: Sequence[Job]) -> None:
    for job in jobs:
        used, budget = _run_of(job.target)["cpu_seconds"], job.chapter.budgets_seconds[job.edition.profile]
        if used > budget and job.edition.results_mode != "stored":
            print(f"[moecache] {job.target.stem} took {used:.0f} s of processor, its budget is {budget:.0f} s")
    sys.stdout.flush()


def _seconds(target: Path) -> str:
    run = _run_of(target)
    return f"done in {run['seconds']:.0f} s ({run['cpu_seconds']:.0f} s of processor)"


def _run_of(target: Path) -> Mapping[str, Any]:
    return json.loads(target.read_text())["metadata"]["moecache"]
