"""From a tidy frame to paired units: every policy on the same documents, or an error that names the gap.

A row of the frame is one (policy, document). A *unit* is what is drawn by the bootstrap and counted by a
test: the document, or the cluster of documents that share an origin. With token losses summed over a unit,
the token-weighted mean over any set of units is sum of sums / sum of tokens. A unit's *contribution* is its
mean times its share of tokens relative to the average unit: the plain mean of the contributions is the
token-weighted mean, so tests, effect sizes and intervals all speak of one and the same effect. With units of
equal length a contribution is the unit's mean.

This module knows frames and sums; it does not know what is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moecache.stats.resample import FEWEST_UNITS

DIFFERENCE = "mean_difference_nats"
SETTING = ("model", "regime", "num_slots")
UNITS = ("document", "cluster")


@dataclass(frozen=True, eq=False)
class PairedUnits:
    """Token-weighted sums of paired quantities: P policies on the same U units.

    Attributes
    ----------
    policies : tuple of str
        P labels, in the order in which the frame names them.
    units : tuple of str
        U names.
    unit : str
        What a unit is: ``"document"`` or ``"cluster"``.
    num_tokens : float64 array [U]
        Scored tokens of each unit.
    sums : dict of float64 arrays [P, U]
        For each requested column, its sum over the tokens of the unit.
    """

    policies: tuple[str, ...]
    units: tuple[str, ...]
    unit: str
    num_tokens: np.ndarray
    sums: dict[str, np.ndarray]

    @property
    def num_units(self) -> int:
        """U, the n of every interval and test."""
        return len(self.units)

    def means(self, column: str = DIFFERENCE) -> np.ndarray:
        """Return the token-weighted mean of each policy over all units, [P]."""
        return self.sums[column].sum(axis=1) / self.num_tokens.sum()

    def contributions(self, column: str = DIFFERENCE) -> np.ndarray:
        """Return each unit's contribution, [P, U]; their plain mean is the token-weighted mean."""
        return self.sums[column] / self.num_tokens.mean()

    def index(self, policy: str) -> int:
        """Return the row of a policy.

        Raises
        ------
        ValueError
            If no policy has this label; the message lists those that exist.
        """
        if policy not in self.policies:
            known = ", ".join(repr(label) for label in self.policies)
            raise ValueError(f"no policy is labelled {policy!r}; the frame has {known}")
        return self.policies.index(policy)


def unique_documents(frame: pd.DataFrame) -> pd.DataFrame:
    """Number documents that share a name within a policy of a setting: the second is "name #2".

    Parameters
    ----------
    frame : DataFrame
        Rows of each (policy, setting) in the order the documents were read; a setting is what `model`, `regime` and
        `num_slots` say, where those columns exist.

    Returns
    -------
    DataFrame
        The same rows, with different names in `document`.
    """
    within = [c for c in ("model", "regime", "num_slots", "policy") if c in frame.columns]
    number = frame.groupby([*within, "document"], sort=False).cumcount() + 1
    names = frame["document"].astype(str)
    return frame.assign(document=names.where(number == 1, names + " #" + number.astype(str)))


def pair_documents(frame: pd.DataFrame, unit: str = "document", columns: Sequence[str] = (DIFFERENCE,)) -> PairedUnits:
    """Sum paired quantities by policy and unit, after checking that the pairing is complete.

    Parameters
    ----------
    frame : DataFrame
        One row per (policy, document) of one setting, with ``policy``, ``document``, ``num_tokens`` and the
        columns asked for (means per scored token); ``cluster`` too where that is the unit.
    unit : {"document", "cluster"}
        What is drawn and counted.
    columns : sequence of str
        The columns to sum.

    Returns
    -------
    PairedUnits

    Raises
    ------
    ValueError
        If a column is absent or holds NaN, a row is doubled, a policy lacks a document, token numbers differ
        between policies, several settings are mixed, or there are fewer than three units.
    """
    _check_frame(frame, unit, columns)
    policies = tuple(str(label) for label in frame["policy"].unique())
    wide = {c: _pivot(frame, c) for c in ("num_tokens", *columns)}
    tokens = _one_row_of_tokens(wide["num_tokens"])
    documents = frame.drop_duplicates("document").set_index("document")
    names = documents.loc[wide["num_tokens"].columns, unit] if unit != "document" else wide["num_tokens"].columns
    codes, units = pd.factorize(np.asarray(names, dtype=object).astype(str))
    if len(units) < FEWEST_UNITS:
        raise ValueError(
            f"the frame holds {len(units)} {unit}s: at least {FEWEST_UNITS} are needed; score more documents"
            + (" or use unit='document'" if unit == "cluster" else "")
        )
    member = (codes[:, None] == np.arange(len(units))).astype(np.float64)
    sums = {c: (wide[c].loc[list(policies)].to_numpy(np.float64) * tokens) @ member for c in columns}
    return PairedUnits(policies, tuple(str(u) for u in units), unit, tokens @ member, sums)


def _check_frame(frame: pd.DataFrame, unit: str, columns: Sequence[str]) -> None:
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}: use one of {', '.join(map(repr, UNITS))}")
    needed = {"policy", "document", "num_tokens", unit, *columns}
    absent = sorted(needed - set(frame.columns))
    if absent:
        raise ValueError(f"the frame lacks {', '.join(absent)}; it has {', '.join(map(str, frame.columns))}")
    if frame.empty:
        raise ValueError("the frame has no rows: nothing was measured")
    _check_values(frame, columns)
    _check_setting(frame)
    doubled = frame.duplicated(["policy", "document"])
    if doubled.any():
        row = frame.loc[doubled].iloc[0]
        raise ValueError(f"policy {row['policy']!r} has document {row['document']!r} more than once")
    if unit == "cluster" and frame.drop_duplicates(["document", "cluster"])["document"].duplicated().any():
        raise ValueError("a document belongs to more than one cluster: each needs exactly one")


def _check_values(frame: pd.DataFrame, columns: Sequence[str]) -> None:
    for column in ("num_tokens", *columns):
        bad = ~np.isfinite(frame[column].to_numpy(np.float64))
        if bad.any():
            row = frame.loc[bad].iloc[0]
            raise ValueError(
                f"{column} is {row[column]} for policy {row['policy']!r}, document {row['document']!r} "
                f"({int(bad.sum())} such rows): leave out that document for every policy"
            )
    if np.any(frame["num_tokens"].to_numpy() <= 0):
        raise ValueError("num_tokens must be positive: a document without scored tokens cannot be compared")


def _check_setting(frame: pd.DataFrame) -> None:
    present = [c for c in SETTING if c in frame.columns]
    num_settings = len(frame[present].drop_duplicates()) if present else 1
    if num_settings > 1:
        raise ValueError(
            f"the frame mixes {num_settings} settings of ({', '.join(present)}): select one, for example with frame.groupby([...])"
        )


def _pivot(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    wide = frame.pivot(index="policy", columns="document", values=column)
    gaps = np.argwhere(wide.isna().to_numpy())
    if len(gaps):
        policy, document = wide.index[gaps[0, 0]], wide.columns[gaps[0, 1]]
        raise ValueError(f"policy {policy!r} lacks document {document!r}: every policy must read every document")
    return wide


def _one_row_of_tokens(wide: pd.DataFrame) -> np.ndarray:
    tokens = wide.to_numpy(np.float64)
    if (tokens != tokens[0]).any():
        document = wide.columns[int((tokens != tokens[0]).any(axis=0).argmax())]
        raise ValueError(f"document {document!r} has a different number of scored tokens under different policies")
    return tokens[0]
