"""One step, by hand: streams small enough to be followed by eye, and tables that say why a decision fell as it did.

The streams have one MoE layer with E = 8 experts and call K = 3 of them a token. Each token is written as the router would say it: all
experts from the highest to the lowest router logit, and the gate weights of the first three. Everything else (who hits, who is fetched,
who leaves, who stands in, who is admitted) is decided by the kernel; the tables here read its state between two tokens and decide nothing.

Letters: T tokens, E experts, K top-k, C slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moecache.cache import ExpertCache
from moecache.kernel import Landing, Outcome
from moecache.policy import Policy
from moecache.trace import DecisionLog, RouterTrace, concatenate_tokens

Said = tuple[tuple[int, ...], tuple[float, ...]]

STREAM: tuple[Said, ...] = (
    ((2, 0, 1, 3, 5, 6, 4, 7), (0.50, 0.30, 0.20)),
    ((5, 2, 0, 1, 3, 6, 4, 7), (0.55, 0.25, 0.20)),
    ((1, 6, 0, 5, 2, 3, 4, 7), (0.45, 0.35, 0.20)),
    ((2, 6, 1, 0, 5, 3, 4, 7), (0.50, 0.30, 0.20)),
    ((5, 6, 2, 0, 1, 3, 4, 7), (0.45, 0.35, 0.20)),
    ((7, 3, 2, 1, 5, 6, 4, 0), (0.50, 0.30, 0.20)),
)
"""Six tokens that show, one after the other: hits, a fetch, a substitution, a copy asked for, its landing, both kinds of miss."""

TRAP: tuple[Said, ...] = (
    ((1, 2, 3, 0, 4, 5, 6, 7), (0.45, 0.35, 0.20)),
    ((5, 0, 1, 2, 3, 4, 6, 7), (0.45, 0.35, 0.20)),
    ((6, 3, 5, 0, 1, 2, 4, 7), (0.45, 0.35, 0.20)),
)
"""Three tokens at which a replay of single calls lets each fetch evict what the same token needs next."""

LOGIT_STEP = 0.3  # how far apart the router logits of the experts outside the top-k lie


@dataclass(frozen=True, eq=False)
class Walk:
    """A stream under a policy, token by token.

    Attributes
    ----------
    trace : RouterTrace of T tokens at one layer.
    log : DecisionLog of all tokens.
    residents : [T+1,C] int, the expert in each slot before each token (and after the last), -1 free.
    scores, last_calls, accounts : [T+1,E] eviction score, token of the last call (-1 never) and mass account at the same moments.
    """

    trace: RouterTrace
    log: DecisionLog
    residents: np.ndarray
    scores: np.ndarray
    last_calls: np.ndarray
    accounts: np.ndarray


def make_trace(stream: Sequence[Said]) -> RouterTrace:
    """The stream as a trace, with router logits whose softmax over the top-k gives the gate weights that it names.

    Parameters
    ----------
    stream : one (experts by falling router logit, gate weights of the first K) a token.
    """
    top_k, num_experts = len(stream[0][1]), len(stream[0][0])
    logits = np.empty((len(stream), 1, num_experts))
    for token, (order, weights) in enumerate(stream):
        outside = np.log(weights[-1]) - LOGIT_STEP * np.arange(1, num_experts - top_k + 1)
        logits[token, 0, list(order)] = np.concatenate([np.log(weights), outside])
    ids = [[order[:top_k]] for order, _ in stream]
    weights = [[weights] for _, weights in stream]
    return RouterTrace.from_arrays(ids, weights, router_logits=logits, source={"text": "a stream written by hand"})


def walk(trace: RouterTrace, policy: Policy, num_slots: int) -> Walk:
    """Decide a stream one token at a time from the cold start, keeping the cache's state between tokens."""
    assert trace.selection_scores is not None
    cache, logs, moments = ExpertCache(trace.shape, policy, num_slots), [], []
    for token in range(trace.num_tokens):
        moments.append(_moment(cache))
        now = slice(token, token + 1)
        logs.append(cache.decide(trace.topk_ids[now], trace.gate_weights[now], trace.selection_scores[now]))
    moments.append(_moment(cache))
    return Walk(trace, concatenate_tokens(logs), *(np.stack(part) for part in zip(*moments, strict=True)))


def _moment(cache: ExpertCache) -> tuple[np.ndarray, ...]:
    state = cache.state
    return tuple(part[0].copy() for part in (state.expert_in_slot, state.eviction_score, state.last_call, state.mass_account))


