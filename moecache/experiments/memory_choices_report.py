"""What chapter 14 shows of its measurement: planned comparisons, curves, the map of winners, and the values of its prose.

A cell is one base precision and one budget of one model; curves and their crossings are the business of `memory_choices_curves`. This
module measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moecache import stats
from moecache.experiments.contrasts_report import UNIT, Contrast, combined
from moecache.experiments.memory_choices import NO_WAIT, PLANNED, PLANNED_COPY_BITS, RULE
from moecache.experiments.memory_choices_cells import ALL_FEW, COPIES, SUBSTITUTION
from moecache.experiments.memory_choices_curves import NOBODY, bands, levels_of, line_at, points, winners
from moecache.stats.paired import DIFFERENCE

PLANNED_COPIES = f"{PLANNED_COPY_BITS}-bit copies"
_ZERO = "nothing"


def cell_name(base_bits: int, budget: float) -> str:
    """A cell in words."""
    return f"{base_bits} bits, {budget:.0%}"


def cells(frame: pd.DataFrame, model: str) -> list[tuple[int, float]]:
    """Every (base precision, budget) of a model, in the frame's order."""
    found = frame.loc[frame["model"] == model, ["base_bits", "budget"]].drop_duplicates()
    return [(int(bits), float(budget)) for bits, budget in found.itertuples(index=False)]


def cell(frame: pd.DataFrame, model: str, base_bits: int, budget: float) -> pd.DataFrame:
    """The map's rows of one cell."""
    rows = frame[(frame["model"] == model) & (frame["base_bits"] == base_bits) & (frame["budget"] == budget) & frame["in_map"]]
    return rows.reset_index(drop=True)


