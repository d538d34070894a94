"""What the chapter against stock engines says: sentences and values made from the rows of `stock`, and what policies cost elsewhere.

A sentence is written from the rows, so it cannot disagree with the tables beside it; where something was not run, it says so. Nothing is
measured here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import pandas as pd

from moecache import stats
from moecache.claims.data import load_claims
from moecache.claims.judge import judge_settings
from moecache.claims.verdict import State, combine
from moecache.experiments.memory_cap import why_no_cap
from moecache.experiments.stock import ENGINES, STOCK
from moecache.experiments.stock_files import files_of
from moecache.experiments.stock_place_report import host_words, is_on_gpu
from moecache.experiments.stock_report import FEWEST_FOR_INTERVAL, RAN, baseline_of, cells_in, is_ours, ratio_between
from moecache.experiments.stock_runs import MEBIBYTE, Text
from moecache.reference.settings import MODELS_FOLDER

FETCHING = "moecache, fetch every miss"
POLICIES = [engine.policy for engine in ENGINES.values() if engine.policy and engine.name != FETCHING]
ADMITTED_ANYWAY = "admitted_anyway"  # the regime of rules that are compared on the same misses, which costs as many copies as fetching
PROGRAM_WORDS = {"llama_cpp": STOCK, "accelerate_offload": "accelerate, disk offload", "ours": FETCHING}
QUALITY_EXPERIMENTS = ("10_chosen_policies", "04_misses_that_matter")  # the first that has a model and policy is shown


def sizes(text: Text) -> dict[str, float]:
    """The checkpoint in numbers."""
    files = files_of(text.model_name, text.hidden_size, text.expert_width, 16, "transformers_mmap")
    shape = files.shape
    return {
        "expert_mebibytes": files.block_bytes[16] / MEBIBYTE,
        "experts_gibibytes": files.expert_bytes(16) / 2**30,
        "num_experts": shape.num_experts,
        "num_layers": shape.num_layers,
        "top_k": shape.top_k,
        "num_cores": os.cpu_count() or 1,
    }


def agreement_table(found: pd.DataFrame) -> pd.DataFrame:
    """Agreement with plain transformers as a page shows it."""
    return pd.DataFrame(
        {
            "engine": [PROGRAM_WORDS.get(program, program) for program in found["engine"]],
            "bits": found["bits"],
            "tokens": found["num_tokens"],
            "mean KL, nats": found["mean_kl_nats"],
            "largest KL": found["max_kl_nats"],
            "same top token": [f"{100 * share:.1f} %" for share in found["same_top_fraction"]],
            "logits": ["equal" if is_equal else f"differ by up to {most:.2g}" for is_equal, most in _pairs(found)],
        }
    )


def _pairs(found: pd.DataFrame) -> list[tuple[bool, float]]:
    return [(bool(row["is_equal"]), float(row["max_difference"])) for row in found.to_dict("records")]


def agreement_words(found: pd.DataFrame) -> str:
    """What the check was, in a sentence."""
    others = ", or a mean KL divergence below 0.01 nats for an engine with products of its own" if not found["must_be_equal"].all() else ""
    required = f"they must be equal{others}" if found["must_be_equal"].any() else "their mean KL divergence must be below 0.01 nats"
    return (
        f"Before any clock is read their logits are compared with plain transformers on {found['num_tokens'].iloc[0]} tokens. With 16 bits "
        f"{required}; otherwise nothing is timed. With 4 bits each engine rounds by its own rule, and the figures say what "
        "that costs."
    )


def cap_words(frame: pd.DataFrame) -> str:
    """How memory was held, or why it was not."""
    if frame["is_capped"].all():
        return "It runs under a memory limit of the operating system (a cgroup), and the cache of files is emptied before it."
    reason = why_no_cap() or "the machine that measured them could not do it"
    return f"**Memory was not capped on this page**, so its figures say nothing about small memory: {reason}."


def spare_words(frame: pd.DataFrame, text: Text) -> str:
    """Where the process's allowance could hold what the cap leaves out, so that an engine with a small process lacks nothing.

    Beside a GPU: whether main memory could.
    """
    if is_on_gpu(frame):
        return host_words(frame, text)
    left_out = (1 - frame["resident_fraction"]) * frame["experts_mebibytes"]
    cells = cells_in(frame[~frame["is_fitting"] & (left_out <= text.process_mebibytes)])
    if not cells:
        return ""
    return (
        f"In {' and '.join(cells)} the allowance alone could hold the other experts, so an engine with a small process lacks nothing there."
    )


def sweep_words(swept: pd.DataFrame) -> str:
    """What was chosen beforehand."""
    if swept.empty:
        return "Threads and the disk's read-ahead are as the machine has them; nothing was tuned on this page."
    return (
        f"Before that, in {len(swept)} runs on a text that no repeat reads, every engine that maps files got the better read-ahead "
        "of the disk, and llama.cpp its best number of threads, in each cap apart:"
    )


def read_ahead_factor(swept: pd.DataFrame) -> str:
    """How many times as fast the baseline is with the better read-ahead of the disk, in the smallest cap of 16 bits."""
    rows = swept[(swept["engine"] == STOCK) & (swept["bits"] == 16) & (swept["outcome"] == RAN)]
    rows = rows[rows["resident_fraction"] == rows["resident_fraction"].min()]
    best = rows.groupby("asked_read_ahead_kib")["tokens_per_second"].max()
    return f"{best.max() / best.min():.2g}" if len(best) > 1 else "unknown size (nothing was tuned on this page)"


def values(frame: pd.DataFrame) -> dict[str, Any]:
    """Values of the prose."""
    num_repeats = frame["repeat"].nunique()
    means = f"Geometric means over {num_repeats} repeats" if num_repeats > 1 else "One repeat"
    return {
        "mean_words": means + (", with 95 % t-intervals" if num_repeats >= FEWEST_FOR_INTERVAL else " (too few for an interval)"),
        "disk_words": disk_words(frame),
        "fitting_words": fitting_words(frame),
    }


def alternative(table: pd.DataFrame) -> str:
    """The figure in a sentence."""
    told = []
    for cell, rows in table.groupby("cell", sort=False):
        ran = rows[rows["rate"].notna()].sort_values("rate", ascending=False)
        if len(ran):
            told.append(
                f"{cell}: from {ran['engine'].iloc[0]} ({ran['rate'].iloc[0]:.3g}) to {ran['engine'].iloc[-1]} ({ran['rate'].iloc[-1]:.3g})"
            )
    return f"Tokens per second of each engine, a panel for each cap. {'; '.join(told)}."


def disk_words(frame: pd.DataFrame) -> str:
    """What the baseline and fetching every miss read from the disk, and how fast, in each cap that does not hold all experts."""
    told = []
    for cell in cells_in(frame[~frame["is_fitting"]]):
        found = [_reading(frame[(frame["cell"] == cell) & (frame["engine"] == engine)]) for engine in (baseline_of(frame), FETCHING)]
        told += [f"{cell}: {' against '.join(found)}"] if all(found) else []
    if not told:
        return ""
    return (
        f"What a token reads from the disk, and at which rate over the whole token (computing included), {baseline_of(frame)} against "
        f"fetching every miss: {'; '.join(told)}."
    )


def _reading(rows: pd.DataFrame) -> str:
    ran = rows[rows["outcome"] == RAN]
    if ran.empty:
        return ""
    mebibytes = float(ran["read_mebibytes_per_token"].mean())
    rate = float((ran["read_mebibytes_per_token"] * ran["tokens_per_second"]).mean()) * MEBIBYTE / 1e9
    return f"{mebibytes:.0f} MiB at {rate:.2f} GB/s"


def fitting_words(frame: pd.DataFrame) -> str:
    """Who is faster where all experts fit, in a sentence."""
    fitting = pd.DataFrame(frame[frame["is_fitting"]])
    ratios = [ratio for cell in cells_in(fitting) if (ratio := ratio_between(frame, cell, STOCK, FETCHING))]
    if not ratios:
        return "A cap that holds all experts was not compared with it on this page; there its products are expected to be faster."
    ratio = ratios[0]
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.n >= FEWEST_FOR_INTERVAL else ""
    return f"Where all experts fit, {STOCK} is {ratio.value:.2f}{interval} times as fast as this runtime when it fetches every miss."


def meaning(frame: pd.DataFrame) -> str:
    """The findings: ratios to the baseline, cap by cap."""
    against = baseline_of(frame)
    ours = [name for name in ENGINES if is_ours(name) and name in set(frame["engine"])]
    told = [sentence for cell in cells_in(frame) if (sentence := _finding(frame, cell, ours, against))]
    if not told:
        return f"No run of this project's runtime can be compared with {against} here."
    if not frame["is_capped"].all():
        told.append("Memory was not capped, so this is a check that everything runs, not a finding.")
    elif against != STOCK:
        told.append(f"{STOCK} was not run on this page; the claim is about it.")
    return " ".join(told)


def _finding(frame: pd.DataFrame, cell: str, ours: Sequence[str], against: str) -> str:
    parts = []
    for engine in ours:
        ratio = ratio_between(frame, cell, engine, against)
        if ratio is None:
            continue
        interval = f" [{ratio.low:.2g}, {ratio.high:.2g}]" if ratio.n >= FEWEST_FOR_INTERVAL else ""
        parts.append(f"*{ENGINES[engine].policy}* {ratio.value:.2g}{interval} times")
    return f"**{cell}**, against {against}: {', '.join(parts)} as fast." if parts else ""


def verdict(frame: pd.DataFrame) -> dict[str, str]:
    """The claim's `verdict` on these rows, and its `evidence` in every cap."""
    if is_on_gpu(frame):
        return {"verdict": str(State.NOT_YET_MEASURED), "evidence": "The claim's plan is about main memory; on a GPU it is not judged."}
    drawing, listed = load_claims()
    claim = next(claim for claim in listed if claim.id == "j")
    found = judge_settings(claim, drawing, frame)
    told = [f"{setting}: {one.state}; {one.evidence}." for setting, one in found.items()]
    state = combine(found).state if found else State.NOT_YET_MEASURED
    return {"verdict": str(state), "evidence": " ".join(told) or "No cap of this page leaves experts out."}


