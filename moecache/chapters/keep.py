"""Keep what a full study measured: from this machine's own results to those that are committed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from moecache import results
from moecache.chapters.display import RECORD_TYPE
from moecache.chapters.study import EDITIONS, Job, find_jobs
from moecache.experiments import misses_report
from moecache.frame_file import read_frame
from moecache.stats import unique_documents

MAIN_FIGURE = "which_misses_matter.png"
_MAX_BYTES = 5_000_000


def keep_results(root: Path) -> list[Path]:
    """Copy every result that the last full study used to the stored ones, and remove those that none uses.

    Chapters that `runs.yml` calls pending are left out.

    Raises
    ------
    ValueError
        If a chapter has not been run in full, or a table is too large to be committed.
    """
    jobs = [job for job in find_jobs(root, EDITIONS["full"]) if not job.chapter.is_pending]
    missing = [job.target.stem for job in jobs if not job.target.exists()]
    if missing:
        raise ValueError(f"not run in full yet: {', '.join(missing)}; run `make study PROFILE=full` first")
    stored = root / "data" / "results"
    used = sorted({place for job in jobs for place in _used(job)})
    for place in used:
        _copy(results.own_folder() / place, stored / place)
    for path in sorted(stored.rglob("*.csv")):
        if path.relative_to(stored) not in used:
            path.unlink()
            path.with_suffix(".json").unlink(missing_ok=True)
    return [stored / place for place in used]


def draw_main_figure(root: Path) -> Path:
    """Draw the README's figure from the stored results of chapter 04; returns its path.

    Raises
    ------
    ValueError
        If nothing is stored of that chapter.
    """
    tables = sorted((root / "data" / "results" / "04_misses_that_matter").glob("*.csv"))
    if not tables:
        raise ValueError("nothing is stored of chapter 04; run `make study PROFILE=full` and `make keep` first")
    frame = pd.concat([read_frame(table)[0] for table in tables], ignore_index=True)
    target = root / "book" / MAIN_FIGURE
    misses_report.main_figure(unique_documents(frame)).savefig(target, dpi=120)
    return target


def _used(job: Job) -> Iterator[Path]:
    for cell in json.loads(job.target.read_text())["cells"]:
        for output in cell.get("outputs", []):
            for result in output.get("data", {}).get(RECORD_TYPE, {}).get("results", []):
                yield Path(result["experiment"], result["file"])


def _copy(source: Path, target: Path) -> None:
    size = source.stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"{source.name} has {size} bytes, more than {_MAX_BYTES}: store fewer rows or columns")
    target.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".csv", ".json"):
        shutil.copyfile(source.with_suffix(suffix), target.with_suffix(suffix))
