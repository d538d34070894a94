"""How chapter 13 fits its models and judges them: on the other half of the documents, each kind of novelty apart.

Clusters of documents are dealt to two halves, in turn within the order of their domains. Models are fitted to the emulator's rows of the
first half; of the second half they are given only what a simulator sees in the exact model's trace, and are held against what the emulator
measured there.

Every coefficient is drawn: clusters of the judged half with replacement, estimates and losses of a draw from the same clusters. Policies
are a design, and are fixed. A policy whose measured loss is not clear of zero is in no coefficient, and is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moecache import stats
from moecache.experiments.loss_from_trace import FAMILY, FRONT
from moecache.pareto import pareto_front
from moecache.quality.fit import FORMS
from moecache.quality.model import QualityModel
from moecache.quality.sums import PolicySums, cell_columns, policy_sums
from moecache.stats.relations import FEWEST_POINTS, rowwise_correlation
from moecache.stats.resample import NUM_DRAWS
from moecache.stats.rows import detectable_from_draws
from moecache.trace import ModelShape

FITTED, JUDGED = "fitted", "judged"
CLEAR = 1.96  # standard errors above zero of a policy that is in a coefficient
USEFUL, HONEST, NEAR = 0.9, 0.8, 1.1  # of the plan: Spearman's coefficient, share inside the interval, ratio to the front


@dataclass(frozen=True)
class Fits:
    """The models of one language model: the chosen form and mass alone, fitted to the list, and to the list without each family."""

    chosen: QualityModel
    mass: QualityModel
    without: dict[str, QualityModel]
    mass_without: dict[str, QualityModel]


@dataclass(frozen=True, eq=False)
class Judged:
    """One novelty: P policies, what was measured and what was estimated, in nats; draws [B, P]."""

    novelty: str
    table: pd.DataFrame
    loss_draws: np.ndarray
    estimate_draws: np.ndarray
    mass_draws: np.ndarray
    num_clusters: int


def with_halves(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with ``half``: clusters in the order of their domains are dealt in turn."""
    clusters = frame.drop_duplicates("cluster")[["cluster", "domain"]].sort_values("domain", kind="stable")
    halves = {cluster: (FITTED, JUDGED)[i % 2] for i, cluster in enumerate(clusters["cluster"])}
    return frame.assign(half=frame["cluster"].map(halves))


def joined(measured: pd.DataFrame, seen: pd.DataFrame) -> pd.DataFrame:
    """Measured rows with what the simulator saw in place of what the emulator logged; policies named with their slots."""
    keys = ["policy", "num_slots"]
    place = measured.groupby(keys, sort=False).cumcount()
    seen = seen.assign(place=seen.groupby(keys, sort=False).cumcount()).drop(columns=["document", "num_tokens"])
    own = [column for column in measured.columns if column not in seen.columns or column in keys]
    both = measured[own].assign(place=place).merge(seen, on=[*keys, "place"], how="left", validate="one_to_one")
    if both["seconds"].isna().any():
        raise ValueError("a policy that was measured was not simulated")
    return named(both)


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """Policies named with their slots, documents of one name told apart."""
    return stats.unique_documents(frame).assign(policy=frame["policy"] + " @ " + frame["num_slots"].astype(str))


def fit_models(rows: pd.DataFrame, shape: ModelShape, num_draws: int) -> Fits:
    """Fit to the emulator's rows of the list, first half."""
    listed = stats.unique_documents(rows[(rows["novelty"] == FAMILY) & (rows["half"] == FITTED)])
    few = 10  # draws of models whose intervals nobody looks at

    def without(family: str, form: str | None, draws: int) -> QualityModel:
        return QualityModel.fit(pd.DataFrame(listed[listed["family"] != family]), shape, form=form, num_draws=draws)

    families = list(dict.fromkeys(listed["family"]))
    return Fits(
        QualityModel.fit(listed, shape, num_draws=num_draws),
        QualityModel.fit(listed, shape, form="mass", num_draws=few),
        {family: without(family, None, num_draws) for family in families},
        {family: without(family, "mass", few) for family in families},
    )


