"""Tables and tests of the chapter on capacity and eviction, from the frames that `capacity` measures.

Two evictions are compared on the same documents: the unit of every interval and test is the document, never the token or the call. The
documents share one cache, so a document also inherits what the one before left resident; their order is fixed and seeded.

This module replays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from moecache import stats

FEWEST_EVICTIONS = 100  # a layer in the warm window: fewer say nothing about eviction
LRU = "LRU"  # the label that others are compared with
LOOK = ["policy", "eviction", "half_life_tokens", "num_slots"]

PUBLIC_HIT_RATES = pd.DataFrame(
    [
        ("llama.cpp PR 27861", 512, 10, 64, 0.67),
        ("llama.cpp PR 27861", 512, 10, 128, 0.81),
        ("kekzl/imp PR 2061 (300 tokens, cold)", 512, 10, 93, 0.435),
        ("kekzl/imp PR 2061 (300 tokens, cold)", 512, 10, 186, 0.620),
        ("kekzl/imp PR 2061 (300 tokens, cold)", 512, 10, 279, 0.720),
        ("kekzl/imp PR 2061 (300 tokens, cold)", 512, 10, 372, 0.789),
    ],
    columns=["source", "num_experts", "top_k", "num_slots", "hit_rate"],
)
"""LRU hit rates that others published for models of E experts and top-K, over their own texts."""


class TooFewEvictions(ValueError):
    """The trace is too short, or the cache too large, for the warm window to say anything about eviction."""


def check_evictions(rates: pd.DataFrame, num_slots: Sequence[int]) -> None:
    """Refuse to conclude at capacities where some policy evicted too little in the warm window.

    Parameters
    ----------
    rates : with `policy`, `num_slots`, `fewest_evictions`: from `window_rates` or `capacity.target_slots`.
    num_slots : the capacities that conclusions are drawn at.

    Raises
    ------
    TooFewEvictions : with the policy and the numbers.
    """
    for policy, slots, fewest in zip(rates["policy"], rates["num_slots"], rates["fewest_evictions"], strict=True):
        if slots in num_slots and fewest < FEWEST_EVICTIONS:
            raise TooFewEvictions(
                f"with {policy} and {slots} slots some layer evicts only {fewest} times in the warm window; at least {FEWEST_EVICTIONS} "
                "are needed to conclude anything: use a longer trace, fewer warm-up tokens or fewer slots"
            )


def window_rates(layers: pd.DataFrame) -> pd.DataFrame:
    """Hit rates over all layers: `policy`, `num_slots`, `cold` (NaN without a cold window), `warm`, `fewest_evictions` (warm, a layer)."""
    sums = layers.pivot_table(index=["policy", "num_slots"], columns="window", values=["hits", "calls"], aggfunc="sum", sort=False)
    rates = pd.DataFrame(sums["hits"] / sums["calls"], columns=["cold", "warm"])
    fewest = layers[layers["window"] == "warm"].groupby(["policy", "num_slots"], sort=False)["evictions"].min()
    return rates.assign(fewest_evictions=fewest).rename_axis(columns=None).reset_index()


def hit_rates(documents: pd.DataFrame, confidence: float = 0.95, seed: int = 0) -> pd.DataFrame:
    """Hit rate of the warm window by policy and capacity, with percentile intervals of a bootstrap over documents.

    Parameters
    ----------
    documents : from `by_document`.

    Returns
    -------
    DataFrame : `policy`, `eviction`, `half_life_tokens`, `num_slots`, `hit_rate`, `low`, `high`.
    """
    rows = []
    for _, group in documents.groupby(LOOK, sort=False):
        hits, calls = group["hits"].to_numpy(np.float64), group["calls"].to_numpy(np.float64)
        rate = hits.sum() / calls.sum()
        low, high = _interval(hits, calls, confidence, seed)
        rows.append({**group.iloc[0][LOOK].to_dict(), "hit_rate": rate, "low": low, "high": high})
    return pd.DataFrame(rows)


def _interval(hits: np.ndarray, calls: np.ndarray, confidence: float, seed: int) -> tuple[float, float]:
    counts = stats.draw_counts(hits.size, seed=seed)
    low, high = stats.percentile_interval(stats.weighted_mean_draws(hits[None], calls, counts)[:, 0], confidence)
    return float(low), float(high)


def compare(documents: pd.DataFrame, pairs: Sequence[tuple[str, str]], num_slots: Sequence[int]) -> pd.DataFrame:
    """Paired t-tests between policies over documents, at several capacities, corrected together by Holm's method.

    Parameters
    ----------
    documents : from `by_document`.
    pairs : (policy, against) labels.
    num_slots : capacities.

    Returns
    -------
    DataFrame : `num_slots`, `policy`, `against`, `difference` (of hit rates, the first minus the second), `low`, `high` (95 %, bootstrap
        over documents), `dz`, `smallest_detectable` (at 80 % power), `p_holm`.
    """
    asked = [(slots, policy, against) for slots in num_slots for policy, against in pairs]
    frame = documents[documents["num_slots"].isin(list(num_slots))]
    # The paired tests know one setting and one paired quantity per policy and document: here the hit rate.
    paired = pd.DataFrame(
        {
            "policy": frame["policy"] + "@" + frame["num_slots"].astype(str),
            "document": frame["document"],
            "num_tokens": frame["num_tokens"],
            "mean_difference_nats": frame["hits"] / frame["calls"],
        }
    )
    table = stats.paired_tests(paired, [(f"{policy}@{slots}", f"{against}@{slots}") for slots, policy, against in asked])
    table = table.rename(columns={"difference_nats": "difference", "smallest_detectable_nats": "smallest_detectable"})
    names = pd.DataFrame(asked, columns=["num_slots", "policy", "against"])
    return pd.concat([names, table.drop(columns="comparison")], axis=1)


def inverted_rankings(misses: pd.DataFrame) -> int:
    """At how many capacities the policy that misses least one by one is not the one (or one of those) that misses least (from
    `capacity.sequential_misses`)."""
    best = misses.loc[misses.groupby("num_slots")["sequential_misses"].idxmin(), ["num_slots", "misses"]]
    fewest = misses.groupby("num_slots")["misses"].min()
    return int((best.set_index("num_slots")["misses"] > fewest).sum())


def gains(documents: pd.DataFrame, policies: Sequence[str], num_slots: Sequence[int]) -> pd.DataFrame:
    """`compare` of each policy with LRU, with the columns `eviction` and `half_life_tokens` besides."""
    table = compare(documents, [(policy, LRU) for policy in policies], num_slots)
    return table.merge(documents[["policy", "eviction", "half_life_tokens"]].drop_duplicates(), on="policy")


def gap_split(documents: pd.DataFrame, bounded: str, bypassing: str) -> pd.DataFrame:
    """How far each policy is from the best possible, and what of it is explained by having to insert every miss.

    With m the misses, c the policy, F Belady who must insert every miss, and B Belady who may leave a newcomer out: of the gap m_c - m_B
    the share (m_F - m_B) / (m_c - m_B) is what *bypass* is worth; the rest, m_c - m_F, is *future knowledge*.

    Parameters
    ----------
    documents : from `capacity.by_document`.
    bounded, bypassing : labels of F and B.

    Returns
    -------
    DataFrame : `num_slots`, `policy`, `miss_rate`, `unavoidable` (m_B), `bypass` (m_F - m_B), `future` (m_c - m_F; all as shares of the
        calls), `bypass_share` of the gap.
    """
    sums = documents.groupby(["num_slots", "policy"], sort=False)[["calls", "hits"]].sum().reset_index()
    rates = sums.assign(miss_rate=1 - sums["hits"] / sums["calls"]).drop(columns=["calls", "hits"])
    parts = []
    for _, group in rates.groupby("num_slots", sort=False):
        forced, best = (float(group.loc[group["policy"] == name, "miss_rate"].iloc[0]) for name in (bounded, bypassing))
        causal = group[~group["policy"].isin([bounded, bypassing])]
        part = causal.assign(unavoidable=best, bypass=forced - best, future=causal["miss_rate"] - forced)
        parts.append(part.assign(bypass_share=part["bypass"] / (part["miss_rate"] - best)))
    return pd.concat(parts, ignore_index=True)


def gap_values(gaps: pd.DataFrame, policy: str, num_slots: int, name: str) -> dict[str, float]:
    """What the prose says about one policy's gap: `miss_<name>`, `unavoidable_<name>`, `bypass_<name>` (share of the gap)."""
    pairs = (("miss", "miss_rate"), ("unavoidable", "unavoidable"), ("bypass", "bypass_share"))
    return {f"{word}_{name}": rate_at(gaps, policy, num_slots, column) for word, column in pairs}


