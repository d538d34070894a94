"""The store of results: measuring and showing are apart.

A chapter never measures by itself. It names an experiment, every parameter that its numbers depend on, and
the function that measures; the store returns the table, from disk where the very same question has been
answered before. The key of an answer is a hash of the experiment's name, its parameters, the version of the
kernel, and the hashes of the model and texts that went in. A changed parameter is another key, so it can
never show an old number.

There are two places. *Stored* results are committed with the study: a full run's tables, which the book can
show on a machine that could not have measured them. *Own* results are what this machine measured; they are
never committed, and an own result is measured again as soon as the code that measures has changed. The
environment variable ``MOECACHE_RESULTS`` says which may be shown:

=========  ========================  ===========================
mode       looks in                  when nothing is there
=========  ========================  ===========================
`auto`     own, then stored          measures, keeps it as own
`own`      own                       measures, keeps it as own
`stored`   stored                    fails, and says how to get it
=========  ========================  ===========================

It does not know what an experiment is, nor how a table is shown.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from moecache.frame_file import read_frame, write_frame
from moecache.provenance import provenance

MODES = ("auto", "own", "stored")
_PACKAGE = Path(__file__).resolve().parent
_SHOWING = ("chapters", "claims", "cli.py", "figures", "stats")
_used: list[Result] = []


class MissingResult(ValueError):
    """A stored result was asked for that nobody has stored."""


@dataclass(frozen=True)
class Result:
    """The answer to one experiment.

    Attributes
    ----------
    experiment : str
    key : str
        Hash of everything the answer depends on, 64 hexadecimal digits.
    frame : pandas.DataFrame
        The measured rows, tidy.
    provenance : dict
        Versions, commit, machine, device, date and seconds of the measurement.
    is_loaded : bool
        Whether the answer was read from disk.
    path : Path
        The table on disk.
    """

    experiment: str
    key: str
    frame: pd.DataFrame
    provenance: dict[str, Any]
    is_loaded: bool
    path: Path


def load_or_run(
    experiment: str,
    parameters: Mapping[str, Any],
    function: Callable[[], pd.DataFrame],
    *,
    inputs: Mapping[str, str] | None = None,
    is_part: bool = False,
) -> Result:
    """Return the table of an experiment, measured only when it is not there yet.

    Parameters
    ----------
    experiment : str
        Lower-case letters, digits and underscores.
    parameters : mapping
        Everything the numbers depend on: JSON types, numpy scalars and arrays, or objects with
        ``to_dict()`` such as a policy.
    function : callable
        Measures; takes nothing and returns a tidy table with the default index.
    inputs : mapping, optional
        Content hashes of what goes in, such as ``{"model": ..., "texts": ...}``.
    is_part : bool
        Whether this is a piece of a larger result: kept on this machine, so that an interrupted measurement
        goes on from there, but not told by `used`.

    Returns
    -------
    Result

    Raises
    ------
    MissingResult
        In mode ``stored`` when no such result is stored.
    DamagedFile
        If the files of this result are incomplete or were changed.
    ValueError
        For a wrong name, mode, parameter or table.
    """
    question = describe(experiment, parameters, inputs)
    code = _code_of(function)
    found = _found(question, code)
    if found is None and _mode() == "stored":
        raise MissingResult(_missing(question))
    result = _run(question, function, code) if found is None else found
    return result if is_part else _noted(result)


def find(
    experiment: str, parameters: Mapping[str, Any], function: Callable[[], pd.DataFrame], *, inputs: Mapping[str, str] | None = None
) -> Result | None:
    """Return what `load_or_run` would return where it is there already, and None where it is not; nothing is measured."""
    found = _found(describe(experiment, parameters, inputs), _code_of(function))
    return None if found is None else _noted(found)


def describe(experiment: str, parameters: Mapping[str, Any], inputs: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a result's key is made from, and the key."""
    from moecache.kernel import KERNEL_VERSION

    if not re.fullmatch(r"[a-z0-9_]+", experiment):
        raise ValueError(f"experiment {experiment!r}: use lower-case letters, digits and underscores")
    question = {
        "experiment": experiment,
        "parameters": _plain(parameters, "parameters"),
        "kernel_version": int(KERNEL_VERSION),
        "inputs": {name: str(value) for name, value in (inputs or {}).items()},
    }
    text = json.dumps(question, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return question | {"key": hashlib.sha256(text.encode()).hexdigest()}


def used() -> tuple[Result, ...]:
    """Return the results that this process has asked for so far, in order."""
    return tuple(_used)


def stored_folder() -> Path | None:
    """Return where committed results are, or None outside a clone."""
    root = _PACKAGE.parent
    return root / "data" / "results" if (root / "pyproject.toml").exists() else None


def own_folder() -> Path:
    """Return where this machine's own results are kept (``MOECACHE_OWN_RESULTS`` overrides it)."""
    chosen = os.environ.get("MOECACHE_OWN_RESULTS")
    if chosen:
        return Path(chosen)
    if stored_folder() is not None:
        return _PACKAGE.parent / "build" / "results"
    from platformdirs import user_cache_path

    return user_cache_path("moecache") / "results"


def _mode() -> str:
    mode = os.environ.get("MOECACHE_RESULTS", "auto")
    if mode not in MODES:
        raise ValueError(f"MOECACHE_RESULTS is {mode!r}: use one of {', '.join(MODES)}")
    return mode


def _folders(mode: str) -> list[Path]:
    stored = [] if stored_folder() is None else [stored_folder()]
    folders = {"auto": [own_folder(), *stored], "own": [own_folder()], "stored": stored}
    return [folder for folder in folders[mode] if folder is not None]


def _path(folder: Path, question: Mapping[str, Any]) -> Path:
    return folder / question["experiment"] / f"{question['key'][:16]}.csv"


def _found(question: Mapping[str, Any], code: str) -> Result | None:
    """Look for a result in every place that may be shown."""
    for folder in _folders(_mode()):
        found = _load(folder, question, code if folder == own_folder() else None)
        if found is not None:
            return found
    return None


def _load(folder: Path, question: Mapping[str, Any], code: str | None) -> Result | None:
    """Read a result; where `code` is given, only one that was measured by that code."""
    path = _path(folder, question)
    try:
        frame, header = read_frame(path)
    except FileNotFoundError:
        return None
    if header["key"] != question["key"] or (code is not None and header["code"] != code):
        return None
    return Result(question["experiment"], question["key"], frame, header["provenance"], True, path)


def _run(question: Mapping[str, Any], function: Callable[[], pd.DataFrame], code: str) -> Result:
    start = time.perf_counter()
    frame = function()
    about = provenance(seconds=time.perf_counter() - start)
    if not isinstance(frame, pd.DataFrame):
        raise ValueError(f"{question['experiment']}: the function must return a DataFrame, got {type(frame).__name__}")
    path = _path(own_folder(), question)
    write_frame(path, frame, {**question, "code": code, "provenance": about})
    # Read back: what is shown now is what will be shown from the file.
    return Result(question["experiment"], question["key"], read_frame(path)[0], about, False, path)


def _noted(result: Result) -> Result:
    if all(result.key != other.key for other in _used):
        _used.append(result)
    return result


def _missing(question: Mapping[str, Any]) -> str:
    parameters = json.dumps(question["parameters"], sort_keys=True)
    return (
        f"no stored result of {question['experiment']!r} for {parameters} "
        f"(kernel {question['kernel_version']}, inputs {question['inputs']}): measure it with "
        "`python3 make.py study --profile full` and store it with `python3 make.py keep`, "
        "or set MOECACHE_RESULTS=auto to measure it where it is asked for"
    )


def _plain(value: Any, where: str) -> Any:
    """Turn a parameter into JSON types, or say which one has no such form."""
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict(), where)
    if isinstance(value, Mapping):
        return {_name(name, where): _plain(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise ValueError(f"{where} is nan, which equals nothing: use None")
        return "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{where} is a {type(value).__name__}: use numbers, strings, lists, dicts or a policy")


def _name(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{where} has the name {name!r}: names must be strings")
    return name


def _code_of(function: Callable[..., Any]) -> str:
    """Hash the code that measures: the package without its showing parts, and the function's own lines."""
    try:
        lines = inspect.getsource(function)
    except (OSError, TypeError):
        lines = ""
    return hashlib.sha256((_package_code() + lines).encode()).hexdigest()


@cache
def _package_code() -> str:
    files = sorted(path for path in _PACKAGE.rglob("*.py") if not _is_showing(path))
    return hashlib.sha256("".join(_meaning(path.read_text()) for path in files).encode()).hexdigest()


def _is_showing(path: Path) -> bool:
    """Whether a module only shows what others measured."""
    return path.relative_to(_PACKAGE).parts[0] in _SHOWING or path.name.endswith("_report.py")


def _meaning(source: str) -> str:
    """Return a module's code without comments and docstrings, those of attributes too: a better explanation measures nothing anew."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
