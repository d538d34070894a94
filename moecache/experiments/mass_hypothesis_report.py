"""What chapter 05 shows of its rows: predictors side by side, pairs, levels, residencies, and the values of its prose.

Everything here reads the rows of `mass_hypothesis` and measures nothing. The planned analyses are those of the plan page;
what is not named there is marked exploratory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moecache import stats
from moecache.experiments.mass_hypothesis import LISTED, RESIDENCIES, VARIED, varied_label
from moecache.substituted_calls import RANK_GROUPS

MASS, SQUARES, AGED, ERROR = "substituted_mass", "squared_weights", "aged_squares", "relative_error2"
LOSS, EXACT = "mean_difference_nats", "exact_loss_nats"
WORDS = {MASS: "mass", SQUARES: "squared weights", AGED: "squared weights x log age", ERROR: "layer error e²", LOSS: "loss"}
PREDICTORS = (MASS, SQUARES, AGED, ERROR)
UNIT = "cluster"
FAN_SIZES = (5, 10, 20, 40, 80)


def prepare(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with `aged_squares`: squared weight times log2 of the call's age, mean a step."""
    layers = sum(column.startswith("squared_l") and column.endswith("_r0") for column in frame.columns)
    cells = [f"l{layer}_{group}" for layer in range(layers) for group in RANK_GROUPS]
    total = sum(frame[f"squared_{cell}"].to_numpy() * frame[f"log_age_{cell}"].to_numpy() for cell in cells)
    return stats.unique_documents(frame.assign(**{AGED: total / layers}))


def one_model(frame: pd.DataFrame, model: str, part: str = LISTED) -> pd.DataFrame:
    """The listed (or varied) rows of one model."""
    return frame[(frame["model"] == model) & (frame["part"] == part)].reset_index(drop=True)