def quality(frames: Sequence[pd.DataFrame], policies: Sequence[str]) -> pd.DataFrame:
    """What policies cost: perplexity increases from the stored rows of chapters on quality, substituted experts staying out.

    Parameters
    ----------
    frames : stored rows, one frame a chapter, the preferred chapter first; may be empty.
    policies : labels.

    Returns
    -------
    DataFrame : `model`, `slots`, `policy`, `increase` (fraction), `low`, `high`, `clusters`; a (model, policy) comes from the first frame
        that has it, with a quarter of the experts resident. Empty where nothing is stored.
    """
    rows: dict[tuple[str, str], dict[str, object]] = {}
    for frame in frames:
        if frame.empty:
            continue
        kept = frame[frame["regime"] != ADMITTED_ANYWAY]
        for model in dict.fromkeys(kept["model"]):
            for row in _costs(pd.DataFrame(kept[kept["model"] == model]), policies):
                rows.setdefault((model, str(row["policy"])), {"model": model, **row})
    return pd.DataFrame(list(rows.values()), columns=["model", "slots", "policy", "increase", "low", "high", "clusters"])


def _quarter(model: str) -> int:
    """Slots for a quarter of a reference model's experts."""
    config = json.loads((MODELS_FOLDER / model / "config.json").read_text())
    return round(config["num_experts"] / 4)


