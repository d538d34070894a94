"""What chapter 04 shows of its measurement: tables by setting, sentences for figures, and the values of its prose.

A *setting* is one capacity in one regime. This module reads the tidy frame of `misses_that_matter` and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from moecache import figures, stats

UNIT = "cluster"  # of documents of one origin
MAIN_MODEL = "reference-512"
REGIME_OF_RANKS = "admitted_anyway"


def planned_tests(frame: pd.DataFrame, num_slots: int) -> pd.DataFrame:
    """The planned t-tests of one model, Holm over all of them, in thousandths of a nat, with Wilcoxon's p beside them."""
    rows = one_setting(frame, num_slots, "admitted_anyway")
    pairs = planned_pairs(frame)
    tests = stats.paired_tests(rows, pairs, unit=UNIT)
    bounds = zip(tests["difference_nats"], tests["low"], tests["high"], strict=True)
    return pd.DataFrame(
        {
            "comparison": tests["comparison"],
            "mnat a token [95 %]": [f"{1000 * m:.3g} [{1000 * a:.3g}, {1000 * b:.3g}]" for m, a, b in bounds],
            "n": [f"{tests.attrs['num_units']} clusters"] * len(tests),
            "dz": tests["dz"],
            "smallest detectable": 1000 * tests["smallest_detectable_nats"],
            "p (t, Holm)": tests["p_holm"],
            "p (Wilcoxon, Holm)": stats.paired_tests(rows, pairs, "wilcoxon", UNIT)["p_holm"],
        }
    )


def last_rank_rule(frame: pd.DataFrame) -> str:
    """The label of the rule that substitutes only the lightest rank."""
    labels = [label for label in frame["policy"].unique() if label.startswith("only rank")]
    return max(labels, key=lambda label: int(label.split()[2]))


