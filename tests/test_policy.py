"""Policies are values: what they accept, what they refuse, when they are equal, and what they become for the kernel."""

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams import policies

import moecache as mc

BACKGROUND = {"admission": "background", "mass_threshold": 0.5}
DECAYED = {"eviction": "decayed_count", "half_life": 128}


def test_default_waits_for_every_miss():
    policy = mc.Policy()
    assert policy == mc.FETCH_EVERY_MISS
    assert policy.waits_for_every_miss
    assert (policy.miss_rule, policy.fallback, policy.eviction) == (mc.MissRule.PROTECT, mc.Fallback.SUBSTITUTE, mc.Eviction.LRU)
    assert (policy.admission, policy.weight_rule) == (mc.Admission.NONE, mc.WeightRule.OWN)
    assert (policy.gate_threshold, policy.wait_ranks) == (0.0, ())


PRESETS = {
    "GATE_015": {"wait_ranks": (0,), "gate_threshold": 0.15},
    "FIRST_CHOICE": {"wait_ranks": (0,), "gate_threshold": math.inf},
    "SUBSTITUTE_EVERY_MISS": {"wait_ranks": (), "gate_threshold": math.inf},
    "QUALITY_FIRST": {"wait_ranks": (0,), "gate_threshold": 0.15, **DECAYED, **BACKGROUND, "admission_delay": 1},
    "SPEED_FIRST": {"wait_ranks": (0,), "gate_threshold": math.inf, **DECAYED, **BACKGROUND, "admission_delay": 1},
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_are_called(name):
    preset = getattr(mc, name)
    assert preset == mc.Policy(**PRESETS[name])
    assert preset in mc.PRESETS
    assert not preset.waits_for_every_miss
    assert preset.max_in_flight is None


def test_named_constructors():
    assert mc.threshold(0.3) == mc.Policy(gate_threshold=0.3)
    assert mc.threshold(0.15, first_choice=True) == mc.GATE_015
    assert mc.first_j(1) == mc.FIRST_CHOICE
    assert mc.first_j(0) == mc.SUBSTITUTE_EVERY_MISS
    assert mc.first_j(3, eviction="fifo") == mc.Policy(wait_ranks=(0, 1, 2), eviction="fifo")
    assert mc.only_rank_substituted(1, 4) == mc.Policy(wait_ranks=(0, 2, 3))
    assert mc.mass_budget(0.1) == mc.Policy(miss_rule="mass_budget", budget=0.1, gate_threshold=math.inf)
    assert mc.mass_budget(0.1, is_squared=True) == mc.Policy(miss_rule="squared_budget", budget=0.1)
    assert mc.cache_prior() == mc.Policy(miss_rule="cache_prior", bonus=0.2, wait_ranks=(0, 1))
    assert mc.max_rank(16) == mc.Policy(miss_rule="max_rank", best_ranks=16, wait_ranks=(0,))
    with pytest.raises(ValueError, match=r"rank=4 is outside 0\.\.3"):
        mc.only_rank_substituted(4, 4)
    with pytest.raises(ValueError, match=r"num_ranks=-1 must be 0 or more"):
        mc.first_j(-1)


def test_admitted_anyway():
    policy = mc.QUALITY_FIRST.replace(max_in_flight=3, admission_delay=9).admitted_anyway()
    assert policy == mc.GATE_015.replace(**DECAYED, admission="background", mass_threshold=0, admission_delay=1)
    assert mc.QUALITY_FIRST.admitted_anyway().label == "quality-first, admitted anyway"
    with pytest.raises(ValueError, match=r"admission=.*every miss is waited for"):
        mc.FETCH_EVERY_MISS.admitted_anyway()


ENUMS = {
    "miss_rule": mc.MissRule,
    "threshold_unit": mc.ThresholdUnit,
    "fallback": mc.Fallback,
    "weight_rule": mc.WeightRule,
    "eviction": mc.Eviction,
    "insertion": mc.Insertion,
    "admission": mc.Admission,
    "counted_calls": mc.CountedCalls,
}


@pytest.mark.parametrize("name", ENUMS)
def test_a_wrong_name_is_answered_with_the_right_ones(name):
    with pytest.raises(ValueError, match=f"{name}='clock' is unknown; choose one of") as caught:
        mc.Policy(**{name: "clock"})
    for member in ENUMS[name]:
        assert member.name.lower() in str(caught.value)
    with pytest.raises(ValueError, match=f"{name}=99 is unknown"):
        mc.Policy(**{name: 99})


@pytest.mark.parametrize("eviction", mc.Eviction)
def test_strings_are_members(eviction):
    rest = {"half_life": 5} if eviction == mc.Eviction.DECAYED_COUNT else {}
    policies = [mc.Policy(eviction=value, **rest) for value in (eviction, eviction.name.lower(), eviction.name)]
    assert len(set(policies)) == 1
    assert policies[1].eviction is eviction


WRONG = [
    ({"wait_ranks": (-1,)}, r"wait_ranks=\(-1,\) must be ranks of 0 or more"),
    ({"wait_ranks": "all"}, r"wait_ranks='all' must be a tuple of ranks"),
    ({"wait_ranks": 0}, r"wait_ranks=0 must be a tuple of ranks"),
    ({"wait_ranks": (0.5,)}, r"wait_ranks=\(0\.5,\) must be a tuple of ranks"),
    ({"gate_threshold": -0.1}, r"gate_threshold=-0\.1 must be 0 or more"),
    ({"gate_threshold": math.nan}, r"gate_threshold=nan must be 0 or more"),
    ({"gate_threshold": "high"}, r"gate_threshold='high' must be a number"),
    ({"eviction": "decayed_count"}, r"needs half_life, in tokens"),
    ({"eviction": "decayed_count", "half_life": 0.5}, r"half_life=0\.5 must be at least 1 token"),
    ({"eviction": "decayed_count", "half_life": math.inf}, r"half_life=inf must be at least 1 token and finite"),
    ({"eviction": "decayed_count", "half_life": math.nan}, r"half_life=nan"),
    ({"wait_ranks": (0,), "admission": "background"}, r"needs mass_threshold"),
    ({"wait_ranks": (0,), **BACKGROUND, "mass_threshold": -1}, r"mass_threshold=-1\.0 must be 0 or more"),
    ({"wait_ranks": (0,), **BACKGROUND, "mass_threshold": math.inf}, r"mass_threshold=inf must be 0 or more and finite"),
    ({"wait_ranks": (0,), **BACKGROUND, "admission_delay": 0}, r"admission_delay=0 must be at least 1 token"),
    ({"wait_ranks": (0,), **BACKGROUND, "admission_delay": 1.5}, r"admission_delay=1\.5 must be an integer"),
    ({"wait_ranks": (0,), **BACKGROUND, "max_in_flight": 0}, r"max_in_flight=0 must be at least 1"),
    ({"wait_ranks": (0,), "fallback": "random_resident", "seed": -1}, r"seed=-1 must be in 0\.\."),
    ({"wait_ranks": (0,), "fallback": "random_resident", "seed": 2**31}, r"seed=2147483648 must be in 0\.\."),
    ({"wait_ranks": (0,), "fallback": "random_resident", "seed": None}, r"seed=None must be in 0\.\."),
    ({"wait_ranks": (0,), "fallback": "drop", "weight_rule": "inherit"}, r"'inherit' has no meaning with fallback='drop'"),
    ({"wait_ranks": (0,), "eviction": "belady", "stand_ins_count": True}, r"leave counted_calls='all' and stand_ins_count=False"),
    ({"wait_ranks": (0,), "eviction": "belady_bypass", "counted_calls": "served"}, r"leave counted_calls='all'"),
    ({"eviction": "static", "max_prefetches": 1}, r"background admission and prefetch contradict it"),
    ({"wait_ranks": (0,), "eviction": "static", **BACKGROUND}, r"background admission and prefetch contradict it"),
    ({"insertion": "tinylfu"}, r"insertion='tinylfu' needs half_life"),
    ({"insertion": "cap"}, r"insertion='cap' needs insertion_cap"),
    ({"insertion": "cap", "insertion_cap": -1}, r"insertion_cap=-1 must be 0 or more"),
    ({"miss_rule": "mass_budget"}, r"needs budget"),
    ({"miss_rule": "mass_budget", "budget": -0.1}, r"budget=-0\.1 must be 0 or more"),
    ({"miss_rule": "squared_budget"}, r"needs budget"),
    ({"miss_rule": "cache_prior"}, r"needs bonus"),
    ({"miss_rule": "max_rank"}, r"needs best_ranks"),
    ({"miss_rule": "max_rank", "best_ranks": 12, "fallback": "drop"}, r"'max_rank' chooses stand-ins by score; it needs"),
    ({"wait_ranks": (0,), **BACKGROUND, "account_half_life": 0.5}, r"account_half_life=0\.5 must be at least 1 token"),
    ({"wait_ranks": (0,), **BACKGROUND, "max_bookings": 0}, r"max_bookings=0 must be at least 1"),
    ({"max_prefetches": -1}, r"max_prefetches=-1 must be 0 or more"),
    ({"wait_ranks": (0,), "stand_ins_count": "no"}, r"stand_ins_count='no' must be True or False"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_values_out_of_range_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        mc.Policy(**fields)


WITHOUT_EFFECT = [
    ({"wait_ranks": (0,), "gate_threshold": 0.0}, "wait_ranks"),
    ({"fallback": "drop"}, "fallback"),
    ({"weight_rule": "rescale"}, "weight_rule"),
    ({**BACKGROUND}, "admission"),
    ({"counted_calls": "served"}, "counted_calls"),
    ({"stand_ins_count": True}, "stand_ins_count"),
    ({"wait_ranks": (0,), "threshold_unit": "uniform"}, "threshold_unit"),
    ({"threshold_unit": "uniform"}, "threshold_unit"),
    ({"half_life": 128}, "half_life"),
    ({"wait_ranks": (0,), "mass_threshold": 0.5}, "mass_threshold"),
    ({"wait_ranks": (0,), "admission_delay": 1}, "admission_delay"),
    ({"wait_ranks": (0,), "max_in_flight": 1}, "max_in_flight"),
    ({"wait_ranks": (0,), "seed": 1}, "seed"),
    ({"wait_ranks": (0,), "fallback": "drop", "stand_ins_count": True}, "stand_ins_count"),
    ({"wait_ranks": (0,), "fallback": "cpu", "weight_rule": "inherit"}, "weight_rule"),
    ({"budget": 0.1}, "budget"),
    ({"bonus": 0.1}, "bonus"),
    ({"best_ranks": 12}, "best_ranks"),
    ({"insertion_cap": 2}, "insertion_cap"),
    ({"miss_rule": "mass_budget", "budget": 0.1, "gate_threshold": 0.2}, "gate_threshold"),
    ({"eviction": "static", "insertion": "cap", "insertion_cap": 2}, "insertion"),
    ({"wait_ranks": (0,), **BACKGROUND, "mass_threshold": 0, "account_half_life": 9}, "account_half_life"),
    ({"wait_ranks": (0,), "max_bookings": 1}, "max_bookings"),
]


@pytest.mark.parametrize(("fields", "name"), WITHOUT_EFFECT)
def test_a_field_without_effect_is_refused(fields, name):
    with pytest.raises(ValueError, match=f"{name}=.* has no effect: .*leave it at"):
        mc.Policy(**fields)


def test_equal_policies_are_one_key():
    spellings = [
        mc.Policy(wait_ranks=[1, 0, 1], **DECAYED, **BACKGROUND),
        mc.Policy(
            wait_ranks={np.int64(0), 1}, gate_threshold=math.inf, eviction="decayed_count", half_life=np.float32(128),
            admission=mc.Admission.BACKGROUND, mass_threshold=np.float64(0.5), admission_delay=np.int16(1), stand_ins_count=np.bool_(False),
            seed=np.int64(0), label="another name",
        ),
    ]  # fmt: skip
    assert spellings[0] == spellings[1]
    assert hash(spellings[0]) == hash(spellings[1])
    described = [{**policy.to_dict(), "label": ""} for policy in spellings]
    assert json.dumps(described[0]) == json.dumps(described[1])
    assert spellings[0] != spellings[0].replace(half_life=64)
    assert spellings[1].label == "another name"


def test_replace_makes_a_new_label():
    assert mc.GATE_015.replace(eviction="fifo").label == "first choice or gate weight 0.15, fifo"
    assert mc.GATE_015.replace(label="mine").label == "mine"
    assert mc.GATE_015.label == "0.15 rule"
    assert mc.Policy(wait_ranks=(0, 2), fallback="drop").label == "ranks 0 2, drop, lru"
    assert mc.Policy(eviction="random", seed=3).label == "fetch every miss, random (seed 3)"
    assert mc.Policy(insertion="tinylfu", half_life=4).label == "fetch every miss, lru, tinylfu insertion (4)"
    assert mc.threshold(1.5, threshold_unit="uniform").label == "gate weight 1.5/K, lru"


def test_fields_cannot_be_changed():
    with pytest.raises(AttributeError):
        mc.GATE_015.gate_threshold = 0.2


@given(policies(4))
def test_json_round_trip(policy):
    text = json.dumps(policy.to_dict(), allow_nan=False)
    again = mc.Policy.from_dict(json.loads(text))
    assert again == policy
    assert hash(again) == hash(policy)
    assert again.label == policy.label
    assert again.to_dict() == policy.to_dict()
    assert pickle.loads(pickle.dumps(policy)) == policy


@given(st.lists(policies(4), min_size=2, max_size=8))
def test_different_policies_have_different_labels(several):
    assert len({policy.label for policy in several}) == len(set(several))


def test_from_dict_refuses_unknown_fields():
    with pytest.raises(ValueError, match=r"unknown policy fields \['treshold'\]; known are"):
        mc.Policy.from_dict({"treshold": 0.1})
    assert mc.Policy.from_dict({"wait_ranks": [0]}) == mc.FIRST_CHOICE


def test_compiled_numbers():
    rules = mc.SPEED_FIRST.compile(10)
    assert rules.wait_ranks == 1
    assert rules.gate_threshold == math.inf
    assert (rules.admission, rules.mass_threshold, rules.admission_delay) == (1, 0.5, 1)
    assert rules.max_in_flight >= 32767
    assert mc.only_rank_substituted(1, 4).compile(4).wait_ranks == 0b1101
    assert mc.threshold(1.5, threshold_unit="uniform").compile(10).gate_threshold == pytest.approx(0.15)
    assert mc.Policy(wait_ranks=(61,)).compile(62).wait_ranks == 1 << 61
    assert {type(value) for value in rules} == {int, float}


def test_compile_names_the_rank_that_does_not_exist():
    with pytest.raises(ValueError, match=r"names rank 4, but top-4 has ranks 0\.\.3"):
        mc.Policy(wait_ranks=(0, 4)).compile(4)
    with pytest.raises(ValueError, match=r"best_ranks=4 must exceed top-4, or nobody can stand in"):
        mc.max_rank(4).compile(4)
    with pytest.raises(ValueError, match=r"top_k=63 is outside 1\.\.62"):
        mc.Policy().compile(63)


@pytest.mark.parametrize("wrong", ["quality_first", None, 3])
def test_what_is_no_policy_is_answered_with_the_presets(wrong):
    trace = mc.RouterTrace.from_arrays(np.zeros((2, 1, 1), int), np.ones((2, 1, 1)), num_experts=2)
    with pytest.raises(ValueError, match=r"is no Policy; use a preset .*moecache.QUALITY_FIRST"):
        mc.simulate(trace, wrong, 1)
    with pytest.raises(ValueError, match="is no Policy"):
        mc.sweep(trace, [wrong], [1], progress=False)
