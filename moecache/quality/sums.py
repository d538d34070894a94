"""From rows of (policy, document) to sums by cluster, from which every bootstrap draw's means are two matrix products.

It knows frames and sums; neither how rows were made nor what is fitted to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moecache.substituted_calls import RANK_GROUPS

LOSS, MASS = "mean_difference_nats", "substituted_mass"
FEWEST_CLUSTERS = 3


@dataclass(frozen=True, eq=False)
class PolicySums:
    """Token-weighted sums of P policies over U clusters, for C cells.

    Attributes
    ----------
    policies, families : P labels each.
    num_tokens : [U] scored tokens.
    losses, masses : [P, U] sums of the losses (NaN without them) and of the substituted masses.
    squared, aged : [P, U, C] sums of squared weights, and of squared weights times the log2 of ages.
    """

    policies: tuple[str, ...]
    families: tuple[str, ...]
    num_tokens: NDArray[np.float64]
    losses: NDArray[np.float64]
    masses: NDArray[np.float64]
    squared: NDArray[np.float64]
    aged: NDArray[np.float64]

    @property
    def num_clusters(self) -> int:
        """U."""
        return self.num_tokens.size

    def of_policies(self, places: NDArray[np.int64]) -> PolicySums:
        """The sums of some of the policies."""
        policies, families = (tuple(labels[i] for i in places) for labels in (self.policies, self.families))
        losses, masses, squared, aged = (array[places] for array in (self.losses, self.masses, self.squared, self.aged))
        return PolicySums(policies, families, self.num_tokens, losses, masses, squared, aged)

    def features(self, counts: NDArray[np.float64], is_mass: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Amounts and mean log2 ages [B, P, C] of B draws given as counts [B, U] of clusters; C = 1 for mass, which has no age."""
        tokens = (counts @ self.num_tokens)[:, None, None]
        if is_mass:
            amounts = np.tensordot(counts, self.masses, (1, 1))[..., None] / tokens
            return amounts, np.zeros_like(amounts)
        total, aged = (np.tensordot(counts, array, (1, 1)) for array in (self.squared, self.aged))
        return total / tokens, np.divide(aged, total, out=np.zeros_like(total), where=total > 0)

    def mean_losses(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mean loss [B, P] of draws."""
        return (counts @ self.losses.T) / (counts @ self.num_tokens)[:, None]

    def standard_errors(self) -> NDArray[np.float64]:
        """Standard error [P] of each policy's mean loss, from the spread of its clusters."""
        residuals = self.losses - self.losses.sum(axis=1, keepdims=True) * self.num_tokens / self.num_tokens.sum()
        return np.sqrt((residuals**2).sum(axis=1) * self.num_clusters / (self.num_clusters - 1)) / self.num_tokens.sum()


def cell_columns(num_layers: int) -> list[str]:
    """Names of the cells, by layer and then rank group, as they end the columns ``squared_`` and ``log_age_``."""
    return [f"l{layer}_{group}" for layer in range(num_layers) for group in RANK_GROUPS]


def policy_sums(frame: pd.DataFrame, num_layers: int, with_losses: bool = True) -> PolicySums:
    """Sum rows by policy and cluster.

    Parameters
    ----------
    frame : DataFrame
        As for `moecache.quality.model.QualityModel.fit`.
    num_layers : int
        L.
    with_losses : bool
        Whether ``mean_difference_nats`` is needed.

    Returns
    -------
    PolicySums

    Raises
    ------
    ValueError
        For missing columns, a policy that lacks a document or has it twice, or too few clusters to fit.
    """
    cells = cell_columns(num_layers)
    needed = ["policy", "document", "num_tokens", MASS, *(f"{kind}_{cell}" for kind in ("squared", "log_age") for cell in cells)]
    needed += [LOSS] if with_losses else []
    if absent := [column for column in needed if column not in frame.columns]:
        raise ValueError(f"the frame lacks {absent}; rows of (policy, document) with these columns are made by moecache.quality_rows")
    policies = tuple(dict.fromkeys(frame["policy"]))
    documents = list(dict.fromkeys(frame["document"]))
    place = frame["policy"].map({p: i for i, p in enumerate(policies)}) * len(documents)
    place += frame["document"].map({d: i for i, d in enumerate(documents)})
    if len(frame) != len(policies) * len(documents) or place.nunique() != len(frame):
        raise ValueError(f"{len(frame)} rows of {len(policies)} policies and {len(documents)} documents: every policy needs each once")
    ordered = frame.iloc[np.argsort(place.to_numpy(), kind="stable")]
    size = (len(policies), len(documents))
    tokens = ordered["num_tokens"].to_numpy(np.float64).reshape(size)
    if (tokens != tokens[0]).any():
        raise ValueError("a document has a different number of tokens under different policies")
    of_document = ordered["cluster" if "cluster" in ordered else "document"].to_numpy()[: len(documents)]
    codes, names = pd.factorize(of_document)
    if with_losses and len(names) < FEWEST_CLUSTERS:
        raise ValueError(f"{len(names)} clusters of documents carry no interval: at least {FEWEST_CLUSTERS} are needed")
    member = (codes[:, None] == np.arange(len(names))) * tokens[0][:, None]

    def by_cluster(columns: list[str]) -> NDArray[np.float64]:
        values = ordered[columns].to_numpy(np.float64).reshape(*size, len(columns))
        return np.einsum("pdc,du->puc", values, member)

    squared = [f"squared_{cell}" for cell in cells]
    log_ages = ordered[[f"log_age_{cell}" for cell in cells]].to_numpy(np.float64).reshape(*size, len(cells))
    aged = np.einsum("pdc,du->puc", ordered[squared].to_numpy(np.float64).reshape(log_ages.shape) * log_ages, member)
    families = ordered["family" if "family" in ordered else "policy"].to_numpy()[:: len(documents)]
    losses = by_cluster([LOSS])[..., 0] if with_losses else np.full((size[0], len(names)), np.nan)
    arrays = (member.sum(axis=0), losses, by_cluster([MASS])[..., 0], by_cluster(squared), aged)
    return PolicySums(policies, tuple(str(f) for f in families), *arrays)
