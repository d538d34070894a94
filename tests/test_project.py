"""The project's own files agree with each other, and the set-up does only what is needed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib

import pytest

from moecache.chapters.source import find_chapters


@pytest.fixture(scope="module")
def make(root):
    """Return make.py as a module."""
    spec = importlib.util.spec_from_file_location("make", root / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pyproject(root):
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pinned(root):
    lines = [line for line in (root / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_conda_environment_is_what_pyproject_describes(make, root, tmp_path, monkeypatch):
    monkeypatch.setattr(make, "VENV", type(root)(sys.prefix))
    make.write_environment(tmp_path / "environment.yml")
    assert (tmp_path / "environment.yml").read_text() == (root / "environment.yml").read_text()


def test_every_dependency_is_pinned_to_one_plain_version(pyproject, pinned):
    extras = pyproject["project"]["optional-dependencies"]
    asked = [*pyproject["project"]["dependencies"], *extras["torch"], *extras["study"], *extras["test"]]
    names = {re.split(r"[\[<>=~!]", line)[0].lower() for line in asked} - {"moecache"}
    assert names <= {name.lower() for name in pinned}
    assert all(re.fullmatch(r"[0-9][\w.!]*", version) for version in pinned.values())
    assert f"torch=={pinned['torch']}" in pyproject["tool"]["moecache"]["lock_constraints"]


def test_the_lock_names_no_place(root):
    assert not re.search(r"://|@|^-|^/", (root / "requirements.lock").read_text(), re.MULTILINE)


def test_every_target_of_make_is_a_command_of_make_py(make, root):
    lines = re.findall(r"^([\w-]+): ; python3 make.py ([\w-]+)", (root / "Makefile").read_text(), re.MULTILINE)
    assert {name for name, _ in lines} == {command for _, command in lines}
    assert {"study", "book", "test", "test-long", "keep", "lock", "environment", "setup", "clean"} == dict(lines).keys()
    usage = subprocess.run([sys.executable, "make.py", "--help"], cwd=root, capture_output=True, text=True, check=True)
    assert all(name in usage.stdout for name, _ in lines)


def test_setting_up_again_does_nothing_until_the_lock_changes(make, tmp_path, monkeypatch):
    ran = []
    for name, file in [("LOCK", "requirements.lock"), ("ROOT", "."), ("VENV", ".venv"), ("STAMP", "stamp")]:
        monkeypatch.setattr(make, name, tmp_path / file)
    (tmp_path / "requirements.lock").write_text("one==1\n")
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(make.venv, "create", lambda place, **options: (place / "bin").mkdir(parents=True))
    monkeypatch.setattr(make, "pip", lambda *words: ran.append(words) or (tmp_path / ".venv/bin/python").touch())
    make.set_up()
    assert ("install", "--requirement", str(tmp_path / "requirements.lock")) in ran
    num_calls = len(ran)
    make.set_up()
    assert len(ran) == num_calls
    (tmp_path / "requirements.lock").write_text("one==2\n")
    make.set_up()
    assert len(ran) == 2 * num_calls


def test_an_interrupted_installation_is_done_again(make, tmp_path, monkeypatch):
    for name, file in [("LOCK", "requirements.lock"), ("ROOT", "."), ("VENV", ".venv"), ("STAMP", "stamp")]:
        monkeypatch.setattr(make, name, tmp_path / file)
    for file in ("requirements.lock", "pyproject.toml"):
        (tmp_path / file).write_text("")

    def stop(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr(make.venv, "create", lambda place, **options: None)
    monkeypatch.setattr(make, "pip", stop)
    with pytest.raises(KeyboardInterrupt):
        make.set_up()
    assert not (tmp_path / "stamp").exists()


def test_quick_chapters_have_small_budgets(root):
    for chapter in find_chapters(root / "notebooks").values():
        assert chapter.budgets_seconds["quick"] <= 40


def test_every_dependency_has_its_reason_in_the_book(root, pyproject):
    page = (root / "book" / "dependencies.md").read_text()
    extras = pyproject["project"]["optional-dependencies"]
    for line in [*pyproject["project"]["dependencies"], *(line for extra in extras.values() for line in extra)]:
        name = re.split(r"[\[<>=~!]", line)[0]
        assert name in page, f"book/dependencies.md gives no reason for {name}"


def test_the_citation_names_this_version(root, pyproject):
    assert f"version: {pyproject['project']['version']}\n" in (root / "CITATION.cff").read_text()
    assert f'__version__ = "{pyproject["project"]["version"]}"' in (root / "moecache" / "__init__.py").read_text()