def calls_by_call(trace: RouterTrace) -> RouterTrace:
    """The same calls with each as a token of its own, [T x K, 1, 1]: what a replay of single calls sees (top-1, weight 1)."""
    ids = trace.topk_ids.reshape(-1, 1, 1)
    scores = None if trace.selection_scores is None else np.repeat(trace.selection_scores, trace.shape.top_k, axis=0)
    return RouterTrace.from_arrays(ids, np.ones(ids.shape), selection_scores=scores, num_experts=trace.shape.num_experts)


def first_token(story: Walk, outcome: Outcome, at_least: int = 1, after: int = -1) -> int:
    """The first token after `after` with at least so many calls of this outcome.

    Raises
    ------
    ValueError : the stream has no such token under this policy.
    """
    found = np.flatnonzero((story.log.outcome[:, 0] == int(outcome)).sum(axis=1) >= at_least)
    found = found[found > after]
    if found.size == 0:
        raise ValueError(
            f"no token after {after} has {at_least} call(s) that end as {outcome.name}: "
            "this page tells what happens with 4 slots, gate threshold 0.4 and mass threshold 0.5; choose values nearer to those"
        )
    return int(found[0])


def router_table(story: Walk, token: int) -> pd.DataFrame:
    """What the router says at one token, and to whom it falls.

    Returns
    -------
    DataFrame : a row per expert by falling router logit: `expert`, `router logit`, `gate weight` (NaN outside the top-k), `resident`,
        `part in this step`.
    """
    trace, log = story.trace, story.log
    assert trace.selection_scores is not None
    logits = trace.selection_scores[token, 0].astype(np.float64)
    called = trace.topk_ids[token, 0].tolist()
    served = dict(zip(log.computed_ids[token, 0].tolist(), called, strict=True))
    present = set(residents_at_lookup(story, token))
    rows = []
    for expert in np.argsort(-logits, kind="stable").tolist():
        weight = float(trace.gate_weights[token, 0, called.index(expert)]) if expert in called else np.nan
        part = f"called, rank {called.index(expert)}" if expert in called else ""
        part = f"stands in for E{served[expert]}" if expert in served and served[expert] != expert else part
        rows.append((f"E{expert}", logits[expert], weight, "yes" if expert in present else "no", part))
    return pd.DataFrame(rows, columns=["expert", "router logit", "gate weight", "resident", "part in this step"])


def residents_at_lookup(story: Walk, token: int) -> list[int]:
    """The experts in the slots when the calls of a token are looked up: after its arrivals have landed."""
    slots = story.residents[token].tolist()
    for expert, victim in _landings(story, token):
        slots[slots.index(victim)] = expert
    return slots


def victim_table(story: Walk, token: int) -> pd.DataFrame:
    """Why the victims of one token are the victims: its residents before anything happens, the next to leave on top.

    Returns
    -------
    DataFrame : `expert`, `eviction score`, `last call` (a token, or "never"), `pinned` ("called now" or ""), `fate` ("stays", or
        who takes the slot), sorted by (score, last call, id), the pinned last.
    """
    called = set(story.trace.topk_ids[token, 0].tolist())
    taken = {victim: f"leaves for E{expert}, which lands" for expert, victim in _landings(story, token)}
    for rank, victim in enumerate(story.log.evicted_ids[token, 0].tolist()):
        if victim >= 0:
            taken[victim] = f"leaves for E{story.trace.topk_ids[token, 0, rank]}, which is fetched"
    rows = []
    for expert in story.residents[token].tolist():
        last, score = int(story.last_calls[token, expert]), float(story.scores[token, expert])
        rows.append((expert in called, score, last, expert))
    return pd.DataFrame(
        [
            (f"E{expert}", score, "never" if last < 0 else f"token {last}", "called now" if is_called else "", taken.get(expert, "stays"))
            for is_called, score, last, expert in sorted(rows)
        ],
        columns=["expert", "eviction score", "last call", "pinned", "fate"],
    )


def account_table(story: Walk, expert: int) -> pd.DataFrame:
    """The mass account of one expert, token by token.

    Returns
    -------
    DataFrame : `token`, `gate weight` added (NaN where none), `account` after the token, `event`.
    """
    rows = []
    for token in range(story.trace.num_tokens):
        called = story.trace.topk_ids[token, 0].tolist()
        outcome = int(story.log.outcome[token, 0, called.index(expert)]) if expert in called else None
        is_added = outcome in (Outcome.SUBSTITUTED, Outcome.DROPPED)
        weight = float(story.trace.gate_weights[token, 0, called.index(expert)]) if is_added else np.nan
        rows.append((token, weight, float(story.accounts[token + 1, expert]), _account_event(story, token, expert, outcome)))
    return pd.DataFrame(rows, columns=["token", "gate weight added", "account after", "what happens"])


