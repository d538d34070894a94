"""What the chapter on seconds says: the numbers of its prose by name, and its small tables.

Nothing is measured or concluded here; frames come from `seconds` and `seconds_copies`, statistics from `seconds_report`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from moecache.experiments.seconds import MEBIBYTE, RECORDED, SYNTHETIC
from moecache.experiments.seconds_copies import PREVIOUS_TOKEN, RECORDED_PREDICTION
from moecache.experiments.seconds_report import FETCHING, break_even, crossing, value_at, where
from moecache.hardware import Hardware

EXAMPLE_ACCURACY = 0.8
CORNER = {"rule": "0.15 rule", "eviction": "decayed count (128)"}


def machines(hardware: Sequence[Hardware], mebibytes: Sequence[float]) -> pd.DataFrame:
    """A row per machine: its rates, and how long it takes to copy and to compute one expert of the largest size."""
    size = round(max(mebibytes) * MEBIBYTE)
    rows = [
        {
            "machine": machine.name,
            "link, GB/s": machine.link_bytes_per_second / 1e9,
            "latency, us": 1e6 * machine.fetch_latency_seconds,
            "fixed, ms a layer": 1e3 * machine.layer_seconds,
            f"copy of {max(mebibytes):g} MiB, ms": 1e3 * machine.seconds_per_transfer(size),
            f"computing {max(mebibytes):g} MiB, ms": 1e3 * machine.seconds_per_expert(size),
            "overlap": machine.overlap,
            "constants": machine.kind,
        }
        for machine in hardware
    ]
    return pd.DataFrame(rows)


def machine_table(times: pd.DataFrame, trace: str, mebibytes: float) -> pd.DataFrame:
    """Milliseconds a token, a row per policy and a column per machine, with the hit rate and the substituted mass written out."""
    rows = where(times, trace=trace, expert_mebibytes=mebibytes)
    table = rows.pivot_table(index="policy", columns="hardware", values="ms_per_token", sort=False)
    rates = rows.drop_duplicates("policy").set_index("policy")
    table.insert(0, "hits", [f"{value:.1%}" for value in rates["hit_rate"].loc[table.index]])
    table.insert(1, "mass", [f"{value:.3f}" for value in rates["substituted_mass"].loc[table.index]])
    return table.rename_axis(columns=None).reset_index()


def link_panels(curves: dict[str, pd.DataFrame], asked: Sequence[tuple[str, float]]) -> pd.DataFrame:
    """The recorded trace's rows for each (device, size of an expert), `panel` naming both."""
    parts = [
        where(curves[device], trace=RECORDED, expert_mebibytes=size).assign(panel=f"{device}, experts of {size:g} MiB")
        for device, size in asked
    ]
    return pd.concat(parts, ignore_index=True)


def up_to_rate(curve: pd.DataFrame, trace: str, policy: str, mebibytes: float, level: float) -> str:
    """In words: at which link rates a policy is at least so many times faster than fetching."""
    rows = where(curve, trace=trace, policy=policy, expert_mebibytes=mebibytes).sort_values("gigabytes_per_second")
    rates, speed_ups = rows["gigabytes_per_second"].to_list(), rows["speed_up"].to_list()
    rate = crossing(rates, speed_ups, level, is_log=True)
    if np.isnan(rate):
        return "at every rate tried" if speed_ups[0] >= level else "at no rate tried"
    return f"{'up to' if speed_ups[0] >= level else 'from'} about {rate:.2g} GB/s"


def admission_values(corners: pd.DataFrame, hardware: Sequence[str]) -> dict[str, float]:
    """What admission changes in the 0.15 rule with decayed counts: rates on the recorded trace, times by machine."""
    found: dict[str, float] = {}
    for is_admitting, name in ((False, "_before"), (True, "")):
        rows = where(corners, trace=RECORDED, is_admitting=is_admitting, **CORNER)
        found[f"admit_hit{name}"], found[f"admit_mass{name}"] = rows["hit_rate"].iloc[0], rows["substituted_mass"].iloc[0]
    for machine in hardware:
        for trace, name in ((RECORDED, machine), (SYNTHETIC, f"{machine}_synthetic")):
            before, after = (where(corners, trace=trace, hardware=machine, is_admitting=flag, **CORNER).iloc[0] for flag in (False, True))
            found[f"admit_change_{name}"] = after["ms_per_token"] / before["ms_per_token"] - 1
            found[f"admit_stall_{name}"] = after["stall_ms"] / after["ms_per_token"]
    return found


