"""What the chapter on seconds per token says: tables, and the numbers of its prose, from the frames of `seconds_per_token`.

A ratio is how many times as long fetching every miss takes. Intervals are over blocks of tokens that took turns, 95 %. Nothing is measured
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moecache.experiments.runtime_curve import crossings
from moecache.experiments.runtime_reads import compared_reads
from moecache.experiments.runtime_seconds import ALL_HITS, DISK, LINKS
from moecache.experiments.seconds_per_token import on_disk, on_links
from moecache.experiments.seconds_report import FETCHING, crossing, where

NAMES = {"0.15 rule": "rule", "first choice": "first", "quality-first": "quality", "speed-first": "speed", ALL_HITS: "floor"}
CHOSEN = ("quality-first", "speed-first")
ASKED_ERROR = 0.15  # of the simulator, on emulated links


def link_words(link: str) -> str:
    """A link as a page names it: an emulated one by its rate and what has about this rate."""
    known = {f"{rate / 1e9:g} GB/s": name for name, rate in LINKS.items()}
    return "this machine's disk" if link == DISK else f"{link}, {known[link]}" if link in known else link


def seconds_table(policies: pd.DataFrame, link: str) -> pd.DataFrame:
    """One link's policies: milliseconds and ratio with intervals, time over the bound, and what became of the calls."""
    rows = where(policies, link=link)
    return pd.DataFrame(
        {
            "policy": rows["policy"],
            "ms a token [95 %]": [_interval(1e3 * row["seconds_per_token"], 1e3 * row["seconds_per_token_low"],
                                            1e3 * row["seconds_per_token_high"]) for row in rows.to_dict("records")],
            "times as fast [95 %]": [_interval(row["ratio"], row["ratio_low"], row["ratio_high"]) for row in rows.to_dict("records")],
            "time / bound": [f"{value:.2f}" for value in rows["bound_ratio"]],
            "hits, %": [f"{100 * value:.1f}" for value in rows["hit_share"]],
            "fetched, %": [f"{100 * value:.1f}" for value in rows["fetched_share"]],
            "substituted, %": [f"{100 * value:.1f}" for value in rows["substituted_share"]],
        }
    )  # fmt: skip