def _account_event(story: Walk, token: int, expert: int, outcome: int | None) -> str:
    arrivals = story.log.arrivals[story.log.arrivals[:, 3] == expert]
    events = [f"the copy lands, E{expert} is resident"] if (arrivals[:, 1] == token).any() else []
    if outcome is not None:
        events.append({Outcome.HIT: "hit", Outcome.SUBSTITUTED: "substituted", Outcome.DROPPED: "dropped"}.get(Outcome(outcome), "fetched"))
    if (arrivals[:, 0] == token).any():
        events.append("a copy is asked for")
    return "; ".join(events)


def _landings(story: Walk, token: int) -> list[tuple[int, int]]:
    """(expert, victim) of every arrival that took a slot at this token, in order."""
    arrivals = story.log.arrivals
    landed = arrivals[(arrivals[:, 1] == token) & (arrivals[:, 6] == int(Landing.LANDED))]
    return [(int(row[3]), int(row[4])) for row in landed]


def names(experts: Sequence[int] | np.ndarray) -> str:
    """Experts in words: "E0, E1 and E2"."""
    words = [f"E{int(expert)}" for expert in experts]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def first_landing(story: Walk) -> int:
    """The token at which the first copy takes a slot.

    Raises
    ------
    ValueError : no copy lands in this stream under this policy.
    """
    landed = story.log.arrivals[story.log.arrivals[:, 6] == int(Landing.LANDED)]
    if landed.size == 0:
        raise ValueError("no copy lands in this stream under this policy; lower mass_threshold or admission_delay_tokens")
    return int(landed[0, 1])


def num_misses(story: Walk, tokens: Sequence[int]) -> int:
    """Calls of these tokens that were not hits."""
    return int((story.log.outcome[list(tokens)] != int(Outcome.HIT)).sum())


def facts(story: Walk, prefix: str, token: int) -> dict[str, str | float | int]:
    """What the prose says about the first miss of a token: `<prefix>_expert`, `_rank`, `_weight`, `_victim`, `_by`, `_mass`, `_story`."""
    log, trace = story.log, story.trace
    rank = int(np.flatnonzero(log.outcome[token, 0] != int(Outcome.HIT))[0])
    found = {
        "expert": f"E{trace.topk_ids[token, 0, rank]}",
        "rank": rank,
        "weight": float(trace.gate_weights[token, 0, rank]),
        "victim": f"E{log.evicted_ids[token, 0, rank]}",
        "by": f"E{log.computed_ids[token, 0, rank]}",
        "mass": float(log.substituted_mass[token, 0]),
        "story": _lost_stand_in(story, token),
    }
    return {f"{prefix}_{name}": value for name, value in found.items()}


def _lost_stand_in(story: Walk, token: int) -> str:
    """A sentence on whether a fetch of this token evicted the resident that would have been the best stand-in."""
    table = router_table(story, token)
    is_candidate = (table["resident"] == "yes") & table["gate weight"].isna()
    candidates = table.loc[is_candidate, "expert"].to_list()
    victims = {f"E{expert}" for expert in story.log.evicted_ids[token, 0].tolist() if expert >= 0}
    if candidates and candidates[0] in victims:
        best = candidates[0]
        return f"The best replacement for the second miss would have been {best}, but {best} has just been evicted by the fetch."
    return "Here the fetch evicted another resident than the best stand-in; it might have evicted that one too."


def landing_facts(story: Walk, token: int) -> dict[str, str | int]:
    """What the prose says about the first landing: `landed`, `landing_delay`, `landing_victim`, `oldest`, `pin_story`."""
    asked, _, _, expert, victim, _, _ = story.log.arrivals[0].tolist()
    residents = story.residents[token].tolist()
    lowest = min(residents, key=lambda resident: (story.scores[token, resident], story.last_calls[token, resident], resident))
    oldest, is_pinned = f"E{lowest}", lowest in story.trace.topk_ids[token, 0]
    why = f"But this token calls {oldest}, so it is pinned, and E{victim} leaves." if is_pinned else f"And so it does: E{victim} leaves."
    return {"landed": f"E{expert}", "landing_delay": token - asked, "landing_victim": f"E{victim}", "oldest": oldest, "pin_story": why}
