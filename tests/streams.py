"""Random router streams and policies for the kernel's tests, and the comparison of the kernel with its twin."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st
from twin import TwinLayer

import moecache as mc
from moecache.cache import ExpertCache, rank_order
from moecache.calibrate import future_calls


def random_stream(seed, num_tokens, num_layers, num_experts, top_k):
    """Scores, ids and gate weights with ties, popularity and persistence: (ids [T,L,K], weights, scores float16)."""
    generator = np.random.default_rng(seed)
    popularity = generator.normal(size=(num_layers, num_experts))
    scores = np.empty((num_tokens, num_layers, num_experts))
    state = generator.normal(size=popularity.shape)
    for token in range(num_tokens):
        state = 0.7 * state + 0.7 * generator.normal(size=popularity.shape)
        scores[token] = state + popularity
    if seed % 3 == 0:
        scores = np.round(scores * 2) / 2  # many equal scores and weights
    scores = scores.astype(np.float16) + np.float16(0)
    if seed % 5 == 4:  # a router that masks some of the experts it does not call
        is_masked = generator.random(scores.shape) < generator.choice([0.2, 0.6, 0.95])
        order = np.argsort(-scores, axis=-1, kind="stable")
        np.put_along_axis(is_masked, order[..., :top_k], False, axis=-1)
        scores[is_masked] = -np.inf
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k].astype(np.int16)
    weights = np.exp(np.take_along_axis(scores, ids.astype(np.int64), -1).astype(np.float32))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    order = rank_order(weights, ids)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1), scores


@st.composite
def policies(draw, top_k, num_experts=10**6):
    """Every kind of policy that fits a router calling `top_k` experts of `num_experts`."""
    values = {"eviction": draw(st.sampled_from([member.name.lower() for member in mc.Eviction]))}
    if values["eviction"] != "static":
        values["insertion"] = draw(st.sampled_from(["every", "every", "cap", "tinylfu"]))
        values["max_prefetches"] = draw(st.sampled_from([0, 0, 0, 1, 3]))
    if values.get("insertion") == "cap":
        values["insertion_cap"] = draw(st.integers(0, 3))
    if values["eviction"] == "decayed_count" or values.get("insertion") == "tinylfu":
        values["half_life"] = draw(st.sampled_from([1, 1.943, 2, 5, 7.3, 128]))
    is_seeded = values["eviction"] == "random"
    if draw(st.integers(0, 4)) > 0:
        values |= draw(_miss_rules(top_k, num_experts))
        is_seeded = is_seeded or values["fallback"] == "random_resident"
        if values["eviction"] != "static" and draw(st.booleans()):
            values |= draw(_admissions())
    if values["eviction"].startswith("belady"):
        values |= {"counted_calls": "all", "stand_ins_count": False}
    if is_seeded:
        values["seed"] = draw(st.integers(0, 2**31 - 1))
    return mc.Policy(**values)


@st.composite
def _miss_rules(draw, top_k, num_experts):
    values = {"miss_rule": draw(st.sampled_from(["protect", "protect", "mass_budget", "squared_budget", "cache_prior", "max_rank"]))}
    if values["miss_rule"] == "max_rank" and top_k + 1 > num_experts:
        values["miss_rule"] = "cache_prior"
    values["wait_ranks"] = tuple(draw(st.sets(st.integers(0, top_k - 1), max_size=top_k)))
    fallbacks = [member.name.lower() for member in mc.Fallback]
    if values["miss_rule"] == "protect":
        values["gate_threshold"] = draw(st.sampled_from([0.05, 0.15, 0.3, 1.2, float("inf")]))
        if values["gate_threshold"] < 2:
            values["threshold_unit"] = draw(st.sampled_from(["absolute", "uniform"]))
    elif values["miss_rule"].endswith("budget"):
        values["budget"] = draw(st.sampled_from([0.0, 0.1, 0.3, 0.7]))
    else:
        fallbacks = ["substitute"]
        if values["miss_rule"] == "cache_prior":
            values["bonus"] = draw(st.sampled_from([0.0, 0.1, 0.2, 0.5, 2.0]))
        else:
            values["best_ranks"] = top_k + draw(st.integers(1, 6))
    values["fallback"] = draw(st.sampled_from(fallbacks))
    values["counted_calls"] = draw(st.sampled_from(["all", "served"]))
    if values["fallback"] in ("substitute", "random_resident", "buddy"):
        values["stand_ins_count"] = draw(st.booleans())
    return values


@st.composite
def _admissions(draw):
    values = {"admission": "background", "mass_threshold": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))}
    values["admission_delay"] = draw(st.sampled_from([1, 2, 5]))
    values["max_in_flight"] = draw(st.sampled_from([None, 1, 3]))
    values["max_bookings"] = draw(st.sampled_from([None, None, 1, 2]))
    if values["mass_threshold"] > 0:
        values["account_half_life"] = draw(st.sampled_from([None, None, 1, 4.5, 100]))
    return values


def twin_policy(policy, top_k):
    """The policy as the plain dictionary that the twin reads."""
    return {**policy.to_dict(), "top_k": top_k}


def assert_same_decisions(stream, policy, num_slots, cold_start="first", is_exact=None, reset_at=(), seed=0):
    """Run kernel and twin over one stream, in parts, and compare every decision."""
    ids, weights, scores = stream
    num_tokens, num_layers, top_k = ids.shape
    shape = mc.ModelShape(num_layers, scores.shape[-1], top_k)
    generator = np.random.default_rng(seed)
    buddies = None
    if policy.fallback == mc.Fallback.BUDDY:
        buddies = generator.integers(-1, shape.num_experts, (num_layers, shape.num_experts, 3))
    predicted = generator.integers(-1, shape.num_experts, (num_tokens, num_layers, 4))
    cuts = sorted({0, *reset_at, num_tokens // 3, num_tokens})
    next_use, first_use = future_calls(ids, shape.num_experts, np.array(cuts[:-1]))
    cache = ExpertCache(shape, policy, num_slots, cold_start, seed=3, buddies=buddies)
    residents = [[int(e) for e in cache.state.expert_in_slot[layer] if e >= 0] for layer in range(num_layers)]
    twins = [
        TwinLayer(
            twin_policy(policy, top_k),
            shape.num_experts,
            int(cache.num_slots[layer]),
            residents[layer],
            layer,
            None if buddies is None else buddies[layer],
        )
        for layer in range(num_layers)
    ]
    is_exact = np.zeros(num_tokens, bool) if is_exact is None else is_exact
    for start, stop in pairwise(cuts):
        if start in reset_at or start == 0:
            cache.reset(first_use[start] if policy.needs_future else None)
            for layer, twin in enumerate(twins):
                twin.reset(first_use[start][layer])
        part = slice(start, stop)
        log = cache.decide(
            ids[part], weights[part], scores[part], is_exact=is_exact[part], predicted_ids=predicted[part], next_use=next_use[part]
        )
        for layer, twin in enumerate(twins):
            for token in range(start, stop):
                twin.step(
                    ids[token, layer].tolist(),
                    weights[token, layer],
                    scores[token, layer],
                    bool(is_exact[token]),
                    predicted[token, layer].tolist(),
                    next_use[token, layer].tolist(),
                )
            _compare(log, twin, layer, start, stop)
    for layer, twin in enumerate(twins):
        found = cache.counts[layer, [mc.Count.PREFETCHED, mc.Count.PREFETCH_USEFUL, mc.Count.PREFETCH_WASTED]]
        assert found.tolist() == [twin.prefetched, twin.useful, twin.wasted]


def _compare(log, twin, layer, start, stop):
    for token, (outcome, computed, evicted, mass) in enumerate(twin.rows[start:stop]):
        place = f"token {start + token}, layer {layer}"
        assert log.outcome[token, layer].tolist() == outcome, place
        assert log.computed_ids[token, layer].tolist() == computed, place
        assert log.evicted_ids[token, layer].tolist() == evicted, place
        assert log.substituted_mass[token, layer] == np.float32(mass), place
    mine = [tuple(row) for row in log.arrivals.tolist() if row[2] == layer]
    assert mine == [row for row in twin.arrivals if start <= row[1] < stop]
