"""What chapter 10 says about seconds, from the rows that chapter 09 measured. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moecache import stats
from moecache.experiments import seconds_per_token
from moecache.experiments.chosen_policies import BARE, CHOSEN
from moecache.experiments.runtime_seconds import DISK
from moecache.experiments.seconds_per_token import Question
from moecache.experiments.seconds_report import FETCHING, where

COLUMNS = ("link", "policy", "ms a token", "times as fast as fetching [95 %]", "time / bare rule's [95 %]", "fetched, %", "waiting, %")


def kept_blocks(model_names: Sequence[str], resident_fraction: float, asked: Mapping[str, Any]) -> pd.DataFrame:
    """The timed blocks of these models, as far as chapter 09 has measured them with these parameters; empty where it has not.

    Parameters
    ----------
    model_names : reference models.
    resident_fraction : share of a layer's experts resident.
    asked : the other fields of `Question`.
    """
    rates = tuple(asked["gigabytes_per_second"])
    questions = [Question(name, resident_fraction=resident_fraction, **{**asked, "gigabytes_per_second": rates}) for name in model_names]
    found = [seconds_per_token.kept(question, "blocks") for question in questions]
    return pd.concat([pd.DataFrame(), *(result.frame for result in found if result is not None)], ignore_index=True)


def ratio(blocks: pd.DataFrame, policy: str, over: str, seed: int = 0) -> tuple[float, float, float]:
    """Seconds of `policy` over seconds of `over` on the same blocks of one link, with a 95 % interval over blocks."""
    seconds = blocks.pivot_table(index="block", columns="policy", values="seconds")[[policy, over]].to_numpy()
    sums = stats.draw_counts(len(seconds), seed=seed) @ seconds
    low, high = stats.percentile_interval(sums[:, 0] / sums[:, 1], 0.95)
    whole = np.sum(seconds, axis=0)
    return float(whole[0] / whole[1]), float(low), float(high)


def table(blocks: pd.DataFrame, model: str) -> pd.DataFrame:
    """One model: a row a link and chosen policy, against fetching every miss and against its bare rule."""
    rows = []
    for link, own in where(blocks, model=model).groupby("link", sort=False):
        for rule, policy in CHOSEN.items():
            found = where(own, policy=policy.label)
            gain, change = ratio(own, FETCHING, policy.label), ratio(own, policy.label, BARE[rule].label)
            calls = found[["hit", "fetched", "forced", "substituted"]].to_numpy().sum()
            fetched = 100 * found[["fetched", "forced"]].to_numpy().sum() / calls
            spent = found["seconds"].sum()
            waiting = 100 * found["seconds_waiting"].sum() / spent
            rows.append((link, policy.label, 1e3 * spent / found["num_tokens"].sum(), _interval(gain), _interval(change), fetched, waiting))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def story(blocks: pd.DataFrame, models: Sequence[str]) -> str:
    """What the chosen policies save on the disk, in a paragraph; where nothing was measured, where to get it."""
    if blocks.empty:
        return (
            "Chapter 09 measures seconds, and has not been run with these parameters here: `moecache run 09 -o out.html`, "
            "then this chapter again, shows them."
        )
    sentences = []
    for model in [name for name in models if name in set(blocks["model"])]:
        own = where(blocks, model=model, link=DISK)
        told = []
        for rule, policy in CHOSEN.items():
            gain, change = ratio(own, FETCHING, policy.label), ratio(own, policy.label, BARE[rule].label)
            bare = f"bare {rule.removesuffix(' rule')} rule"
            told.append(
                f"{policy.label} is {_interval(gain)} times as fast as fetching every miss and takes {_interval(change)} times as long "
                f"as the {bare}"
            )
        sentences.append(f"On the disk, with {model}, {', '.join(told)} (n = {own['block'].nunique()} blocks of tokens).")
    return " ".join(sentences)


def _interval(found: tuple[float, float, float]) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*found)
