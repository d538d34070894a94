"""Run one chapter: a source goes in, an executed notebook comes out, or nothing.

papermill runs the cells and saves after each, so it writes to another name that becomes the real one only
when every cell has run; a cancelled or failed run leaves no plausible half chapter, only a
``.failed.ipynb`` to look at. Each run is a process of its own with one computing thread. Whatever a chapter
writes to its error stream is a fault: a warning that nobody reads is worth nothing.

It does not know what is stale, what a page looks like, or what the chapter asks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moecache.chapters.source import Chapter, parameters_cell

RECORD_TAG = "record"
_RECORD = "from moecache.chapters.display import record\n\nrecord()"
_TAIL_LINES = 12
_running: set[subprocess.Popen[bytes]] = set()


class ChapterFailed(RuntimeError):
    """A chapter did not run to its end; the message holds its last lines."""


def run_chapter(
    chapter: Chapter,
    parameters: Mapping[str, Any],
    target: Path,
    *,
    results_mode: str,
    position: int = 0,
) -> None:
    """Run a chapter in a process of its own.

    Parameters
    ----------
    chapter : Chapter
    parameters : mapping
        Every parameter's value.
    target : Path
        The executed notebook; there afterwards, or the call has raised.
    results_mode : str
        Which results may be shown, see `moecache.results`.
    position : int
        Line of the terminal for the progress bar.

    Raises
    ------
    ChapterFailed
        With the chapter's number and the last lines of its error.
    """
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    error = target.with_suffix(".error.txt")
    error.unlink(missing_ok=True)
    work = {"source": str(chapter.path), "parameters": dict(parameters), "target": str(target), "position": position}
    command = [sys.executable, "-m", "moecache.chapters.execute", json.dumps(work)]
    environment = kernel_environment(target.parent, results_mode)
    status = _wait_for(command, environment)
    if status != 0:
        told = error.read_text() if error.exists() else f"its process ended with status {status}"
        raise ChapterFailed(f"chapter {chapter.number} ({chapter.path.name}) failed:\n{told}")


def interrupt_all() -> None:
    """Interrupt every chapter that runs now, as the interrupt key would."""
    for process in list(_running):
        process.send_signal(signal.SIGINT)


def _wait_for(command: list[str], environment: Mapping[str, str]) -> int:
    # A group of its own: the interrupt key must not reach it twice, directly and through us.
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
    _running.add(process)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    finally:
        _running.discard(process)


def kernel_environment(folder: Path, results_mode: str) -> dict[str, str]:
    """Return the variables of a chapter's process: one thread, no settings of the user's, no progress bars."""
    own = {
        "IPYTHONDIR": str(folder / ".ipython"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "MOECACHE_RESULTS": results_mode,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "TQDM_DISABLE": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        # Neither a fault of the chapter: a missing optional kernel, and widgets for bars that are not drawn.
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore:IProgress not found",
        "PYTHONHASHSEED": "0",
    }
    return dict(os.environ) | own


def execute(source: Path, parameters: Mapping[str, Any], target: Path, position: int = 0) -> None:
    """Run a source in this process; `run_chapter` does so in one of its own.

    Raises
    ------
    ChapterFailed
        If a cell raises or writes to its error stream.
    """
    import nbformat
    import papermill

    part = target.with_name(f".{target.stem}.part.ipynb")
    start = time.perf_counter()
    try:
        notebook = papermill.execute_notebook(
            _prepared(source),
            part,
            parameters=dict(parameters),
            kernel_name="python3",
            progress_bar=_progress(target.stem, position),
            cwd=source.resolve().parent.parent,
            # The kernel talks over the loopback device only; its word about that would end every progress bar.
            extra_arguments=["--log-level=ERROR"],
            start_timeout=600,  # a busy machine may take minutes to import the libraries
        )
        _check_error_stream(notebook)
        notebook.metadata["moecache"] = {
            "parameters": dict(parameters),
            "seconds": round(time.perf_counter() - start, 1),
            "cpu_seconds": round(_kernel_cpu_seconds(), 1),
        }
        nbformat.write(notebook, part)
        part.replace(target)
    except papermill.exceptions.PapermillExecutionError as fault:
        raise ChapterFailed(_last_lines(fault)) from fault
    finally:
        if part.exists():
            part.replace(target.with_suffix(".failed.ipynb"))


def _prepared(source: Path) -> Any:
    """Return the notebook to run: the source, and the cell that hands over its values and provenance."""
    import jupytext
    import nbformat

    notebook = jupytext.read(source)
    parameters_cell(notebook)
    notebook.cells.append(nbformat.v4.new_code_cell(_RECORD, metadata={"tags": [RECORD_TAG]}))
    notebook.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
    return notebook


def _progress(name: str, position: int) -> Any:
    # `disable=None` is silent where nobody watches; TQDM_DISABLE is meant for the bars inside the chapter.
    return {"desc": f"[moecache] {name}", "position": position, "leave": False, "disable": None, "ncols": 100}


def _check_error_stream(notebook: Any) -> None:
    for place, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                tail = "\n".join(output.text.splitlines()[-_TAIL_LINES:])
                raise ChapterFailed(f"cell {place} wrote to its error stream (a warning counts as a failure):\n{tail}")


def _last_lines(fault: Any) -> str:
    lines = str(fault).strip().splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


def _kernel_cpu_seconds() -> float:
    used = os.times()
    return used.children_user + used.children_system


def main() -> int:
    """Run the work that the only argument describes as JSON."""
    work = json.loads(sys.argv[1])
    target = Path(work["target"])
    try:
        execute(Path(work["source"]), work["parameters"], target, work["position"])
    except KeyboardInterrupt:
        return 130
    except Exception as fault:
        target.with_suffix(".error.txt").write_text(str(fault))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
