"""The rule about composition: does one heavy call cost more than light calls of the same summed gate weight?

No rule knows which claim it serves, where results come from, or any number that is not in its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moecache.claims.data import Drawing
from moecache.claims.losses import gather_losses
from moecache.claims.verdict import State, Verdict


def heavy_calls_cost_more(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether the cell `heavy` loses more than `factor` times the cell `light`, at equal and sufficient mass."""
    losses, heavy, light = gather_losses(frame, drawing), parameters["heavy"], parameters["light"]
    if absent := losses.lacking(heavy, light):
        return Verdict(State.NOT_YET_MEASURED, f"The stored results hold no {', '.join(f'*{label}*' for label in absent)}.")
    masses = sorted(losses.mass(label) for label in (heavy, light))
    told = (
        f"*{heavy}* loses {1000 * losses.loss(heavy):.2f} mnat a token with mass {losses.mass(heavy):.4f} a step, *{light}* "
        f"{1000 * losses.loss(light):.2f} with {losses.mass(light):.4f}"
    )
    if masses[0] < parameters["least_mass"]:
        return Verdict(
            State.INCONCLUSIVE, f"{told}: less than the {parameters['least_mass']:g} of mass a step that was asked for ({losses.n})"
        )
    if masses[1] - masses[0] > parameters["most_gap"] * masses[1]:
        return Verdict(State.INCONCLUSIVE, f"{told}: the masses differ by more than {100 * parameters['most_gap']:g} % ({losses.n})")
    low, high = losses.interval(losses.drawn(heavy) - losses.drawn(light))
    margin = losses.interval(losses.drawn(heavy) - parameters["factor"] * losses.drawn(light))
    state = State.SUPPORTED if low > 0.0 and margin[0] > 0.0 else State.NOT_SUPPORTED if margin[1] < 0.0 else State.INCONCLUSIVE
    difference = 1000 * (losses.loss(heavy) - losses.loss(light))
    return Verdict(
        state, f"{told}: {difference:+.2f} [{1000 * low:+.2f}, {1000 * high:+.2f}] mnat{_ratio(losses, heavy, light)} ({losses.n})"
    )


def _ratio(losses: Any, heavy: str, light: str) -> str:
    if losses.interval(losses.drawn(light))[0] <= 0.0:
        return ", no ratio since the light side is not clear of zero"
    drawn = losses.drawn(light)
    low, high = losses.interval(losses.drawn(heavy) / np.where(drawn > 0, drawn, np.nan))
    return f", {losses.loss(heavy) / losses.loss(light):.1f} [{low:.1f}, {high:.1f}] times as much"


COMPOSITION_RULES = {heavy_calls_cost_more.__name__: heavy_calls_cost_more}