def all_points(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """`points` of every cell of a model, with `base_bits` and `budget`."""
    parts = [points(cell(frame, model, *at)).assign(base_bits=at[0], budget=at[1]) for at in cells(frame, model)]
    return pd.concat(parts, ignore_index=True)


def all_bands(frame: pd.DataFrame, model: str, table: pd.DataFrame) -> pd.DataFrame:
    """Bands of winners of every cell; the levels of one base precision are the same in all its budgets."""
    parts = []
    for bits, budget in cells(frame, model):
        of_base = table[table["base_bits"] == bits]
        found = winners(cell(frame, model, bits, budget), of_base[of_base["budget"] == budget], levels_of(of_base))
        parts.append(bands(found).assign(base_bits=bits, budget=budget))
    return pd.concat(parts, ignore_index=True)


def planned_rows(frame: pd.DataFrame, model: str, base_bits: int, budget: float) -> pd.DataFrame:
    """The policies of a planned cell that have read all documents; empty where copies of all experts do not fit."""
    rows = frame[(frame["model"] == model) & (frame["base_bits"] == base_bits) & (frame["budget"] == budget)]
    is_copy = (rows["contender"] == PLANNED_COPIES) & (rows["rule"] == RULE)
    is_curve = (rows["family"] == SUBSTITUTION) & rows["rule"].str.startswith("gate weight")
    kept = rows[is_copy | is_curve].reset_index(drop=True)
    return kept if is_copy.any() else kept.iloc[:0]


def planned_contrast(rows: pd.DataFrame) -> tuple[Contrast, str]:
    """2-bit copies under the 0.15 rule minus the substitution curve at as many waited-for bytes, and a note where the curve ends before.

    Returns
    -------
    Contrast, str : the note is "" where the curve reaches.
    """
    table = points(rows)
    copies = table[table["contender"] == PLANNED_COPIES].iloc[0]
    curve = table[table["family"] == SUBSTITUTION].sort_values("waited_kb")
    waited, first, last = float(copies["waited_kb"]), curve.iloc[0], curve.iloc[-1]
    note = ""
    if not first["waited_kb"] <= waited <= last["waited_kb"]:
        end = first if waited < first["waited_kb"] else last
        note = f"the copies wait for {waited:.1f} kB a token, beyond the curve: compared with {end['rule']}, {end['waited_kb']:.1f} kB"
    weights = line_at(curve, waited)[1]
    return {str(copies["policy"]): 1.0} | {name: -weight for name, weight in weights.items()}, note


def planned_tests(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """The planned comparisons of one model that could be carried out, corrected together; may be empty.

    Returns
    -------
    DataFrame : as `stats.paired_tests`, with `p_wilcoxon` (a check), `note`, `copies_loss` and `ratio` (substitution over copies).
    """
    parts, notes, losses = [], [], []
    for bits, budget in PLANNED:
        rows = planned_rows(frame, model, bits, budget)
        if rows.empty:
            continue
        contrast, note = planned_contrast(rows)
        parts.append(combined(rows, {cell_name(bits, budget): contrast}))
        notes.append(note)
        copies = rows[rows["contender"] == PLANNED_COPIES]
        losses.append(float((copies[DIFFERENCE] * copies["num_tokens"]).sum() / copies["num_tokens"].sum()))
    if not parts:
        return pd.DataFrame()
    joined = pd.concat(parts, ignore_index=True)
    names = list(joined["policy"].unique())
    zero = joined[joined["policy"] == names[0]].assign(policy=_ZERO, **{DIFFERENCE: 0.0})
    pairs = [(str(name), _ZERO) for name in names]
    found = stats.paired_tests(pd.concat([joined, zero], ignore_index=True), pairs, unit=UNIT)
    checked = stats.paired_tests(pd.concat([joined, zero], ignore_index=True), pairs, test="wilcoxon", unit=UNIT)
    ratio = [_ratio(loss - difference, loss) for difference, loss in zip(found["difference_nats"], losses, strict=True)]
    return found.assign(comparison=names, p_wilcoxon=checked["p_holm"], note=notes, copies_loss=losses, ratio=ratio)


def _ratio(above: float, below: float) -> float:
    """NaN where one of the two is no loss."""
    return above / below if min(above, below) > 0 else math.nan


def shown_tests(found: pd.DataFrame) -> pd.DataFrame:
    """`planned_tests` with a column `model`, as a page shows them, in thousandths of a nat."""
    if "comparison" not in found:
        return pd.DataFrame({"cell": ["none could be carried out"]})
    bounds = zip(found["low"], found["high"], strict=True)
    return pd.DataFrame(
        {
            "cell": found["model"].str.removeprefix("reference-") + ": " + found["comparison"],
            "copies − substitution": 1000 * found["difference_nats"],
            "95 % interval": [f"[{1000 * low:+.1f}, {1000 * high:+.1f}]" for low, high in bounds],
            "dz": found["dz"],
            "smallest detectable": 1000 * found["smallest_detectable_nats"],
            "p (Holm)": found["p_holm"],
            "p (Wilcoxon)": found["p_wilcoxon"],
            "ratio": [f"{ratio:.1f}" if math.isfinite(ratio) else "-" for ratio in found["ratio"]],
        }
    )


def main_cell(found: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """The cell whose policies are listed: the first planned one that was read, else the first."""
    read = [(int(bits), float(budget)) for bits, budget in found]
    return next((at for at in PLANNED if at in read), read[0])


def shown_points(table: pd.DataFrame, base_bits: int, budget: float) -> pd.DataFrame:
    """One cell's policies as a page shows them."""
    rows = table[(table["base_bits"] == base_bits) & (table["budget"] == budget)]
    bounds = zip(rows["loss"], rows["low"], rows["high"], strict=True)
    return pd.DataFrame(
        {
            "contender": rows["contender"],
            "slots": rows["slots"],
            "rule": rows["rule"],
            "loss, mnat [95 %]": [f"{1000 * middle:.1f} [{1000 * low:.1f}, {1000 * high:.1f}]" for middle, low, high in bounds],
            "fetches": rows["fetches"],
            "waited for, kB": rows["waited_kb"],
            "moved, kB": rows["moved_kb"],
        }
    )


def shown_sizes(sizes: pd.DataFrame) -> pd.DataFrame:
    """What fits where, one row a cell: slots of each contender."""
    rows = []
    for bits, budget in sizes[["base_bits", "budget"]].drop_duplicates().itertuples(index=False):
        part = sizes[(sizes["base_bits"] == bits) & (sizes["budget"] == budget)]
        slots = part.set_index("family")["num_slots"]
        copies = part[part["family"] == COPIES]
        some = part[part["family"] == "copies of some"]
        few = part[part["family"] == ALL_FEW]["contender"]
        words = "; ".join(f"{row.copy_bits} bits, {row.num_slots} slots" for row in copies.itertuples())
        partly = "; ".join(f"{row.num_copies} of {row.num_experts}, {row.num_slots} slots" for row in some.itertuples())
        rows.append(
            {
                "base": f"{bits} bits",
                "budget": f"{budget:.0%}",
                "substitution, slots": int(slots.get(SUBSTITUTION, 0)),
                "copies of all experts": words or "do not fit",
                "copies of some": partly or "-",
                "prefetch, slots": int(slots.get("prefetch", 0)),
                "everything at": str(few.iloc[0]).removeprefix("everything at ") if len(few) else "-",
            }
        )
    return pd.DataFrame(rows)


def copy_words(sizes: pd.DataFrame) -> str:
    """What 2-bit copies of all experts take of each base precision."""
    rows = sizes[sizes["copy_bits"] == PLANNED_COPY_BITS].drop_duplicates("base_bits")
    return ", ".join(f"{row.copy_fraction:.1%} of an expert at {row.base_bits} bits" for row in rows.itertuples())


def untested_words(frame: pd.DataFrame, model: str, asked: Sequence[tuple[int, float]]) -> str:
    """Which planned comparisons could not be carried out, and why."""
    there = {at for at in PLANNED if not planned_rows(frame, model, *at).empty}
    absent = [cell_name(*at) for at in PLANNED if at in asked and at not in there]
    unread = [cell_name(*at) for at in PLANNED if at not in asked]
    parts = [f"2-bit copies of all experts beside as many slots as the router calls do not fit at {', '.join(absent)}"] if absent else []
    parts += [f"not read in this edition: {'; '.join(unread)}"] if unread else []
    return f"{model}: " + ("; ".join(parts) if parts else "all four planned comparisons were carried out") + "."


def test_words(found: pd.DataFrame) -> str:
    """The planned comparisons of one model in prose."""
    if found.empty:
        return "none of the planned comparisons could be carried out"
    parts = []
    for row in found.to_dict("records"):
        verdict = "copies win" if row["high"] < 0 else "substitution wins" if row["low"] > 0 else "not told apart"
        bounds = f"{1000 * row['difference_nats']:+.1f} [{1000 * row['low']:+.1f}, {1000 * row['high']:+.1f}]"
        note = f" ({row['note']})" if row["note"] else ""
        parts.append(f"{row['comparison']}: {bounds} thousandths of a nat, {verdict}{note}")
    return "; ".join(parts)


def band_words(found: pd.DataFrame) -> str:
    """The map in sentences, cell by cell."""
    sentences = []
    for bits, budget in found[["base_bits", "budget"]].drop_duplicates().itertuples(index=False):
        rows = found[(found["base_bits"] == bits) & (found["budget"] == budget)]
        steps = [f"{row.contender} from {row.from_kb:.1f}" for row in rows.itertuples() if row.contender != NOBODY]
        sentences.append(f"{cell_name(bits, budget)}: {', '.join(steps)} kB")
    return "; ".join(sentences) + "."


def others_words(found: Mapping[str, pd.DataFrame], tests: Mapping[str, pd.DataFrame], first: str) -> str:
    """The planned comparisons and the map of the models after the first, in prose."""
    parts = [f"{model}, planned: {test_words(tests[model])}. {band_words(found[model])}" for model in found if model != first]
    return " ".join(parts) if parts else "(Only one model was read.)"


def wins_words(found: pd.DataFrame) -> str:
    """In how many cells each family wins somewhere while some misses are not waited for."""
    number = found[["base_bits", "budget"]].drop_duplicates().shape[0]
    families = [name for name in found["family"].unique() if name != NOBODY]
    counts = {name: found.loc[found["family"] == name, ["base_bits", "budget"]].drop_duplicates().shape[0] for name in families}
    return ", ".join(f"{name} in {count}" for name, count in counts.items()) + f" of {number} cells"


def values(frame: pd.DataFrame, table: pd.DataFrame, found: pd.DataFrame, model: str) -> dict[str, Any]:
    """What the chapter's prose quotes of its first model."""
    rows = frame[frame["model"] == model]
    in_map = rows[rows["in_map"]]
    return {
        "model": model,
        "main_cell": cell_name(*main_cell(cells(frame, model))),
        "num_scored": int(in_map["document"].nunique()),
        "num_clusters": int(in_map["cluster"].nunique()),
        "num_planned_scored": int(rows["document"].nunique()),
        "num_planned_clusters": int(rows["cluster"].nunique()),
        "map_words": band_words(found),
        "wins_words": wins_words(found),
        "no_wait_words": no_wait_words(table),
        "prefetch_words": prefetch_words(table),
    }


def no_wait_words(table: pd.DataFrame) -> str:
    """What each contender loses when nothing is waited for, at the smallest budget of each base precision."""
    parts = []
    for bits in dict.fromkeys(table["base_bits"]):
        rows = table[table["base_bits"] == bits]
        at = rows[(rows["budget"] == rows["budget"].min()) & ((rows["rule"] == NO_WAIT) | (rows["family"] == ALL_FEW))]
        words = ", ".join(f"{row.contender} {1000 * row.loss:.1f}" for row in at.itertuples())
        parts.append(f"{cell_name(bits, rows['budget'].min())}: {words}")
    return "; ".join(parts)


def prefetch_words(table: pd.DataFrame) -> str:
    """What prefetch does to fetching every miss, at the smallest budget of the first base precision that has it."""
    rows = table[table["rule"] == "fetch every miss"]
    ahead = rows[rows["family"] == "prefetch"]
    if ahead.empty:
        return "no budget had room for it"
    first = ahead.iloc[0]
    same = (rows["base_bits"] == first["base_bits"]) & (rows["budget"] == first["budget"]) & (rows["family"] == "waiting")
    plain = rows[same].iloc[0]
    return (
        f"at {cell_name(first['base_bits'], first['budget'])}, fetching every miss waits for {plain['waited_kb']:.1f} kB "
        f"a token and moves as much; with prefetch it waits for {first['waited_kb']:.1f} kB and moves {first['moved_kb']:.1f} kB"
    )