def map_panels(own: pd.DataFrame, maps: pd.DataFrame, name: str) -> pd.DataFrame:
    """The map of a trace and those of the synthetic ones, each under its `panel`."""
    strongest = maps["topic_strength"].max()
    words = [
        f"{'topics' if strength == strongest else 'weak topics'} of {tokens:,} tokens"
        for tokens, strength in zip(maps["topic_tokens"], maps["topic_strength"], strict=True)
    ]
    made = maps.assign(panel=words)
    return pd.concat([own.assign(panel=name), made], ignore_index=True)


def map_values(own: pd.DataFrame, maps: pd.DataFrame) -> dict[str, float]:
    """What the prose says about the maps: extremes in points, for the shortest and the longest strong topics, and for weak ones."""
    strongest = maps["topic_strength"].max()
    weak, maps = maps[maps["topic_strength"] < strongest], maps[maps["topic_strength"] == strongest]
    short, longest = int(maps["topic_tokens"].min()), int(maps["topic_tokens"].max())
    worst = maps[(maps["topic_tokens"] == short) & (maps["half_life_tokens"] > 0)].sort_values("gain").iloc[0]
    return {
        "short_topic": short,
        "long_topic": longest,
        "long_memory": float(worst["half_life_tokens"]),
        "worst_loss": -100 * float(worst["gain"]),
        "best_long": 100 * float(maps.loc[maps["topic_tokens"] == longest, "gain"].max()),
        "best_weak": 100 * float(weak["gain"].max()) if len(weak) else 0.0,
        "own_low": 100 * float(own["gain"].min()),
        "own_high": 100 * float(own["gain"].max()),
    }


