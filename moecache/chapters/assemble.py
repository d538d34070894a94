"""From an executed notebook to a page's notebook.

An executed notebook holds run times, random cell ids, placeholders and the parameters twice. A page holds
none of these: the same numbers always give the same page. Assembly writes the values into the prose, moves
each figure's alternative text to where the book's builder looks for it, and adds the boxes. It refuses
figures without alternative text.

It runs nothing and renders nothing.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import nbformat

from moecache.chapters import boxes
from moecache.chapters.display import RECORD_TYPE
from moecache.chapters.execute import RECORD_TAG
from moecache.chapters.fill import fill
from moecache.chapters.source import Chapter, parameters_cell

_INJECTED_TAG = "injected-parameters"
_KEPT_METADATA = ("tags", "mystnb")


@dataclass(frozen=True)
class Page:
    """A chapter's page: a notebook to render, the values of its prose, and the results it used."""

    notebook: Any
    values: dict[str, Any]
    results: tuple[dict[str, Any], ...]


def assemble(chapter: Chapter, executed: Any, profile: str) -> Page:
    """Turn an executed notebook into a page.

    Parameters
    ----------
    chapter : Chapter
    executed : NotebookNode
        As `moecache.chapters.execute` leaves it; not changed.
    profile : str
        ``quick``, ``full``, or any other word for parameters of one's own.

    Returns
    -------
    Page

    Raises
    ------
    ValueError
        If a placeholder has no value or a figure no alternative text.
    """
    run = executed.metadata["moecache"]
    record = _record(executed)
    shown = [cell for cell in executed.cells if not _is_machinery(cell)]
    first, *body = [_clean(part, chapter) for cell in shown for part in _one_figure_each(cell)]
    first.source = first.source.replace("# ", f"# {chapter.number} · ", 1)
    parameters = parameters_cell(nbformat.v4.new_notebook(cells=body))
    parameters.source = with_values(parameters.source, run["parameters"])
    heading = nbformat.v4.new_markdown_cell(boxes.heading(chapter, profile, run["parameters"]))
    origin = nbformat.v4.new_markdown_cell(boxes.origin(record, run))
    cells = [_filled(cell, record["values"], chapter.number) for cell in [first, *body]]
    cells = [cells[0], heading, *cells[1:], origin]
    for place, cell in enumerate(cells):
        cell["id"] = hashlib.sha256(f"{chapter.number}/{place}/{cell.source}".encode()).hexdigest()[:12]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": executed.metadata["kernelspec"]})
    return Page(notebook, record["values"], tuple(record["results"]))


def announce(chapter: Chapter) -> Any:
    """Return the page's notebook of a chapter whose full run is not stored yet: its title and how to see it in small."""
    cells = [
        nbformat.v4.new_markdown_cell(f"# {chapter.number} · {chapter.title}"),
        nbformat.v4.new_markdown_cell(boxes.pending(chapter)),
    ]
    for place, cell in enumerate(cells):
        cell["id"] = hashlib.sha256(f"{chapter.number}/{place}/{cell.source}".encode()).hexdigest()[:12]
    return nbformat.v4.new_notebook(cells=cells)


def with_values(source: str, values: Mapping[str, Any]) -> str:
    """Return a parameters cell with the values that were used in place of the defaults; comments stay."""
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            _put(lines, node.value, repr(values[node.targets[0].id]))
    return "\n".join(lines)


def _put(lines: list[str], old: ast.expr, new: str) -> None:
    first, last = old.lineno - 1, (old.end_lineno or old.lineno) - 1
    if ast.unparse(old) == ast.unparse(ast.parse(new).body[0]):
        return
    # Columns of the syntax tree count bytes.
    head = lines[first].encode()[: old.col_offset].decode()
    tail = lines[last].encode()[old.end_col_offset :].decode()
    lines[first : last + 1] = [head + new + tail]


def _record(executed: Any) -> Mapping[str, Any]:
    for cell in executed.cells:
        if RECORD_TAG in cell.metadata.get("tags", []):
            return cell.outputs[0].data[RECORD_TYPE]
    raise ValueError("the notebook was not run by the pipeline: it has no record of its values")


def _is_machinery(cell: Any) -> bool:
    return not {_INJECTED_TAG, RECORD_TAG}.isdisjoint(cell.metadata.get("tags", []))


def _one_figure_each(cell: Any) -> list[Any]:
    """Split a cell that drew several figures: the builder knows one alternative text for each cell."""
    outputs = cell.get("outputs", [])
    images = [place for place, output in enumerate(outputs) if _is_image(output)]
    if len(images) < 2:
        return [cell]
    parts = [{**cell, "outputs": outputs[: images[1]]}]
    for place, end in zip(images[1:], [*images[2:], len(outputs)], strict=True):
        metadata = {"tags": [*cell.metadata.get("tags", []), "remove-input"]}
        parts.append({**cell, "source": "", "metadata": metadata, "outputs": outputs[place:end]})
    return [nbformat.from_dict(part) for part in parts]


def _is_image(output: Any) -> bool:
    return "image/png" in output.get("data", {})


def _clean(cell: Any, chapter: Chapter) -> Any:
    """Return a copy of a cell without anything that differs between two runs of the same numbers."""
    metadata = {name: cell.metadata[name] for name in _KEPT_METADATA if name in cell.metadata}
    if cell.cell_type != "code":
        return nbformat.v4.new_markdown_cell(cell.source, metadata=metadata)
    alt = _alt_text(cell, chapter)
    if alt is not None:
        metadata["mystnb"] = {**metadata.get("mystnb", {}), "image": {"alt": alt}}
    return nbformat.v4.new_code_cell(cell.source, metadata=metadata, outputs=cell.outputs, execution_count=cell.execution_count)


def _alt_text(cell: Any, chapter: Chapter) -> str | None:
    alts = [output.metadata.get("image/png", {}).get("alt") for output in cell.outputs if _is_image(output)]
    if None in alts:
        raise ValueError(f"chapter {chapter.number}: show each figure with chapters.show(figure, alt=...), in\n{cell.source}")
    return alts[0] if alts else None


def _filled(cell: Any, values: Mapping[str, Any], number: str) -> Any:
    if cell.cell_type == "markdown":
        cell.source = fill(cell.source, values, f"chapter {number}")
    return cell
