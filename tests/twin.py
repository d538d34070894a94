"""The plain twin of the kernel: one layer's cache with sets, dicts and sorting, short enough to be checked by eye.

It imports nothing from the package. A policy comes as a plain dictionary of names and numbers. Where the kernel keeps keys, the twin
sorts; where the kernel lets new calls grow, the twin lets old ones decay.
"""

import math

HIT, FETCHED, FORCED, SUBSTITUTED, DROPPED = range(5)
LANDED, ALREADY_RESIDENT, NO_VICTIM = range(3)


class TwinLayer:
    """One layer: `step` decides one token and appends to `rows` and `arrivals`."""

    def __init__(self, policy, num_experts, num_slots, residents, layer=0):
        self.policy, self.layer = policy, layer
        self.num_experts, self.num_slots = num_experts, num_slots
        self.initial = list(residents)
        self.clock = -1
        self.rows, self.arrivals = [], []
        self.reset()

    def reset(self):
        self.residents = set(self.initial)
        self.score = dict.fromkeys(range(self.num_experts), 0.0)
        self.scored_at = dict.fromkeys(range(self.num_experts), 0)
        self.last_call = dict.fromkeys(range(self.num_experts), -1)
        self.account = dict.fromkeys(range(self.num_experts), 0.0)
        self.under_way = []  # (asked, expert), in booking order

    # -- eviction -----------------------------------------------------------------------------------------------------------

    def decayed(self, expert):
        if self.policy["eviction"] != "decayed_count":
            return self.score[expert]
        return self.score[expert] * 0.5 ** ((self.clock - self.scored_at[expert]) / self.policy["half_life"])

    def call(self, expert):
        eviction = self.policy["eviction"]
        if eviction == "lru":
            self.score[expert] = self.clock + 1
        elif eviction in ("plain_count", "plain_count_forget"):
            self.score[expert] += 1
        elif eviction == "decayed_count":
            self.score[expert] = self.decayed(expert) + 1
            self.scored_at[expert] = self.clock
        self.last_call[expert] = self.clock

    def insert(self, expert, pinned):
        """Make `expert` resident; who left, -1 for nobody; None when nobody may leave."""
        evicted = -1
        if len(self.residents) == self.num_slots:
            candidates = self.residents - pinned
            if not candidates:
                return None
            evicted = min(candidates, key=lambda e: (self.decayed(e), self.last_call[e], e))
            self.residents.remove(evicted)
            if self.policy["eviction"] == "plain_count_forget":
                self.score[evicted] = 0
        self.residents.add(expert)
        self.account[expert] = 0.0
        if self.policy["eviction"] == "fifo":
            self.score[expert] = self.clock + 1
        return evicted

    # -- one step -----------------------------------------------------------------------------------------------------------

    def step(self, ids, weights, scores=None, is_exact=False):
        self.clock += 1
        ids = list(ids)
        self.land(ids)
        pinned = {e for e in ids if e in self.residents}
        outcome = [HIT if e in self.residents else None for e in ids]
        computed, evicted = list(ids), [-1] * len(ids)
        misses = [rank for rank, what in enumerate(outcome) if what is None]
        for rank in misses:
            if is_exact or self.is_waited_for(rank, weights[rank]):
                evicted[rank], outcome[rank] = self.insert(ids[rank], pinned), FETCHED
                pinned.add(ids[rank])
        stand_ins = self.stand_ins(ids, scores) if self.policy["fallback"] != "drop" else []
        for rank in misses:
            if outcome[rank] is not None:
                continue
            if self.policy["fallback"] == "drop":
                outcome[rank], computed[rank] = DROPPED, -1
            elif stand_ins:
                chosen = 0 if self.policy["fallback"] == "substitute" else self.random_number(rank) % len(stand_ins)
                computed[rank], outcome[rank] = stand_ins.pop(chosen), SUBSTITUTED
                pinned.add(computed[rank])
            else:
                evicted[rank], outcome[rank] = self.insert(ids[rank], pinned), FORCED
                pinned.add(ids[rank])
        self.score_calls(ids, outcome, computed)
        mass = self.add_mass(ids, weights, outcome)
        self.rows.append((outcome, computed, evicted, mass))

    def land(self, ids):
        landed = set()
        while self.under_way and self.under_way[0][0] + self.policy["admission_delay"] <= self.clock:
            asked, expert = self.under_way.pop(0)
            victim, reason = -2, ALREADY_RESIDENT
            if expert not in self.residents:
                called = {e for e in ids if e in self.residents}
                victim = self.insert(expert, called | landed)
                reason = LANDED
                landed.add(expert)
                if victim is None:
                    victim, reason = -2, NO_VICTIM
                    landed.remove(expert)
            self.arrivals.append((asked, self.clock, self.layer, expert, victim, 0, reason))

    def is_waited_for(self, rank, weight):
        scale = 1 / self.policy["top_k"] if self.policy["threshold_unit"] == "uniform" else 1.0
        threshold = float(self.policy["gate_threshold"])
        return rank in self.policy["wait_ranks"] or float(weight) >= threshold * scale

    def stand_ins(self, ids, scores):
        outside = sorted(self.residents - set(ids))
        if self.policy["fallback"] == "substitute" and scores is not None:
            outside.sort(key=lambda e: -float(scores[e]))  # stable: the lower id first among equals
        return outside

    def random_number(self, rank):
        number = self.policy["seed"] % (2**31 - 1)
        for value in (self.layer, self.clock, rank, 1):
            number = ((number ^ (number >> 15)) * 48271 + value + 1) % (2**31 - 1)
            number = ((number ^ (number >> 13)) * 69621) % (2**31 - 1)
        return number

    def score_calls(self, ids, outcome, computed):
        for rank, expert in enumerate(ids):
            if outcome[rank] <= FORCED or self.policy["counted_calls"] == "all":
                self.call(expert)
            if outcome[rank] == SUBSTITUTED and self.policy["stand_ins_count"]:
                self.call(computed[rank])

    def add_mass(self, ids, weights, outcome):
        mass = 0.0
        for rank, expert in enumerate(ids):
            if outcome[rank] <= FORCED:
                continue
            mass += float(weights[rank])
            if self.policy["admission"] == "background":
                self.account[expert] += float(weights[rank])
                limit = math.inf if self.policy["max_in_flight"] is None else self.policy["max_in_flight"]
                is_under_way = any(expert == other for _, other in self.under_way)
                if self.account[expert] >= self.policy["mass_threshold"] and not is_under_way and len(self.under_way) < limit:
                    self.under_way.append((self.clock, expert))
        return mass
