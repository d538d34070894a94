"""One contract for every policy: what must hold whatever is decided.

Residency is replayed from the decision log alone, with sets, so a log that contradicts itself is found even where kernel and twin agree.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import pytest
from streams import random_stream

import moecache as mc
from moecache.calibrate import future_calls
from moecache.kernel import ArrivalKind
from moecache.kernel.codes import BOOKED, PREFETCH_USEFUL, PREFETCH_WASTED
from moecache.metrics import count_calls

HIT, FETCHED, FORCED, SUBSTITUTED, DROPPED, LOW_PRECISION, CPU = range(7)
NOT_INSERTED = -2
NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_SLOTS = 130, 3, 12, 3, 5
SHAPE = mc.ModelShape(NUM_LAYERS, NUM_EXPERTS, TOP_K, expert_bytes=10)
BACKGROUND = {"admission": "background", "mass_threshold": 0.4}
EVICTIONS = [{"eviction": member.name.lower()} for member in mc.Eviction]
EVICTIONS[mc.Eviction.DECAYED_COUNT]["half_life"] = 20
INSERTIONS = [{"insertion": "cap", "insertion_cap": 1}, {"insertion": "tinylfu", "half_life": 20}]
SERVED_BY = {
    mc.Fallback.SUBSTITUTE: SUBSTITUTED, mc.Fallback.RANDOM_RESIDENT: SUBSTITUTED, mc.Fallback.BUDDY: SUBSTITUTED,
    mc.Fallback.DROP: DROPPED, mc.Fallback.LOW_PRECISION: LOW_PRECISION, mc.Fallback.CPU: CPU,
}  # fmt: skip


def all_policies():
    """The presets; every eviction, fallback, insertion and miss rule, with admission and prefetch where they fit; the switches."""
    policies = [*mc.PRESETS, *(mc.Policy(**eviction) for eviction in EVICTIONS), *(mc.Policy(**insertion) for insertion in INSERTIONS)]
    rules = [mc.threshold(0.4, first_choice=True), mc.mass_budget(0.3), mc.mass_budget(0.1, is_squared=True), mc.cache_prior(0.4, 1)]
    rules += [mc.max_rank(7, 1), mc.first_j(1)]
    for eviction in EVICTIONS:
        rule = rules[0].replace(**eviction)
        policies += [rule] if rule.eviction == mc.Eviction.STATIC else [rule, rule.replace(**BACKGROUND), rule.replace(max_prefetches=2)]
    for fallback in mc.Fallback:
        policies += [rules[0].replace(fallback=fallback), rules[5].replace(fallback=fallback, **BACKGROUND)]
    policies += [rule.replace(**insertion, **BACKGROUND, max_prefetches=1) for rule in rules for insertion in ({}, *INSERTIONS)]
    base = mc.first_j(1, **BACKGROUND)
    policies += [
        base.admitted_anyway(),
        base.replace(admission_delay=4, max_in_flight=2),
        base.replace(max_bookings=1, account_half_life=5),
        base.replace(counted_calls="served"),
        base.replace(stand_ins_count=True),
        base.replace(fallback="random_resident", seed=99),
        base.replace(weight_rule="inherit"),
        mc.threshold(1.2, threshold_unit="uniform"),
        mc.only_rank_substituted(0, TOP_K),
        mc.SUBSTITUTE_EVERY_MISS.admitted_anyway(),
    ]
    return {policy.label: policy for policy in policies}


POLICIES = all_policies()
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@dataclass(frozen=True)
class Stream:
    """All that a router, a predictor and the future may say about some tokens and layers."""

    ids: np.ndarray
    weights: np.ndarray
    scores: np.ndarray
    predicted: np.ndarray
    next_use: np.ndarray

    def cut(self, tokens=slice(None), layers=slice(None)):
        return Stream(**{name: array[tokens][:, layers] for name, array in vars(self).items()})

    def later(self, num_tokens):
        """The same where the clock already stands at `num_tokens`."""
        return replace(self, next_use=self.next_use + num_tokens)


def new_stream():
    ids, weights, scores = random_stream(6, NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, TOP_K)
    predicted = np.random.default_rng(0).integers(-1, NUM_EXPERTS, (NUM_TOKENS, NUM_LAYERS, 4))
    next_use, first_use = future_calls(ids, NUM_EXPERTS, np.array([0]))
    return Stream(ids, weights, scores, predicted, next_use), first_use[0]


STREAM, FIRST_USE = new_stream()
BUDDIES = np.random.default_rng(1).integers(-1, NUM_EXPERTS, (NUM_LAYERS, NUM_EXPERTS, 4))


def new_cache(policy, num_slots=NUM_SLOTS, cold_start="first", layers=slice(None), **rest):
    cache = mc.ExpertCache(SHAPE, policy, num_slots, cold_start, buddies=BUDDIES[layers], **rest)
    if policy.needs_future:
        cache.reset(FIRST_USE[layers])
    return cache


def decide(cache, stream=STREAM, **rest):
    return cache.decide(
        stream.ids, stream.weights, stream.scores, predicted_ids=stream.predicted, next_use=stream.next_use, **rest
    )  # fmt: skip


def residents_of(cache, layer):
    return {int(expert) for expert in cache.state.expert_in_slot[layer]} - {-1}


def land(rows, residents, called, num_slots):
    """Replay the arrivals of one step into `residents`."""
    landed = set()
    for expert, victim, reason in rows:
        if reason == mc.Landing.ALREADY_RESIDENT:
            assert expert in residents
            assert victim == -2
        elif reason == mc.Landing.NO_VICTIM:
            assert expert not in residents
            assert victim == -2
            assert len(residents) == num_slots
            assert residents <= called | landed
        else:
            assert reason == mc.Landing.LANDED
            put(expert, victim, residents, called | landed, num_slots)
            landed.add(expert)


def put(expert, victim, residents, pinned, num_slots):
    """Make `expert` resident in place of `victim` (-1: of nobody)."""
    assert expert not in residents
    if victim == -1:
        assert len(residents) < num_slots
    else:
        assert victim in residents - pinned
        residents.remove(victim)
    residents.add(expert)
    assert len(residents) <= num_slots


def fetch(expert, victim, residents, pinned, num_slots):
    """A fetched expert becomes resident, or is computed and forgotten."""
    if victim != NOT_INSERTED:
        put(expert, victim, residents, pinned, num_slots)


def replay_step(ids, outcome, computed, evicted, residents, num_slots):
    """Replay one step of the log into `residents`; every rule about a step is checked here."""
    called = set(ids)
    stand_ins = {e for e, what in zip(computed, outcome, strict=True) if what == SUBSTITUTED}
    pinned = {expert for expert in called if expert in residents}
    assert [what == HIT for what in outcome] == [expert in residents for expert in ids]
    served_first = [rank for rank, what in enumerate(outcome) if what == FETCHED]
    for rank in served_first:
        fetch(ids[rank], evicted[rank], residents, pinned | stand_ins, num_slots)
        pinned.add(ids[rank])
    assert stand_ins <= residents - called
    assert len(stand_ins) == outcome.count(SUBSTITUTED)
    for rank, what in enumerate(outcome):
        if what == FORCED:
            fetch(ids[rank], evicted[rank], residents, pinned | stand_ins, num_slots)
            pinned.add(ids[rank])
        if what == DROPPED:
            assert computed[rank] == -1
        elif what != SUBSTITUTED:
            assert computed[rank] == ids[rank]
        if what not in (FETCHED, FORCED):
            assert evicted[rank] == -1


def check_log(log, start, slots, delay):
    """Replay a log of all layers from the residents `start`; returns the residents at the end."""
    for layer, residents in enumerate(start):
        rows = log.arrivals[log.arrivals[:, 2] == layer]
        is_prefetch = rows[:, 5] == ArrivalKind.PREFETCH
        assert (rows[is_prefetch, 1] == rows[is_prefetch, 0]).all()
        assert (rows[~is_prefetch, 1] - rows[~is_prefetch, 0] == delay).all()
        assert (np.diff(rows[:, 1]) >= 0).all()
        for token in range(NUM_TOKENS):
            due = rows[rows[:, 1] == token][:, [3, 4, 6]].tolist()
            step = [array[token, layer].tolist() for array in (STREAM.ids, log.outcome, log.computed_ids, log.evicted_ids)]
            land(due, residents, set(step[0]), slots[layer])
            replay_step(*step, residents, slots[layer])
            lost = [w for w, what in zip(STREAM.weights[token, layer], step[1], strict=True) if what in (SUBSTITUTED, DROPPED)]
            assert log.substituted_mass[token, layer] == np.float32(sum(map(float, lost)))
    return start


@pytest.mark.parametrize("cold_start", ["first", "random", "empty"])
@every_policy
def test_log_tells_a_possible_story(policy, cold_start):
    cache = new_cache(policy, [3, 5, 9], cold_start)
    start = [residents_of(cache, layer) for layer in range(NUM_LAYERS)]
    log = decide(cache)
    end = check_log(log, start, [3, 5, 9], policy.admission_delay)
    assert end == [residents_of(cache, layer) for layer in range(NUM_LAYERS)]


@every_policy
def test_misses_get_what_the_rule_says(policy):
    log = decide(new_cache(policy))
    is_miss, weights = log.outcome != HIT, STREAM.weights.astype(np.float64)
    must_wait = np.broadcast_to(np.isin(np.arange(TOP_K), policy.wait_ranks), is_miss.shape)
    allowed = [FETCHED, FORCED, SERVED_BY[policy.fallback]]
    if policy.miss_rule == mc.MissRule.PROTECT:
        unit = 1 / TOP_K if policy.threshold_unit == "uniform" else 1.0
        must_wait = must_wait | (weights >= policy.gate_threshold * unit)
        assert (log.outcome[is_miss & ~must_wait] != FETCHED).all()
    assert (log.outcome[is_miss & must_wait] == FETCHED).all()
    assert np.isin(log.outcome[is_miss & ~must_wait], allowed).all()
    assert is_miss.any()
    is_lost = np.isin(log.outcome, [SUBSTITUTED, DROPPED, LOW_PRECISION, CPU])
    assert is_lost.any() != policy.waits_for_every_miss
    if policy.budget is not None:
        power = 2 if policy.miss_rule == mc.MissRule.SQUARED_BUDGET else 1
        assert ((weights**power * is_lost).sum(axis=2) <= policy.budget).all()


@pytest.mark.parametrize("cold_start", ["first", "empty"])
@every_policy
def test_counters_equal_the_log(policy, cold_start):
    cache = new_cache(policy, cold_start=cold_start)
    log = decide(cache)
    counted, expected = cache.counts.copy(), count_calls(log)
    background = log.arrivals[log.arrivals[:, 5] == ArrivalKind.ADMISSION]
    assert (counted[:, BOOKED] >= np.bincount(background[:, 2], minlength=NUM_LAYERS)).all()
    counted[:, [BOOKED, PREFETCH_USEFUL, PREFETCH_WASTED]] = 0  # a log does not show them
    assert np.array_equal(counted, expected)
    summary_only = new_cache(policy, cold_start=cold_start)
    assert decide(summary_only, keep_log=False) is None
    assert np.array_equal(summary_only.counts, cache.counts)
    assert np.array_equal(summary_only.state.mass_sum, cache.state.mass_sum)
    assert cache.state.mass_sum.sum() == pytest.approx(log.substituted_mass.sum(dtype=np.float64), rel=1e-5)


MASKING = [policy for policy in POLICIES.values() if policy.fallback == mc.Fallback.SUBSTITUTE and not policy.waits_for_every_miss]


@pytest.mark.parametrize("policy", MASKING, ids=[policy.label for policy in MASKING])
def test_masked_experts_never_stand_in(policy):
    """A score of minus infinity says that the router may not choose this expert."""
    is_masked = np.random.default_rng(2).random(STREAM.scores.shape) < 0.5
    np.put_along_axis(is_masked, STREAM.ids.astype(np.int64), False, axis=-1)
    masked = replace(STREAM, scores=np.where(is_masked, np.float16(-np.inf), STREAM.scores))
    for stream in (STREAM, masked):
        log = decide(new_cache(policy), stream)
        tokens, layers, ranks = np.nonzero(log.outcome == SUBSTITUTED)
        is_wrong = is_masked[tokens, layers, log.computed_ids[tokens, layers, ranks]]
        assert is_wrong.size
        assert is_wrong.any() == (stream is STREAM)


def test_nobody_may_stand_in():
    scores = np.full((1, 1, 6), -np.inf, np.float16)
    ids, weights = np.array([[[4, 5]]]), np.full((1, 1, 2), 0.5, np.float32)
    shape = mc.ModelShape(1, 6, 2)
    for policy in (mc.SUBSTITUTE_EVERY_MISS, mc.cache_prior(0.3, 0), mc.max_rank(6, 0)):
        log = mc.ExpertCache(shape, policy, 4).decide(ids, weights, scores)
        assert set(log.outcome.ravel().tolist()) <= {FETCHED, FORCED}
        assert log.evicted_ids.ravel().tolist() == [0, 1]


def test_a_cap_counts_forced_fetches_too():
    """Three misses for which nobody can stand in: one is inserted, the others are computed and forgotten."""
    policy = mc.SUBSTITUTE_EVERY_MISS.replace(fallback="buddy", insertion="cap", insertion_cap=1)
    cache = mc.ExpertCache(mc.ModelShape(1, 8, 3), policy, 4, buddies=np.full((1, 8, 1), -1))
    log = cache.decide(np.array([[[5, 6, 7]]]), np.array([[[0.5, 0.3, 0.2]]], np.float32))
    assert log.outcome.ravel().tolist() == [FORCED] * 3
    assert log.evicted_ids.ravel().tolist() == [0, NOT_INSERTED, NOT_INSERTED]


def test_the_commonest_policy_decides_as_the_others_do():
    """`Policy()` runs through code of its own. A prefetch that is never predicted sends the same policy through the general one."""
    log = decide(new_cache(mc.Policy()))
    nothing = replace(STREAM, predicted=np.full_like(STREAM.predicted, -1))
    assert decide(new_cache(mc.Policy(max_prefetches=1)), nothing).is_equal(log)
    assert (log.outcome == FETCHED).any()


def without_chance(policy):
    """Numbers drawn by chance depend on the layer's index and on the clock, by definition: the same policy without them."""
    if policy.eviction == mc.Eviction.RANDOM:
        policy = policy.replace(eviction="lru", seed=policy.seed if policy.fallback == mc.Fallback.RANDOM_RESIDENT else 0)
    if policy.fallback == mc.Fallback.RANDOM_RESIDENT:
        policy = policy.replace(fallback="substitute", seed=0)
    return policy


