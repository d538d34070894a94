"""The rules: small pure functions from one setting's results to a verdict.

Each takes the tidy frame of one setting (one row per policy and document), the claim's parameters and how to
draw, and returns a ``Verdict``. A rule decides by an interval against a bound that stands in the data file;
where the results cannot carry the question (a policy is missing, too few policies, too few units) it says so
instead.

No rule knows which claim it serves, where results come from, or any number that is not in its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from moecache.claims.composition_rules import COMPOSITION_RULES
from moecache.claims.data import Drawing
from moecache.claims.generation_rules import GENERATION_RULES
from moecache.claims.losses import MASS, Losses, gather_losses
from moecache.claims.policy_rules import POLICY_RULES
from moecache.claims.speed_rules import SPEED_RULES
from moecache.claims.time_rules import TIME_RULES
from moecache.claims.verdict import State, Verdict, counted, side_of
from moecache.stats import correlation_across_documents, correlation_across_policies, fan_across, fan_within, leaving_families_out
from moecache.stats.paired import DIFFERENCE

Rule = Callable[[pd.DataFrame, Mapping[str, Any], Drawing], Verdict]


def few_calls_carry_the_loss(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether the policy `heavy` has most of the loss of `heavy` and `rest` with few of their
    calls."""
    losses, heavy, rest = gather_losses(frame, drawing), parameters["heavy"], parameters["rest"]
    if losses.lacking(heavy, rest):
        return _lacking(losses, heavy, rest)
    calls = losses.substituted[heavy] / (losses.substituted[heavy] + losses.substituted[rest])
    total, most = losses.loss(heavy) + losses.loss(rest), parameters["most"]
    # The sign of this margin says on which side of `most` the share lies, also where the total is near zero.
    margin = losses.interval((1 - most) * losses.drawn(heavy) - most * losses.drawn(rest))
    share = losses.interval(losses.drawn(heavy) / (losses.drawn(heavy) + losses.drawn(rest)))
    state = side_of(*margin) if calls <= parameters["few"] else State.INCONCLUSIVE
    return Verdict(
        state,
        f"*{heavy}* has {_percent(calls)} of the substituted calls and {_percent(losses.loss(heavy) / total)} "
        f"[{_percent(share[0])}, {_percent(share[1])}] of the loss of the two rules "
        f"({losses.increase(heavy)} against {losses.increase(rest)} for *{rest}*; {losses.n})"
        + ("" if calls <= parameters["few"] else f"; more than {_percent(parameters['few'])} of the calls are not few"),
    )