def link_table(policies: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds a token: a row a policy, a column a link."""
    table = policies.pivot_table(index="policy", columns="link", values="seconds_per_token", sort=False) * 1e3
    return table.rename_axis(columns=None).reset_index()


def error_table(predicted: pd.DataFrame) -> pd.DataFrame:
    """The simulator's time over the measured one, less 1: a row a policy, a column a link."""
    words = predicted.assign(error=[f"{round(100 * value, 1) + 0.0:+.1f} %" for value in predicted["error_fraction"]])
    table = words.pivot(index="policy", columns="link", values="error")
    order = list(dict.fromkeys(predicted["policy"]))
    return table.loc[order, list(dict.fromkeys(predicted["link"]))].rename_axis(columns=None).reset_index()


def reads_table(reads: pd.DataFrame) -> pd.DataFrame:
    """The runtime's demand reads beside the plain reader's."""
    found = compared_reads(reads)
    return pd.DataFrame(
        {
            "reads": [f"{found['num_groups']} groups, {found['num_bytes'] / 2**20:,.0f} MiB"],
            "runtime, GB/s": [found["fetch_bytes_per_second"] / 1e9],
            "plain reader, GB/s": [found["plain_bytes_per_second"] / 1e9],
            "runtime / plain [95 %]": [_interval(found["ratio"], found["ratio_low"], found["ratio_high"])],
            "where plain read first": [found["ratio_plain_first"]],
            "where it read second": [found["ratio_plain_second"]],
        }
    )


def with_rest(policies: pd.DataFrame) -> pd.DataFrame:
    """The rows with `rest_seconds_per_token`: what the clock saw and the runtime's own counters did not (vocabulary head, the loop)."""
    parts = [f"{kind}_seconds_per_token" for kind in ("dense", "experts", "routing", "overhead", "waiting")]
    return policies.assign(rest_seconds_per_token=(policies["seconds_per_token"] - policies[parts].sum(axis=1)).clip(lower=0.0))


def crossing_table(curve: pd.DataFrame, formula: pd.DataFrame, levels: Sequence[float]) -> pd.DataFrame:
    """Up to which rate of an emulated link each policy is so many times as fast as fetching; the formula's answer in the last row."""
    names = [label for label in NAMES if label in set(curve["policy"]) and label != ALL_HITS]
    table = pd.DataFrame({"policy": [f"{name} (MEASURED)" for name in names] + ["formula (ESTIMATED)"]})
    for level in levels:
        found = crossings(on_links(curve), level).set_index("policy")["bytes_per_second"]
        own = [up_to(where(on_links(curve), policy=name), float(found[name]), level, "ratio") for name in names]
        table[f"{level:g} times as fast up to"] = [*own, formula_rate(formula, level)]
    return table


def up_to(own: pd.DataFrame, rate: float, level: float, column: str) -> str:
    """In words: the rate at which a gain falls through a level, or on which side of it all rates lie."""
    if np.isfinite(rate):
        return f"{rate / 1e9:.2g} GB/s"
    return "every rate tried" if (own[column] >= level).all() else "no rate tried" if (own[column] < level).all() else "not in order"


def formula_rate(formula: pd.DataFrame, level: float) -> str:
    """In words: the rate at which the formula falls through a level."""
    rate = crossing(formula["bytes_per_second"].to_list(), formula["ratio"].to_list(), level, is_log=True)
    return up_to(formula, rate, level, "ratio")


def of_models(policies: pd.DataFrame) -> pd.DataFrame:
    """The chosen policies on every link: a row a model and link, and ratios with intervals."""
    rows = []
    for (model, link), own in policies.groupby(["model", "link"], sort=False):
        row = {"model": model, "link": link, "fetching, ms": 1e3 * where(own, policy=FETCHING)["seconds_per_token"].iloc[0]}
        for label in CHOSEN:
            found = where(own, policy=label).iloc[0]
            row[f"{label}, times as fast [95 %]"] = _interval(found["ratio"], found["ratio_low"], found["ratio_high"])
        rows.append(row)
    return pd.DataFrame(rows)


def values(frames: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """The numbers of the chapter's prose about its first model."""
    facts, policies, predicted = frames["facts"].iloc[0], frames["policies"], frames["predicted"]
    disk: Any = on_disk(policies).set_index("policy")
    read = compared_reads(frames["reads"])
    steps = int(facts["num_layers"])
    result: dict[str, Any] = {key: facts[key] for key in facts.index}
    result |= {"expert_mebibytes": facts["expert_bytes"] / 2**20, "packed_gigabytes": facts["packed_bytes"] / 1e9}
    result |= {"num_tokens": int(facts["block_tokens"] * facts["num_blocks"]), "num_links": int(on_links(policies)["link"].nunique())}
    fetching = disk.loc[FETCHING]
    result |= {"fetch_ms": 1e3 * fetching["seconds_per_token"], "misses": facts["top_k"] * fetching["fetched_share"]}
    result["fetch_wait"] = fetching["waiting_seconds_per_token"] / fetching["seconds_per_token"]
    for label, name in NAMES.items():
        row = disk.loc[label]
        result |= {f"{name}_ms": 1e3 * row["seconds_per_token"], f"{name}_ratio": row["ratio"]}
        result |= {f"{name}_low": row["ratio_low"], f"{name}_high": row["ratio_high"]}
    hooks = policies[policies["policy"] != ALL_HITS]
    added = 1e6 * (hooks["routing_seconds_per_token"] + hooks["overhead_seconds_per_token"]) / steps
    result |= {"least_added_us": added.min(), "most_added_us": added.max(), "most_bound": on_disk(hooks)["bound_ratio"].max()}
    result |= {"disk_rate": read["plain_bytes_per_second"] / 1e9, "runtime_rate": read["fetch_bytes_per_second"] / 1e9}
    result |= {"read_ratio": read["ratio"], "read_low": read["ratio_low"], "read_high": read["ratio_high"]}
    return result | _error_values(predicted)


def _error_values(predicted: pd.DataFrame) -> dict[str, Any]:
    errors = {name: side(predicted)["error_fraction"] for name, side in (("link", on_links), ("disk", on_disk))}
    found: dict[str, Any] = {"num_equal": int(predicted["is_log_equal"].sum()), "num_predicted": len(predicted)}
    for name, error in errors.items():
        found |= {f"{name}_error_low": error.min(), f"{name}_error_high": error.max(), f"{name}_error_median": error.abs().median()}
    found |= {"num_within": int((errors["link"].abs() <= ASKED_ERROR).sum()), "num_link_predictions": len(errors["link"])}
    found["num_within_median"] = int((on_links(predicted)["error_fraction_median"].abs() <= ASKED_ERROR).sum())
    return found | {"asked_error": ASKED_ERROR, "most_late": on_links(predicted)["late_fraction"].max()}


def _interval(middle: float, low: float, high: float) -> str:
    digits = 1 if abs(middle) >= 10 else 2
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