@every_policy
def test_layers_are_independent(policy):
    together = decide(new_cache(policy, [3, 5, 9]))
    apart = new_cache(policy, [3, 5, 9])
    logs = [decide(apart, STREAM.cut(layers=slice(layer, layer + 1)), first_layer=layer) for layer in (2, 0, 1)]
    assert mc.trace.concatenate_layers([logs[1], logs[2], logs[0]]).is_equal(together)


@every_policy
def test_layers_can_be_permuted(policy):
    policy = without_chance(policy)
    order = np.array([2, 0, 1])
    plain = decide(new_cache(policy))
    permuted = decide(new_cache(policy, layers=order), STREAM.cut(layers=order))
    for name in ("outcome", "computed_ids", "evicted_ids", "substituted_mass"):
        assert np.array_equal(getattr(permuted, name), getattr(plain, name)[:, order]), name
    rows = plain.arrivals.copy()
    rows[:, 2] = np.argsort(order)[rows[:, 2]]
    assert Counter(map(tuple, permuted.arrivals)) == Counter(map(tuple, rows))


@every_policy
def test_blocks_do_not_matter(policy):
    whole = decide(new_cache(policy))
    parts, cache = [], new_cache(policy)
    for start, stop in ((0, 1), (1, 2), (2, 63), (63, 66), (66, 66), (66, NUM_TOKENS)):
        parts.append(decide(cache, STREAM.cut(slice(start, stop))))
    assert mc.trace.concatenate_tokens(parts).is_equal(whole)


