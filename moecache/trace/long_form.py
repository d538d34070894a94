"""From a table with one row a call to arrays [T,L,K].

A table can lack cells, hold them twice, or hold what is no number. Everything is looked for before an array of T x L x K is made, and every
error names the token and the layer as the table calls them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from moecache.trace.shape import ModelShape, TraceError

LARGEST_INTEGER = 2**53  # up to here a float64 is exact


class Columns(NamedTuple):
    """Names of the columns; `rank` and `document` may be None."""

    token: str
    layer: str
    rank: str | None
    expert: str
    weight: str
    document: str | None

    def present(self) -> list[str]:
        """The names that are given."""
        return [name for name in self if name is not None]


class Cells(NamedTuple):
    """The calls of a table, one a row, checked one by one: arrays [n]."""

    document: np.ndarray  # int64, in the order of first rows
    token: np.ndarray  # int64, as in the table
    layer: np.ndarray  # int64, as in the table
    rank: np.ndarray | None  # int64, as in the table
    expert: np.ndarray  # int64
    weight: np.ndarray  # float32
    documents: tuple[object, ...]  # the table's name of each document; empty without such a column

    def rows(self, is_kept: np.ndarray) -> Cells:
        """Some of the rows (a mask), or all in another order (positions)."""
        kept = {name: array[is_kept] for name, array in self._asdict().items() if isinstance(array, np.ndarray)}
        return self._replace(**kept)

    def place(self, row: int, rank: int | None = None) -> str:
        """The token and layer of a row, in the table's own words."""
        document = f" of document {self.documents[self.document[row]]}" if self.documents else ""
        return f"token {self.token[row]}{document}, layer {self.layer[row]}" + ("" if rank is None else f", rank {rank}")


class Table(NamedTuple):
    """The arrays of a table, and what it calls its tokens and layers."""

    ids: np.ndarray  # [T,L,K] int64
    weights: np.ndarray  # [T,L,K] float32
    document_start: np.ndarray  # [T] bool
    layers: np.ndarray  # [L] int64
    cells: Cells
    first_row: np.ndarray  # [T,L] int64, a row of `cells`

    def renamed(self, error: TraceError) -> TraceError:
        """The same error with the table's own name of the place."""
        if error.place is None:
            return error
        return TraceError(f"{self.cells.place(int(self.first_row[error.place]))}: {error.reason}")


def read_cells(frame: pd.DataFrame, names: Columns, shape: ModelShape | None, num_experts: int | None) -> Cells:
    """The table's columns as numbers in range.

    Raises
    ------
    TraceError : no such column, no rows, or a value that is no number or out of range, with its token and layer.
    """
    if missing := [name for name in names.present() if name not in frame.columns]:
        raise TraceError(f"columns {missing} are missing; the table has {list(frame.columns)}")
    if frame.empty:
        raise TraceError("the table holds no calls")
    document, documents = np.zeros(len(frame), np.int64), ()
    if names.document is not None:
        codes, values = pd.factorize(frame[names.document])
        _refuse(codes < 0, frame, names, names.document, "which names no document")
        document, documents = codes.astype(np.int64), tuple(values.tolist())
    bounds = {} if shape is None else {names.layer: shape.num_layers, names.rank: shape.top_k}
    bounds[names.expert] = shape.num_experts if shape is not None else int(num_experts or 0)
    numbers = {}
    for name in (names.token, names.layer, names.rank, names.expert):
        if name is not None:
            numbers[name] = integer_column(frame, names, name)
            if name in bounds:
                is_outside = (numbers[name] < 0) | (numbers[name] >= bounds[name])
                _refuse(is_outside, frame, names, name, f"outside 0..{bounds[name] - 1}")
    weight = pd.to_numeric(frame[names.weight], errors="coerce").to_numpy(np.float64, na_value=np.nan)
    _refuse(~np.isfinite(weight) | (weight < 0) | (weight > 2), frame, names, names.weight, "which is no gate weight")
    rank = None if names.rank is None else numbers[names.rank]
    expert = numbers[names.expert]
    return Cells(document, numbers[names.token], numbers[names.layer], rank, expert, weight.astype(np.float32), documents)


