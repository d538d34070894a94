"""Set up moecache in a fresh clone and run one command of it. Only the standard library is needed.

    python3 make.py study                    every chapter at its quick parameters, then the book
    python3 make.py study --profile full     the same at the full parameters (hours)
    python3 make.py keep                     keep what the last full study measured under data/results
    python3 make.py book                     the book from the stored results; nothing is measured
    python3 make.py test                     style, types and tests
    python3 make.py test-long                the tests that take longer
    python3 make.py lock                     pin the newest versions that fit pyproject.toml
    python3 make.py environment              write environment.yml anew from pyproject.toml
    python3 make.py setup | clean            set up only | remove what was built

Every command first brings the virtual environment `.venv` up to date and does nothing when it already is.
Outside the clone only the user's cache folder is written to.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "moecache-installed.txt"
LOCK = ROOT / "requirements.lock"
EXTRAS = ".[study,test]"
BUILT = ("build", "book/_build", "book/chapters", ".pytask", ".pytest_cache", ".ruff_cache", ".hypothesis")


def main() -> int:
    """Set up, then run the command that was asked for; return its exit status."""
    commands = {
        "setup": lambda rest: 0,
        "study": lambda rest: run_module("moecache.cli", "study", *rest),
        "keep": lambda rest: run_module("moecache.cli", "keep", *rest),
        "book": lambda rest: run_module("moecache.cli", "book", *rest),
        "test": test,
        "test-long": lambda rest: run_module("pytest", "-m", "not gpu", *rest),
        "lock": lock,
        "environment": lambda rest: write_environment(ROOT / "environment.yml"),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("command", choices=[*commands, "clean"])
    asked, rest = parser.parse_known_args()
    if asked.command == "clean":
        return clean()
    try:
        set_up()
        return commands[asked.command](rest)
    except subprocess.CalledProcessError as failed:
        print(f"make.py: this command failed: {' '.join(map(str, failed.cmd))}", file=sys.stderr)
        return failed.returncode or 1
    except KeyboardInterrupt:
        print("\nmake.py: stopped; the same command goes on from here", file=sys.stderr)
        return 130


def set_up() -> None:
    """Make `.venv` hold exactly what the lock file names, unless it does already."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this file is the one that an old Python may meet)
        sys.exit(f"moecache needs Python 3.11 or later, this is {sys.version.split()[0]}: python3.11 make.py ...")
    wanted = _fingerprint()
    if STAMP.exists() and STAMP.read_text() == wanted and _python(VENV).exists():
        return
    say(f"setting up {VENV.relative_to(ROOT)} (once; a few minutes, about 2 GB)")
    if not _python(VENV).exists() or not _is_from_here():
        venv.create(VENV, with_pip=True, clear=True)
    pip("install", "--quiet", "--upgrade", "pip")
    pip("install", "--requirement", str(LOCK))
    pip("install", "--quiet", "--no-deps", "--editable", ".")
    STAMP.write_text(wanted)


def test(rest: list[str]) -> int:
    """Check the style, then the types, then the behaviour."""
    run_module("ruff", "check", ".")
    run_module("ruff", "format", "--check", ".")
    run_module("basedpyright", "--level", "error")
    return run_module("pytest", "--numprocesses", "2", *rest)


def lock(rest: list[str]) -> int:
    """Write requirements.lock from a clean installation of what pyproject.toml asks for."""
    constraints = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["moecache"]["lock_constraints"]
    with tempfile.TemporaryDirectory() as folder:
        fresh, pins = Path(folder, "venv"), Path(folder, "constraints.txt")
        pins.write_text("\n".join(constraints) + "\n")
        venv.create(fresh, with_pip=True)
        run(_python(fresh), "-m", "pip", "install", "--quiet", "--upgrade", "pip")
        run(_python(fresh), "-m", "pip", "install", "--constraint", str(pins), EXTRAS)
        frozen = subprocess.run(
            [_python(fresh), "-m", "pip", "freeze", "--all", "--exclude", "pip", "--exclude", "moecache"],
            check=True, text=True, stdout=subprocess.PIPE,
        ).stdout  # fmt: skip
    # `2.13.0+cpu` names one build of a release; the release alone also fits a machine with a GPU.
    names = sorted((line.partition("+")[0] for line in frozen.splitlines()), key=str.lower)
    header = "# Made by `python3 make.py lock`: every version that the tests were run with.\n"
    _replace(LOCK, header + "\n".join(names) + "\n")
    return 0


def write_environment(path: Path) -> int:
    """Write the conda environment that pyproject.toml describes."""
    run(
        _python(VENV).with_name("pyproject2conda"), "yaml", "--pyproject", str(ROOT / "pyproject.toml"),
        "--extra", "study", "--extra", "test", "--python-include", "infer", "--name", "moecache",
        "--channel", "conda-forge", "--custom-command", "python3 make.py environment",
        "--overwrite", "force", "--output", str(path),
    )  # fmt: skip
    return 0


def clean() -> int:
    """Remove everything that was built, but not the environment and not the stored results."""
    for name in BUILT:
        shutil.rmtree(ROOT / name, ignore_errors=True)
    for path in ROOT.glob("pytask.lock*"):
        path.unlink()
    return 0


def run_module(module: str, *arguments: str) -> int:
    """Run a module of the environment; stop at a failure."""
    say(" ".join(["python -m", module, *arguments]))
    return run(_python(VENV), "-m", module, *arguments)


def run(*command: str | Path) -> int:
    """Run a command in the root of the clone with caches in the user's cache folder."""
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, env=_environment())
    return 0


def pip(*arguments: str) -> int:
    """Run pip of the environment."""
    return run(_python(VENV), "-m", "pip", *arguments)


def say(message: str) -> None:
    """Tell what happens next."""
    print(f"[moecache] {message}", flush=True)


def _environment() -> dict[str, str]:
    """Return the environment variables with every tool's own folder moved into the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moecache"
    folders = {
        "MPLCONFIGDIR": "matplotlib",
        "IPYTHONDIR": "ipython",
        "JUPYTER_CONFIG_DIR": "jupyter/config",
        "JUPYTER_DATA_DIR": "jupyter/data",
        "JUPYTER_RUNTIME_DIR": "jupyter/runtime",
    }
    for name in folders.values():
        (cache / name).mkdir(parents=True, exist_ok=True)
    own = {variable: str(cache / name) for variable, name in folders.items()}
    return own | dict(os.environ) | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _fingerprint() -> str:
    """Describe an installation: what it was made from, for which Python, and where."""
    digest = hashlib.sha256()
    for path in (LOCK, ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()}\n{sys.version}\n{VENV}\n"


def _is_from_here() -> bool:
    """Tell whether `.venv` was made in this folder: its scripts hold its own address."""
    script = VENV / "bin" / "activate"
    return not script.exists() or str(VENV) in script.read_text()


def _python(environment: Path) -> Path:
    on_windows = sys.platform == "win32"
    return environment / ("Scripts/python.exe" if on_windows else "bin/python")


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