def test_blocks_of_the_door_do_not_matter():
    """More tokens than the door logs at once, with copies under way across the cut."""
    stream = random_stream(8, 1100, 1, NUM_EXPERTS, TOP_K)
    policy = mc.FIRST_CHOICE.replace(**BACKGROUND, admission_delay=7)
    shape = mc.ModelShape(1, NUM_EXPERTS, TOP_K)
    whole = mc.ExpertCache(shape, policy, NUM_SLOTS).decide(*stream)
    cache = mc.ExpertCache(shape, policy, NUM_SLOTS)
    parts = [cache.decide(*[a[start : start + 550] for a in stream]) for start in (0, 550)]
    assert mc.trace.concatenate_tokens(parts).is_equal(whole)
    assert (whole.arrivals[:, 1] >= 1024).any()


@every_policy
def test_full_cache_never_misses(policy):
    cache = new_cache(policy, NUM_EXPERTS)
    log = decide(cache)
    assert (log.outcome == HIT).all()
    assert np.array_equal(log.computed_ids, STREAM.ids)
    assert log.arrivals.shape == (0, 7)
    assert not log.substituted_mass.any()


@every_policy
def test_same_input_same_decisions(policy):
    for cold_start in ("first", "random"):
        assert decide(new_cache(policy, cold_start=cold_start)).is_equal(decide(new_cache(policy, cold_start=cold_start)))