def judge(rows: pd.DataFrame, fits: Fits, novelty: str, num_draws: int = NUM_DRAWS) -> Judged:
    """Estimate the policies of one novelty on the judged half, and draw its clusters."""
    part = pd.DataFrame(rows[(rows["novelty"] == novelty) & (rows["half"] == JUDGED)])
    sums = policy_sums(part, fits.chosen.shape.num_layers)
    counts, whole = stats.draw_counts(sums.num_clusters, num_draws), np.ones((1, sums.num_clusters))
    tables, draws, of_mass = [], [], []
    for place, (label, family) in enumerate(zip(sums.policies, sums.families, strict=True)):
        one = sums.of_policies(np.array([place]))
        is_apart = novelty == FAMILY
        model, mass = (fits.without[family], fits.mass_without[family]) if is_apart else (fits.chosen, fits.mass)
        amounts, log_ages = one.features(whole, FORMS[model.form].mass)
        estimate = model.estimate(amounts[0, 0], log_ages[0, 0])
        draws.append(_estimates(model, one, counts))
        of_mass.append(_estimates(mass, one, counts))
        point_of_mass = float(_estimates(mass, one, whole)[0])
        tables.append(
            {"policy": label, "family": family, "estimated_nats": estimate.loss_nats, "mass_nats": point_of_mass, **estimate.summary()}
        )
    table = pd.DataFrame(tables)
    losses = sums.mean_losses(whole)[0]
    table = table.assign(
        novelty=novelty, loss_nats=losses, measured_increase=np.expm1(losses), is_clear=losses > CLEAR * sums.standard_errors()
    )
    return Judged(novelty, table, sums.mean_losses(counts), np.stack(draws, axis=1), np.stack(of_mass, axis=1), sums.num_clusters)


def _estimates(model: QualityModel, one: PolicySums, counts: np.ndarray) -> np.ndarray:
    """Estimated loss of one policy in every draw [B]."""
    amounts, log_ages = one.features(counts, FORMS[model.form].mass)
    return model.loss_nats(amounts[:, 0], log_ages[:, 0])


def order_rows(judged: Judged) -> pd.DataFrame | None:
    """Planned: Spearman's coefficient of estimate and loss, and by how much it is above that of mass; None with too few policies."""
    is_clear = judged.table["is_clear"].to_numpy()
    if is_clear.sum() < FEWEST_POINTS:
        return None
    points = judged.table[judged.table["is_clear"]]
    losses, drawn = points["loss_nats"].to_numpy()[None], judged.loss_draws[:, is_clear]
    found, mass = (float(rowwise_correlation(points[c].to_numpy()[None], losses, "spearman")[0]) for c in ("estimated_nats", "mass_nats"))
    draws, mass_draws = (rowwise_correlation(d[:, is_clear], drawn, "spearman") for d in (judged.estimate_draws, judged.mass_draws))
    where = f"{judged.novelty} ({int(is_clear.sum())} policies)"
    return pd.concat(
        [
            _row(f"spearman of estimate and loss, {where}", found, draws, judged.num_clusters),
            _row(f"the same, minus that of mass alone, {where}", found - mass, draws - mass_draws, judged.num_clusters),
        ],
        ignore_index=True,
    )


def _row(question: str, estimate: float, draws: np.ndarray, num_clusters: int) -> pd.DataFrame:
    low, high = stats.percentile_interval(draws)
    smallest = detectable_from_draws(draws)
    return stats.tidy_row(
        question, estimate, (float(low), float(high)), num_clusters, "clusters", smallest_detectable=smallest, is_planned=True
    )


def summary(judged: Sequence[Judged]) -> pd.DataFrame:
    """One row a novelty: policies, how many are clear of zero, typical error of estimate and of mass, share inside the interval."""
    rows = []
    for one in judged:
        clear = one.table[one.table["is_clear"]]
        errors = {c: np.exp(np.median(np.abs(np.log(clear[c] / clear["loss_nats"])))) - 1 for c in ("estimated_nats", "mass_nats")}
        bias = np.exp(np.median(np.log(clear["estimated_nats"] / clear["loss_nats"])))
        low, high, at = (one.table[c] for c in ("estimated_increase_low", "estimated_increase_high", "measured_increase"))
        rows.append(
            {
                "novelty": one.novelty,
                "policies": len(one.table),
                "clear of zero": len(clear),
                "median error": errors["estimated_nats"],
                "median error, mass alone": errors["mass_nats"],
                "estimate / loss": bias,
                "inside the interval": float(((low <= at) & (at <= high)).mean()),
            }
        )
    return pd.DataFrame(rows)


