"""What measured seconds say: how far from the bound, how far from the simulator, and how the gain of a policy hangs on the link.

*Two constants are taken from the run itself*, from fetch-every-miss's blocks decoded again with every call a hit: the seconds T of such a
token, and the seconds c of one expert's products. With them a `Hardware` is made, and the simulator replays the recorded routers' words.

*The curve.* A policy that never waits takes T. Fetching every miss takes T + W, where W is what its reads last longer than the products
that hide them. Over layers and tokens, with m misses of K calls, blocks of B bytes, a link of `latency` and `rate`:

    W = mean over tokens of sum over layers of max(0, m (latency + B / rate) - (K - m) c),      ratio = 1 + W / T.

So the gain is a property of link and computation, not of the code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moecache.cost import estimate_seconds
from moecache.experiments.runtime_reads import compared_reads
from moecache.experiments.runtime_seconds import ALL_HITS, DISK, LATENCY_SECONDS, Timed
from moecache.hardware import Hardware
from moecache.kernel import Outcome
from moecache.policy import FETCH_EVERY_MISS
from moecache.simulate import simulate
from moecache.trace import DecisionLog

NUM_DRAWS = 2000
SOURCE_GAIN = 2.5  # the lower end of the source's 2.5-3x
WAITED = (int(Outcome.FETCHED), int(Outcome.FORCED))


def by_policy(timed: Timed, seed: int = 0) -> pd.DataFrame:
    """Seconds a token of every link and policy, against fetch-every-miss and against the bound.

    Returns
    -------
    DataFrame
        One row a link and policy, "all hits" too: link, link_bytes_per_second (on the disk the plain reader's), late_fraction, policy,
        num_tokens; seconds_per_token with _low and _high; ratio = fetch-every-miss's seconds / this policy's with ratio_low, ratio_high;
        demand_bytes_per_token; bound_seconds, bound_ratio = seconds / bound, bound_ratio_median = the median over blocks of a block's
        seconds / its own bound; preempted_per_token (a sign of other work on the machine); hit_share, fetched_share, substituted_share
        of calls; waiting_, experts_, routing_, overhead_, dense_seconds_per_token. All MEASURED; intervals are 95 %, blocks of tokens
        drawn again.
    """
    rows = []
    for link, blocks in timed.blocks.groupby("link", sort=False):
        rate, latency = _link_constants(timed, blocks)
        floor = _seconds_per_token(blocks[blocks["policy"] == ALL_HITS])
        fetching, again = (
            blocks[blocks["policy"] == name].sort_values("block").reset_index(drop=True) for name in (FETCH_EVERY_MISS.label, ALL_HITS)
        )
        byte_seconds = 1 / rate + latency / _expert_bytes(timed)
        for policy, own in blocks.groupby("policy", sort=False):
            own = own.sort_values("block").reset_index(drop=True)
            num_tokens, demand = int(own["num_tokens"].sum()), own["bytes_demand"].sum() / own["num_tokens"].sum()
            bound, bounds = demand * byte_seconds + floor, own["bytes_demand"] * byte_seconds + again["seconds"]
            row = {"link": link, "link_bytes_per_second": rate, "late_fraction": float(own["late_fraction"].iloc[0]), "policy": policy}
            row |= {"num_tokens": num_tokens, **_with_intervals(own, fetching, seed), "demand_bytes_per_token": demand}
            row |= {"bound_seconds": bound, "bound_ratio": row["seconds_per_token"] / bound}
            row["bound_ratio_median"] = (own["seconds"] / bounds).median()
            rows.append(row | _shares(own))
    return pd.DataFrame(rows)


def predicted(timed: Timed) -> pd.DataFrame:
    """The simulator's seconds per token beside the measured ones, over the same tokens.

    Returns
    -------
    DataFrame
        One row a link and policy: link, link_bytes_per_second, late_fraction, policy, seconds_per_token (MEASURED), predicted_seconds
        (SIMULATED), error_fraction = predicted / measured - 1, error_fraction_median = the median over blocks of the same for each
        block, with the all-hits token of that block (what disturbs a few blocks does not move it), is_log_equal (the simulator's replay
        of the recorded trace decided as the runtime did).
    """
    rows = []
    runs = {label: simulate(kept.trace, _policy(timed, label), timed.plan.num_slots) for label, kept in timed.recorded.items()}
    equal = {label: bool(run.decisions and run.decisions.is_equal(timed.recorded[label].decisions)) for label, run in runs.items()}
    for link, blocks in timed.blocks.groupby("link", sort=False):
        hardware = machine(timed, str(link))
        for label, run in runs.items():
            own = blocks[blocks["policy"] == label]
            measured = _seconds_per_token(own)
            tokens = estimate_seconds(run, hardware).seconds[timed.plan.warm_tokens :]
            seconds = float(tokens.mean())
            row = {"link": link, "link_bytes_per_second": hardware.link_bytes_per_second, "late_fraction": own["late_fraction"].iloc[0]}
            row |= {"policy": label, "seconds_per_token": measured, "predicted_seconds": seconds}
            row |= {"error_fraction": seconds / measured - 1, "error_fraction_median": _median_error(tokens, blocks, own)}
            rows.append(row | {"is_log_equal": equal[label]})
    return pd.DataFrame(rows)


def _median_error(predicted_seconds: np.ndarray, blocks: pd.DataFrame, own: pd.DataFrame) -> float:
    """Median over blocks of predicted / measured - 1, the floor taken from the block itself."""
    measured, again = (frame.sort_values("block")["seconds"].to_numpy() for frame in (own, blocks[blocks["policy"] == ALL_HITS]))
    by_block = predicted_seconds.reshape(len(measured), -1).sum(axis=1)
    return float(np.median((by_block - again.mean() + again) / measured - 1))


def machine(timed: Timed, link: str) -> Hardware:
    """Constants of one link's run: the emulated link's own, or the plain reader's rate on the disk; T and c from the all-hits blocks."""
    blocks = timed.blocks[timed.blocks["link"] == link]
    rate, latency = _link_constants(timed, blocks)
    floor, expert = _floor(timed, blocks)
    shape = _shape(timed)
    return Hardware(
        f"this machine, {link}",
        rate,
        latency,
        layer_seconds=floor / shape.num_layers - shape.top_k * expert,
        expert_seconds=expert,
        kind="measured",
        derivation="all-hits token and products measured in place; the link as emulated, or a plain reader of the same blocks",
    )


def curve(timed: Timed) -> pd.DataFrame:
    """The gain over fetch-every-miss against the link's rate, measured and by the formula.

    Returns
    -------
    DataFrame
        One row a link and policy other than fetch-every-miss: link, link_bytes_per_second, late_fraction, policy, ratio with
        ratio_low, ratio_high (MEASURED), calculated_ratio = 1 + W / T (ESTIMATED), with wait_seconds = W and floor_seconds = T a token.
    """
    table = by_policy(timed)
    kept = ["link", "link_bytes_per_second", "late_fraction", "policy", "ratio", "ratio_low", "ratio_high"]
    rows = table.loc[table["policy"] != FETCH_EVERY_MISS.label, kept].reset_index(drop=True)
    log = timed.recorded[FETCH_EVERY_MISS.label].decisions
    waits, floors = {}, {}
    for link in rows["link"].unique():
        hardware = machine(timed, link)
        floors[link] = _floor(timed, timed.blocks[timed.blocks["link"] == link])[0]
        waits[link] = unhidden_wait(log, hardware, _expert_bytes(timed), timed.plan.warm_tokens)
    wait, floor = rows["link"].map(waits), rows["link"].map(floors)
    return rows.assign(calculated_ratio=1 + wait / floor, wait_seconds=wait, floor_seconds=floor)


def unhidden_wait(log: DecisionLog, hardware: Hardware, expert_bytes: int, first_token: int = 0) -> float:
    """W: mean seconds a token that the reads of a log last longer than the products of the calls that need no read."""
    misses = np.isin(log.outcome[first_token:], WAITED).sum(axis=2)
    reads = misses * hardware.seconds_per_transfer(expert_bytes)
    products = (log.outcome.shape[2] - misses) * hardware.seconds_per_expert(expert_bytes)
    return float(np.maximum(reads - products, 0.0).sum(axis=1).mean())


def crossings(points: pd.DataFrame, level: float = SOURCE_GAIN) -> pd.DataFrame:
    """The link's rate at which each policy's gain falls through `level`, interpolated between neighbours in logarithms of both.

    Parameters
    ----------
    points : of `curve`, one run.
    level : gain above 1.

    Returns
    -------
    DataFrame : policy, level, bytes_per_second (from the MEASURED ratios), calculated_bytes_per_second (from the formula's); NaN where no
        two neighbours lie on different sides.
    """
    rows = []
    for policy, own in points.groupby("policy", sort=False):
        own = own.sort_values("link_bytes_per_second")
        rates = own["link_bytes_per_second"].to_numpy()
        found = [_crossing(rates, own[column].to_numpy(), level) for column in ("ratio", "calculated_ratio")]
        rows.append({"policy": policy, "level": level, "bytes_per_second": found[0], "calculated_bytes_per_second": found[1]})
    return pd.DataFrame(rows)


def _crossing(rates: np.ndarray, ratios: np.ndarray, level: float) -> float:
    x, y = np.log(rates), np.log(ratios / level)
    for i in range(len(x) - 1):
        if y[i] >= 0 > y[i + 1]:
            return float(np.exp(x[i] + (x[i + 1] - x[i]) * y[i] / (y[i] - y[i + 1])))
    return float("nan")


def _with_intervals(own: pd.DataFrame, fetching: pd.DataFrame, seed: int) -> dict[str, float]:
    """Seconds a token and the ratio against fetch-every-miss; whole blocks are drawn again, the same of both."""
    picks = np.random.default_rng(seed).integers(len(own), size=(NUM_DRAWS, len(own)))
    mine, theirs, tokens = (frame.to_numpy() for frame in (own["seconds"], fetching["seconds"], own["num_tokens"]))
    seconds = np.quantile(mine[picks].sum(axis=1) / tokens[picks].sum(axis=1), (0.025, 0.975))
    ratios = np.quantile(theirs[picks].sum(axis=1) / mine[picks].sum(axis=1), (0.025, 0.975))
    return {
        "seconds_per_token": mine.sum() / tokens.sum(),
        "seconds_per_token_low": float(seconds[0]),
        "seconds_per_token_high": float(seconds[1]),
        "ratio": theirs.sum() / mine.sum(),
        "ratio_low": float(ratios[0]),
        "ratio_high": float(ratios[1]),
    }


def _shares(own: pd.DataFrame) -> dict[str, float]:
    calls, tokens = own[["hit", "fetched", "forced", "substituted"]].sum(), own["num_tokens"].sum()
    shares = {
        "preempted_per_token": own["num_preempted"].sum() / tokens,
        "hit_share": calls["hit"] / calls.sum(),
        "fetched_share": (calls["fetched"] + calls["forced"]) / calls.sum(),
        "substituted_share": calls["substituted"] / calls.sum(),
    }
    kinds = ("waiting", "experts", "routing", "overhead", "dense")
    return shares | {f"{kind}_seconds_per_token": own[f"seconds_{kind}"].sum() / tokens for kind in kinds}


def _link_constants(timed: Timed, blocks: pd.DataFrame) -> tuple[float, float]:
    """(bytes per second, latency in seconds) of a link, or of the disk as the plain reader found it."""
    if (blocks["link"] == DISK).all():
        return float(compared_reads(timed.reads)["plain_bytes_per_second"]), 0.0
    return float(blocks["link_bytes_per_second"].iloc[0]), LATENCY_SECONDS


def _floor(timed: Timed, blocks: pd.DataFrame) -> tuple[float, float]:
    """(T, c): seconds of an all-hits token, and of one expert's products in it."""
    again = blocks[blocks["policy"] == ALL_HITS]
    shape = _shape(timed)
    return _seconds_per_token(again), again["seconds_experts"].sum() / (again["num_tokens"].sum() * shape.num_layers * shape.top_k)


def _seconds_per_token(own: pd.DataFrame) -> float:
    return float(own["seconds"].sum() / own["num_tokens"].sum())


def _shape(timed: Timed) -> Any:
    return timed.recorded[FETCH_EVERY_MISS.label].trace.shape


def _expert_bytes(timed: Timed) -> int:
    return int(_shape(timed).expert_bytes)


def _policy(timed: Timed, label: str) -> Any:
    return next(policy for policy in timed.plan.policies if policy.label == label)