@every_policy
def test_exact_tokens_wait_for_every_miss(policy):
    is_exact = np.arange(NUM_TOKENS) % 10 < 4
    log = decide(new_cache(policy), is_exact=is_exact)
    assert np.isin(log.outcome[is_exact], [HIT, FETCHED]).all()
    assert np.array_equal(log.computed_ids[is_exact], STREAM.ids[is_exact])
    assert log.is_equal(decide(new_cache(policy))) == policy.waits_for_every_miss


@every_policy
def test_all_exact_tokens_leave_only_residency(policy):
    """The same eviction, insertion and prefetch, and nothing else left of the policy."""
    log = decide(new_cache(policy), is_exact=np.ones(NUM_TOKENS, bool))
    names = ("eviction", "half_life", "insertion", "insertion_cap", "max_prefetches")
    null = mc.Policy(**{name: getattr(policy, name) for name in names})
    assert log.is_equal(decide(new_cache(null)))


@pytest.mark.parametrize("eviction", EVICTIONS, ids=lambda values: values["eviction"])
def test_null_policy_computes_what_the_router_called(eviction):
    log = decide(new_cache(mc.Policy(**eviction)))
    assert np.array_equal(log.computed_ids, STREAM.ids)
    assert np.isin(log.outcome, [HIT, FETCHED]).all()
    assert not log.substituted_mass.any()
    assert log.arrivals.shape == (0, 7)


