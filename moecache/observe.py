"""What a planned intervention sees of a running model: its calls, their ages, and who would be resident.

An `Observation` sits at every router. It lets a simulated cache (every miss waited for, LRU) follow the calls, keeps
their gate weights and ages, and hands the calls of each layer to whoever acts on them. What is done with them is not
known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moecache import hf_internals
from moecache.cache import ExpertCache, slots_per_layer
from moecache.experts import LayerErrors
from moecache.families import Family, Routing, check_router, family_of, model_shape, routing_of
from moecache.hf_internals import MoeLayer, RouterOutput
from moecache.kernel import Outcome
from moecache.metrics import count_calls
from moecache.policy import FETCH_EVERY_MISS
from moecache.provenance import provenance
from moecache.run import Run
from moecache.score import describe_model, document_losses, document_starts, with_progress
from moecache.stand_ins import NEVER, ages, residents_before
from moecache.trace import DecisionLog, ModelShape, RouterTrace, TraceError, concatenate_layers, concatenate_tokens

NO_ARRIVALS = np.zeros((0, 7), np.int64)


@dataclass(frozen=True, eq=False)
class LayerCalls:
    """The calls of one layer in n tokens of one document; arrays broadcast to [n, K].

    Attributes
    ----------
    layer, document : int
        Which MoE layer; which of the documents.
    tokens : ndarray [n] int64
        Numbers of the tokens, from the first token of the first document.
    position : ndarray [n, 1] int64
        Tokens before this one in its document.
    rank : ndarray [1, K] int64
    expert : ndarray [n, K] int16
    gate_weight : ndarray [n, K] float32
    age : ndarray [n, K] float32
        Tokens since the expert's last call in this layer, infinite if there was none.
    is_miss : ndarray [n, K] bool
        Whether the simulated cache lacks the expert; never without slots.
    selection_scores : ndarray [n, E] float16
    """

    layer: int
    document: int
    tokens: np.ndarray
    position: np.ndarray
    rank: np.ndarray
    expert: np.ndarray
    gate_weight: np.ndarray
    age: np.ndarray
    is_miss: np.ndarray
    selection_scores: np.ndarray
    _residents: Callable[[], np.ndarray]

    @property
    def first_position(self) -> int:
        """Position of the first of these tokens in its document."""
        return int(self.position[0, 0])

    def residents(self, rows: np.ndarray) -> np.ndarray:
        """Who is resident when tokens `rows` of these n arrive, [len(rows), E] bool."""
        return self._residents()[rows]


Act = Callable[[LayerCalls, DecisionLog, Routing, RouterOutput], tuple[DecisionLog, RouterOutput | None]]


@dataclass(frozen=True, eq=False)
class Setting:
    """The model, the number of its calls, and the simulated cache at the first token."""

    model: Any
    family: Family
    layers: tuple[MoeLayer, ...]
    shape: ModelShape
    num_tokens: int
    num_slots: np.ndarray
    cold_start: str
    cache: ExpertCache | None
    last_call: np.ndarray
    seed: int

    @classmethod
    def of(
        cls,
        model: Any,
        texts: Sequence[np.ndarray],
        num_slots: int | Sequence[int] | None,
        cold_start: str | npt.ArrayLike,
        before: RouterTrace | None,
        seed: int,
    ) -> Setting:
        """Set up a run over documents; `before` is what the routers said earlier.

        Raises
        ------
        UnknownRouter, CapacityError
            For a model or a number of slots that cannot work.
        TraceError
            If `before` was recorded with another shape of routing.
        """
        shape = model_shape(model)
        cache = None if num_slots is None else ExpertCache(shape, FETCH_EVERY_MISS, num_slots, cold_start=cold_start, seed=seed)
        last_call = np.full((shape.num_layers, shape.num_experts), NEVER, np.int64)
        if before is not None:
            _follow(before, shape, cache, last_call)
        return cls(
            model=model,
            family=family_of(model),
            layers=hf_internals.moe_layers(model),
            shape=shape,
            num_tokens=sum(text.size for text in texts),
            num_slots=slots_per_layer(shape, shape.num_experts) if cache is None else cache.num_slots,
            cold_start=cold_start if isinstance(cold_start, str) else "profile",
            cache=cache,
            last_call=last_call,
            seed=seed,
        )

    @property
    def call_shape(self) -> tuple[int, int, int]:
        """Tokens, layers, ranks."""
        return self.num_tokens, self.shape.num_layers, self.shape.top_k


def _follow(before: RouterTrace, shape: ModelShape, cache: ExpertCache | None, last_call: np.ndarray) -> None:
    """Bring the cache and the last calls to where a trace leaves them; its tokens count backwards from -1."""
    mine, theirs = ((s.num_layers, s.num_experts, s.top_k) for s in (shape, before.shape))
    if mine != theirs:
        raise TraceError(f"the trace before has (layers, experts, top-k) = {theirs}, the model {mine}; record it with this model")
    if cache is not None:
        cache.decide(before.topk_ids, before.gate_weights, keep_log=False)
    for layer in range(shape.num_layers):
        ages(before.topk_ids[:, layer], -before.num_tokens, last_call[layer])


@dataclass(eq=False)
class Observation:
    """Sits at the routers, document after document."""

    setting: Setting
    act: Act
    errors: LayerErrors | None
    document: int = -1
    first_token: int = 0
    num_seen: list[int] = field(default_factory=list)
    blocks: list[list[DecisionLog]] = field(default_factory=list)
    logs: list[DecisionLog] = field(default_factory=list)
    squared_errors: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate_weights = np.zeros(self.setting.call_shape, np.float32)
        self.ages = np.zeros(self.setting.call_shape, np.float32)

    def begin(self, num_tokens: int) -> None:
        """Start a document."""
        self.document += 1
        self.num_seen = [0] * self.setting.shape.num_layers
        self.blocks = [[] for _ in self.num_seen]
        if self.errors is not None:
            self.errors.begin(num_tokens)

    def end(self) -> None:
        """Close the document: lay its blocks together."""
        self.logs.append(concatenate_layers([concatenate_tokens(blocks) for blocks in self.blocks]))
        self.first_token += self.num_seen[0]
        if self.errors is not None:
            self.squared_errors.append(self.errors.squared)

    def listen(self, layer: int, output: RouterOutput) -> RouterOutput | None:
        """Look at the next tokens of a layer, let the experiment act, and return what its experts are to compute."""
        setting = self.setting
        if not self.logs and not self.blocks[layer]:
            check_router(setting.family, setting.layers[layer].name, output)
        routing = routing_of(setting.family, output)
        position = self.num_seen[layer] + np.arange(len(routing.topk_ids))
        self.num_seen[layer] += position.size
        tokens = self.first_token + position
        log, residents = self._follow_cache(layer, routing)
        self.gate_weights[tokens, layer] = routing.gate_weights
        self.ages[tokens, layer] = ages(routing.topk_ids, int(tokens[0]), setting.last_call[layer])
        seen = LayerCalls(
            layer=layer,
            document=self.document,
            tokens=tokens,
            position=position[:, None],
            rank=np.arange(setting.shape.top_k)[None],
            expert=routing.topk_ids,
            gate_weight=routing.gate_weights,
            age=self.ages[tokens, layer],
            is_miss=log.outcome[:, 0] != Outcome.HIT,
            selection_scores=routing.selection_scores,
            _residents=residents,
        )
        changed, replaced = self.act(seen, log, routing, output)
        self.blocks[layer].append(changed)
        return replaced

    def _follow_cache(self, layer: int, routing: Routing) -> tuple[DecisionLog, Callable[[], np.ndarray]]:
        """The simulated cache's log of one layer's next tokens, and who is resident when each arrives."""
        cache, num_experts = self.setting.cache, self.setting.shape.num_experts
        size = routing.topk_ids.shape
        if cache is None:
            log = DecisionLog(
                outcome=np.full(size, Outcome.HIT, np.uint8)[:, None],
                computed_ids=routing.topk_ids[:, None],
                evicted_ids=np.full(size, -1, np.int16)[:, None],
                arrivals=NO_ARRIVALS,
                substituted_mass=np.zeros((size[0], 1), np.float32),
            )
            return log, lambda: np.ones((size[0], num_experts), bool)
        at_first = cache.state.slot_of_expert[layer] >= 0
        decided = cache.decide(routing.topk_ids[:, None], routing.gate_weights[:, None], first_layer=layer)
        assert decided is not None
        return decided, lambda: residents_before(decided, 0, at_first)

    def extra(self) -> dict[str, np.ndarray]:
        """Per-call and per-token arrays by name."""
        found = {"gate_weights": self.gate_weights, "ages": self.ages}
        if self.errors is None:
            return found
        by_layer = np.concatenate(self.squared_errors)
        return found | {"relative_error2_by_layer": by_layer, "relative_error2": by_layer.mean(axis=1)}


def observed_run(observation: Observation, texts: list[np.ndarray], keep_logits: bool, progress: bool, label: str) -> Run:
    """Let the model read documents under an observation; the run calls itself an intervention."""
    setting = observation.setting
    losses, logits = [], []
    with ExitStack() as hooks:
        hooks.enter_context(hf_internals.watched(setting.layers, observation.listen))
        if observation.errors is not None:
            hooks.enter_context(observation.errors.measuring())
        for text in with_progress(texts, progress, label):
            observation.begin(text.size)
            loss, kept = document_losses(setting.model, text, keep_logits)
            observation.end()
            losses.append(loss)
            logits.append(kept)
    log = concatenate_tokens(observation.logs)
    return Run(
        instrument="intervention",
        policy=FETCH_EVERY_MISS.replace(label=label),
        shape=setting.shape,
        num_slots=setting.num_slots,
        cold_start=setting.cold_start,
        documents="keep",
        replay="atomic",
        document_start=document_starts(texts),
        decisions=log,
        counts=count_calls(log),
        mass_sum=float(log.substituted_mass.sum(dtype=np.float64)),
        loss_nats=np.concatenate(losses),
        provenance=provenance() | {"model": describe_model(setting.model, texts)},
        extra=observation.extra() | ({"logits": np.concatenate(logits)} if keep_logits else {}),
    )
