"""One quantity, three questions: between policies, between documents, and within both.

That policies with more mass lose more does not say that texts with more mass do. Where every policy read every document,
a quantity splits without remainder into three uncorrelated parts: its policy's mean, its document's mean, and the rest
(the interaction: more than this policy usually, on a document where others do not). Each part gets its own slope. If the
quantity were the cause of the loss, the three slopes would agree.

Two models give the slopes. The *mixed model* has crossed random intercepts of policy and document (statsmodels'
variance components in one group). The *clustered* one is least squares with errors clustered by document and by policy
at once (A. C. Cameron, J. B. Gelbach and D. L. Miller, J. Bus. Econ. Stat. 29:238, 2011), with as many degrees of
freedom as the fewer clusters less one. In a balanced frame both give
the same slopes and differ in what they say of their error.

The slope between policies carries an interval but no p-value: policies are a design, not a sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from moecache.stats.paired import DIFFERENCE, pair_documents
from moecache.stats.rows import STANDARD_ERRORS, tidy_row

LEVELS = ("policies", "documents", "interaction")


def split_levels(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Split quantities into the policy's mean, the document's mean and the interaction.

    Parameters
    ----------
    frame : DataFrame
        One setting, one row per (policy, document), complete.
    columns : sequence of str

    Returns
    -------
    DataFrame
        One row per (policy, document): ``policy``, ``document``, the columns, and for each of them ``{column}_policies``,
        ``{column}_documents`` (both around the grand mean) and ``{column}_interaction``.
    """
    paired = pair_documents(frame, "document", columns)
    policies = np.repeat(paired.policies, paired.num_units)
    result: dict[str, Any] = {"policy": policies, "document": np.tile(paired.units, len(paired.policies))}
    for column in columns:
        values = paired.sums[column] / paired.num_tokens
        grand = values.mean()
        of_policy, of_document = values.mean(axis=1, keepdims=True) - grand, values.mean(axis=0, keepdims=True) - grand
        parts = (of_policy + 0 * values, of_document + 0 * values, values - of_policy - of_document - grand)
        result[column] = values.ravel()
        result |= {f"{column}_{level}": part.ravel() for level, part in zip(LEVELS, parts, strict=True)}
    return pd.DataFrame(result)


def slopes_by_level(
    frame: pd.DataFrame, xs: Sequence[str] = ("substituted_mass",), y: str = DIFFERENCE, model: str = "mixed", is_planned: bool = False
) -> pd.DataFrame:
    """Return the slope of y on each x at each level, all in one model.

    Parameters
    ----------
    frame : DataFrame
        As for `split_levels`.
    xs : sequence of str
        Columns that explain.
    y : str
        Column that is explained.
    model : {"mixed", "clustered"}
        Crossed random intercepts, or least squares with errors clustered both ways.
    is_planned : bool

    Returns
    -------
    DataFrame
        Rows in the form of `rows`, one for each x and level, with 95 % intervals. The effect is the slope times the
        standard deviation of its part over that of y. A part that does not vary has no slope and is not listed.

    Raises
    ------
    ValueError
        For an unknown model.
    """
    if model not in ("mixed", "clustered"):
        raise ValueError(f"model is {model!r}: use one of 'mixed', 'clustered'")
    data = split_levels(frame, [*xs, y])
    # Parts are scaled to unit deviation: slopes of very different size would leave the optimiser nowhere to start.
    scales = {f"{x}_{level}": float(data[f"{x}_{level}"].std()) for x in xs for level in LEVELS}
    kept = {name: scale for name, scale in scales.items() if scale > 1e-12 * float(np.abs(data[name.rsplit("_", 1)[0]]).max())}
    y_scale = float(data[y].std())
    design = pd.DataFrame({f"x{i}": data[name] / scale for i, (name, scale) in enumerate(kept.items())})
    design = design.assign(y=(data[y] - data[y].mean()) / y_scale, policy=data["policy"], document=data["document"])
    fit = _fit_mixed(design, len(kept)) if model == "mixed" else _fit_clustered(design, len(kept))
    counted = {"policies": data["policy"].nunique(), "documents": data["document"].nunique(), "interaction": len(data)}
    rows = []
    for i, (name, scale) in enumerate(kept.items()):
        x, level = name.rsplit("_", 1)
        question = f"slope of {y} on {x}, " + (level if level == "interaction" else f"between {level}")
        rows.append(_row(question, fit, i, y_scale / scale, counted[level], level, model, is_planned))
    return pd.concat(rows, ignore_index=True)


@dataclass(frozen=True)
class _Fit:
    """Slopes of the scaled parts, their standard errors, and the degrees of freedom of the errors."""

    slopes: np.ndarray
    errors: np.ndarray
    degrees: float = np.inf


def _row(question: str, fit: _Fit, i: int, unit: float, n: int, level: str, model: str, is_planned: bool) -> pd.DataFrame:
    """Return one slope; `unit` turns it back into the units of y over x."""
    slope, error = float(fit.slopes[i]), float(fit.errors[i])
    t = scipy_stats.t(fit.degrees)
    half, is_tested = error * float(t.ppf(0.975)), level != "policies"
    return tidy_row(
        question,
        slope * unit,
        ((slope - half) * unit, (slope + half) * unit),
        n,
        "rows" if level == "interaction" else level,
        test=f"Wald, {model} model" if is_tested else "",
        p=2.0 * float(t.sf(abs(slope) / error)) if is_tested else np.nan,
        effect=slope,
        effect_kind="beta",
        smallest_detectable=STANDARD_ERRORS * error * unit,
        is_planned=is_planned,
    )


def _formula(num_parts: int) -> str:
    return "y ~ " + " + ".join(f"x{i}" for i in range(num_parts))


def _fit_mixed(design: pd.DataFrame, num_parts: int) -> _Fit:
    import statsmodels.formula.api as formulas  # slow to load, and few pages ask for it
    from statsmodels.tools.sm_exceptions import ConvergenceWarning

    components = {"document": "0 + C(document)", "policy": "0 + C(policy)"}
    with warnings.catch_warnings():
        # A variance that ends at zero is an answer here: the slopes are those of the smaller model.
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixed = formulas.mixedlm(_formula(num_parts), design, groups=np.ones(len(design)), re_formula="0", vc_formula=components)
        fit: Any = mixed.fit(reml=True)
    return _Fit(np.asarray(fit.fe_params)[1:], np.asarray(fit.bse_fe)[1:])


def _fit_clustered(design: pd.DataFrame, num_parts: int) -> _Fit:
    import statsmodels.formula.api as formulas
    from statsmodels.stats.sandwich_covariance import cov_cluster_2groups

    fit = formulas.ols(_formula(num_parts), design).fit()
    groups = [pd.factorize(design[c])[0] for c in ("document", "policy")]
    both, *single = (np.diag(covariance)[1:] for covariance in cov_cluster_2groups(fit, groups[0], groups[1]))
    # A sum of two covariances less a third need not be positive; then the larger single one is the safe choice.
    variances = np.where(both > 0, both, np.maximum(*single))
    fewest = min(len(np.unique(group)) for group in groups)
    return _Fit(np.asarray(fit.params)[1:], np.sqrt(variances), fewest - 1)