@every_policy
def test_reset_is_a_cold_start(policy):
    policy = without_chance(policy)
    cache = new_cache(policy, cold_start="random", seed=4)
    residents = [residents_of(cache, layer) for layer in range(NUM_LAYERS)]
    log = decide(cache, STREAM.cut(slice(41)))
    cancelled = cache.reset(FIRST_USE + 41 if policy.needs_future else None)
    assert len(cancelled) == cache.counts[:, BOOKED].sum() - (log.arrivals[:, 5] == ArrivalKind.ADMISSION).sum()
    assert (cancelled[:, 6] == mc.Landing.CANCELLED).all()
    assert [residents_of(cache, layer) for layer in range(NUM_LAYERS)] == residents
    again, fresh = decide(cache, STREAM.later(41)), decide(new_cache(policy, cold_start="random", seed=4))
    shifted = again.arrivals.copy()
    shifted[:, :2] -= 41
    assert replace(again, arrivals=shifted).is_equal(fresh)


def test_random_stand_ins_depend_on_the_seed_alone():
    policy = mc.SUBSTITUTE_EVERY_MISS.replace(fallback="random_resident")
    logs = [decide(new_cache(policy.replace(seed=seed))).computed_ids for seed in (0, 0, 1)]
    assert np.array_equal(logs[0], logs[1])
    assert not np.array_equal(logs[0], logs[2])