def decisions(judged: Sequence[Judged]) -> dict[str, tuple[str, str, str]]:
    """The plan's decisions of each novelty: useful, better than mass, honest."""
    found = {}
    for one, line in zip(judged, summary(judged).to_dict("records"), strict=True):
        rows = order_rows(one)
        is_honest = "yes" if line["inside the interval"] >= HONEST else "no"
        if rows is None:
            found[one.novelty] = ("not judged", "not judged", is_honest)
            continue
        low, high = rows[["low", "high"]].iloc[0]
        useful = "yes" if low > USEFUL else "no" if high < USEFUL else "inconclusive"
        better = "yes" if rows["low"].iloc[1] > 0 else "no" if rows["high"].iloc[1] < 0 else "inconclusive"
        found[one.novelty] = (useful, better, is_honest)
    return found


def best(sweep: pd.DataFrame, number: int) -> list[str]:
    """The policies that the estimate calls best at their seconds: the front, and if it is short the fronts behind it.

    Of the last front only as many as are wanted, spread evenly along the seconds.
    """
    rest, chosen = sweep, []
    while len(chosen) < number and len(rest):
        front = pareto_front(rest, minimise=["seconds", "estimated_increase"])["policy"].tolist()
        wanted = number - len(chosen)
        if len(front) > wanted:
            front = [front[i] for i in np.linspace(0, len(front) - 1, wanted).round().astype(int)]
        chosen += front
        rest = rest[~rest["policy"].isin(front)]
    return chosen


def confirmed(rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """Each best policy against the smallest measured loss of any emulated policy that takes no more seconds.

    Parameters
    ----------
    rows : DataFrame
        Joined rows of everything emulated at the capacity, the best policies (novelty "front") among them.
    labels : sequence of str
        The best policies.

    Returns
    -------
    DataFrame
        ``policy``, ``seconds``, ``increase`` with its interval, ``front_increase``, ``is_confirmed``.
    """
    part = pd.DataFrame(rows[rows["half"] == JUDGED].drop(columns=["regime", "num_slots"], errors="ignore"))
    table = stats.perplexity_increases(part, unit="cluster")
    weights = part["num_tokens"]
    seconds = (part["seconds"] * weights).groupby(part["policy"]).sum() / weights.groupby(part["policy"]).sum()
    table["seconds"] = seconds.loc[table["policy"]].to_numpy()
    losses, times = np.log1p(table["increase"].to_numpy()), table["seconds"].to_numpy()
    front = np.array([losses[times <= at].min() for at in times])
    table = table.assign(front_increase=np.expm1(front), is_confirmed=losses <= NEAR * np.maximum(front, 0.0) + 1e-12)
    is_best = table["policy"].str.rsplit(" @ ", n=1).str[0].isin(labels)
    columns = ["policy", "seconds", "increase", "low", "high", "front_increase", "is_confirmed"]
    return pd.DataFrame(table[columns].assign(is_best=is_best)).sort_values("seconds", ignore_index=True)


def seen_and_logged(measured: pd.DataFrame, rows: pd.DataFrame, model: QualityModel) -> pd.DataFrame:
    """What the exact model's trace shows of each policy against what the emulated model's own routing was: by layer, and in the estimate.

    Returns
    -------
    DataFrame
        ``policy``, ``layer {l}`` (squared weights in the trace / in the log) and ``estimate`` (the same of estimated losses).
    """
    logged, seen = named(measured), rows[rows["novelty"] != FRONT]
    num_layers = model.shape.num_layers
    cells = cell_columns(num_layers)
    table = {}
    for frame in (seen, logged):
        totals = frame.groupby("policy", sort=False)[[f"squared_{cell}" for cell in cells]].sum()
        table[len(table)] = totals.to_numpy().reshape(len(totals), num_layers, -1).sum(axis=2)
        labels = totals.index
    ratios = np.divide(table[0], table[1], out=np.full_like(table[0], np.nan), where=table[1] > 0)
    estimates = [model.predict(frame)["estimated_nats"].to_numpy() for frame in (seen, logged)]
    columns = {f"layer {layer}": ratios[:, layer] for layer in range(num_layers)}
    return pd.DataFrame({"policy": labels, **columns, "estimate": estimates[0] / estimates[1]})
