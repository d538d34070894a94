"""What chapter 10 shows of its measurement: costs of the twelve policies, who owns each gain, and the values of its prose.

A *setting* is one model at one capacity. A gain's owner is found by contrasts within the 2 x 2 of eviction and admission; all of them are
paired by document. This module measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from moecache import stats
from moecache.experiments import contrasts_report
from moecache.experiments.chosen_policies import CHOSEN, RULES, label_of
from moecache.experiments.contrasts_report import UNIT, Contrast
from moecache.experiments.paired_runs import moved

PARTS = ("both changes", "eviction alone", "admission alone", "interaction")
LATER_PARTS = ("eviction, once admitted", "admission, once decayed", "against admitting anyway")


def contrasts(rule: str) -> dict[str, Contrast]:
    """The contrasts of one rule: the four parts of the plan, then the others."""
    bare, evicting = label_of(rule, "LRU", "none"), label_of(rule, "decayed count", "none")
    admitting, chosen = label_of(rule, "LRU", "at 0.5"), label_of(rule, "decayed count", "at 0.5")
    anyway = label_of(rule, "LRU", "anyway")
    return {
        "both changes": {chosen: 1, bare: -1},
        "eviction alone": {evicting: 1, bare: -1},
        "admission alone": {admitting: 1, bare: -1},
        "interaction": {chosen: 1, evicting: -1, admitting: -1, bare: 1},
        "eviction, once admitted": {chosen: 1, admitting: -1},
        "admission, once decayed": {chosen: 1, evicting: -1},
        "against admitting anyway": {chosen: 1, anyway: -1},
    }


def setting(frame: pd.DataFrame, model: str, num_slots: int) -> pd.DataFrame:
    """The rows of one model at one capacity."""
    return frame[(frame["model"] == model) & (frame["num_slots"] == num_slots)].reset_index(drop=True)


def settings(frame: pd.DataFrame) -> list[tuple[str, int]]:
    """Every (model, capacity) of the frame, in its order."""
    found = frame[["model", "num_slots"]].drop_duplicates()
    return [(str(model), int(slots)) for model, slots in found.itertuples(index=False)]


def first_settings(frame: pd.DataFrame) -> list[tuple[str, int]]:
    """Each model at the first of its capacities, where the planned comparisons are made."""
    first: dict[str, int] = {}
    for model, num_slots in settings(frame):
        first.setdefault(model, num_slots)
    return list(first.items())


def planned_tests(frame: pd.DataFrame, model: str, num_slots: int) -> pd.DataFrame:
    """The planned comparisons of one setting: four parts of each rule, corrected together."""
    named = {f"{CHOSEN[rule].label}: {part}": contrasts(rule)[part] for rule in RULES for part in PARTS}
    return contrasts_report.table_of(setting(frame, model, num_slots), named)


def effects(frame: pd.DataFrame) -> pd.DataFrame:
    """Every contrast of every setting: `model`, `num_slots`, `rule`, `part`, `effect`, `low`, `high` (nats)."""
    parts = []
    for model, num_slots in settings(frame):
        for rule in RULES:
            found = contrasts_report.table_of(setting(frame, model, num_slots), contrasts(rule))
            part = found[["difference_nats", "low", "high"]].rename(columns={"difference_nats": "effect"})
            parts.append(part.assign(model=model, num_slots=num_slots, rule=rule, part=list(contrasts(rule))))
    return pd.concat(parts, ignore_index=True)


def costs(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a (model, capacity, policy): its increase with interval, what it substituted and what it moved."""
    parts = []
    for model, num_slots in settings(frame):
        rows = setting(frame, model, num_slots)
        made_of = rows.drop_duplicates("policy").set_index("policy")[["rule", "eviction", "admission"]]
        table = stats.policy_table(rows.assign(family=rows["rule"]), unit=UNIT).set_index("policy")
        part = table.drop(columns="family").join(made_of).join(moved(rows)).reset_index()
        parts.append(part.assign(model=model, num_slots=num_slots))
    return pd.concat(parts, ignore_index=True)


def cost_of(table: pd.DataFrame, model: str, num_slots: int, policy: str) -> pd.Series:
    """One policy of one setting, from `costs`."""
    rows = table[(table["model"] == model) & (table["num_slots"] == num_slots) & (table["policy"] == policy)]
    return rows.iloc[0]


def shown(table: pd.DataFrame, model: str, num_slots: int, capacities: pd.DataFrame) -> pd.DataFrame:
    """One setting as a page shows it, fetching every miss above the others."""
    rows = table[(table["model"] == model) & (table["num_slots"] == num_slots)]
    at = capacities[(capacities["model"] == model) & (capacities["num_slots"] == num_slots)]
    fetching = pd.DataFrame(
        {
            "policy": [f"fetch every miss, {eviction}" for eviction in at["eviction"]],
            "increase [95 %]": "0",
            "calls, %": 0.0,
            "mass": 0.0,
            "fetches": at["fetches"].to_numpy(),
            "copies": 0.0,
            "moved": at["fetches"].to_numpy(),
        }
    )
    bounds = zip(rows["increase"], rows["low"], rows["high"], strict=True)
    others = pd.DataFrame(
        {
            "policy": rows["policy"],
            "increase [95 %]": [f"{100 * middle:+.2f} % [{100 * low:.2f}, {100 * high:.2f}]" for middle, low, high in bounds],
            "calls, %": 100 * rows["substituted_fraction"],
            "mass": rows["substituted_mass"],
            "fetches": rows["fetches"],
            "copies": rows["copies"],
            "moved": rows["moved"],
        }
    )
    return pd.concat([fetching, others], ignore_index=True)


