"""What smaller samples would have said: the fan of a correlation over sample sizes.

Samples of n units are drawn without replacement from those that were measured, and the correlation is computed in each.
Where all of them agree in sign, the conclusion was safe at that n. Where a coefficient lies near zero it has no sign to
find: its sign in a small sample is a coin, and a study that grows from 10 to 40 documents may see it turn without
anything having changed. The fan shows that, where a single small study would report a reversal.

A sample of nearly all units can hardly differ from all of them: the fan closes at the right by construction, and says
nothing about units that were not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from moecache.stats.associations import document_points
from moecache.stats.paired import DIFFERENCE, pair_documents
from moecache.stats.relations import FEWEST_POINTS, rowwise_correlation
from moecache.stats.resample import percentile_interval


def fan_within(
    frame: pd.DataFrame,
    policies: str | Sequence[str],
    sizes: Sequence[int],
    x: str = "substituted_mass",
    y: str = DIFFERENCE,
    num_samples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """Say what samples of n documents would have given for the coefficient across documents, within policies.

    Parameters
    ----------
    frame, x, y
        As for `association_within`.
    policies : str, or a sequence of them
        One policy, or several whose coefficients are averaged.
    sizes : sequence of int
        Numbers of documents a sample, each from 4 to those there are; drawn without replacement.
    num_samples, seed
        Samples of each size.
    confidence : float
        Share of the samples between ``low`` and ``high``.

    Returns
    -------
    DataFrame
        One row a size: ``policy``, ``num_documents``, ``low``, ``median``, ``high``, ``opposite_fraction`` (of the
        samples: sign other than with all documents).
    """
    labels = [policies] if isinstance(policies, str) else list(policies)
    points = [document_points(frame, label, x, y) for label in labels]

    def correlate(chosen: np.ndarray) -> np.ndarray:
        return np.mean([_spearman(of_x[chosen], of_y[chosen]) for of_x, of_y in points], axis=0)

    num_documents = len(points[0][0])
    sign = np.sign(correlate(np.arange(num_documents)[None])[0])
    name = labels[0] if len(labels) == 1 else f"mean of {len(labels)} policies"
    return _fan(name, sizes, num_documents, sign, correlate, num_samples, confidence, seed)


def fan_across(
    frame: pd.DataFrame,
    sizes: Sequence[int],
    x: str = "substituted_mass",
    y: str = DIFFERENCE,
    unit: str = "document",
    num_samples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """Say what samples of n units would have given for the coefficient across policies.

    Parameters
    ----------
    frame, x, y, unit
        As for `correlation_across_policies`.
    sizes, num_samples, confidence, seed
        As for `fan_within`; sizes count units.

    Returns
    -------
    DataFrame
        One row a size, with the columns of `fan_within`.
    """
    paired = pair_documents(frame, unit, (x, y))
    sign = np.sign(_spearman(paired.means(x)[None], paired.means(y)[None])[0])

    def correlate(chosen: np.ndarray) -> np.ndarray:
        means = [paired.sums[c][:, chosen].sum(axis=2).T / paired.num_tokens[chosen].sum(axis=1)[:, None] for c in (x, y)]
        return _spearman(*means)

    return _fan("across policies", sizes, paired.num_units, sign, correlate, num_samples, confidence, seed)


def _fan(
    name: str,
    sizes: Sequence[int],
    num_units: int,
    sign: float,
    correlate: Callable[[np.ndarray], np.ndarray],
    num_samples: int,
    confidence: float,
    seed: int,
) -> pd.DataFrame:
    wrong = [size for size in sizes if not FEWEST_POINTS <= size <= num_units]
    if wrong:
        raise ValueError(f"sizes {wrong} lie outside {FEWEST_POINTS}..{num_units} units")
    rng, rows = np.random.default_rng(seed), []
    for size in sizes:
        chosen = np.argsort(rng.random((num_samples, num_units)), axis=1)[:, :size]
        found = correlate(chosen)
        low, high = map(float, percentile_interval(found, confidence))
        rows.append((name, int(size), low, float(np.nanmedian(found)), high, float(np.mean(np.sign(found) == -sign))))
    return pd.DataFrame(rows, columns=["policy", "num_documents", "low", "median", "high", "opposite_fraction"])


def _spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return rowwise_correlation(x, y, "spearman")
