"""Random router streams and policies for the kernel's tests, and the comparison of the kernel with its twin."""

import numpy as np
from hypothesis import strategies as st
from twin import TwinLayer

import moecache as mc
from moecache.cache import ExpertCache, rank_order


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
    ids = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k].astype(np.int16)
    weights = np.exp(np.take_along_axis(scores, ids.astype(np.int64), -1).astype(np.float32))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    order = rank_order(weights, ids)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1), scores


@st.composite
def policies(draw, top_k):
    """Every kind of policy that fits a router calling `top_k` experts."""
    values = {"eviction": draw(st.sampled_from([member.name.lower() for member in mc.Eviction]))}
    if values["eviction"] == "decayed_count":
        values["half_life"] = draw(st.sampled_from([1, 1.943, 2, 5, 7.3, 128]))
    if draw(st.integers(0, 4)) == 0:
        return mc.Policy(**values)
    values["wait_ranks"] = tuple(draw(st.sets(st.integers(0, top_k - 1), max_size=top_k)))
    values["gate_threshold"] = draw(st.sampled_from([0.05, 0.15, 0.3, 1.2, float("inf")]))
    if values["gate_threshold"] < 2:
        values["threshold_unit"] = draw(st.sampled_from(["absolute", "uniform"]))
    values["fallback"] = draw(st.sampled_from(["substitute", "random_resident", "drop"]))
    values["counted_calls"] = draw(st.sampled_from(["all", "served"]))
    if values["fallback"] != "drop":
        values["stand_ins_count"] = draw(st.booleans())
    if values["fallback"] == "random_resident":
        values["seed"] = draw(st.integers(0, 2**31 - 1))
    if draw(st.booleans()):
        values |= {"admission": "background", "mass_threshold": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))}
        values["admission_delay"] = draw(st.sampled_from([1, 2, 5]))
        values["max_in_flight"] = draw(st.sampled_from([None, 1, 3]))
    return mc.Policy(**values)


def twin_policy(policy, top_k):
    """The policy as the plain dictionary that the twin reads."""
    return {**policy.to_dict(), "top_k": top_k}


def assert_same_decisions(stream, policy, num_slots, cold_start="first", is_exact=None, reset_at=()):
    """Run kernel and twin over one stream, also in two parts, and compare every decision."""
    ids, weights, scores = stream
    num_tokens, num_layers, top_k = ids.shape
    shape = mc.ModelShape(num_layers, scores.shape[-1], top_k)
    cache = ExpertCache(shape, policy, num_slots, cold_start, seed=3)
    residents = [[int(e) for e in cache.state.expert_in_slot[layer] if e >= 0] for layer in range(num_layers)]
    twins = [
        TwinLayer(twin_policy(policy, top_k), shape.num_experts, int(cache.num_slots[layer]), residents[layer], layer)
        for layer in range(num_layers)
    ]
    is_exact = np.zeros(num_tokens, bool) if is_exact is None else is_exact
    cuts = [0, *sorted(set(reset_at) | {num_tokens // 3}), num_tokens]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        if start in reset_at:
            cache.reset()
            for twin in twins:
                twin.reset()
        log = cache.decide(ids[start:stop], weights[start:stop], scores[start:stop], is_exact=is_exact[start:stop])
        for layer, twin in enumerate(twins):
            for token in range(start, stop):
                twin.step(ids[token, layer].tolist(), weights[token, layer], scores[token, layer], bool(is_exact[token]))
            _compare(log, twin, layer, start, stop)


def _compare(log, twin, layer, start, stop):
    for token, (outcome, computed, evicted, mass) in enumerate(twin.rows[start:stop]):
        place = f"token {start + token}, layer {layer}"
        assert log.outcome[token, layer].tolist() == outcome, place
        assert log.computed_ids[token, layer].tolist() == computed, place
        assert log.evicted_ids[token, layer].tolist() == evicted, place
        assert log.substituted_mass[token, layer] == np.float32(mass), place
    mine = [tuple(row) for row in log.arrivals.tolist() if row[2] == layer]
    assert mine == [row for row in twin.arrivals if start <= row[1] < stop]