def test_random_stand_ins_are_spread_evenly():
    shape = mc.ModelShape(1, 16, 1)
    ids = np.full((4000, 1, 1), 15)
    policy = mc.SUBSTITUTE_EVERY_MISS.replace(fallback="random_resident")
    chosen = mc.ExpertCache(shape, policy, 10).decide(ids, np.ones(ids.shape, np.float32)).computed_ids
    counts = np.bincount(chosen.ravel(), minlength=16)
    assert counts[10:].sum() == 0
    assert ((counts[:10] - 400) ** 2 / 400).sum() < 27.9  # chi-squared, 9 degrees of freedom, p = 0.001


def test_random_cold_start_depends_on_the_seed():
    caches = [new_cache(mc.FETCH_EVERY_MISS, cold_start="random", seed=seed) for seed in (0, 0, 1)]
    slots = [cache.state.expert_in_slot for cache in caches]
    assert np.array_equal(slots[0], slots[1])
    assert not np.array_equal(slots[0], slots[2])
    assert not np.array_equal(slots[0][0], slots[0][1])


def lru_hits(ids, num_slots):
    """Hits of a plain LRU that takes the calls one after the other, empty at the start."""
    hits = 0
    for layer in range(ids.shape[1]):
        cache = OrderedDict()
        for expert in ids[:, layer].ravel().tolist():
            hits += expert in cache
            if expert in cache:
                cache.move_to_end(expert)
            elif len(cache) == num_slots:
                cache.popitem(last=False)
            cache[expert] = True
    return hits


@pytest.mark.parametrize("num_slots", [TOP_K, 5, 9])
def test_sequential_replay_inflates_misses(num_slots):
    ids, weights, _ = random_stream(3, 400, 2, 16, TOP_K)
    trace = mc.RouterTrace.from_arrays(ids, weights, num_experts=16)
    atomic, sequential = (
        mc.simulate(trace, mc.FETCH_EVERY_MISS, num_slots, "empty", replay=replay).summary() for replay in ("atomic", "sequential")
    )
    assert sequential["hits"] == lru_hits(trace.topk_ids, num_slots)
    assert sequential["fetched"] > atomic["fetched"]
    assert sequential["calls"] == atomic["calls"]