def admission_table(corners: pd.DataFrame, trace: str, hardware: Sequence[str]) -> pd.DataFrame:
    """A row per rule and eviction: hit rates without and with admission, and per machine "change of time (share of stalls)"."""
    rows = []
    for (rule, eviction), group in where(corners, trace=trace).groupby(["rule", "eviction"], sort=False):
        row = {"rule": rule, "eviction": eviction}
        hits = [where(group, is_admitting=flag)["hit_rate"].iloc[0] for flag in (False, True)]
        row["hits"] = f"{hits[0]:.1%} to {hits[1]:.1%}"
        for machine in hardware:
            before, after = (where(group, hardware=machine, is_admitting=flag).iloc[0] for flag in (False, True))
            change = after["ms_per_token"] / before["ms_per_token"] - 1
            row[machine] = f"{change:+.0%} ({after['stall_ms'] / after['ms_per_token']:.0%})"
        rows.append(row)
    return pd.DataFrame(rows)


def admission_ratios(admission: pd.DataFrame, corners: pd.DataFrame, trace: str) -> pd.DataFrame:
    """The rows of a trace with `ratio` (time / time of the same rule and eviction without admission) and `stall_fraction`."""
    base = where(corners, trace=trace, is_admitting=False, **CORNER).set_index("hardware")["ms_per_token"].rename("before")
    rows = where(admission, trace=trace).join(base, on="hardware")
    return rows.assign(ratio=rows["ms_per_token"] / rows["before"], stall_fraction=rows["stall_ms"] / rows["ms_per_token"])


def delay_table(ratios: pd.DataFrame, mass_threshold: float, hardware: Sequence[str]) -> pd.DataFrame:
    """A row per delay: hit rate, substituted mass, and the share of stalls on each machine."""
    rows = []
    for delay, group in where(ratios, mass_threshold=mass_threshold).groupby("delay_tokens"):
        row = {"delay, tokens": delay, "hits": f"{group['hit_rate'].iloc[0]:.1%}", "mass": group["substituted_mass"].iloc[0]}
        rows.append(row | {f"stalls, {name}": f"{value_at(group, 'stall_fraction', hardware=name):.1%}" for name in hardware})
    return pd.DataFrame(rows)


def delay_values(ratios: pd.DataFrame, mass_threshold: float, machine: str) -> dict[str, float]:
    """The first and the last delay, and stalls and substituted mass there."""
    rows = where(ratios, mass_threshold=mass_threshold, hardware=machine).sort_values("delay_tokens")
    found: dict[str, float] = {}
    for name, row in (("first", rows.iloc[0]), ("last", rows.iloc[-1])):
        found[f"delay_{name}"] = int(row["delay_tokens"])
        found[f"delay_stall_{name}"], found[f"delay_mass_{name}"] = row["stall_fraction"], row["substituted_mass"]
    return found


