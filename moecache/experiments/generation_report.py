"""What the chapter on generation shows of its rows: policies, relations to mass, accuracy, and the values of its prose.

Everything here reads the rows of `generation` and measures nothing. Each kind of task is told apart. What the plan does not name is
marked exploratory. Accuracy is compared by McNemar's exact test: of the problems on which only one of the two is right, how many are the
policy's? (Q. McNemar, Psychometrika 12:153, 1947.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from moecache import stats
from moecache.claims.data import load_claims
from moecache.claims.generation_rules import Answer, across_policies, within_policies
from moecache.experiments.generation import CHOSEN, STAYS_OUT
from moecache.stats.rows import detectable_from_draws

MASS, BEFORE, WHOLE, SAME, RIGHT = "substituted_mass", "agreement_before", "agreement_whole", "is_same", "is_right"
UNIT = "cluster"
EXACT = "fetch every miss"
FEWEST_TEMPLATES = 5  # to be drawn
LEAST_ACCURACY = 0.2  # where the exact model solves fewer, accuracy is not judged
_FOLLOWS = {Answer.YES: "follows mass", Answer.NO: "does not follow mass", Answer.OPEN: "may or may not follow mass"}
_NOTHING = {Answer.YES: "says nothing", Answer.NO: "says something", Answer.OPEN: "may or may not say something"}


def words_of(kind: str) -> str:
    """A kind of task in words."""
    return {"gsm8k": "GSM8K", "humaneval": "HumanEval"}.get(kind, kind.replace("_", " "))


def listed(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the fixed list: neither the exact model nor the chosen policies."""
    return frame[~frame["family"].isin([EXACT, CHOSEN])].reset_index(drop=True)


def kinds(frame: pd.DataFrame) -> list[str]:
    """The kinds of task, in the order in which they were read."""
    return list(dict.fromkeys(frame["domain"]))


def settings(frame: pd.DataFrame) -> list[tuple[Any, pd.DataFrame]]:
    """((model, regime, num_slots), rows) of every setting, in the order of the frame."""
    return [(key, rows.reset_index(drop=True)) for key, rows in frame.groupby(["model", "regime", "num_slots"], sort=False)]


def points(rows: pd.DataFrame, num_draws: int = 2000) -> pd.DataFrame:
    """One row per (kind, policy) of one setting: `mass`, `agreement` with `low` and `high` (problems drawn), `whole`, `same`, `right`.

    Parameters
    ----------
    rows : DataFrame
    num_draws : int
        Bootstrap draws.
    """
    found = []
    for kind in kinds(rows):
        part = pd.DataFrame(rows[rows["domain"] == kind])
        paired = stats.pair_documents(part, UNIT, (MASS, BEFORE, WHOLE, SAME, RIGHT))
        counts = stats.draw_counts(paired.num_units, num_draws)
        low, high = stats.percentile_interval(stats.weighted_mean_draws(paired.sums[BEFORE], paired.num_tokens, counts))
        families = part.drop_duplicates("policy").set_index("policy")["family"]
        columns = {name: paired.means(column) for name, column in zip(_POINTS, (MASS, BEFORE, WHOLE, SAME, RIGHT), strict=True)}
        found.append(
            pd.DataFrame(
                {"kind": kind, "policy": paired.policies, "family": families.loc[list(paired.policies)].to_list(), **columns}
            ).assign(low=low, high=high, num_problems=paired.num_units)
        )
    return pd.concat(found, ignore_index=True)


_POINTS = ("mass", "agreement", "whole", "same", "right")


def policy_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`points` as a page shows them."""
    table = points(rows)
    bounds = zip(table["agreement"], table["low"], table["high"], strict=True)
    return pd.DataFrame(
        {
            "task": [words_of(kind) for kind in table["kind"]],
            "policy": table["policy"],
            "mass": table["mass"],
            "agrees to the first difference": [f"{value:.1%} [{low:.1%}, {high:.1%}]" for value, low, high in bounds],
            "over the whole": [f"{value:.1%}" for value in table["whole"]],
            "same answer": [f"{value:.1%}" for value in table["same"]],
            "right": [f"{value:.1%}" for value in table["right"]],
        }
    )


def right_at_ages(ages: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Share of right answers by policy, a column for each age of a model.

    Parameters
    ----------
    ages : rows of one setting each, by the name of the age.
    """
    columns = {name: points(rows).set_index(["kind", "policy"])["right"] for name, rows in ages.items()}
    table = pd.DataFrame(columns).reset_index()
    shares = {f"{name}, right": [f"{value:.1%}" for value in table[name]] for name in columns}
    return pd.DataFrame({"task": [words_of(kind) for kind in table["kind"]], "policy": table["policy"], **shares})


