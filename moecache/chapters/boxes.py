"""The boxes that every chapter's page carries: how its numbers were made, how to rerun it, where they come from.

They are plain Markdown admonitions, which both generations of Jupyter Book read.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from moecache.chapters.source import Chapter

_MEANING = {
    "MEASURED": "measured on the machine named below",
    "SIMULATED": "exact decisions of the cache, nothing timed",
    "ESTIMATED": "computed from counts by a model of the machine, not measured",
}
_QUICK = """```{admonition} QUICK
:class: warning
This page was made with the quick parameters: small samples, so that the whole study runs in minutes. The full run
(`make study PROFILE=full`) asks the same question of more text; do not quote the numbers of this page.
```"""


def heading(chapter: Chapter, profile: str, parameters: Mapping[str, Any]) -> str:
    """Return what stands under the title: labels, QUICK where it is, and the box to rerun the chapter."""
    labels = "\n".join(f"**{label}**: {_MEANING[label]}.  " for label in chapter.labels)
    is_quick = profile == "quick" and chapter.values("quick") != chapter.values("full")
    quick = [_QUICK] if is_quick else []
    return "\n\n".join([labels, *quick, _rerun(chapter, parameters)])


def pending(chapter: Chapter) -> str:
    """Return what a page says of a chapter that no full run has measured yet."""
    return "\n".join(
        [
            "```{admonition} Not measured in full yet",
            ":class: warning",
            "No result of this chapter's full run is stored, so nothing is shown here. "
            f"`moecache run {chapter.number} -o out.html` measures and shows it with small samples,",
            "`make study PROFILE=full` with the full ones.",
            "```",
        ]
    )


def command(chapter: Chapter, parameters: Mapping[str, Any]) -> str:
    """Return the command that makes this page again, with at least one parameter to change."""
    changed = [item for item in chapter.parameters if parameters[item.name] != item.default]
    words = [f"-p {item.name} {_word(parameters[item.name])}" for item in changed or chapter.parameters[:1]]
    return " ".join(["moecache run", chapter.number, *words, "-o out.html"])


def origin(record: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Return the box that says which code and machine made the page and each of its results."""
    page = record["provenance"]
    lines = [
        f"The page: {describe(page)}; {run['seconds']:.0f} seconds on the wall, {run['cpu_seconds']:.0f} of processor.",
        "",
        *_table(
            ["result", "key", "measured", "commit", "device", "seconds", "here"],
            [_row(result) for result in record["results"]],
        ),
    ]
    return "```{admonition} Where these numbers come from\n:class: note, dropdown\n" + "\n".join(lines) + "\n```"


def describe(about: Mapping[str, Any]) -> str:
    """Return a provenance in one line of words."""
    machine = about["machine"]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else "memory unknown"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about["versions"].items()))
    return (
        f"moecache {about['moecache']} (commit {_commit(about)}), Python {about['python']}, {versions}; "
        f"{machine['cpu']}, {machine['num_cores']} cores, {memory}, {machine['system']}; "
        f"device {about['device']}; {about['date']}"
    )


def _rerun(chapter: Chapter, parameters: Mapping[str, Any]) -> str:
    rows = [
        [
            f"`{item.name}`",
            f"`{_literal(parameters[item.name])}`",
            f"`{_literal(chapter.values('quick')[item.name])}`",
            f"`{_literal(chapter.values('full')[item.name])}`",
            item.meaning,
        ]
        for item in chapter.parameters
    ]
    lines = [
        "```{admonition} Rerun with other parameters",
        ":class: tip, dropdown",
        "In a clone, with any value changed:",
        "",
        f"    {command(chapter, parameters)}",
        "",
        *_table(["parameter", "this page", "quick", "full", "meaning"], rows),
        "```",
    ]
    return "\n".join(lines)


def _row(result: Mapping[str, Any]) -> list[str]:
    about = result["provenance"]
    seconds = "" if about["seconds"] is None else f"{about['seconds']:.1f}"
    here = "loaded" if result["is_loaded"] else "measured for this page"
    device = about["device"] if about["device"] != "cpu" else about["machine"]["cpu"]
    return [f"`{result['experiment']}`", f"`{result['key'][:8]}`", about["date"], _commit(about), device, seconds, here]


def _commit(about: Mapping[str, Any]) -> str:
    if about["commit"] is None:
        return "none"
    return about["commit"][:10] + (" with changes" if about["is_dirty"] else "")


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [names, ["---"] * len(names), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _word(value: Any) -> str:
    """A value as it is typed in a shell."""
    return shlex.quote(_literal(value)) if value != "" else '""'


def _literal(value: Any) -> str:
    """A value as it is written: strings without quotes, lists with double ones, so that a shell's single ones can go round them."""
    if isinstance(value, str):
        return value or '""'
    text = repr(value)
    return text if '"' in text else text.replace("'", '"')