def prefetch_panels(
    prefetch: pd.DataFrame, trace: str, asked: Sequence[tuple[str, int]], hardware: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The what-if predictors of each (policy, limit) as lines, and the other predictors as points."""
    parts = []
    for policy, limit in asked:
        rows = where(prefetch, trace=trace, policy=policy, max_prefetches=limit)
        parts.append(rows[rows["hardware"].isin(list(hardware))].assign(panel=f"{policy}, up to {limit} a step"))
    frame = pd.concat(parts, ignore_index=True)
    frame = frame.assign(ratio=frame["ms_per_token"] / frame["ms_without"])
    is_line = frame["predictor"].str.startswith("accuracy")
    return pd.DataFrame(frame[is_line]), pd.DataFrame(frame[~is_line])


def prefetch_table(prefetch: pd.DataFrame, trace: str, policy: str, machine: str, limit: int) -> pd.DataFrame:
    """A row per predictor on one machine: accuracy, hit rate, MiB a token used and wasted, stalls and time."""
    rows = where(prefetch, trace=trace, policy=policy, hardware=machine)
    rows = rows[(rows["max_prefetches"] == limit) | (rows["predictor"] == "none")]
    return pd.DataFrame(
        {
            "predictor": rows["predictor"],
            "come true": ["" if np.isnan(value) else f"{value:.0%}" for value in rows["accuracy"]],
            "hits": [f"{value:.1%}" for value in rows["hit_rate"]],
            "useful, MiB": [f"{value:.0f}" for value in rows["useful_mebibytes"]],
            "wasted, MiB": [f"{value:.0f}" for value in rows["wasted_mebibytes"]],
            "waiting, ms": rows["waiting_ms"],
            "stalls, ms": rows["stall_ms"],
            "ms a token": rows["ms_per_token"],
        }
    )


def prefetch_values(prefetch: pd.DataFrame, hardware: Sequence[str], limit: int) -> dict[str, float]:
    """What the prose says about the previous token and about an example of accuracy, on the recorded trace."""
    rows = where(prefetch, trace=RECORDED)
    accuracies = np.array(sorted({a for a, name in zip(rows["accuracy"], rows["predictor"], strict=True) if name.startswith("accuracy")}))
    example = float(accuracies[np.argmin(np.abs(accuracies - EXAMPLE_ACCURACY))])
    fetching = where(rows, policy=FETCHING)
    previous = where(fetching, predictor=PREVIOUS_TOKEN, max_prefetches=limit).iloc[0]
    found = {
        "previous_copies": previous["prefetches_per_step"],
        "previous_change": previous["ms_per_token"] / previous["ms_without"] - 1,
        "previous_accuracy": previous["accuracy"],
        "example_accuracy": example,
        "hit_without": where(fetching, predictor="none")["hit_rate"].iloc[0],
        "hit_with": where(fetching, accuracy=example, max_prefetches=limit)["hit_rate"].iloc[0],
    }
    for machine in hardware:
        row = where(fetching, accuracy=example, max_prefetches=limit, hardware=machine).iloc[0]
        found[f"example_change_{machine}"] = row["ms_per_token"] / row["ms_without"] - 1
        substituting = where(rows, policy="quality-first", predictor=PREVIOUS_TOKEN, max_prefetches=limit, hardware=machine).iloc[0]
        found[f"previous_quality_{machine}"] = substituting["ms_per_token"] / substituting["ms_without"]
    return {name: float(value) for name, value in found.items()}


def stale_story(prefetch: pd.DataFrame, hardware: Sequence[str], limit: int) -> str:
    """In words: what the recorded predictions do to hits, bytes and time, or that the trace has none."""
    rows = prefetch[(prefetch["predictor"] == RECORDED_PREDICTION) & (prefetch["max_prefetches"] == limit)]
    rows = pd.DataFrame(rows[rows["policy"] == FETCHING])
    if rows.empty:
        return "This trace brings no predictions of its own along, so the stale gate has no point here."
    one = rows.iloc[0]
    hits = where(prefetch, trace=RECORDED, policy=FETCHING, predictor="none")["hit_rate"].iloc[0]
    useful = one["useful_mebibytes"] / (one["useful_mebibytes"] + one["wasted_mebibytes"])
    timed = [row for row in rows.to_dict("records") if row["hardware"] in hardware]
    changes = ", ".join(f"{row['ms_per_token'] / row['ms_without'] - 1:+.0%} on {row['hardware']}" for row in timed)
    return (
        f"The stale gate names experts of which {one['accuracy']:.0%} are called. With up to {limit} prefetches a step it moves the hit "
        f"rate of fetching from {hits:.1%} to {one['hit_rate']:.1%}; {useful:.0%} of the bytes that it copies are used, and the time "
        f"changes by {changes}."
    )


def break_even_table(prefetch: pd.DataFrame, limit: int) -> pd.DataFrame:
    """A row per trace and policy: the accuracy from which prefetching costs no time, by machine ("never" where at none)."""
    even = break_even(prefetch, limit)
    words = even.assign(words=["never" if np.isnan(value) else f"{value:.0%}" for value in even["accuracy"]])
    table = words.pivot(index=["trace", "policy"], columns="hardware", values="words")
    return table[list(dict.fromkeys(prefetch["hardware"]))].rename_axis(columns=None).reset_index()


def swap_values(swaps: pd.DataFrame) -> dict[str, float | str]:
    """The change of a constant that swaps most pairs of policies, and how many swap none."""
    most = swaps.sort_values("num_changed", ascending=False, kind="stable").iloc[0]
    return {
        "most_swapped": int(most["num_changed"]),
        "num_pairs": int(most["num_pairs"]),
        "swap_machine": str(most["hardware"]),
        "swap_constant": str(most["constant"]).replace("_", " "),
        "swap_factor": float(most["factor"]),
        "num_unchanged": int((swaps["num_changed"] == 0).sum()),
        "num_changes": len(swaps),
    }


def front_values(fronts: pd.DataFrame, hardware: Sequence[str]) -> dict[str, int]:
    """How many policies no other beats, and how many of them admit in the background, by machine."""
    found = {}
    for machine in hardware:
        best = where(fronts, hardware=machine, is_front=True)
        found[f"front_{machine}"], found[f"front_admitting_{machine}"] = len(best), int(best["is_admitting"].sum())
    return found