def relations(rows: pd.DataFrame) -> pd.DataFrame:
    """Coefficients of mass with agreement and accuracy in one setting: planned ones first, in the form of `stats.rows`."""
    is_planned = rows["regime"].iloc[0] == STAYS_OUT
    found = []
    for kind in kinds(rows):
        part = pd.DataFrame(listed(rows)[lambda frame, kind=kind: frame["domain"] == kind])
        found += [_across(part, kind, BEFORE, is_planned), _within(part, kind, BEFORE, is_planned)]
        found += [_across(part, kind, column) for column in (WHOLE, RIGHT)]
        by_template = part.assign(cluster=part["template"])
        if FEWEST_TEMPLATES <= by_template["cluster"].nunique() < part["document"].nunique():
            found += [_across(by_template, kind, BEFORE, counted="templates"), _within(by_template, kind, BEFORE, counted="templates")]
    kept = [row for row in found if row is not None]
    return pd.concat(kept, ignore_index=True) if kept else stats.tidy_row("", 0, (0, 0), 0, "").iloc[:0]


_WORDS = {BEFORE: "agreement", WHOLE: "agreement over the whole answer", RIGHT: "right answers"}


def _across(part: pd.DataFrame, kind: str, column: str, is_planned: bool = False, counted: str = "problems") -> pd.DataFrame | None:
    if part.groupby("policy")[column].mean().nunique() < 2:
        return None
    row = stats.association(part, MASS, column, unit=UNIT, is_planned=is_planned, num_draws=_draws(is_planned))
    drawn = "" if counted == "problems" else f", {counted} drawn"
    return row.assign(question=f"{words_of(kind)}: mass and {_WORDS[column]} across policies{drawn}", counted=counted, effect_kind="")


def _within(part: pd.DataFrame, kind: str, column: str, is_planned: bool = False, counted: str = "problems") -> pd.DataFrame | None:
    spreads = part.groupby("policy")[[MASS, column]].agg(np.ptp)
    varying = spreads.index[(spreads > 0).all(axis=1)]
    if len(varying) == 0:
        return None
    kept = pd.DataFrame(part[part["policy"].isin(varying)])
    row = stats.correlation_across_documents(kept, MASS, column, unit=UNIT, num_draws=_draws(is_planned)).iloc[-1]
    drawn = "" if counted == "problems" else f", {counted} drawn"
    return stats.tidy_row(
        f"{words_of(kind)}: problem by problem, mean of {len(varying)} policies{drawn}",
        row["spearman"],
        (row["low"], row["high"]),
        part["cluster"].nunique(),
        counted,
        smallest_detectable=stats.detectable_correlation(part["document"].nunique()),
        is_planned=is_planned,
    )


def _draws(is_planned: bool) -> int:
    return 10_000 if is_planned else 2_000


def by_problem(rows: pd.DataFrame, num_draws: int = 2000) -> pd.DataFrame:
    """Spearman's coefficient of mass and agreement across problems, of each listed policy that has one: `kind`, `policy`, `family`, `r`,
    `low`, `high`."""
    found = []
    for kind in kinds(rows):
        part = pd.DataFrame(listed(rows)[lambda frame, kind=kind: frame["domain"] == kind])
        spreads = part.groupby("policy", sort=False)[[MASS, BEFORE]].agg(np.ptp)
        varying = spreads.index[(spreads > 0).all(axis=1)]
        if len(varying) == 0:
            continue
        kept = pd.DataFrame(part[part["policy"].isin(varying)])
        table = stats.correlation_across_documents(kept, MASS, BEFORE, unit=UNIT, num_draws=num_draws).iloc[:-1]
        families = part.drop_duplicates("policy").set_index("policy")["family"]
        found.append(
            pd.DataFrame(
                {"kind": kind, "policy": table["policy"], "family": families.loc[table["policy"]].to_list(), "r": table["spearman"]}
            ).assign(low=table["low"], high=table["high"])
        )
    columns = ["kind", "policy", "family", "r", "low", "high"]
    return pd.concat(found, ignore_index=True)[columns] if found else pd.DataFrame(columns=columns)


