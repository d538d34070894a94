"""Synthetic tidy frames for the tests of the statistics, the figures and the claims: never results.

One row per (policy, document) of one setting, in the columns of the chapter on which misses matter. Losses
are built from a law chosen by the test, so that the right answer is known beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

TOP_K = 10


@dataclass(frozen=True)
class SyntheticPolicy:
    """What one synthetic policy does on average and what it costs."""

    family: str
    loss_nats: float
    mass: float
    substituted_fraction: float
    first_choice_fraction: float = 0.0
    mass_slope: float = 0.0  # how far a document's mass drives its loss, nats per unit of mass
    noise_nats: float = 0.01


def paired_frame(
    policies: Mapping[str, SyntheticPolicy],
    num_documents: int = 48,
    seed: int = 0,
    setting: tuple[str, str, int] = ("reference-512", "admitted_anyway", 128),
    num_tokens: int = 999,
) -> pd.DataFrame:
    """Build the frame of one setting; documents come in clusters of three and three domains."""
    rng = np.random.default_rng(seed)
    difficulty = rng.normal(size=num_documents)
    rows = []
    for label, policy in policies.items():
        for document in range(num_documents):
            deviation = rng.normal(0.0, 0.05 * policy.mass)
            noise = policy.noise_nats * (0.5 * difficulty[document] + rng.normal())
            is_exact = policy.substituted_fraction == 0.0
            difference = policy.loss_nats + policy.mass_slope * deviation + noise
            rows.append(
                _row(label, policy, document, setting, num_tokens)
                | {
                    "mean_difference_nats": 0.0 if is_exact else difference,
                    "exact_loss_nats": 2.0 + 0.3 * difficulty[document],
                    "substituted_mass": policy.mass + deviation,
                }
            )
    return pd.DataFrame(rows)


def _row(label: str, policy: SyntheticPolicy, document: int, setting: tuple[str, str, int], num_tokens: int) -> dict[str, object]:
    calls = (num_tokens + 1) * TOP_K * 4
    substituted = round(policy.substituted_fraction * calls)
    hits = calls // 2
    return {
        "model": setting[0],
        "regime": setting[1],
        "num_slots": setting[2],
        "policy": label,
        "family": policy.family,
        "document": f"document {document:03d}",
        "domain": ("code", "scripture", "languages")[document // 3 % 3],
        "cluster": f"cluster {document // 3:02d}",
        "num_tokens": num_tokens,
        "calls": calls,
        "hits": hits,
        "fetched": max(calls - hits - substituted, 0),
        "forced": 0,
        "substituted": substituted,
        "dropped": 0,
        "first_choices_substituted": round(policy.first_choice_fraction * calls),
        "copies": substituted if setting[1] == "admitted_anyway" else 0,
        "evictions": calls - hits,
    }