def _costs(rows: pd.DataFrame, policies: Sequence[str]) -> list[dict[str, object]]:
    slots = _quarter(str(rows["model"].iloc[0]))
    part = pd.DataFrame(rows[(rows["num_slots"] == slots) & rows["policy"].isin(list(policies))])
    if part.empty:
        return []
    table = stats.perplexity_increases(part, unit="cluster")
    return [
        {
            "slots": int(slots),
            "policy": row["policy"],
            **{name: row[name] for name in ("increase", "low", "high")},
            "clusters": row["num_units"],
        }
        for row in table.to_dict("records")
    ]


def quality_table(costs: pd.DataFrame) -> pd.DataFrame:
    """`quality` as a page shows it."""
    bounds = zip(costs["increase"], costs["low"], costs["high"], strict=True)
    return pd.DataFrame(
        {
            "model": costs["model"],
            "slots": costs["slots"],
            "policy": costs["policy"],
            "perplexity increase [95 %]": [f"{100 * middle:+.2f} % [{100 * low:.2f}, {100 * high:.2f}]" for middle, low, high in bounds],
            "clusters of documents": costs["clusters"],
        }
    )


def quality_words(costs: pd.DataFrame) -> str:
    """What is stored of each policy, and what is not."""
    missing = [policy for policy in POLICIES if policy not in set(costs["policy"])]
    absent = f"Not stored yet: {', '.join(missing)}." if missing else ""
    if costs.empty:
        return absent
    worst = costs.iloc[int(costs["increase"].to_numpy(float).argmax())]
    return f"The dearest is {worst['policy']} on {worst['model']}: {100 * worst['increase']:.2f} % more perplexity. {absent}".strip()