def integer_column(frame: pd.DataFrame, names: Columns, name: str) -> np.ndarray:
    """[n] int64 of a column of integers, whatever their dtype."""
    column = frame[name]
    if pd.api.types.is_integer_dtype(column.dtype) and not column.hasnans:
        return column.to_numpy(np.int64)
    values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    is_wrong = ~(np.abs(values) < LARGEST_INTEGER) | (values != np.floor(values)) | (column.dtype.kind == "b")
    _refuse(is_wrong, frame, names, name, "which is no integer")
    return values.astype(np.int64)


def _refuse(is_wrong: np.ndarray, frame: pd.DataFrame, names: Columns, name: str, why: str) -> None:
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        token, layer, value = (frame[column].iloc[row] for column in (names.token, names.layer, name))
        document = f" of document {frame[names.document].iloc[row]}" if names.document is not None else ""
        raise TraceError(f"token {token}{document}, layer {layer}: column {name!r} holds {value!s:.40}, {why} (row {row})")


def arrays_of(cells: Cells, shape: ModelShape | None) -> Table:
    """The calls as arrays, every cell filled once.

    Raises
    ------
    TraceError : a cell that is missing or there twice.
    """
    layers = np.arange(shape.num_layers) if shape is not None else np.unique(cells.layer)
    cells, ranks = _sorted(cells, shape)
    is_new = np.ones(cells.token.size, bool)
    is_new[1:] = (np.diff(cells.token) != 0) | (np.diff(cells.document) != 0)
    token = np.cumsum(is_new) - 1
    num_tokens = int(token[-1]) + 1
    cell = (token * layers.size + np.searchsorted(layers, cells.layer)) * ranks.size + np.searchsorted(ranks, _rank(cells))
    _check_filled(cells, cell, layers, ranks, num_tokens * layers.size * ranks.size)
    size = (num_tokens, layers.size, ranks.size)
    document = cells.document[is_new]
    starts = np.concatenate([[True], document[1:] != document[:-1]])
    first_row = np.arange(cell.size).reshape(size)[..., 0]
    return Table(cells.expert.reshape(size), cells.weight.reshape(size), starts, layers, cells, first_row)


def _sorted(cells: Cells, shape: ModelShape | None) -> tuple[Cells, np.ndarray]:
    """The calls by document, token, layer and rank, each with a rank; and the ranks that there are."""
    keys = (cells.layer, cells.token, cells.document)
    order = np.lexsort(keys if cells.rank is None else (cells.rank, *keys))
    cells = cells.rows(order)
    if cells.rank is None:
        is_first = np.ones(cells.token.size, bool)
        is_first[1:] = (np.diff(cells.layer) != 0) | (np.diff(cells.token) != 0) | (np.diff(cells.document) != 0)
        row = np.arange(cells.token.size)
        cells = cells._replace(rank=row - np.maximum.accumulate(np.where(is_first, row, 0)))
    if shape is None:
        return cells, np.unique(_rank(cells))
    if (is_over := _rank(cells) >= shape.top_k).any():
        raise TraceError(f"{cells.place(int(np.argmax(is_over)))}: more than {shape.top_k} calls")
    return cells, np.arange(shape.top_k)


def _rank(cells: Cells) -> np.ndarray:
    assert cells.rank is not None
    return cells.rank


def _check_filled(cells: Cells, cell: np.ndarray, layers: np.ndarray, ranks: np.ndarray, num_cells: int) -> None:
    """`cell` [n] int64 rises; it must be 0, 1, 2 .. num_cells - 1."""
    if (is_twice := cell[1:] == cell[:-1]).any():
        row = int(np.argmax(is_twice)) + 1
        raise TraceError(f"{cells.place(row, _rank(cells)[row])}: the call stands twice")
    if cell.size == num_cells:
        return
    # The first call that is not where it should be; if none is, the last ones are missing.
    is_shifted = cell != np.arange(cell.size)
    absent = int(np.argmax(is_shifted)) if is_shifted.any() else cell.size
    layer, rank = layers[absent // ranks.size % layers.size], ranks[absent % ranks.size]
    neighbour = _row_of_token(cell, absent // (ranks.size * layers.size), ranks.size * layers.size)
    named = cells._replace(layer=np.full(cells.layer.size, layer))
    raise TraceError(
        f"{named.place(neighbour)} lacks its call of rank {rank}; every token needs {layers.size} layers x {ranks.size} calls (is it cut?)"
    )


def _row_of_token(cell: np.ndarray, token: int, cells_a_token: int) -> int:
    """A row of that token: each token has one at least."""
    return int(np.searchsorted(cell, token * cells_a_token))
