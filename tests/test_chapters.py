"""The pipeline on a throw-away study: sources, execution, assembly, pages, and what each refuses."""

from __future__ import annotations

import ast
import copy
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from moecache.chapters import boxes, display, render, study
from moecache.chapters.assemble import assemble, with_values
from moecache.chapters.check_pages import faults
from moecache.chapters.execute import ChapterFailed, run_chapter
from moecache.chapters.fill import fill
from moecache.chapters.keep import MAIN_FIGURE, draw_main_figure, keep_results
from moecache.chapters.page import to_html
from moecache.chapters.source import ChapterError, find_chapters, read_parameters

SOURCE = """# %% [markdown]
# # Does it work?
#
# With {{num_slots}} slots, $\\sum_k g_k = 1$.

# %% tags=["parameters"]
num_slots = 2  # slots a layer
share = 0.5  # of something
name = "a"
ranks = [0, 1]

# %%
import matplotlib.pyplot as plt
import pandas as pd

from moecache import chapters, results

# %%
table = results.load_or_run("90_test", {"num_slots": num_slots}, lambda: pd.DataFrame({"slots": [num_slots]}))
chapters.show_table(table.frame)

# %%
figure, axes = plt.subplots()
axes.plot([0, num_slots])
chapters.show(figure, alt="A line that rises to the number of slots.")

# %% [markdown]
# The share is {{share:.0%}}, see [glossary](../glossary.md).

# %%
chapters.values(num_slots=num_slots, share=table.frame["slots"].mean() / 4)
"""
SMALL = """# %% [markdown]
# # Does it stop?

# %% tags=["parameters"]
num_slots = 2

# %%
from moecache import chapters
"""
RUNS = """
"90":
  labels: [SIMULATED]
  quick: {seconds: 10}
  full: {seconds: 20, parameters: {num_slots: 3}}
"""


