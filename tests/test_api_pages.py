"""The reference: every public name is on one page, says what it takes and gives, and docstrings are read as they are written."""

from __future__ import annotations

import dataclasses
import inspect
import re
from enum import Enum
from pathlib import Path

import pytest
import yaml

import moecache as mc
from moecache import cli, figures, reference, stats
from moecache.api_pages import contents, docstrings, objects, pages

ROOT = Path(__file__).resolve().parent.parent
NAMES = [name for page in contents.PAGES for name in page.names]
CALLABLE = [name for name in NAMES if callable(contents.find(name))]


def lacking(described) -> list[str]:
    """What the docstring of a public function or class leaves out."""
    docstring = docstrings.read(described)
    if not docstring.prose:
        return ["what it is for"]
    if not inspect.isclass(described):
        signature = inspect.signature(described)
        lacks = sorted(set(signature.parameters) - docstring.names("Parameters"))
        gives = signature.return_annotation in ("None", None) or {"Returns", "Yields"} & set(docstring.sections)
        return lacks + ([] if gives else ["what it returns"])
    if issubclass(described, (Enum, Exception)):
        return []
    wanted = {field.name for field in dataclasses.fields(described)} if dataclasses.is_dataclass(described) else set()
    if not wanted and not getattr(described, "_is_protocol", False):
        wanted = set(inspect.signature(described).parameters)
    unsaid = [name for name, member in objects.public_members(described) if not docstrings.read(_function(member)).prose]
    return sorted(wanted - docstring.names("Parameters", "Attributes")) + unsaid


def _function(member):
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def test_every_public_name_is_on_one_page():
    assert len(NAMES) == len(set(NAMES))
    assert {name for name in NAMES if "." not in name} == set(mc.__all__)
    for module in (stats, figures, reference):
        short = module.__name__.removeprefix("moecache.")
        assert {name.removeprefix(f"{short}.") for name in NAMES if name.startswith(f"{short}.")} == set(module.__all__)


@pytest.mark.parametrize("name", CALLABLE)
def test_every_public_name_says_what_it_takes_and_gives(name):
    assert lacking(contents.find(name)) == []


def test_what_is_not_said_is_found():
    def scale(values, factor=2.0) -> float:
        """Multiply.

        Parameters
        ----------
        values : [n] float64.
        """
        return values * factor

    @dataclasses.dataclass
    class Bare:
        size: int

    assert lacking(scale) == ["factor", "what it returns"]
    assert lacking(Bare) == ["what it is for"]


def test_the_book_lists_every_page():
    toc = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())
    listed = [
        section["file"]
        for part in toc["parts"]
        for chapter in part["chapters"]
        if chapter.get("file") == "reference/README"
        for section in chapter["sections"]
    ]
    assert listed == [f"reference/{page.file}" for page in contents.PAGES] + ["reference/command_line"]
    index = (ROOT / "book" / "reference" / "README.md").read_text()
    assert all(f"({Path(file).name}.md)" in index for file in listed)


def test_pages_hold_their_names_and_every_command(tmp_path):
    written = {path.stem: path.read_text() for path in pages.write_pages(tmp_path / "reference")}
    for page in contents.PAGES:
        for name in page.names:
            assert len(re.findall(rf"\}} moecache\.{re.escape(name)}(?!\w)", written[page.file])) == 1, name
    assert "{py:function} moecache.threshold(gate_threshold, first_choice=False, **rest)" in written["policies"]
    assert "{py:obj}`WeightRule <moecache.WeightRule>`" in written["policies"]
    assert "policy=QUALITY_FIRST" in written["runtime"]
    for name in cli.parsers():
        assert f"usage: moecache {name}".strip() in written["command_line"]
    assert max(map(len, written["command_line"].split("```text")[1].splitlines())) <= 90


def test_both_forms_of_an_entry_are_read():
    long = "a meaning that fills its line and goes on, indented, in the next one, as many of this package's do; " * 2
    read = docstrings.parse(f"""Do it.

    More words.

    Parameters
    ----------
    ids : array-like of int [T]
        Token ids.
    low, high : bounds, both of them inside.
    policy : Policy.
    size : {long.strip()}
        here.
    **rest : further fields.

    Returns
    -------
    DataFrame : a row a size.

    Raises
    ------
    ValueError
        For a negative size.

    The rule is that of someone.
    """)
    assert read.prose == "Do it.\n\nMore words.\n\n\nThe rule is that of someone."
    ids, bounds, policy, size, rest = read.sections["Parameters"]
    assert ids == docstrings.Entry(("ids",), "array-like of int [T]", "Token ids.")
    assert bounds == docstrings.Entry(("low", "high"), "", "bounds, both of them inside.")
    assert policy == docstrings.Entry(("policy",), "Policy", "")
    assert (size.kind, size.text) == ("", f"{long.strip()}\nhere.")
    assert rest.names == ("**rest",)
    assert read.sections["Returns"] == [docstrings.Entry((), "DataFrame", "a row a size.")]
    assert read.sections["Raises"] == [docstrings.Entry((), "ValueError", "For a negative size.")]
    assert read.names("Parameters") == {"ids", "low", "high", "policy", "size", "rest"}


@pytest.mark.parametrize("kind", [mc.Outcome, mc.Landing, mc.ArrivalKind, mc.Count])
def test_every_member_of_what_a_log_holds_has_one_line_on_its_page(kind):
    said = docstrings.of_members(kind)
    assert list(said) == [member.name for member in kind]
    written = objects.write(f"moecache.{kind.__name__}", kind, str, {}).splitlines()
    assert all(f"- `{member.name.lower()}` = {member.value}: {said[member.name]}" in written for member in kind)


def test_only_the_string_below_a_member_is_its_meaning():
    class Kind(Enum):
        """Who."""

        NEAR = "near"
        """Close by."""
        FAR = "far"

    assert docstrings.of_members(Kind) == {"NEAR": "Close by."}
    assert objects.write("moecache.Kind", Kind, str, {}).splitlines()[-3:-1] == ["- `near` = 'near': Close by.", "- `far` = 'far'"]


def test_an_unknown_section_is_refused_with_the_name_of_its_object():
    def wrong():
        """Do it.

        Arguments
        ---------
        nothing
        """

    with pytest.raises(ValueError, match=r"moecache\.wrong: section 'Arguments' .* use Parameters"):
        objects.write("moecache.wrong", wrong, str, {})