def mass_orders_the_rules(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether loss rises with mass across rules that substituted no first choice."""
    losses = gather_losses(frame, drawing)
    rules = losses.always_fetching_first_choices(parameters["other_fallbacks"])
    if too_few := _too_few_rules(losses, rules, parameters):
        return too_few
    kept = pd.DataFrame(frame[frame["policy"].isin(rules)])
    found = correlation_across_policies(kept, unit=drawing.unit, **_bootstrap(drawing))
    spearman, pearson = found.to_dict("records")
    without = leaving_families_out(kept)["r"]
    lowest = f", at least {without.min():.2f} with any one family left out" if len(without) else ""
    return Verdict(
        side_of(spearman["low"], spearman["high"], parameters["strong"]),
        f"Spearman {_interval(spearman['r'], spearman['low'], spearman['high'])} over {len(rules)} rules{lowest} "
        f"(Pearson {pearson['r']:.2f}; {losses.n})",
    )


def mass_does_not_order_the_texts(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether, within a rule, loss is unrelated to mass across documents."""
    losses = gather_losses(frame, drawing)
    rules = losses.always_fetching_first_choices(parameters["other_fallbacks"])
    if too_few := _too_few_rules(losses, rules, parameters):
        return too_few
    kept = pd.DataFrame(frame[frame["policy"].isin(rules)])
    rows = correlation_across_documents(kept, unit=drawing.unit, **_bootstrap(drawing)).to_dict("records")
    mean, weak = rows.pop(), parameters["weak"]
    beyond = [row["policy"] for row in rows if row["low"] > weak or row["high"] < -weak]
    is_inside = -weak < mean["low"] and mean["high"] < weak and not beyond
    is_beyond = mean["low"] > weak or mean["high"] < -weak
    coefficients = [row["spearman"] for row in rows if not row["note"]]
    return Verdict(
        State.SUPPORTED if is_inside else State.NOT_SUPPORTED if is_beyond else State.INCONCLUSIVE,
        f"Spearman across documents within a rule, mean of {len(coefficients)} rules: "
        f"{_interval(mean['spearman'], mean['low'], mean['high'])}, single rules {min(coefficients):.2f} to "
        f"{max(coefficients):.2f} ({mean['num_documents']} documents, {losses.n})"
        + (f"; clearly beyond ±{weak:g}: {', '.join(f'*{label}*' for label in beyond)}" if beyond else ""),
    )


def first_choices_break_the_relation(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether the policy `breaking` loses far more than a rule of at least its mass."""
    losses, breaking = gather_losses(frame, drawing), parameters["breaking"]
    if losses.lacking(breaking):
        return _lacking(losses, breaking)
    rules = losses.always_fetching_first_choices(parameters["other_fallbacks"])
    heavier = [label for label in rules if losses.mass(label) >= losses.mass(breaking)]
    if not heavier:
        return Verdict(
            State.INCONCLUSIVE,
            f"no rule that always fetches first choices has the mass of *{breaking}* ({losses.mass(breaking):.3f} a step; {losses.n})",
        )
    nearest, factor = heavier[0], parameters["factor"]
    margin = losses.interval(losses.drawn(breaking) - factor * losses.drawn(nearest))
    return Verdict(
        side_of(*margin),
        f"*{breaking}* loses {losses.increase(breaking)} with mass {losses.mass(breaking):.3f}; *{nearest}* loses "
        f"{losses.increase(nearest)} with mass {losses.mass(nearest):.3f}: "
        f"{_times(losses, breaking, nearest)} ({losses.n})",
    )


def signs_turn_in_small_samples(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether a small sample of the texts often gives a relation another sign than all of them do."""
    losses, size = gather_losses(frame, drawing), int(parameters["small"])
    rules = losses.always_fetching_first_choices(parameters["other_fallbacks"])
    if too_few := _too_few_rules(losses, rules, parameters):
        return too_few
    kept = pd.DataFrame(frame[frame["policy"].isin(rules)])
    varying = [str(label) for label, rows in kept.groupby("policy", sort=False) if (rows[[MASS, DIFFERENCE]].agg(np.ptp) > 0).all()]
    settings: dict[str, Any] = {"num_samples": int(parameters["samples"]), "seed": drawing.seed}
    turned = {
        f"across {len(rules)} rules": fan_across(kept, [size], unit=drawing.unit, **settings)["opposite_fraction"].iloc[0],
        "across documents within a rule (mean)": fan_within(kept, varying, [size], **settings)["opposite_fraction"].iloc[0],
    }
    often, seldom = parameters["often"], parameters["seldom"]
    is_often, is_seldom = max(turned.values()) > often, max(turned.values()) < seldom
    shares = ", ".join(f"{_percent(share)} {what}" for what, share in turned.items())
    return Verdict(
        State.SUPPORTED if is_often else State.NOT_SUPPORTED if is_seldom else State.INCONCLUSIVE,
        f"samples of {size} whose coefficient of mass and loss has another sign than with all: {shares} ({losses.n})",
    )


def protecting_beats_fewer(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether protecting heavy calls beats a rule that does not and substitutes no more calls."""
    losses = gather_losses(frame, drawing)
    pairs = [pair for pair in parameters["pairs"] if not losses.lacking(*pair)]
    if not pairs:
        return _lacking(losses, *dict.fromkeys(label for pair in parameters["pairs"] for label in pair))
    protecting, other = pairs[0]
    ratio = losses.substituted[other] / losses.substituted[protecting]
    low, high = losses.interval(losses.drawn(other) - losses.drawn(protecting))
    state = side_of(low, high)
    is_asked = {
        State.SUPPORTED: ratio <= 1 + parameters["tolerance"],
        State.NOT_SUPPORTED: ratio >= 1 - parameters["tolerance"],
    }
    return Verdict(
        state if is_asked.get(state, True) else State.INCONCLUSIVE,
        f"*{other}* substitutes {ratio:.2f} times the calls of *{protecting}* and loses {losses.increase(other)} "
        f"against {losses.increase(protecting)}: {low:+.4f} to {high:+.4f} nats a token more ({losses.n})",
    )


RULES: Mapping[str, Rule] = (
    {
        rule.__name__: rule
        for rule in (
            few_calls_carry_the_loss,
            mass_orders_the_rules,
            mass_does_not_order_the_texts,
            first_choices_break_the_relation,
            signs_turn_in_small_samples,
            protecting_beats_fewer,
        )
    }
    | POLICY_RULES
    | COMPOSITION_RULES
    | GENERATION_RULES
    | SPEED_RULES
    | TIME_RULES
)


def _too_few_rules(losses: Losses, rules: list[str], parameters: Mapping[str, Any]) -> Verdict | None:
    families = {losses.families[label] for label in rules}
    if len(rules) >= parameters["fewest_policies"] and len(families) >= parameters["fewest_families"]:
        return None
    return Verdict(
        State.INCONCLUSIVE,
        f"only {counted(len(rules), 'rule')} of {counted(len(families), 'family', 'families')} substituted no first choice; "
        f"{parameters['fewest_policies']} of {parameters['fewest_families']} are needed ({losses.n})",
    )


def _lacking(losses: Losses, *policies: str) -> Verdict:
    names = ", ".join(f"*{label}*" for label in losses.lacking(*policies))
    return Verdict(State.NOT_YET_MEASURED, f"The stored results hold no {names}.")


def _bootstrap(drawing: Drawing) -> dict[str, Any]:
    return {"confidence": drawing.confidence, "num_draws": drawing.num_draws, "seed": drawing.seed}


def _times(losses: Losses, above: str, below: str) -> str:
    """Say how many times one loss is another, with an interval where the lower one is clear of zero."""
    low, high = losses.interval(losses.drawn(below))
    if low <= 0.0:
        return f"a loss of {losses.loss(below):.4f} [{low:.4f}, {high:.4f}] nats, too near zero for a ratio"
    ratio = losses.loss(above) / losses.loss(below)
    bounds = losses.interval(losses.drawn(above) / np.maximum(losses.drawn(below), 1e-12))
    return f"{ratio:.1f} [{bounds[0]:.1f}, {bounds[1]:.1f}] times the loss in nats"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"