def setting_name(model: str, num_slots: int) -> str:
    """A setting as a legend names it."""
    return f"{model.removeprefix('reference-')}: {num_slots} slots"


def with_setting_names(found: pd.DataFrame) -> pd.DataFrame:
    """`effects` with a column `setting` that names model and capacity."""
    names = [setting_name(model, slots) for model, slots in zip(found["model"], found["num_slots"], strict=True)]
    return found.assign(setting=names)


def owner_words(found: pd.DataFrame) -> str:
    """The four planned parts of both policies in the first setting, in a sentence."""
    first = found[(found["model"] == found["model"].iloc[0]) & (found["num_slots"] == found["num_slots"].iloc[0])]
    sentences = []
    for rule in RULES:
        at = first[first["rule"] == rule].set_index("part")
        words = ", ".join(f"{part} {_mnat(at.loc[part])}" for part in PARTS)
        sentences.append(f"{CHOSEN[rule].label} at {int(first['num_slots'].iloc[0])} slots, thousandths of a nat: {words}.")
    return " ".join(sentences)


def corner_words(table: pd.DataFrame) -> str:
    """What the bare rules and the chosen policies cost in every setting, in a sentence."""
    labels = [label for rule in RULES for label in (rule, CHOSEN[rule].label)]
    named = table[table["policy"].isin(labels)].groupby(["model", "num_slots"], sort=False)
    parts = [
        f"at {slots} slots " + ", ".join(f"{row.policy} {row.increase:.1%}" for row in rows.itertuples()) for (_, slots), rows in named
    ]
    return "; ".join(parts).capitalize() + "."


def _other_settings(found: pd.DataFrame) -> str:
    """What both changes do in the settings after the first, in prose."""
    named = with_setting_names(found)
    first = named["setting"].iloc[0]
    rows = named[(named["part"] == "both changes") & (named["setting"] != first)]
    if rows.empty:
        return "(Only one setting was read.)"
    parts = [
        f"{name} ({CHOSEN[rule].label}) {_mnat(row)}"
        for name, rule, (_, row) in zip(rows["setting"], rows["rule"], rows.iterrows(), strict=True)
    ]
    return "Both changes together in the other settings, thousandths of a nat: " + "; ".join(parts) + "."


def verdicts(frame: pd.DataFrame, judge: Callable[[str, pd.DataFrame], Any], claims: Sequence[str] = ("g", "h", "i")) -> dict[str, str]:
    """Verdict and evidence of each claim on this frame, as `verdict_x` and `evidence_x`.

    Parameters
    ----------
    frame : DataFrame
    judge : function of (claim, frame) that returns an object with `state` and `evidence`.
    claims : ids.
    """
    found = {claim: judge(claim, frame) for claim in claims}
    words = {f"verdict_{claim}": str(verdict.state) for claim, verdict in found.items()}
    return words | {f"evidence_{claim}": f"({verdict.evidence})" if verdict.evidence else "" for claim, verdict in found.items()}


def _mnat(row: Any) -> str:
    return f"{1000 * row['effect']:+.1f} [{1000 * row['low']:+.1f}, {1000 * row['high']:+.1f}]"


def direction(row: Any) -> str:
    """Whether a contrast raises or lowers the loss, as far as its interval tells."""
    return "raises the loss" if row["low"] > 0 else "lowers the loss" if row["high"] < 0 else "is not told apart from nothing"


def values(frame: pd.DataFrame, capacities: pd.DataFrame) -> dict[str, Any]:
    """The numbers of the chapter's prose: those of the first model at its first capacity, and lists over all settings."""
    model, first = settings(frame)[0]
    table, found = costs(frame), effects(frame)
    rows = setting(frame, model, first)
    at: Any = capacities[(capacities["model"] == model) & (capacities["num_slots"] == first)].set_index("eviction")
    result: dict[str, Any] = {
        "model": model,
        "slots_first": first,
        "num_scored": int(rows["document"].nunique()),
        "num_clusters": int(rows["cluster"].nunique()),
        "fetch_all_lru": float(at.loc["LRU", "fetches"]),
        "fetch_all_decayed": float(at.loc["decayed count", "fetches"]),
        "hit_lru": float(at.loc["LRU", "hit_rate"]),
        "hit_decayed": float(at.loc["decayed count", "hit_rate"]),
        "other_settings": _other_settings(found),
    }
    for name, rule in (("quality", "0.15 rule"), ("speed", "first choice")):
        bare, chosen = (cost_of(table, model, first, label) for label in (rule, CHOSEN[rule].label))
        parts = found[(found["model"] == model) & (found["num_slots"] == first) & (found["rule"] == rule)].set_index("part")
        result |= {f"{name}_{key}": value for key, value in (_cost_values(bare, chosen) | _part_values(parts)).items()}
    return result


def _cost_values(bare: pd.Series, chosen: pd.Series) -> dict[str, Any]:
    """What a bare rule and its chosen policy cost and move."""
    return {
        "bare": bare["increase"],
        "chosen": chosen["increase"],
        "low": chosen["low"],
        "high": chosen["high"],
        "bare_moved": bare["moved"],
        "chosen_moved": chosen["moved"],
        "bare_mass": bare["substituted_mass"],
        "chosen_mass": chosen["substituted_mass"],
    }


def _part_values(parts: Any) -> dict[str, Any]:
    """The parts of one rule's change, in words and as a number."""
    both, evicting, admitting = (parts.loc[part] for part in PARTS[:3])
    return {
        "both": _mnat(both),
        "both_mnat": 1000 * both["effect"],
        "direction": direction(both),
        "eviction": f"{_mnat(evicting)} and {direction(evicting)}",
        "admission": f"{_mnat(admitting)} and {direction(admitting)}",
        "interaction": _mnat(parts.loc["interaction"]),
    }