BAD_DECIDE = {
    "another top-k": (lambda i, w, s: (i[..., :2], w[..., :2], s), r"topk_ids is int16 \[130, 3, 2\].*ask for \[130, 3, 3\]"),
    "another number of layers": (lambda i, w, s: (np.repeat(i, 2, 1), w, s), r"\[130, 6, 3\].*3 layers"),
    "no layer axis": (lambda i, w, s: (i[:, 0], w[:, 0], s[:, 0]), r"\[130, 3\].*must be \[tokens, layers, 3\]"),
    "an id too large": (lambda i, w, s: (i + 1, w, s), r"0\.\.11, got int16 1\.\.12"),
    "a negative id": (lambda i, w, s: (i - 1, w, s), r"0\.\.11, got int16 -1\.\.10"),
    "ids that would wrap": (lambda i, w, s: (i.astype(np.int64) + 65536, w, s), r"0\.\.11, got int64 65536"),
    "real ids": (lambda i, w, s: (i.astype(float), w, s), r"integers.*float64"),
    "fewer weights": (lambda i, w, s: (i, w[..., :2], s), r"gate_weights is float32 \[130, 3, 2\].*ask for \[130, 3, 3\]"),
    "integer weights": (lambda i, w, s: (i, i, s), r"gate_weights is int16"),
    "a call twice": (
        lambda i, w, s: (np.where(np.arange(i.size).reshape(i.shape) == 41, np.roll(i, 1, -1), i), w, s),
        r"token 4, layer 1: expert (\d+) is called twice in topk_ids \[.*a step calls each expert once",
    ),
    "no scores": (lambda i, w, s: (i, w, None), r"substitutes by selection score, but no selection scores"),
    "scores of fewer experts": (lambda i, w, s: (i, w, s[..., :11]), r"selection_scores is float16 \[130, 3, 11\].*\[130, 3, 12\]"),
    "wide scores": (lambda i, w, s: (i, w, s.astype(np.float32)), r"selection_scores are float32.*float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_DECIDE)
def test_door_refuses_what_the_kernel_would_misread(name):
    spoil, message = BAD_DECIDE[name]
    cache = new_cache(mc.GATE_015)
    with pytest.raises(ValueError, match=message):
        cache.decide(*spoil(STREAM.ids, STREAM.weights, STREAM.scores))
    assert (cache.state.clock == -1).all()
    assert not cache.counts.any()


def test_door_refuses_other_misuse():
    cache = new_cache(mc.GATE_015)
    with pytest.raises(ValueError, match=r"from layer 1 do not fit a cache of 3 layers"):
        decide(cache, first_layer=1)
    with pytest.raises(ValueError, match=r"is_exact is bool \[5\].*\[130\]"):
        decide(cache, is_exact=np.zeros(5, bool))
    decide(cache, STREAM.cut(slice(9), slice(1, 2)), first_layer=1)
    for name, wrong in {"predicted_ids": [0, 12], "next_use": [0, 1]}.items():
        with pytest.raises(ValueError, match=name):
            new_cache(mc.GATE_015).decide(STREAM.ids, STREAM.weights, STREAM.scores, **{name: np.array([[wrong] * 3] * NUM_TOKENS)})
    with pytest.raises(ValueError, match="knows the future, which only the simulator can tell"):
        new_cache(mc.Policy(eviction="belady")).decide(STREAM.ids, STREAM.weights)
    with pytest.raises(ValueError, match="prefetches, but nothing is predicted"):
        new_cache(mc.Policy(max_prefetches=1)).decide(STREAM.ids, STREAM.weights)
    with pytest.raises(ValueError, match=r"layers 0\.\.2 stand at different tokens \[-1  8 -1\]"):
        decide(cache)


@pytest.mark.parametrize(
    ("num_slots", "message"),
    [
        (2, r"num_slots=2 is below top-k=3.*3\.\.12"),
        (13, r"num_slots=13 exceeds the 12 experts"),
        ([5, 5], r"num_slots lists 2 layers, but the model has 3"),
        ([5, 1, 5], r"num_slots=1 is below top-k=3"),
        (5.0, r"num_slots=5\.0 must be an integer"),
        ("5", r"num_slots='5' must be an integer"),
        (True, r"num_slots=True must be an integer"),
        ([[5, 5, 5]], r"must be an integer, or one integer per MoE layer"),
    ],
)
def test_impossible_capacities_are_named(num_slots, message):
    with pytest.raises(mc.CapacityError, match=message):
        new_cache(mc.FETCH_EVERY_MISS, num_slots)