def write_study(root: Path, source: str = SOURCE, runs: str = RUNS) -> Path:
    """Write a study of one chapter and the smallest book."""
    (root / "notebooks").mkdir(parents=True)
    (root / "notebooks" / "90_works.py").write_text(textwrap.dedent(source))
    (root / "notebooks" / "runs.yml").write_text(runs)
    book = root / "book"
    book.mkdir()
    (book / "intro.md").write_text("# A book\n\nThe share is {{90.share:.0%}}, [why](chapters/90_works.ipynb).\n")
    (book / "glossary.md").write_text("# Glossary\n")
    (book / "_toc.yml").write_text("format: jb-book\nroot: intro\nchapters:\n- glob: chapters/*\n- file: glossary\n")
    own = Path(__file__).resolve().parent.parent
    (book / "_config.yml").write_text((own / "book" / "_config.yml").read_text())
    (root / "notebooks" / "task_chapters.py").write_text((own / "notebooks" / "task_chapters.py").read_text())
    (root / "pyproject.toml").write_text('[tool.pytask.ini_options]\nmarkers = {alone = "", together = ""}\n')
    return root


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Run the chapter once with changed parameters; return the chapter and the executed notebook."""
    root = write_study(tmp_path_factory.mktemp("study"))
    chapter = find_chapters(root / "notebooks")["90"]
    target = root / "build" / "90_works.ipynb"
    before = os.environ.get("MOECACHE_OWN_RESULTS")
    os.environ["MOECACHE_OWN_RESULTS"] = str(root / "build" / "results")
    try:
        run_chapter(chapter, chapter.values("quick", {"num_slots": 3}), target, results_mode="own")
    finally:
        if before is None:
            del os.environ["MOECACHE_OWN_RESULTS"]
    return chapter, nbformat.read(target, as_version=4)


def _chapter(tmp_path, source=SOURCE, runs=RUNS):
    return find_chapters(write_study(tmp_path / "study", source, runs) / "notebooks")["90"]


def test_parameters_carry_default_type_and_meaning(tmp_path):
    chapter = _chapter(tmp_path)
    assert [(item.name, item.default, item.meaning) for item in chapter.parameters] == [
        ("num_slots", 2, "slots a layer"),
        ("share", 0.5, "of something"),
        ("name", "a", ""),
        ("ranks", [0, 1], ""),
    ]
    assert chapter.title == "Does it work?"
    assert chapter.values("quick")["num_slots"] == 2
    assert chapter.values("full")["num_slots"] == 3


def test_words_of_the_command_line_take_the_type_of_the_default(tmp_path):
    slots, share, name, ranks = _chapter(tmp_path).parameters
    assert (slots.read("4"), share.read("1"), name.read("4"), ranks.read("(2,)")) == (4, 1.0, "4", [2])
    assert isinstance(share.read("1"), float)
    for parameter, word in [(slots, "4.5"), (slots, "True"), (slots, "four"), (share, "x"), (ranks, "1")]:
        with pytest.raises(ChapterError, match=f"{parameter.name} is .*must be of type"):
            parameter.read(word)


def test_an_unknown_parameter_is_answered_with_those_that_exist(tmp_path):
    with pytest.raises(ChapterError, match=r"no parameter 'slots'.*\n.*num_slots = 2 \(int\) slots a layer"):
        _chapter(tmp_path).values("quick", {"slots": 1})


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("num_slots = 2", "num_slots = 1 + 1", "must be a literal"),
        ("num_slots = 2", "print(1)", "only `name = literal`"),
        ('tags=["parameters"]', "", "exactly one cell"),
        ("# # Does", "# Does", "begin with a title"),
    ],
)
def test_a_source_out_of_form_is_refused(tmp_path, old, new, told):
    with pytest.raises(ChapterError, match=f"chapter 90.*{told}"):
        _chapter(tmp_path, SOURCE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[SIMULATED]", "[GUESSED]", "MEASURED, SIMULATED, ESTIMATED"),
        ("num_slots: 3", "slots: 3", "no parameter 'slots'"),
        ("num_slots: 3", "num_slots: x", "must be of type int"),
        ('"90"', '"91"', "'90' lacks an entry"),
    ],
)
def test_an_entry_out_of_form_is_refused(tmp_path, old, new, told):
    with pytest.raises(ChapterError, match=told):
        _chapter(tmp_path, runs=RUNS.replace(old, new))


def test_parameters_reach_the_cells_and_the_prose(executed):
    page = assemble(*executed, "own")
    text = "\n".join(cell.source for cell in page.notebook.cells)
    assert "With 3 slots" in text
    assert "The share is 75%" in text
    assert "num_slots = 3  # slots a layer" in text
    assert "{{" not in text
    assert page.values == {"num_slots": 3, "share": 0.75}
    assert [result["experiment"] for result in page.results] == ["90_test"]


def test_a_page_carries_label_rerun_box_and_provenance(executed):
    text = "\n".join(cell.source for cell in assemble(*executed, "own").notebook.cells)
    assert "**SIMULATED**" in text
    assert "moecache run 90 -p num_slots 3 -o out.html" in text
    assert "| `num_slots` | `3` | `2` | `3` | slots a layer |" in text
    assert "| `90_test` |" in text
    assert "Python" in text


@pytest.mark.parametrize("value", [["reference-512", "reference-64"], "0.15 rule", "", 3, 0.25, True, [1, 2], ["it's"]])
def test_a_value_in_the_command_is_read_back_by_a_shell_and_by_the_parser(value):
    (typed,) = shlex.split(boxes._word(value))
    assert (typed if isinstance(value, str) else ast.literal_eval(typed)) == value


def test_lists_of_strings_are_quoted_once():
    assert boxes._word(["a", "b"]) == """'["a", "b"]'"""
    assert boxes._literal(["a", "b"]) == '["a", "b"]'


def test_quick_is_said_where_it_is_and_only_there(executed):
    def is_said(profile):
        return any("QUICK" in cell.source for cell in assemble(*executed, profile).notebook.cells)

    assert is_said("quick")
    assert not is_said("full")


def test_the_same_numbers_give_the_same_page(executed):
    chapter, notebook = executed
    again = copy.deepcopy(notebook)
    for cell in again.cells:
        cell.id = "another"
        cell.metadata["papermill"] = {"duration": time.time()}
    first, second = (nbformat.writes(assemble(chapter, it, "quick").notebook) for it in (notebook, again))
    assert first == second
    assert "papermill" not in first
    assert "injected" not in first
    assert "vnd.moecache" not in first


def test_a_figure_keeps_its_words_and_one_without_is_refused(executed):
    chapter, notebook = executed
    page = assemble(chapter, notebook, "quick").notebook
    alts = [cell.metadata["mystnb"]["image"]["alt"] for cell in page.cells if "mystnb" in cell.metadata]
    assert alts == ["A line that rises to the number of slots."]
    bare = copy.deepcopy(notebook)
    for cell in bare.cells:
        for output in cell.get("outputs", []):
            output.get("metadata", {}).pop("image/png", None)
    with pytest.raises(ValueError, match=r"chapters.show\(figure, alt="):
        assemble(chapter, bare, "quick")


def test_several_figures_of_one_cell_each_keep_their_words(executed):
    chapter, notebook = executed
    several = copy.deepcopy(notebook)
    cell = next(cell for cell in several.cells if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])))
    image = next(output for output in cell.outputs if "image/png" in output.get("data", {}))
    second = copy.deepcopy(image)
    second.metadata["image/png"]["alt"] = "Another line, for the second model."
    note = nbformat.v4.new_output("stream", name="stdout", text="between")
    cell.outputs = [note, image, note, second]
    page = assemble(chapter, several, "quick").notebook
    nbformat.validate(page)
    drawn = [part for part in page.cells if "mystnb" in part.metadata]
    assert [part.metadata["mystnb"]["image"]["alt"] for part in drawn] == [
        "A line that rises to the number of slots.",
        "Another line, for the second model.",
    ]
    assert [len(part.outputs) for part in drawn] == [3, 1]
    assert drawn[1].source == ""
    assert "remove-input" in drawn[1].metadata["tags"]


def test_a_placeholder_without_a_value_is_refused():
    assert fill("{{a}} {{ a : +.1f }} {{b.c}}", {"a": 2, "b.c": "x"}, "page") == "2 +2.0 x"
    with pytest.raises(ValueError, match=r"page: no value 'c' for \{\{c\}\}; there are: a"):
        fill("{{c}}", {"a": 1}, "page")
    with pytest.raises(ValueError, match="does not fit"):
        fill("{{a:.1%}}", {"a": "word"}, "page")


def test_values_written_into_a_parameters_cell_keep_its_comments():
    source = "a = 1  # é one\nb = (\n    2,\n    3,\n)  # two\nc = 'x'  # three"
    assert with_values(source, {"a": 7, "b": [4], "c": "x"}) == "a = 7  # é one\nb = [4]  # two\nc = 'x'  # three"
    assert [item.meaning for item in read_parameters(source)] == ["é one", "two", "three"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1], None])
def test_prose_takes_only_finite_scalars(value):
    with pytest.raises(ValueError, match="the value 'x' is"):
        display.values(x=value)


def test_figures_need_words_and_tables_few_columns():
    with pytest.raises(ValueError, match="too short"):
        display.show(None, alt="plot")
    with pytest.raises(ValueError, match="9 columns"):
        display.show_table(pd.DataFrame([range(9)]))


def test_a_page_by_itself_needs_no_network(executed, tmp_path):
    chapter, _ = executed
    page = to_html(assemble(*executed, "own").notebook, chapter.title)
    (tmp_path / "page.html").write_text(page)
    assert faults(tmp_path) == []
    assert "data:image/png;base64," in page
    assert "\\(\\sum_k g_k = 1\\)" in page
    assert "<details><summary>Rerun with other parameters</summary>" in page
    assert "MathJax" in page


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("raise ValueError('no such expert')", "ValueError: no such expert"),
        ("import warnings; warnings.warn('old habit')", "old habit"),
        ("chapters.values(x=float('nan'))", "finite number"),
    ],
)
def test_a_failing_chapter_leaves_no_chapter(tmp_path, line, told):
    chapter = _chapter(tmp_path, SMALL + f"\n# %%\n{line}\n")
    target = tmp_path / "build" / "90_works.ipynb"
    target.parent.mkdir()
    target.write_text("from an earlier run")
    with pytest.raises(ChapterFailed, match=rf"(?s)chapter 90 \(90_works.py\) failed:.*{told}"):
        run_chapter(chapter, chapter.values("quick"), target, results_mode="auto")
    assert not target.exists()
    assert target.with_suffix(".failed.ipynb").exists()


def test_built_pages_are_checked_for_links_networks_and_words(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html#here">ok</a><a href="b.html#gone">x</a><a href="c.html">x</a>'
        '<a href="https://example.org">ok</a><a href="#top">ok</a><a href="#no">x</a><script src="//cdn/x.js"></script>'
        '<style>@import "https://fonts/x.css";</style><img src="p.png" alt="p.png"><img src="p.png" alt="A picture">'
        '<script>import("https://far/y.js")</script>'
    )
    (tmp_path / "b.html").write_text('<p id="here"></p>')
    (tmp_path / "p.png").write_bytes(b"")
    (tmp_path / "s.css").write_text("a { background: url(https://far/z.png) }")
    assert sorted(faults(tmp_path)) == [
        "a.html has an image without alternative text: p.png",
        "a.html links to #no, which is not there",
        "a.html links to b.html#gone, which is not there",
        "a.html links to c.html, which is not there",
        "a.html loads //cdn/x.js from the network",
        "a.html loads https://far/y.js from the network",
        "a.html loads https://fonts/x.css from the network",
        "s.css loads https://far/z.png from the network",
    ]


def _study(root: Path, *, edition: str = "quick") -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; from pathlib import Path; from moecache.chapters import study, render\n"
        "root = Path(sys.argv[1]); jobs = study.run_chapters(root, study.EDITIONS[sys.argv[2]])\n"
        "print(render.make_book(root, jobs))"
    )
    environment = os.environ | {"MOECACHE_OWN_RESULTS": str(root / "build" / "results"), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", program, str(root), edition]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_only_what_is_stale_runs_again_and_a_failure_is_told(tmp_path):
    root = write_study(tmp_path / "study")
    first = _study(root)
    assert first.returncode == 0, first.stderr
    assert "90_works: done" in first.stdout
    assert (root / "book" / "_build" / "html" / "index.html").exists()
    assert "The share is 50%" in (root / "book" / "_build" / "html" / "intro.html").read_text()
    values = json.loads((root / "book" / "chapters" / "values.json").read_text())
    assert values == {"90": {"num_slots": 2, "share": 0.5}}
    assert "90_works: done" not in _study(root).stdout

    (root / "notebooks" / "90_works.py").write_text(SMALL + "\n# %%\nraise ValueError('no such expert')\n")
    failed = _study(root)
    assert failed.returncode != 0
    assert "chapter 90 (90_works.py) failed" in failed.stderr
    assert "no such expert" in failed.stderr


def test_chapters_that_run_alone_run_after_the_others(tmp_path):
    alone = RUNS.replace('"90"', '"91"').replace("  labels", "  alone: true\n  labels")
    root = write_study(tmp_path / "study", SMALL, RUNS + alone)
    (root / "notebooks" / "91_alone.py").write_text(SMALL)
    program = (
        "import sys; from pathlib import Path; from moecache.chapters import study\n"
        "study.run_chapters(Path(sys.argv[1]), study.EDITIONS['quick'])"
    )
    command = [sys.executable, "-c", program, str(root)]
    environment = os.environ | {"MOECACHE_OWN_RESULTS": str(root / "build" / "results")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("90_works: done") < done.stdout.index("91_alone: done")


def test_an_interruption_ends_the_running_chapter_and_its_kernel(tmp_path):
    mark = tmp_path / "kernel.txt"
    line = f"import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(600)"
    root = write_study(tmp_path / "study", SMALL + f"\n# %%\n{line}\n")
    program = (
        "import sys; from pathlib import Path; from moecache.chapters import study\n"
        "study.run_chapters(Path(sys.argv[1]), study.EDITIONS['quick'])"
    )
    running = subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    kernel = int(_wait_until(lambda: mark.exists() and mark.read_text()))
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode not in (0, None)
    _wait_until(lambda: not Path(f"/proc/{kernel}").exists())
    assert not (root / "build" / "chapters" / "quick" / "90_works.ipynb").exists()


def _wait_until(condition):
    for _ in range(600):
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen within a minute")


def test_a_full_study_is_kept_with_what_it_used_and_nothing_else(executed, tmp_path, monkeypatch):
    root = write_study(tmp_path / "study")
    with pytest.raises(ValueError, match="not run in full yet: 90_works"):
        keep_results(root)
    target = root / "build" / "chapters" / "full" / "90_works.ipynb"
    target.parent.mkdir(parents=True)
    nbformat.write(executed[1], target)
    (used,) = assemble(*executed, "full").results
    own, stored = tmp_path / "own", root / "data" / "results"
    monkeypatch.setenv("MOECACHE_OWN_RESULTS", str(own))
    for folder, name in [(own / "90_test", used["file"]), (own / "90_test", "other.csv"), (stored / "old", "old.csv")]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a\n1\n")
        (folder / name).with_suffix(".json").write_text("{}")
    assert keep_results(root) == [stored / "90_test" / used["file"]]
    kept = {path.name for path in stored.rglob("*") if path.is_file()}
    assert kept == {used["file"], used["file"].replace("csv", "json")}


def test_a_chapter_without_a_stored_full_run_is_named_and_not_shown(executed, tmp_path):
    root = write_study(tmp_path / "study", runs=RUNS + RUNS.strip().replace('"90":', '"91":') + "\n  pending: true\n")
    (root / "notebooks" / "91_later.py").write_text(SMALL)
    assert [job.chapter.number for job in study.find_jobs(root, study.EDITIONS["quick"])] == ["90", "91"]
    assert [job.chapter.number for job in study.find_jobs(root, study.EDITIONS["stored"])] == ["90"]
    with pytest.raises(ChapterError, match="no full run of chapter 91 is stored yet"):
        study.find_jobs(root, study.EDITIONS["stored"], ["91"])
    target = root / "build" / "90_works.ipynb"
    target.parent.mkdir()
    nbformat.write(executed[1], target)
    for edition, numbers in (("stored", {"90_works", "91_later"}), ("quick", {"90_works"})):
        pages = render.assemble_chapters(root, [study.Job(executed[0], study.EDITIONS[edition], target, ())])
        assert list(pages) == ["90"]
        assert {path.stem for path in (root / "book" / "chapters").glob("*.ipynb")} == numbers
        if edition == "stored":
            page = nbformat.read(root / "book" / "chapters" / "91_later.ipynb", as_version=4)
            assert page.cells[0].source.startswith("# 91 · ")
            assert "Not measured in full yet" in page.cells[1].source
            nbformat.validate(page)


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "text", "told"),
    [
        ("glossary.md", "\n[gone](gone.md)\n", "gone"),
        ("glossary.md", "\n[gone](chapters/90_works.ipynb#no-such-heading)\n", "no-such-heading"),
        ("glossary.md", "\n![](https://example.org/x.png)\n", "x.png"),
        ("glossary.md", "\n```{nonsense}\n```\n", "nonsense"),
        ("glossary.md", "\n{{90.nothing}}\n", "90.nothing"),
        ("_toc.yml", "- file: nowhere\n", "nowhere"),
    ],
)
def test_a_fault_of_a_page_fails_the_book(executed, tmp_path, page, text, told):
    root = write_study(tmp_path / "study")
    chapter, notebook = executed
    target = root / "build" / "90_works.ipynb"
    target.parent.mkdir()
    nbformat.write(notebook, target)
    place = root / "book" / page
    place.write_text(place.read_text() + text)
    with pytest.raises((render.BookFailed, ValueError), match=told):
        render.make_book(root, [study.Job(chapter, study.EDITIONS["quick"], target, ())])
    assert not (root / "book" / "_build" / "html").exists()


def test_the_main_figure_is_drawn_from_what_is_stored(tmp_path):
    with pytest.raises(ValueError, match="nothing is stored of chapter 04"):
        draw_main_figure(tmp_path)
    clone = Path(__file__).parents[1]
    shutil.copytree(clone / "data" / "results" / "04_misses_that_matter", tmp_path / "data" / "results" / "04_misses_that_matter")
    (tmp_path / "book").mkdir()
    assert draw_main_figure(tmp_path).stat().st_size > 20_000
    assert (clone / "book" / MAIN_FIGURE).is_file()
    assert f"book/{MAIN_FIGURE}" in (clone / "README.md").read_text()