def verdict(low: float, high: float) -> str:
    """What an interval of a difference of hit rates says: "hits more often than", "... less ...", "cannot be told apart from"."""
    if low > 0:
        return "hits more often than"
    return "hits less often than" if high < 0 else "cannot be told apart from"


def rate_at(rates: pd.DataFrame, policy: str, num_slots: int, column: str = "hit_rate") -> float:
    """One number of a table by policy and capacity.

    Raises
    ------
    ValueError : there is no such row.
    """
    found = rates.loc[(rates["policy"] == policy) & (rates["num_slots"] == num_slots), column].to_list()
    if len(found) != 1:
        raise ValueError(
            f"there are {len(found)} rows for policy {policy!r} at {num_slots} slots; name a policy and a capacity that were measured"
        )
    return float(found[0])


def public_rates(num_experts: int, top_k: int) -> pd.DataFrame:
    """The published hit rates for models of this routing geometry; no rows where there are none."""
    is_same = (PUBLIC_HIT_RATES["num_experts"] == num_experts) & (PUBLIC_HIT_RATES["top_k"] == top_k)
    return pd.DataFrame(PUBLIC_HIT_RATES[is_same]).reset_index(drop=True)


def beside_public(rates: pd.DataFrame, num_experts: int, top_k: int) -> str:
    """In words: LRU's hit rate here beside the published ones at the same numbers of slots."""
    lru = rates[rates["policy"] == LRU].set_index("num_slots")["hit_rate"].to_dict()
    public = public_rates(num_experts, top_k)
    found = [
        f"at {slots} slots {lru[slots]:.1%} here and {rate:.1%} in {source}"
        for source, slots, rate in zip(public["source"], public["num_slots"], public["hit_rate"], strict=True)
        if slots in lru
    ]
    if not found:
        return f"We know of no published hit rate for {num_experts} experts, top-{top_k}, at these capacities."
    return "LRU hits " + ", ".join(found) + "."


def layer_rates(layers: pd.DataFrame, policies: Sequence[str], num_slots: int) -> pd.DataFrame:
    """Hit rate of each layer in the warm window at one capacity: the rows of `capacity.by_layer` with `hit_rate`."""
    is_asked = (layers["window"] == "warm") & (layers["num_slots"] == num_slots) & layers["policy"].isin(list(policies))
    rows = pd.DataFrame(layers[is_asked])
    return rows.assign(hit_rate=rows["hits"] / rows["calls"]).reset_index(drop=True)


def span(frame: pd.DataFrame, column: str) -> dict[str, float]:
    """The smallest and the largest value of a column, as `low` and `high`."""
    values = frame[column].to_numpy(np.float64)
    return {"low": float(values.min()), "high": float(values.max())}


def extreme(tests: pd.DataFrame, num_slots: int, is_best: bool) -> str:
    """The policy with the largest (or smallest) difference at one capacity, LRU itself counting as 0."""
    rows = tests.loc[tests["num_slots"] == num_slots, ["policy", "difference"]].to_numpy().tolist()
    rows = sorted([*rows, [LRU, 0.0]], key=lambda row: row[1])
    return str(rows[-1 if is_best else 0][0])


def best_half_life(gains: pd.DataFrame, num_slots: int) -> dict[str, float]:
    """`best_half_life` in tokens and `best_gain` over LRU in points of hit rate, at one capacity."""
    rows = gains.loc[gains["num_slots"] == num_slots, ["difference", "half_life_tokens"]].to_numpy().tolist()
    gain, half_life = max(rows)
    return {"best_half_life": half_life, "best_gain": 100 * gain}


def in_percent(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The frame with these fractions written as percentages ("" for NaN), for a table."""
    return frame.assign(**{column: ["" if np.isnan(value) else f"{value:.1%}" for value in frame[column]] for column in columns})
