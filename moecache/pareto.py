"""The Pareto front of a table: the rows worth choosing from when two or more columns pull against each other.

It knows columns and numbers, not what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd


def pareto_front(frame: pd.DataFrame, *, minimise: str | Sequence[str] = (), maximise: str | Sequence[str] = ()) -> pd.DataFrame:
    """The rows that no other row beats: none is at least as good in every column and better in one.

    Parameters
    ----------
    frame : a table, such as `sweep` returns.
    minimise, maximise : columns where less or more is better; two or more in all.

    Returns
    -------
    DataFrame : those rows, sorted by the first column named; equal rows stay together.

    Raises
    ------
    ValueError : unknown columns, fewer than two, or values that are missing or not numbers.
    """
    less, more = _names(minimise), _names(maximise)
    names = [*less, *more]
    if unknown := [name for name in names if name not in frame.columns]:
        raise ValueError(f"columns {unknown} are not in the table; it has {list(frame.columns)}")
    if len(set(names)) != len(names) or len(names) < 2:
        raise ValueError(f"minimise={less} and maximise={more} must name at least two different columns")
    values = np.column_stack([frame[name].to_numpy(np.float64) * (1 if name in less else -1) for name in names])
    if np.isnan(values).any():
        raise ValueError(f"columns {[name for name in names if frame[name].isna().any()]} have missing values; drop those rows first")
    is_beaten = [bool(((values <= row).all(axis=1) & (values < row).any(axis=1)).any()) for row in values]
    return frame[~np.array(is_beaten, bool)].sort_values(names[0], kind="stable")


def _names(columns: str | Sequence[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)
