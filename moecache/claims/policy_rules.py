"""Rules about whole policies: what a chosen policy costs against the exact model and against its bare rule.

These decide what is said about perplexity. A claim that also promises seconds has another half, see `time_rules`.

No rule knows which claim it serves, where results come from, or any number that is not in its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moecache.claims.data import Drawing
from moecache.claims.losses import Losses, gather_losses
from moecache.claims.verdict import State, Verdict, side_of, worst_of
from moecache.stats import draw_counts, pair_documents, weighted_mean_draws
from moecache.stats.paired import DIFFERENCE


def chosen_policies_cost_little(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether every policy of `chosen` raises the perplexity by less than `small`."""
    losses, chosen = gather_losses(frame, drawing), parameters["chosen"]
    if absent := _lacking(losses, *chosen):
        return absent
    bound = parameters["small"]
    found = {label: losses.interval(np.expm1(losses.drawn(label))) for label in chosen}
    states = [side_of(-high, -low, -bound) for low, high in found.values()]
    told = "; ".join(f"*{label}* raises the perplexity by {losses.increase(label)} {_percents(*found[label])}" for label in chosen)
    return Verdict(worst_of(states), f"{told} ({losses.n})")


def chosen_policy_beats_its_bare_rule(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether the policy `chosen` loses less than the rule `bare`."""
    losses, chosen, bare = gather_losses(frame, drawing), parameters["chosen"], parameters["bare"]
    if absent := _lacking(losses, chosen, bare):
        return absent
    low, high = losses.interval(losses.drawn(chosen) - losses.drawn(bare))
    return Verdict(side_of(-high, -low), f"{_difference(losses, chosen, bare, low, high)} ({losses.n})")


def chosen_policy_loses_no_more(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether the policy `chosen` loses at most `bound_nats` more than the rule `bare`."""
    losses, chosen, bare = gather_losses(frame, drawing), parameters["chosen"], parameters["bare"]
    if absent := _lacking(losses, chosen, bare):
        return absent
    low, high = losses.interval(losses.drawn(chosen) - losses.drawn(bare))
    # A clear increase refutes; where there may be none, it must also be shown to be small.
    is_small = high < parameters["bound_nats"]
    state = State.NOT_SUPPORTED if low > 0.0 else State.SUPPORTED if is_small else State.INCONCLUSIVE
    return Verdict(state, f"{_difference(losses, chosen, bare, low, high)} ({losses.n})")


def admission_helps_after_a_change(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether `admitting` loses less than `bare`, and gains more near a change of topic (column `near`) than far from it (`far`)."""
    losses, admitting, bare = gather_losses(frame, drawing), parameters["admitting"], parameters["bare"]
    if absent := _lacking(losses, admitting, bare):
        return absent
    columns = (DIFFERENCE, parameters["near"], parameters["far"])
    paired = pair_documents(frame, drawing.unit, columns)
    counts = draw_counts(paired.num_units, drawing.num_draws, drawing.seed)
    pair = paired.index(admitting), paired.index(bare)
    gains, draws = {}, {}
    for column in columns:
        sums = paired.sums[column][pair[1]] - paired.sums[column][pair[0]]
        gains[column] = float(sums.sum() / paired.num_tokens.sum())
        draws[column] = weighted_mean_draws(sums[None], paired.num_tokens, counts)[:, 0]
    whole, near, far = (draws[column] for column in columns)
    states = [side_of(*losses.interval(whole)), side_of(*losses.interval(near - far))]
    state = worst_of(states)
    told = [_gain(gains[column], losses.interval(draws[column])) for column in columns]
    return Verdict(
        state,
        f"*{admitting}* gains {told[0]} thousandths of a nat a token over *{bare}*: {told[1]} near a change, {told[2]} "
        f"further on ({losses.n})",
    )


def _gain(gain: float, interval: tuple[float, float]) -> str:
    return f"{1000 * gain:+.1f} [{1000 * interval[0]:+.1f}, {1000 * interval[1]:+.1f}]"


def _difference(losses: Losses, chosen: str, bare: str, low: float, high: float) -> str:
    difference = losses.loss(chosen) - losses.loss(bare)
    return (
        f"*{chosen}* minus *{bare}*: {1000 * difference:+.1f} [{1000 * low:+.1f}, {1000 * high:+.1f}] thousandths of a nat a token "
        f"({losses.increase(chosen)} against {losses.increase(bare)})"
    )


def _percents(low: float, high: float) -> str:
    return f"[{100 * low:.2f}, {100 * high:.2f}]"


def _lacking(losses: Losses, *policies: str) -> Verdict | None:
    names = ", ".join(f"*{label}*" for label in losses.lacking(*policies))
    return Verdict(State.NOT_YET_MEASURED, f"The stored results hold no {names}.") if names else None


POLICY_RULES = {
    rule.__name__: rule
    for rule in (
        admission_helps_after_a_change,
        chosen_policies_cost_little,
        chosen_policy_beats_its_bare_rule,
        chosen_policy_loses_no_more,
    )
}
