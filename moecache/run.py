"""`Run`: what one instrument did with one policy on one text or trace, with its provenance.

A run knows what was decided and (where a model ran) each token's loss. It does not know how the decisions were carried out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from moecache.kernel import Admission, Outcome
from moecache.metrics import count_calls, count_transfers, summarise, token_frame
from moecache.policy import Policy
from moecache.quality.model import QualityEstimate
from moecache.trace import DecisionLog, ModelShape


@dataclass(frozen=True, eq=False)
class Run:
    """One policy carried out by one instrument.

    Attributes
    ----------
    instrument : "simulator", "emulator" or "runtime".
    policy, shape : Policy, ModelShape.
    num_slots : [L] int64 slots of each layer.
    cold_start : "first", "random", "empty" or "profile".
    documents : "keep" (the cache outlives a document) or "reset".
    replay : "atomic", or "sequential" (a diagnostic: never a result).
    document_start : [T] bool.
    decisions : DecisionLog, or None when only totals were kept.
    counts, mass_sum : totals over all tokens, [L,17] int64 and float.
    warm_counts, warm_mass_sum, warmup_tokens : the same from token `warmup_tokens` on.
    loss_nats : [T] float64 token losses, NaN at a document's first token; None without a model.
    seconds, seconds_kind : [T] float64 or None; "measured", "simulated" or "estimated".
    bytes_moved : bytes of fetches and background copies (`moecache.metrics.count_transfers`); None where the size of an expert is
        unknown, and where only totals of a policy that admits in the background or prefetches were kept: copies may have been shared.
    near_ties : steps that float16 rounding could have decided otherwise; None where not counted.
    provenance : versions, machine, date.
    extra : further per-token arrays of an instrument, by name.
    estimates : what a quality model estimates the policy to lose (ESTIMATED), by the first token of the window; empty without one.
    """

    instrument: str
    policy: Policy
    shape: ModelShape
    num_slots: np.ndarray
    cold_start: str
    documents: str
    replay: str
    document_start: np.ndarray
    decisions: DecisionLog | None
    counts: np.ndarray
    mass_sum: float
    warmup_tokens: int = 0
    warm_counts: np.ndarray | None = None
    warm_mass_sum: float = 0.0
    loss_nats: np.ndarray | None = None
    seconds: np.ndarray | None = None
    seconds_kind: str | None = None
    near_ties: int | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    estimates: dict[int, QualityEstimate] = field(default_factory=dict)

    def __repr__(self) -> str:
        slots = f"{self.num_slots.min()}..{self.num_slots.max()}" if self.num_slots.min() < self.num_slots.max() else self.num_slots[0]
        hits = self._totals(0)["hit_rate"]
        return (
            f"Run({self.instrument}, {self.policy.label!r}, {slots} slots, {self.num_tokens:,} tokens x {self.shape.num_layers} layers, "
            f"hit rate {hits:.1%})"
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.document_start.size

    @property
    def bytes_moved(self) -> int | None:
        """Bytes of all fetches and background copies, each transfer once; None where they are unknown."""
        if self.shape.expert_bytes is None:
            return None
        if self.decisions is not None:
            return count_transfers(self.decisions) * self.shape.expert_bytes
        if self.policy.admission == Admission.BACKGROUND or self.policy.max_prefetches:
            return None
        return int(self.counts[:, [Outcome.FETCHED, Outcome.FORCED]].sum()) * self.shape.expert_bytes

    def summary(self, first_token: int = 0) -> dict[str, Any]:
        """Totals and rates from token `first_token` on (0 = all; pass the warm-up to see the warm window), and the estimated increase.

        Raises
        ------
        ValueError : a window that was not kept (`keep="summary"` and estimates know only 0 and `warmup_tokens`), or an empty one.
        """
        if not 0 <= first_token < self.num_tokens:
            raise ValueError(f"first_token={first_token} is outside 0..{self.num_tokens - 1}")
        if not self.estimates:
            return self._totals(first_token)
        if first_token not in self.estimates:
            raise ValueError(f"the loss was estimated from tokens {sorted(self.estimates)}, not from {first_token}; use that warmup_tokens")
        return self._totals(first_token) | self.estimates[first_token].summary()

    def _totals(self, first_token: int) -> dict[str, float | int]:
        remaining = self.num_tokens - first_token
        if first_token == 0:
            return summarise(self.counts, self.mass_sum, remaining)
        if self.decisions is not None:
            mass = self.decisions.substituted_mass[first_token:].sum(dtype=np.float64)
            return summarise(count_calls(self.decisions, first_token), float(mass), remaining)
        if first_token == self.warmup_tokens and self.warm_counts is not None:
            return summarise(self.warm_counts, self.warm_mass_sum, remaining)
        raise ValueError(f"only totals were kept, from tokens 0 and {self.warmup_tokens}; use keep='log' or that warmup_tokens")

    def layer_hit_rates(self) -> np.ndarray:
        """[L] float64 share of calls that hit, per layer, over all tokens."""
        return self.counts[:, 0] / self.counts[:, :7].sum(axis=1)

    def frame(self) -> pd.DataFrame:
        """One row a token: document, loss, calls by outcome, substituted mass, evictions, copies, and what `extra` holds."""
        if self.decisions is None:
            raise ValueError("only totals were kept; run with keep='log' for a frame per token")
        frame = token_frame(self.decisions, self.document_start, self.loss_nats)
        return frame.assign(**{name: values for name, values in self.extra.items() if np.shape(values) == (self.num_tokens,)})