def planned_pairs(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """The comparisons fixed before the full run, after small pilots, as (rule, against)."""
    half = next(label for label in frame["policy"].unique() if label.startswith("first ") and label not in ("first choice", "first 3"))
    return [
        ("only rank 0 substituted", last_rank_rule(frame)),
        ("only rank 0 substituted", "first choice"),
        ("first choice", "0.15 rule"),
        ("gate weight 0.15", "0.15 rule"),
        (half, "gate weight 0.10"),
        (half.replace("first", "last"), half),
    ]


def planned_ratios(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """The ratios of increases fixed before the full run, after small pilots, as (above, below)."""
    return [
        ("substitute every miss", "0.15 rule"),
        ("only rank 0 substituted", last_rank_rule(frame)),
        ("gate weight 0.15", "0.15 rule"),
        ("first choice", "0.15 rule"),
    ]


def one_setting(frame: pd.DataFrame, num_slots: int, regime: str) -> pd.DataFrame:
    """The rows of one capacity and regime, without the fetching policy (it is what the others are compared with)."""
    rows = frame[(frame["num_slots"] == num_slots) & (frame["regime"] == regime)]
    return rows[rows["family"] != "fetch every miss"].reset_index(drop=True)


def tables(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a (capacity, regime, rule): `stats.policy_table` with fetches and copies a step."""
    parts = []
    settings = frame[["num_slots", "regime"]].drop_duplicates().sort_values(["num_slots", "regime"])
    for num_slots, regime in zip(settings["num_slots"].tolist(), settings["regime"].tolist(), strict=True):
        rows = one_setting(frame, num_slots, regime)
        part = stats.policy_table(rows, UNIT)
        parts.append(part.assign(num_slots=num_slots, regime=regime, **_per_step(rows, part["policy"])))
    return pd.concat(parts, ignore_index=True)


def _per_step(rows: pd.DataFrame, policies: pd.Series) -> dict[str, Any]:
    """Fetches and copies a step. A step has as many calls as its router has ranks."""
    totals = rows.groupby("policy")[["fetched", "forced", "copies", "steps"]].sum().loc[policies]
    return {
        "fetches_per_step": ((totals["fetched"] + totals["forced"]) / totals["steps"]).to_numpy(),
        "copies_per_step": (totals["copies"] / totals["steps"]).to_numpy(),
    }


def setting(table: pd.DataFrame, num_slots: int, regime: str) -> pd.DataFrame:
    """The rules of one capacity and regime."""
    return table[(table["num_slots"] == num_slots) & (table["regime"] == regime)].drop(columns=["num_slots", "regime"])


def row_of(table: pd.DataFrame, num_slots: int, regime: str, policy: str) -> pd.Series:
    """One rule of one setting."""
    rows = setting(table, num_slots, regime)
    return rows[rows["policy"] == policy].iloc[0]


def describe(table: pd.DataFrame, num_slots: int, regime: str) -> str:
    """What a forest plot of this setting shows, in one sentence, for its alternative text."""
    rows = setting(table, num_slots, regime).sort_values("increase", ascending=False)
    items = [f"{row.policy} {row.increase:.1%}" for row in rows.itertuples()]
    return f"Perplexity increase of each rule at {num_slots} slots, {regime.replace('_', ' ')}: " + ", ".join(items) + "."


def regime_table(table: pd.DataFrame, num_slots: int) -> pd.DataFrame:
    """Both regimes of one capacity side by side, the dearest rule first; shares in percent, fetches and copies a step."""
    sides = [setting(table, num_slots, regime).set_index("policy") for regime in ("admitted_anyway", "stays_out")]
    order = sides[0].sort_values("increase", ascending=False).index
    anyway, out = (side.loc[order] for side in sides)
    return pd.DataFrame(
        {
            "rule": order,
            "anyway: increase [95 %]": _intervals(anyway),
            "calls, %": (100 * anyway["substituted_fraction"]).to_numpy(),
            "fetches + copies": [f"{f:.2f} + {c:.2f}" for f, c in zip(anyway["fetches_per_step"], anyway["copies_per_step"], strict=True)],
            "stays out: increase": _intervals(out),
            "calls, % ": (100 * out["substituted_fraction"]).to_numpy(),
            "fetches": out["fetches_per_step"].to_numpy(),
        }
    )


def _intervals(rows: pd.DataFrame) -> list[str]:
    bounds = zip(rows["increase"], rows["low"], rows["high"], strict=True)
    return [f"{100 * middle:.3g} % [{100 * low:.3g}, {100 * high:.3g}]" for middle, low, high in bounds]


def mass_sentence(frame: pd.DataFrame, num_slots: int, regime: str = "admitted_anyway") -> str:
    """Spearman's coefficient between mass and loss across the rules, with and without those that substitute first choices."""
    rows = one_setting(frame, num_slots, regime)
    substitutes_first = rows.groupby("policy")["first_choices_substituted"].sum() > 0
    protecting = rows[~rows["policy"].map(substitutes_first)]
    parts = []
    for name, part in (("all rules", rows), ("rules that never substitute a first choice", protecting)):
        found = stats.correlation_across_policies(part, "substituted_mass", "mean_difference_nats", UNIT)
        row = found[found["method"] == "spearman"].iloc[0]
        parts.append(f"{name}: Spearman {row['r']:.2f} [{row['low']:.2f}, {row['high']:.2f}]")
    return "Across " + "; ".join(parts) + "."


def main_figure(frame: pd.DataFrame) -> Figure:
    """The study's main figure: what each rule costs at the first capacity, every substituted expert admitted anyway."""
    names = list(frame["model"].unique())
    rows = frame[frame["model"] == (MAIN_MODEL if MAIN_MODEL in names else names[0])]
    return figures.forest(setting(tables(rows), int(rows["num_slots"].min()), "admitted_anyway"))


def _capacity_words(table: pd.DataFrame, first: int, last: int, lru_hit_rate: float) -> dict[str, str]:
    """How the prose speaks of the second capacity, where there is one."""
    if first == last:
        asked = f"here one capacity was asked for, {first} slots"
        return {"capacities": asked, "second_capacity": f"(No second capacity: {asked}.)", "second_result": f"({asked.capitalize()}.)"}
    gate, everything = (row_of(table, last, "admitted_anyway", rule)["increase"] for rule in ("0.15 rule", "substitute every miss"))
    where = f"{last} slots, where LRU hits {lru_hit_rate:.1%} of the calls"
    return {
        "capacities": f"at {first} slots, the share of residents asked for, and at {where}",
        "second_capacity": f"At {where}:",
        "second_result": f"At {last} slots the same rule costs {gate:.2%}, and substituting every miss {everything:.1%}.",
    }


def policy_points(frame: pd.DataFrame) -> pd.DataFrame:
    """`stats.policy_table` of one setting, over clusters."""
    return stats.policy_table(frame, UNIT)


def ratio_rows(frame: pd.DataFrame, num_slots: int) -> pd.DataFrame:
    """How many times one rule's increase is another's, at one capacity, admitted anyway."""
    rows = one_setting(frame, num_slots, "admitted_anyway")
    return stats.ratios_of_increases(rows, planned_ratios(frame), UNIT).drop(columns="note")


def words(model_names: Sequence[str], capacities: Mapping[str, Sequence[int]], early_model_name: str, third: float) -> dict[str, str]:
    """Sentences about what else was asked: other models, a third capacity, another age."""
    model, *others = model_names
    named = ", ".join(f"{name} at {capacities[name][0]} slots" for name in others)
    ages = f"The same rules in {early_model_name} and in {model}, at the first capacity, admitted anyway"
    return {
        "model": model,
        "other_models": f"{named}:" if others else "(No other model was asked for.)",
        "third_capacity": f"With {third:.1%} of the experts resident, increase of the rules of the claims, in percent (exploratory):"
        if third
        else "(No third capacity was asked for.)",
        "two_ages": f"{ages}: percentages belong to an age, the order of the rules should not (exploratory)."
        if early_model_name
        else "(No other age of the model was asked for.)",
    }


def values(frame: pd.DataFrame, table: pd.DataFrame, num_warmup: int, lru_hit_rate: float) -> dict[str, Any]:
    """The numbers of the chapter's prose."""
    first, last = int(frame["num_slots"].min()), int(frame["num_slots"].max())
    anyway = {name: row_of(table, first, "admitted_anyway", name) for name in table["policy"].unique()}
    last_rank = last_rank_rule(frame)
    everything, rank0, gate = anyway["substitute every miss"], anyway["only rank 0 substituted"], anyway["0.15 rule"]
    return {
        "num_scored": int(frame["document"].nunique()),
        "num_warmup": num_warmup,
        "num_clusters": int(frame["cluster"].nunique()),
        "lru_hit_rate": lru_hit_rate,
        "slots_first": first,
        "slots_second": last,
        "all_calls": everything["substituted_fraction"],
        "gate010_increase": anyway["gate weight 0.10"]["increase"],
        "gate010_calls": anyway["gate weight 0.10"]["substituted_fraction"],
        "all_increase": everything["increase"],
        "all_low": everything["low"],
        "all_high": everything["high"],
        "rank0_increase": rank0["increase"],
        "rank0_calls": rank0["substituted_fraction"],
        "last_increase": anyway[last_rank]["increase"],
        "last_calls": anyway[last_rank]["substituted_fraction"],
        "gate015_increase": gate["increase"],
        "gate015_calls": gate["substituted_fraction"],
        "gate015_fetches": gate["fetches_per_step"],
        **_capacity_words(table, first, last, lru_hit_rate),
        "mass_sentence": mass_sentence(frame, first),
    }