def without_first_choices(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of policies that substituted no first choice."""
    substituted = rows.groupby("policy")["first_choices_substituted"].transform("sum")
    return rows[substituted == 0].reset_index(drop=True)


def every_model(make: Callable[[Any], pd.DataFrame], of_model: Mapping[str, Any]) -> pd.DataFrame:
    """A table of each model below one another; the model is named where there are several."""
    tables = {model: make(rows) for model, rows in of_model.items()}
    if len(tables) == 1:
        return next(iter(tables.values()))
    named = [pd.concat([pd.DataFrame({"model": [model] * len(table)}), table], axis=1) for model, table in tables.items()]
    return pd.concat(named, ignore_index=True)


def order_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`order_rows` as a page shows them."""
    return stats.shown(order_rows(rows)).drop(columns=["test", "effect size"])


def order_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Planned and exploratory coefficients of mass and loss across policies."""
    protecting = without_first_choices(rows)
    parts = [
        stats.association(protecting, unit=UNIT, is_planned=True).assign(question="spearman, no first choices substituted"),
        stats.association(rows, unit=UNIT).assign(question="spearman, whole list"),
        stats.association(protecting, method="pearson", unit=UNIT).assign(question="pearson, no first choices substituted"),
        stats.association(rows, method="pearson", unit=UNIT).assign(question="pearson, whole list"),
    ]
    numbers = [protecting["policy"].nunique(), rows["policy"].nunique()] * 2
    for part, number in zip(parts, numbers, strict=True):
        part["question"] += f" ({number} policies)"
    return pd.concat(parts, ignore_index=True)


def with_varied(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """The list and the varied residencies of one model together, as a row of coefficients."""
    rows = frame[frame["model"] == model].drop(columns="regime")
    found = [stats.association(rows, x, unit=UNIT) for x in (MASS, ERROR)]
    return pd.concat(
        [
            row.assign(question=f"spearman of {WORDS[x]} and loss, list and varied residencies")
            for x, row in zip((MASS, ERROR), found, strict=True)
        ],
        ignore_index=True,
    )


def families_left_out(rows: pd.DataFrame) -> pd.DataFrame:
    """Spearman's coefficient of mass and of e² with each family left out, over the list and without first choices."""
    sets = {"whole list": rows, "no first choices": without_first_choices(rows)}
    columns = {
        f"{WORDS[x]}, {name}": stats.leaving_families_out(part, x).set_index("left_out")["r"]
        for name, part in sets.items()
        for x in (MASS, ERROR)
    }
    table = pd.DataFrame(columns)
    return table.loc[[family for family in dict.fromkeys(rows["family"]) if family in table.index]].reset_index(names="left out")


def ratio_rows(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Median loss ratio of pairs of nearly equal mass, whole list and without first choices; None where there are too few pairs."""
    found = []
    for name, part in (("whole list", rows), ("no first choices", without_first_choices(rows))):
        if len(stats.near_pairs(part, unit=UNIT)) >= 10:
            row = stats.loss_ratio_of_near_pairs(part, unit=UNIT, is_planned=True)
            found.append(row.assign(question=f"median loss ratio, masses within 10 %, {name}"))
    return pd.concat(found, ignore_index=True) if found else None


def ratio_table(rows: pd.DataFrame) -> pd.DataFrame:
    """`ratio_rows` as a page shows them."""
    found = ratio_rows(rows)
    if found is None:
        return pd.DataFrame([{"question": "median loss ratio, masses within 10 %", "answer": "not judged: fewer than ten pairs"}])
    return stats.shown(found).drop(columns=["test", "effect size"])


def widest_pairs(rows: pd.DataFrame, most: int = 6) -> pd.DataFrame:
    """The pairs of nearly equal mass whose losses differ most."""
    pairs = stats.near_pairs(rows, unit=UNIT)[:most]
    return pd.DataFrame({"loses more": pairs["dearer"], "loses less": pairs["cheaper"], "loss ratio": pairs["ratio"]})


def strong_form(ratios: pd.DataFrame | None, bound: float = 1.25) -> str:
    """The planned decision on "equal mass, equal loss" over the whole list."""
    if ratios is None:
        return "not judged: fewer than ten pairs"
    low, high = ratios[["low", "high"]].iloc[0]
    return "supported" if high < bound else "refuted" if low > bound else "inconclusive"


def predictors(rows: pd.DataFrame) -> pd.DataFrame:
    """Each predictor: its order of the policies, against mass, and what it leaves open between policies that it holds equal."""
    protecting, found = without_first_choices(rows), []
    for x in PREDICTORS:
        against = "" if x == MASS else _bounds(stats.better_association(rows, x, MASS, unit=UNIT, is_planned=x in (SQUARES, ERROR)))
        pairs = len(stats.near_pairs(rows, x, unit=UNIT))
        found.append(
            {
                "predictor": WORDS[x],
                "spearman, whole list": _bounds(stats.association(rows, x, unit=UNIT)),
                "minus that of mass": against,
                "no first choices": _bounds(stats.association(protecting, x, unit=UNIT)),
                "loss ratio at equal value": _bounds(stats.loss_ratio_of_near_pairs(rows, x, unit=UNIT)) if pairs else "",
                "pairs": pairs,
            }
        )
    return pd.DataFrame(found)


def _bounds(row: pd.DataFrame) -> str:
    estimate, low, high = row[["estimate", "low", "high"]].iloc[0]
    return f"{estimate:.2f} [{low:.2f}, {high:.2f}]"


def within_policies(rows: pd.DataFrame) -> pd.DataFrame:
    """Spearman's coefficient with loss across the documents of each policy that substituted no first choice, and their mean."""
    protecting = without_first_choices(rows)
    table: dict[str, Any] = {}
    for x in (MASS, ERROR, EXACT):
        found = stats.correlation_across_documents(protecting, x, unit=UNIT, num_draws=2000)
        table |= {"policy": found["policy"]} if not table else {}
        bounds = zip(found["spearman"], found["low"], found["high"], strict=True)
        table[{EXACT: "loss of the exact model"}.get(x, WORDS.get(x, x))] = [
            "" if np.isnan(r) else f"{r:+.2f} [{low:+.2f}, {high:+.2f}]" for r, low, high in bounds
        ]
    return pd.DataFrame(table)


def fans(rows: pd.DataFrame) -> pd.DataFrame:
    """What samples of n documents would have said: across policies, and across documents within the policies (their mean)."""
    protecting = without_first_choices(rows)
    num_documents = rows["document"].nunique()
    sizes = [*([n for n in FAN_SIZES if n < num_documents] or [num_documents - 1]), num_documents]
    across = stats.fan_across(protecting, sizes).assign(kind="across policies")
    mean = stats.fan_within(protecting, varying(protecting), sizes).assign(kind="within policies, mean")
    one = stats.fan_within(protecting, typical(protecting), sizes).assign(kind="within one policy")
    return pd.concat([across, mean, one], ignore_index=True)


def varying(rows: pd.DataFrame) -> list[str]:
    """Policies whose mass and loss differ between documents."""
    spreads = rows.groupby("policy", sort=False)[[MASS, LOSS]].agg(np.ptp)
    return list(spreads.index[(spreads > 0).all(axis=1)])


def typical(rows: pd.DataFrame) -> str:
    """The policy of the median mass among those that vary."""
    masses = rows[rows["policy"].isin(varying(rows))].groupby("policy")[MASS].mean().sort_values()
    return str(masses.index[len(masses) // 2])


def levels(rows: pd.DataFrame) -> pd.DataFrame:
    """Slopes of loss at three levels on mass alone, on e² alone, and on both together; in nats a unit."""
    alone = [stats.slopes_by_level(rows, [x]).assign(model=f"{WORDS[x]} alone") for x in (MASS, ERROR)]
    both = stats.slopes_by_level(rows, [MASS, ERROR]).assign(model="both")
    table = pd.concat([*alone, both], ignore_index=True)
    cells = [f"{e:.3g} [{low:.3g}, {high:.3g}]" for e, low, high in zip(table["estimate"], table["low"], table["high"], strict=True)]
    named = table.assign(
        cell=cells, level=table["question"].str.extract(r", (.*)$")[0], x=table["question"].str.extract(r" on (\w+),")[0].map(WORDS)
    )
    wide = named.pivot_table(index=["model", "x"], columns="level", values="cell", aggfunc="first", sort=False)
    return wide.reset_index().rename(columns={"model": "explained by", "x": "slope on"}).rename_axis(columns=None)


def residencies(listed: pd.DataFrame, varied: pd.DataFrame) -> pd.DataFrame:
    """Each varied residency against the plain one: change in mass and in loss, Holm over all of them."""
    rules = list(dict.fromkeys(varied["family"]))
    rows = pd.concat([listed[listed["policy"].isin(rules)], varied], ignore_index=True).drop(columns="regime")
    asked = [(rule, residency) for rule in rules for residency in RESIDENCIES[1:]]
    tested = stats.holm_family([stats.compare(rows, varied_label(*pair), pair[0], unit=UNIT, is_planned=True) for pair in asked])
    changes = [stats.compare(rows.assign(**{LOSS: rows[MASS]}), varied_label(*pair), pair[0], unit=UNIT) for pair in asked]
    return tested.assign(
        rule=[rule for rule, _ in asked],
        residency=[residency for _, residency in asked],
        mass_change=[c["estimate"].iloc[0] for c in changes],
        is_opposite=[_is_opposite(c.iloc[0], t) for c, (_, t) in zip(changes, tested.iterrows(), strict=True)],
    )


def _is_opposite(mass: pd.Series, loss: pd.Series) -> bool:
    """Whether mass and loss clearly change in opposite directions."""
    is_clear = mass["low"] * mass["high"] > 0 and loss["low"] * loss["high"] > 0
    return bool(is_clear and mass["estimate"] * loss["estimate"] < 0)


def residency_table(found: pd.DataFrame) -> pd.DataFrame:
    """`residencies` as a page shows it; loss in thousandths of a nat a token."""
    bounds = zip(found["estimate"], found["low"], found["high"], strict=True)
    return pd.DataFrame(
        {
            "rule": found["rule"],
            "residency": found["residency"],
            "change in mass": found["mass_change"],
            "change in loss, 0.001 nats": [f"{1e3 * e:+.1f} [{1e3 * low:+.1f}, {1e3 * high:+.1f}]" for e, low, high in bounds],
            "dz": found["effect"],
            "p (Holm)": found["p"],
            "smallest detectable": 1e3 * found["smallest_detectable"],
        }
    )


def points(frame: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """One row a (model, listed policy): family, loss with its interval, mass, e², whether first choices were substituted."""
    tables = []
    for model in models:
        rows = one_model(frame, model)
        table = stats.policy_table(rows, unit=UNIT)
        paired = stats.pair_documents(rows, columns=(ERROR, SQUARES))
        tables.append(table.assign(model=model, **{c: paired.means(c) for c in (ERROR, SQUARES)}))
    return pd.concat(tables, ignore_index=True)


def sentence(frame: pd.DataFrame, models: Sequence[str]) -> str:
    """How well mass and e² order the policies of each model, in words."""
    parts = []
    for model in models:
        rows = one_model(frame, model)
        mass, error = (_bounds(stats.association(rows, x, unit=UNIT)) for x in (MASS, ERROR))
        parts.append(f"{model}: Spearman {mass} for mass, {error} for layer error")
    return "; ".join(parts) + "."


def fan_sentence(fans: pd.DataFrame, size: int = 20) -> str:
    """What the fans show at one size, in words."""
    parts = []
    for row in fans[fans["num_documents"] == min(size, fans["num_documents"].max())].to_dict("records"):
        middle = f"{row['low']:.2f} to {row['high']:.2f}"
        parts.append(f"{row['model']}, {row['kind']}, {row['num_documents']} documents: {middle}")
    return "; ".join(parts) + "."


def values(frame: pd.DataFrame, models: Sequence[str]) -> dict[str, Any]:
    """The numbers of the chapter's prose, of the first model; the others stand in tables."""
    rows = one_model(frame, models[0])
    ratios, table = ratio_rows(rows), predictors(rows).set_index("predictor")
    order = order_rows(rows)
    return {
        "model": models[0],
        "models": ", ".join(models),
        "num_policies": rows["policy"].nunique(),
        "num_families": rows["family"].nunique(),
        "num_protecting": without_first_choices(rows)["policy"].nunique(),
        "num_documents": rows["document"].nunique(),
        "num_slots": int(rows["num_slots"].iloc[0]),
        "spearman_protecting": _bounds(order[:1]),
        "spearman_all": _bounds(order[1:2]),
        "spearman_error": str(table.loc[WORDS[ERROR], "spearman, whole list"]),
        "ratio": "not judged (fewer than ten pairs)" if ratios is None else _bounds(ratios[:1]),
        "strong_form": strong_form(ratios),
        "spearman_varied": _bounds(with_varied(frame, models[0])[:1]),
        "num_opposite": int(residencies(rows, one_model(frame, models[0], VARIED))["is_opposite"].sum()),
        "detectable_r": stats.detectable_correlation(rows["document"].nunique()),
    }