def accuracy_tests(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Right answers of the exact model minus those of each policy, of one setting; Holm's correction over a kind's policies.

    Returns
    -------
    DataFrame in the form of `stats.rows`, or None where the exact model solves less than a fifth of every kind.
    """
    families = []
    for kind in kinds(rows):
        part = rows[(rows["domain"] == kind) & (rows["family"] != EXACT)]
        if part.drop_duplicates("document")["exact_is_right"].mean() < LEAST_ACCURACY:
            continue
        found = [_mcnemar(own, f"{words_of(kind)}: {policy}") for policy, own in part.groupby("policy", sort=False)]
        families.append(stats.holm_family(found))
    return pd.concat(families, ignore_index=True) if families else None


def _mcnemar(own: pd.DataFrame, question: str, num_draws: int = 10_000) -> pd.DataFrame:
    exact, mine = (own[column].to_numpy(bool) for column in ("exact_is_right", RIGHT))
    lost, won = int((exact & ~mine).sum()), int((mine & ~exact).sum())
    difference = exact.astype(float) - mine
    draws = stats.weighted_mean_draws(difference[None], np.ones(len(own)), stats.draw_counts(len(own), num_draws))[:, 0]
    low, high = stats.percentile_interval(draws)
    return stats.tidy_row(
        question,
        difference.mean(),
        (float(low), float(high)),
        len(own),
        f"problems, {lost} lost, {won} won",
        test="McNemar",
        p=float(scipy_stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0,
        smallest_detectable=detectable_from_draws(draws) if difference.any() else np.nan,
        is_planned=own["regime"].iloc[0] == STAYS_OUT and own["family"].iloc[0] != CHOSEN,
    )


def values(rows: pd.DataFrame) -> dict[str, Any]:
    """Numbers and words of the prose about one setting; those of a kind end in its name."""
    drawing, claims = load_claims()
    parameters = next(claim.parameters for claim in claims if claim.id == "k")
    result: dict[str, Any] = {"model": rows["model"].iloc[0], "slots": int(rows["num_slots"].iloc[0])}
    result |= {"num_listed": listed(rows)["policy"].nunique(), "num_families": listed(rows)["family"].nunique()}
    for kind in kinds(rows):
        part = pd.DataFrame(listed(rows)[lambda frame, kind=kind: frame["domain"] == kind])
        problems = part.drop_duplicates("document")
        follows, across = across_policies(part, BEFORE, parameters["strong"], drawing)
        nothing, within = within_policies(part, BEFORE, parameters["weak"], drawing)
        of_policy: Any = part.groupby("policy")[[BEFORE, RIGHT, MASS]].mean()
        worst = str(of_policy[BEFORE].idxmin())
        found = {
            "num_problems": len(problems),
            "num_templates": problems["template"].nunique(),
            "exact_right": float(problems["exact_is_right"].mean()),
            "num_exact": float(problems["num_exact"].mean()),
            "across": f"{across} ({int((of_policy[BEFORE] == 1.0).sum())} of them agree in full)",
            "follows": _FOLLOWS[follows],
            "within": within,
            "nothing": _NOTHING[nothing],
            "worst": worst,
            "worst_agreement": float(of_policy.loc[worst, BEFORE]),
            "worst_right": float(of_policy.loc[worst, RIGHT]),
            "median_agreement": float(of_policy[BEFORE].median()),
            "least_mass": float(of_policy[MASS].min()),
            "most_mass": float(of_policy[MASS].max()),
        }
        result |= {f"{name}_{kind}": value for name, value in found.items()}
    return result


def accuracy_words(tests: pd.DataFrame | None) -> str:
    """Which policies answer fewer problems rightly than the exact model, as far as the tests tell."""
    if tests is None:
        return "The exact model solves too few of the problems, so accuracy could not be asked."
    worse = tests[(tests["p"] < 0.05) & (tests["estimate"] > 0)]
    if worse.empty:
        return "No policy is told apart from the exact model in right answers; the table says what could have been seen."
    told = [f"{row['question']} ({row['estimate']:+.1%} [{row['low']:+.1%}, {row['high']:+.1%}])" for row in worse.to_dict("records")]
    return f"Fewer right answers than the exact model's, clear of zero after correction: {'; '.join(told)}. All others are not told apart."


def file_words(frame: pd.DataFrame) -> str:
    """What a file of problems gave, in a sentence."""
    problems = frame.drop_duplicates("document")
    right = problems["exact_is_right"].mean()
    judged = "" if right >= LEAST_ACCURACY else " That is too few to compare accuracy."
    kind = words_of(kinds(frame)[0])
    return f"{frame['model'].iloc[0]} solves {right:.0%} of {len(problems)} problems of {kind} when every miss is waited for.{judged}"
