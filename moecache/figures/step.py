"""The picture of one step: slots before, calls by rank, slots after.

Read it from left to right. On the left the experts that are resident when the token's calls are looked up; in
the middle the calls, the heaviest on top, each as long as its gate weight and coloured by what became of it;
on the right the slots when the step is over. A blue frame marks an expert that has just become resident; on
the left it arrived in the background, "for" the expert it evicted. A solid line joins a hit to its slot. A
fetched expert has an arrow into the slot it took, and the expert it evicted is struck through on the left. A
dashed line runs from the resident that stands in to the call it serves.

This module does not decide and does not replay; it draws what ``slot_history`` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from moecache.figures.slots import NOBODY, CallView, StepView, slot_history
from moecache.figures.style import FAINT, INK, new_figure, stamp, styled
from moecache.kernel import Outcome
from moecache.trace import DecisionLog

OUTCOME_COLOURS = {
    Outcome.HIT: "#009E73",
    Outcome.FETCHED: "#0072B2",
    Outcome.FORCED: "#882255",
    Outcome.SUBSTITUTED: "#E69F00",
    Outcome.DROPPED: "#888888",
    Outcome.LOW_PRECISION: "#CC79A7",
    Outcome.CPU: "#56B4E9",
}
OUTCOME_WORDS = {
    Outcome.HIT: "hit",
    Outcome.FETCHED: "fetched (waits)",
    Outcome.FORCED: "fetched (nobody could stand in)",
    Outcome.SUBSTITUTED: "substituted",
    Outcome.DROPPED: "dropped",
    Outcome.LOW_PRECISION: "low-bit copy",
    Outcome.CPU: "computed on the CPU",
}
BEFORE_X, CALLS_X, AFTER_X = 0.0, 2.6, 8.2
SLOT_WIDTH, CALL_WIDTH = 1.45, 3.0
MOST_STEPS = 8


@styled
def step_picture(
    log: DecisionLog,
    topk_ids: np.ndarray,
    gate_weights: np.ndarray,
    residents: Sequence[int],
    *,
    layer: int = 0,
    steps: Sequence[int] | None = None,
    first_clock: int = 0,
    name: Callable[[int], str] = "E{}".format,
    titles: Sequence[str] | None = None,
    kind: str = "SIMULATED",
) -> Figure:
    """Draw some steps of one layer, one below the other.

    Parameters
    ----------
    log : DecisionLog
        Of T tokens; at most 8 steps are drawn.
    topk_ids, gate_weights : arrays [T,L,K]
        The calls in rank order and their gate weights.
    residents : sequence of int
        The expert in each slot before the first token of the log, -1 free.
    layer : int
    steps : sequence of int, optional
        Which tokens to draw; by default all.
    first_clock : int
        The layer's clock at the first token: 0 for a new cache.
    name : callable
        Names an expert, for example ``"E{}".format``.
    titles : sequence of str, optional
        What stands above each drawn step; by default its token.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        If log, calls and residents do not belong together, a step does not exist, or more than 8 steps are
        asked for.
    """
    history = slot_history(log, topk_ids, gate_weights, residents, layer, first_clock)
    chosen = range(len(history)) if steps is None else steps
    outside = [step for step in chosen if not 0 <= step < len(history)]
    if outside:
        raise ValueError(f"step {outside[0]} does not exist: the log has steps 0 to {len(history) - 1}")
    if not 1 <= len(chosen) <= MOST_STEPS:
        raise ValueError(f"{len(chosen)} steps were asked for: name 1 to {MOST_STEPS} of them in steps=")
    num_rows = max(len(residents), topk_ids.shape[2])
    figure = new_figure(0.5 + len(chosen) * (0.42 * num_rows + 0.62))
    panels = figure.subplots(len(chosen), 1, squeeze=False)[:, 0]
    titles = [f"Token {step}" for step in chosen] if titles is None else titles
    for axes, step, title in zip(panels, chosen, titles, strict=True):
        _draw_step(axes, history[step], num_rows, name, title)
    stamp(panels[0], kind)
    _outcome_legend(figure, [history[step] for step in chosen])
    return figure


def _draw_step(axes: Axes, step: StepView, num_rows: int, name: Callable[[int], str], title: str) -> None:
    axes.set_xlim(-0.1, AFTER_X + SLOT_WIDTH + 0.15)
    axes.set_ylim(num_rows - 0.35, -1.05)
    axes.axis("off")
    axes.set_title(title, loc="left", fontweight="bold", pad=2)
    mass = sum(call.gate_weight for call in step.calls if call.outcome in (Outcome.SUBSTITUTED, Outcome.DROPPED))
    if mass > 0.0:
        axes.set_title(f"substituted gate mass {mass:.2f}", fontsize=9, pad=2)
    for x, text in ((BEFORE_X, "slots before"), (CALLS_X, "calls by rank"), (AFTER_X, "slots after")):
        axes.text(x, -0.72, text, color=FAINT, fontsize=9)
    evicted = {call.evicted for call in step.calls if call.evicted >= 0}
    for slot, expert in enumerate(step.before):
        _slot_box(axes, BEFORE_X, slot, expert, name, expert in evicted, slot in step.landed, _arrival_note(step, slot, name))
    for slot, expert in enumerate(step.after):
        _slot_box(axes, AFTER_X, slot, expert, name, is_new=expert != step.before[slot])
    for call in step.calls:
        _call_box(axes, call, name)
        _call_line(axes, call)


def _slot_box(
    axes: Axes,
    x: float,
    y: float,
    expert: int,
    name: Callable[[int], str],
    is_struck: bool = False,
    is_new: bool = False,
    note: str = "",
) -> None:
    edge = OUTCOME_COLOURS[Outcome.FETCHED] if is_new else FAINT
    box = FancyBboxPatch(
        (x, y - 0.34), SLOT_WIDTH, 0.68, boxstyle="round,pad=0,rounding_size=0.08",
        facecolor="white" if expert >= 0 else "#f4f4f4", edgecolor=edge, linewidth=2.0 if is_new else 1.0,
    )  # fmt: skip
    axes.add_patch(box)
    colour = INK if expert >= 0 else FAINT
    centre = x + SLOT_WIDTH * (0.3 if note else 0.5)
    axes.text(centre, y, name(expert) if expert >= 0 else "free", ha="center", va="center", color=colour)
    axes.text(x + SLOT_WIDTH - 0.1, y, note, ha="right", va="center", fontsize=8, color=FAINT)
    if is_struck:
        axes.plot([x + 0.2, x + SLOT_WIDTH - 0.2], [y + 0.16, y - 0.16], color="#D55E00", linewidth=2.0)


def _arrival_note(step: StepView, slot: int, name: Callable[[int], str]) -> str:
    victim = step.landed.get(slot)
    if victim is None:
        return ""
    return "arrived" if victim == NOBODY else f"for {name(victim)}"


def _call_box(axes: Axes, call: CallView, name: Callable[[int], str]) -> None:
    colour = OUTCOME_COLOURS[call.outcome]
    left = CALLS_X
    axes.add_patch(
        FancyBboxPatch(
            (left, call.rank - 0.3), CALL_WIDTH, 0.6, boxstyle="round,pad=0,rounding_size=0.06", facecolor="#f4f4f4", edgecolor="none"
        )
    )
    length = max(CALL_WIDTH * call.gate_weight, 0.06)
    axes.add_patch(
        FancyBboxPatch(
            (left, call.rank - 0.3), length, 0.6, boxstyle="round,pad=0,rounding_size=0.06", facecolor=colour, edgecolor="none", alpha=0.45
        )
    )
    axes.text(left + 0.1, call.rank, f"{name(call.expert)}   {call.gate_weight:.2f}", va="center", color=INK)
    axes.text(left + CALL_WIDTH + 0.12, call.rank, _what_happened(call, name), va="center", fontsize=8.5, color=INK)


def _what_happened(call: CallView, name: Callable[[int], str]) -> str:
    if call.outcome == Outcome.SUBSTITUTED:
        text = f"{name(call.computed_by)} stands in"
    elif call.outcome in (Outcome.FETCHED, Outcome.FORCED):
        text = f"fetched, {name(call.evicted)} out" if call.evicted >= 0 else "fetched"
    else:
        text = OUTCOME_WORDS[call.outcome]
    return text + (",\ncopy asked for" if call.is_copy_asked else "")


def _call_line(axes: Axes, call: CallView) -> None:
    """Join the call to the slot of the expert that computed it."""
    if call.slot == NOBODY:
        return
    colour = OUTCOME_COLOURS[call.outcome]
    left = (BEFORE_X + SLOT_WIDTH, call.slot), (CALLS_X, call.rank)
    right = (CALLS_X + CALL_WIDTH + 1.6, call.rank), (AFTER_X, call.slot)
    if call.outcome in (Outcome.FETCHED, Outcome.FORCED):
        _arrow(axes, *right, colour, "-|>", "-")
    elif call.outcome == Outcome.SUBSTITUTED:
        _arrow(axes, *left, colour, "-|>", (0, (3, 2)))
    else:
        _arrow(axes, *left, colour, "-", "-")


def _arrow(axes: Axes, start: tuple, end: tuple, colour: str, style: str, dash: object) -> None:
    arrow = FancyArrowPatch(
        start, end, arrowstyle=style, linestyle=dash, color=colour, linewidth=1.8, mutation_scale=11,
        shrinkA=3, shrinkB=3, connectionstyle="arc3,rad=0.0",
    )  # fmt: skip
    axes.add_patch(arrow)


def _outcome_legend(figure: Figure, steps: Sequence[StepView]) -> None:
    seen = sorted({call.outcome for step in steps for call in step.calls})
    handles = [Patch(facecolor=OUTCOME_COLOURS[o], alpha=0.45, label=OUTCOME_WORDS[o]) for o in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
