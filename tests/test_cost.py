"""Seconds from decisions: the loop against a plain twin, cases worked by hand, and what the model must do whatever the numbers."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import policies, random_stream

import moecache as mc
from moecache import hardware_probe
from moecache.hardware import KINDS
from moecache.metrics import count_transfers

HIT, FETCHED, FORCED, SUBSTITUTED, DROPPED, LOW_PRECISION, CPU = range(7)
LANDED, ALREADY_RESIDENT, NO_VICTIM, CANCELLED = range(4)
ADMISSION, PREFETCH = range(2)
MIB = 2**20


class Twin:
    """One link, one device, an optional host tier. Seconds are sums of binary fractions in these tests, so that no sum rounds."""

    def __init__(self, log, hardware, expert_bytes, prefetch_lead_steps):
        self.log, self.hw, self.num_bytes, self.lead = log, hardware, expert_bytes, prefetch_lead_steps
        self.num_layers = log.outcome.shape[1]
        names = ("asked", "landed", "layer", "expert", "victim", "kind", "reason")
        rows = [row for row in log.arrivals.tolist() if row[6] != CANCELLED]
        rows.sort(key=lambda row: (row[1], row[2]))  # as they land; an emulator logs them layer by layer
        self.copies = [dict(zip(names, row, strict=True), left=None, served_by=None) for row in rows]
        self.host = []  # blocks in host memory, least recently read first
        self.rows = [self.token(token) for token in range(log.outcome.shape[0])]

    def token(self, token):
        self.row = dict.fromkeys(("compute", "blocking", "stall", "busy", "transfers", "disk_reads"), 0)
        for layer in range(self.num_layers):
            self.pass_time(self.hw.layer_seconds, compute=self.hw.layer_seconds)
            for copy in self.due(token, layer):
                self.book(copy, token, layer)
                if copy["reason"] == LANDED:
                    self.row["stall"] += copy["left"]
                    self.row["busy"] += copy["left"]
                    copy["left"] = 0
            self.experts(token, layer, self.log.outcome[token, layer].tolist(), self.log.computed_ids[token, layer].tolist())
        self.pass_time(self.hw.token_seconds, compute=self.hw.token_seconds)
        return self.row

    def experts(self, token, layer, outcome, computed):
        fetching = sum(self.fetch(layer, e, token) for o, e in zip(outcome, computed, strict=True) if o in (FETCHED, FORCED))
        for copy in self.copies:
            step = copy["asked"] * self.num_layers + copy["layer"] - (self.lead if copy["kind"] == PREFETCH else 0)
            if max(step, 0) == token * self.num_layers + layer:
                self.book(copy, token, layer)
        c = self.num_bytes / self.hw.device_bytes_per_second
        low = c if self.hw.low_precision_seconds is None else self.hw.low_precision_seconds
        ready = sum(c for o in outcome if o in (HIT, SUBSTITUTED)) + sum(low for o in outcome if o == LOW_PRECISION)
        wait = max(0, fetching - self.hw.overlap * ready)
        device = ready + sum(c for o in outcome if o in (FETCHED, FORCED))
        on_cpu = sum(self.hw.cpu_seconds for o in outcome if o == CPU)
        phase = max(device + wait, on_cpu)
        self.row["busy"] += fetching
        self.row["blocking"] += wait
        self.pass_time(phase - fetching, compute=phase - wait)

    def due(self, token, layer):
        return [copy for copy in self.copies if (copy["landed"], copy["layer"]) == (token, layer)]

    def fetch(self, layer, expert, token):
        for copy in self.under_way(layer, expert, token, layer):
            left, copy["left"] = copy["left"], 0
            return left
        return self.transfer((layer, expert))

    def under_way(self, layer, expert, token, now):
        """At most one copy of an expert: asked for, not landed by layer `now`, and not served by one that lands first."""

        def is_to_come(copy):
            return (copy["landed"], copy["layer"]) > (token, now)

        return [
            copy
            for copy in self.copies
            if (copy["layer"], copy["expert"]) == (layer, expert)
            and copy["left"] is not None
            and is_to_come(copy)
            and not (copy["served_by"] and is_to_come(copy["served_by"]))
        ]

    def book(self, copy, token, now):
        if copy["left"] is None:
            others = self.under_way(copy["layer"], copy["expert"], token, now)
            if not others:
                copy["left"] = self.transfer((copy["layer"], copy["expert"]))
            elif self.copies.index(others[0]) < self.copies.index(copy):
                copy["left"], copy["served_by"] = 0, others[0]
            else:
                copy["left"], others[0]["left"], others[0]["served_by"] = others[0]["left"], 0, copy

    def transfer(self, block):
        self.row["transfers"] += 1
        link = self.hw.fetch_latency_seconds + self.num_bytes / self.hw.link_bytes_per_second
        if self.hw.host_ram_bytes is None:
            return link
        was_in_host = block in self.host
        self.host = [b for b in self.host if b != block] + [block]
        self.host = self.host[max(len(self.host) - self.hw.host_ram_bytes // self.num_bytes, 0) :]
        if was_in_host:
            return link
        self.row["disk_reads"] += 1
        return self.hw.disk_latency_seconds + self.num_bytes / self.hw.disk_bytes_per_second + link

    def pass_time(self, idle, compute):
        self.row["compute"] += compute
        booked = [copy for copy in self.copies if copy["left"]]
        for copy in sorted(booked, key=lambda copy: (copy["landed"], copy["layer"])):  # stable: then in the order of the log
            part = min(idle, copy["left"])
            copy["left"] -= part
            idle -= part
            self.row["busy"] += part


def assert_same_as_twin(log, hardware, expert_bytes, prefetch_lead_steps=1):
    estimate = mc.estimate_seconds(log, hardware, expert_bytes, prefetch_lead_steps)
    rows = Twin(log, hardware, expert_bytes, prefetch_lead_steps).rows
    for name, twin_name in (
        ("compute_seconds", "compute"),
        ("blocking_seconds", "blocking"),
        ("stall_seconds", "stall"),
        ("link_busy_seconds", "busy"),
        ("transfers", "transfers"),
        ("disk_reads", "disk_reads"),
    ):
        assert getattr(estimate, name).tolist() == [row[twin_name] for row in rows], name
    assert estimate.seconds.tolist() == [row["compute"] + row["blocking"] + row["stall"] for row in rows]
    return estimate


def fractions(most):
    """Binary fractions: 0 .. most / 8."""
    return st.integers(0, most).map(lambda eighths: eighths / 8)


@st.composite
def machines(draw):
    """Hardware whose every constant is a binary fraction, for experts of 8 bytes."""
    disk = {}
    if draw(st.booleans()):
        disk = {
            "host_ram_bytes": draw(st.integers(1, 80)),
            "disk_bytes_per_second": draw(st.sampled_from([1.0, 16.0, 64.0])),
            "disk_latency_seconds": draw(fractions(8)),
        }
    return mc.Hardware(
        "random",
        draw(st.sampled_from([2.0, 8.0, 32.0, 256.0])),
        fetch_latency_seconds=draw(fractions(8)),
        layer_seconds=draw(fractions(24)),
        device_bytes_per_second=draw(st.sampled_from([8.0, 32.0, 64.0])),
        token_seconds=draw(fractions(16)),
        overlap=draw(st.sampled_from([0.0, 0.5, 1.0])),
        low_precision_seconds=draw(st.one_of(st.none(), fractions(4))),
        cpu_seconds=draw(fractions(40)),
        **disk,
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6), num_slots=st.integers(3, 8), lead=st.integers(1, 2), hardware=machines())
def test_decisions_of_random_policies_take_the_twins_seconds(data, seed, num_slots, lead, hardware):
    ids, weights, scores = random_stream(seed, 24, 2, 10, 3)
    generator = np.random.default_rng(seed)
    trace = mc.RouterTrace.from_arrays(ids, weights, selection_scores=scores)
    trace = dataclasses.replace(trace, predicted_ids=generator.integers(-1, 10, (24, 2, 4), np.int16))
    policy = data.draw(policies(3, 10))
    buddies = generator.integers(0, 10, (2, 10, 3)) if policy.fallback == mc.Fallback.BUDDY else None
    hardware = hardware.replace(cpu_seconds=0.5) if hardware.cpu_seconds is None else hardware
    assert_same_as_twin(mc.simulate(trace, policy, num_slots, buddies=buddies).decisions, hardware, 8, lead)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lead=st.integers(1, 5), hardware=machines())
def test_any_log_takes_the_twins_seconds(seed, lead, hardware):
    log = random_log(np.random.default_rng(seed))
    assert_same_as_twin(log, hardware, 8, min(lead, log.outcome.shape[1]))


def random_log(generator, num_tokens=12, num_layers=3, num_experts=5, top_k=3, num_copies=24):
    """Outcomes and arrivals that need not come from any policy, but no expert lands twice in one step."""
    size = (num_tokens, num_layers, top_k)
    computed = np.argsort(generator.random((num_tokens, num_layers, num_experts)), axis=-1)[..., :top_k].astype(np.int16)
    rows = {}
    for _ in range(num_copies):
        asked, landed = sorted(generator.integers(0, num_tokens, 2).tolist())
        layer, expert, kind = (int(generator.integers(n)) for n in (num_layers, num_experts, 2))
        asked = landed if kind == PREFETCH else asked
        others = [row for row in rows.values() if row[2:4] == (layer, expert) and ADMISSION == kind == row[5]]
        if any(asked <= row[1] and row[0] <= landed for row in others):
            continue  # one background copy of an expert at a time
        rows[landed, layer, expert] = (asked, landed, layer, expert, -1, kind, int(generator.integers(4)))
    return mc.DecisionLog(
        generator.integers(0, 7, size).astype(np.uint8),
        computed,
        np.full(size, -1, np.int16),
        np.array(sorted(rows.values(), key=lambda row: row[1]), np.int64).reshape(-1, 7),
        np.zeros(size[:2], np.float32),
    )


# An expert takes 4 s over the link and 1 s to compute; a layer takes 2 s besides.
PLAIN = mc.Hardware("plain", 2.0, layer_seconds=2.0, expert_seconds=1.0)


def make_log(outcomes, computed_ids=None, arrivals=()):
    outcome = np.array(outcomes, np.uint8)
    computed = np.broadcast_to(np.arange(outcome.shape[2]), outcome.shape) if computed_ids is None else computed_ids
    return mc.DecisionLog(
        outcome,
        np.array(computed, np.int16),
        np.full(outcome.shape, -1, np.int16),
        np.array(arrivals, np.int64).reshape(-1, 7),
        np.zeros(outcome.shape[:2], np.float32),
    )


def test_a_fetch_hides_behind_the_hits():
    estimate = mc.estimate_seconds(make_log([[[HIT, HIT, FETCHED]]]), PLAIN, 8)
    assert estimate.blocking_seconds.tolist() == [2.0]  # 4 s of link, 2 s of hits
    assert estimate.compute_seconds.tolist() == [5.0]
    assert estimate.seconds.tolist() == [7.0]
    assert estimate.link_busy_seconds.tolist() == [4.0]


def test_fetches_share_the_link_and_stand_ins_hide_them_too():
    estimate = mc.estimate_seconds(make_log([[[FETCHED, FORCED, SUBSTITUTED]]]), PLAIN, 8)
    assert estimate.blocking_seconds.tolist() == [7.0]
    assert mc.estimate_seconds(make_log([[[FETCHED, FORCED, DROPPED]]]), PLAIN, 8).seconds.tolist() == [2 + 8 + 2]


def test_without_overlap_the_whole_fetch_is_waited_for():
    estimate = mc.estimate_seconds(make_log([[[HIT, HIT, FETCHED]]]), PLAIN.replace(overlap=0.0), 8)
    assert estimate.blocking_seconds.tolist() == [4.0]


def test_a_copy_that_fits_into_idle_time_costs_nothing_and_a_late_one_stalls():
    log = make_log([[[HIT, SUBSTITUTED]], [[HIT, HIT]]], arrivals=[(0, 1, 0, 4, -1, 0, LANDED)])
    on_time = mc.estimate_seconds(log, PLAIN, 8)  # 2 s of the experts of token 0, 2 s of the layer's other work in token 1
    assert on_time.stall_seconds.tolist() == [0.0, 0.0]
    assert on_time.link_busy_seconds.tolist() == [2.0, 2.0]
    late = mc.estimate_seconds(log, PLAIN.replace(link_bytes_per_second=1.0), 8)
    assert late.stall_seconds.tolist() == [0.0, 4.0]
    assert late.seconds.tolist() == [4.0, 8.0]


def test_fetches_go_before_background_copies():
    log = make_log([[[SUBSTITUTED, HIT]], [[HIT, HIT]]], arrivals=[(0, 1, 0, 4, -1, 0, LANDED)])
    busy = make_log([[[SUBSTITUTED, FETCHED]], [[HIT, HIT]]], arrivals=[(0, 1, 0, 4, -1, 0, LANDED)])
    assert mc.estimate_seconds(log, PLAIN, 8).stall_seconds[1] == 0
    assert mc.estimate_seconds(busy, PLAIN, 8).stall_seconds[1] == 1.0  # idle: 1 s after the fetch, 2 s before the landing


def test_an_expert_fetched_while_its_copy_is_under_way_moves_once():
    calls = [[[SUBSTITUTED, HIT]], [[FETCHED, HIT]], [[HIT, HIT]]]
    log = make_log(calls, computed_ids=[[[1, 0]], [[4, 0]], [[4, 0]]], arrivals=[(0, 2, 0, 4, -2, 0, ALREADY_RESIDENT)])
    estimate = mc.estimate_seconds(log, PLAIN.replace(link_bytes_per_second=1.0), 8)
    assert estimate.transfers.sum() == 1
    assert estimate.link_busy_seconds.sum() == 8.0
    assert estimate.blocking_seconds.tolist() == [0.0, 3.0, 0.0]  # 8 s less 2 s in token 0, 2 s in token 1, and 1 s behind the hit


def test_a_prefetch_known_earlier_stalls_less():
    log = make_log([[[HIT], [HIT], [HIT]]], arrivals=[(0, 0, 2, 4, -1, PREFETCH, LANDED)])
    stalls = [mc.estimate_seconds(log, PLAIN.replace(link_bytes_per_second=1.0), 8, lead).stall_seconds[0] for lead in (1, 2, 3)]
    assert stalls == [5.0, 2.0, 2.0]  # 8 s, of which a layer hides 3; nothing is known before the first decision is made


@pytest.mark.parametrize("lead", [0, 4])
def test_a_prefetch_is_known_one_token_before_at_most(lead):
    with pytest.raises(ValueError, match=rf"prefetch_lead_steps={lead} must be 1 \(the layer before\) to 3 layers \(the token before\)"):
        mc.estimate_seconds(make_log([[[HIT], [HIT], [HIT]]]), PLAIN, 8, lead)


def test_the_cpu_path_runs_beside_the_device():
    log = make_log([[[HIT, HIT, CPU]]])
    assert mc.estimate_seconds(log, PLAIN.replace(cpu_seconds=1.5), 8).seconds.tolist() == [4.0]
    assert mc.estimate_seconds(log, PLAIN.replace(cpu_seconds=5.0), 8).seconds.tolist() == [7.0]


def test_the_host_tier_keeps_what_was_read_last():
    hardware = PLAIN.replace(host_ram_bytes=16, disk_bytes_per_second=1.0)  # two experts of 8 bytes
    ids = [[[0]], [[1]], [[0]], [[2]], [[0]], [[1]]]
    estimate = mc.estimate_seconds(make_log([[[FETCHED]]] * 6, ids), hardware, 8)
    assert estimate.disk_reads.tolist() == [1, 1, 0, 1, 0, 1]
    assert estimate.blocking_seconds.tolist() == [12.0, 12.0, 4.0, 12.0, 4.0, 12.0]
    unbounded = mc.estimate_seconds(make_log([[[FETCHED]]] * 6, ids), hardware.replace(host_ram_bytes=10**9), 8)
    assert unbounded.disk_reads.tolist() == [1, 1, 0, 1, 0, 0]


@pytest.fixture(scope="module")
def trace():
    return mc.synthetic_trace(400, 3, 64, 4, seed=5, document_tokens=100, expert_bytes=6 * MIB)


def test_fetch_every_miss_follows_the_linear_model(trace):
    """Floor + sum over layers of max(0, f(k) - (K - k) c)."""
    run, hardware = mc.simulate(trace, mc.FETCH_EVERY_MISS, 16), mc.Hardware.profile("pcie4")
    num_fetches = (run.decisions.outcome == FETCHED).sum(axis=2)
    c, f = 6 * MIB / 1e12, 10e-6 + 6 * MIB / 26.8e9
    floor = 3 * (80e-6 + 4 * c)
    expected = floor + np.maximum(0, num_fetches * f - (4 - num_fetches) * c).sum(axis=1)
    np.testing.assert_allclose(mc.estimate_seconds(run, hardware).seconds, expected, rtol=1e-12)


def test_all_hits_take_the_floor(trace):
    run = mc.simulate(trace, mc.SPEED_FIRST, 64)
    estimate = mc.estimate_seconds(run, mc.Hardware.profile("nvme"))
    np.testing.assert_allclose(estimate.seconds, 3 * (1e-3 + 4 * 6 * MIB / 60e9), rtol=1e-12)
    assert not estimate.link_busy_seconds.any()


def test_bytes_are_those_of_the_run(trace):
    policy = mc.SPEED_FIRST.replace(admission_delay=3)
    run = mc.simulate(trace, policy, 16)
    estimate = mc.estimate_seconds(run, "nvme")
    fetches = zip(*np.nonzero(run.decisions.outcome == FETCHED), strict=True)
    arrivals = run.decisions.arrivals.tolist()
    spans = {(layer, expert, clock) for asked, landed, layer, expert, *_ in arrivals for clock in range(asked + 1, landed)}
    num_shared = sum((layer, run.decisions.computed_ids[token, layer, rank], token) in spans for token, layer, rank in fetches)
    assert num_shared > 0
    num_fetches = (run.decisions.outcome == FETCHED).sum() + (run.decisions.outcome == FORCED).sum()
    assert run.bytes_moved == (num_fetches + len(arrivals) - num_shared) * 6 * MIB
    assert estimate.transfers.sum() * 6 * MIB == run.bytes_moved
    assert mc.simulate(trace, policy, 16, keep="summary").bytes_moved is None


@pytest.mark.parametrize("documents", ["keep", "reset"])
@pytest.mark.parametrize("lead", [1, 2])
def test_transfers_are_counted_by_one_rule(lead, documents):
    """The event loop, which knows times, and the count from the log alone: with delays, prefetches and fetches that insert nothing."""
    base = mc.first_j(1, admission="background", mass_threshold=0.2, admission_delay=4, insertion="cap", insertion_cap=1)
    num_shared = 0
    for seed in range(12):
        ids, weights, scores = random_stream(seed, 80, 2, 10, 3)
        starts = np.isin(np.arange(80), [0, 33])
        trace = mc.RouterTrace.from_arrays(ids, weights, selection_scores=scores, document_start=starts)
        predicted = np.random.default_rng(seed).integers(-1, 10, (80, 2, 4))
        trace = dataclasses.replace(trace, predicted_ids=predicted.astype(np.int16))
        for policy in (base, base.replace(max_prefetches=2), base.replace(max_prefetches=1, insertion="every", insertion_cap=None)):
            log = mc.simulate(trace, policy, 4, documents=documents).decisions
            num_transfers = count_transfers(log)
            assert mc.estimate_seconds(log, PLAIN, 1, lead).transfers.sum() == num_transfers
            arrived = (log.arrivals[:, 6] != CANCELLED).sum()
            num_shared += arrived + np.isin(log.outcome, [FETCHED, FORCED]).sum() - num_transfers
    assert num_shared > 100


def test_a_slower_link_never_saves_time_and_changes_no_decision(trace):
    run = mc.simulate(trace, mc.QUALITY_FIRST, 16)
    before = run.decisions.outcome.copy()
    seconds = [mc.estimate_seconds(run, mc.Hardware.profile(name)).seconds.sum() for name in ("pcie5", "pcie4", "pcie3")]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]
    assert np.array_equal(run.decisions.outcome, before)


def test_the_sum_of_parts_and_the_summary(trace):
    estimate = mc.estimate_seconds(mc.simulate(trace, mc.SPEED_FIRST, 16), "pcie3")
    parts = estimate.compute_seconds + estimate.blocking_seconds + estimate.stall_seconds
    np.testing.assert_array_equal(estimate.seconds, parts)
    assert (estimate.link_busy_seconds <= estimate.seconds * (1 + 1e-12)).all()
    warm = estimate.summary(first_token=100)
    assert warm["seconds_per_token"] == pytest.approx(estimate.seconds[100:].mean())
    assert (warm["seconds_kind"], warm["hardware"]) == ("simulated", "pcie3")
    assert len(estimate.frame()) == 400


def test_a_run_with_seconds_says_that_they_are_simulated(trace):
    run = mc.with_seconds(mc.simulate(trace, mc.SPEED_FIRST, 16), "sata")
    assert run.seconds_kind == "simulated"
    assert run.provenance["hardware"]["kind"] == "nominal"
    np.testing.assert_array_equal(run.frame()["stall_seconds"], run.extra["stall_seconds"])


def test_sensitivity_has_a_row_for_every_constant_that_matters(trace):
    run = mc.simulate(trace, mc.SPEED_FIRST.replace(mass_threshold=0.1), 16)
    hardware = mc.Hardware.profile("nvme").behind_disk("sata", host_ram_bytes=400 * MIB)
    frame = mc.cost_sensitivity(run, hardware, factors=(0.999, 1.001))
    times = frame[frame["constant"].str.endswith("_seconds")].groupby("constant")["elasticity"].mean()
    rates = frame[frame["constant"].str.endswith("per_second")].groupby("constant")["elasticity"].mean()
    assert set(times.index) == {"fetch_latency_seconds", "layer_seconds", "disk_latency_seconds"}
    assert set(rates.index) == {"link_bytes_per_second", "device_bytes_per_second", "disk_bytes_per_second"}
    assert (times >= 0).all()
    assert (rates <= 0).all()
    assert times.sum() - rates.sum() == pytest.approx(1, abs=0.02)  # doubling every time doubles the seconds
    assert frame.query("constant == 'overlap'")["factor"].tolist() == [0.999]  # overlap cannot exceed 1


def test_profiles_are_nominal_and_say_where_they_come_from():
    profiles = mc.Hardware.profiles()
    assert {"pcie3", "pcie4", "pcie5", "nvme", "sata"} <= set(profiles)
    for name, profile in profiles.items():
        assert profile.name == name
        assert profile.kind == "nominal"
        assert len(profile.derivation) > 40
        assert mc.Hardware.from_dict(profile.to_dict()) == profile
    rates = [profiles[name].link_bytes_per_second for name in ("pcie5", "pcie4", "pcie3", "nvme", "sata")]
    assert rates == sorted(rates, reverse=True)


def test_changed_constants_are_no_longer_nominal():
    assert mc.Hardware.profile("pcie4").replace(overlap=0.5).kind == "assumed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"link_bytes_per_second": 0}, "link_bytes_per_second=0 must be above 0"),
        ({"layer_seconds": -1.0}, "layer_seconds=-1.0 must be 0 or more"),
        ({"overlap": 1.5}, "overlap=1.5 must be in 0..1"),
        ({"kind": "guess"}, f"choose one of {', '.join(KINDS)}"),
        ({"device_bytes_per_second": 1e9}, "exactly one"),
        ({"expert_seconds": None}, "exactly one"),
        ({"host_ram_bytes": 8}, "needs both"),
        ({"disk_latency_seconds": 1.0}, "no effect"),
    ],
)
def test_impossible_hardware_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **changes)


def test_an_unknown_profile_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="pcie3, pcie4, pcie5, nvme, sata"):
        mc.estimate_seconds(make_log([[[HIT]]]), "pcie9", 8)
    with pytest.raises(ValueError, match="unknown hardware fields"):
        mc.Hardware.from_dict({"name": "x", "link": 3})


def test_what_has_no_seconds_is_refused(trace):
    with pytest.raises(ValueError, match="keep='log'"):
        mc.estimate_seconds(mc.simulate(trace, mc.Policy(), 16, keep="summary"), PLAIN)
    with pytest.raises(ValueError, match="diagnostic"):
        mc.estimate_seconds(mc.simulate(trace, mc.Policy(), 16, replay="sequential"), PLAIN)
    with pytest.raises(ValueError, match="give expert_bytes"):
        mc.estimate_seconds(make_log([[[HIT]]]), PLAIN)
    with pytest.raises(ValueError, match="cpu_seconds"):
        mc.estimate_seconds(make_log([[[CPU]]]), PLAIN, 8)
    with pytest.raises(ValueError, match="clock 0"):
        mc.estimate_seconds(make_log([[[HIT]]], arrivals=[(4, 5, 0, 1, -1, 0, LANDED)]), PLAIN, 8)
    with pytest.raises(ValueError, match="first_token=1 is outside"):
        mc.estimate_seconds(make_log([[[HIT]]]), PLAIN, 8).summary(1)
    with pytest.raises(ValueError, match="factors"):
        mc.cost_sensitivity(make_log([[[HIT]]]), PLAIN, 8, factors=(0, 1))


def test_this_machine_can_be_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware_probe, "WORKING_SET_BYTES", 4 * MIB)
    hardware = mc.measure_hardware(expert_bytes=256 * 1024, directory=tmp_path, file_bytes=4 * MIB, seconds_each=0.05, progress=False)
    assert hardware.kind == "measured"
    assert hardware.link_bytes_per_second > 0
    assert hardware.expert_seconds > 0
    assert hardware.name.startswith("this machine")
    assert not list(tmp_path.iterdir())  # the scratch file is gone
    memory = mc.measure_hardware(expert_bytes=256 * 1024, link="memory", seconds_each=0.05, progress=False)
    assert "copy" in memory.derivation
    with pytest.raises(ValueError, match="disk, memory"):
        mc.measure_hardware(link="usb")
