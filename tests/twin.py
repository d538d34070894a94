"""The plain twin of the kernel: one layer's cache with sets, dicts and sorting, short enough to be checked by eye.

It imports nothing from the package. A policy comes as a plain dictionary of names and numbers. Where the kernel keeps keys, the twin
sorts; where the kernel lets new calls grow, the twin lets old ones decay.
"""

import math

HIT, FETCHED, FORCED, SUBSTITUTED, DROPPED, LOW_PRECISION, CPU = range(7)
LANDED, ALREADY_RESIDENT, NO_VICTIM = range(3)
ADMISSION, PREFETCH = range(2)
NEVER = 2**50
MODULUS = 2**31 - 1


class TwinLayer:
    """One layer: `step` decides one token and appends to `rows` and `arrivals`."""

    def __init__(self, policy, num_experts, num_slots, residents, layer=0, buddies=None):
        self.policy, self.layer, self.buddies = policy, layer, buddies
        self.num_experts, self.num_slots = num_experts, num_slots
        self.initial = list(residents)
        self.clock = -1
        self.rows, self.arrivals = [], []
        self.prefetched = self.useful = self.wasted = self.not_recorded = 0
        self.reset()

    def reset(self, first_use=None):
        experts = range(self.num_experts)
        self.residents = set(self.initial)
        self.protected, self.untried = set(), set()
        self.score = dict.fromkeys(experts, 0.0)
        self.frequency = dict.fromkeys(experts, (0.0, 0))
        self.scored_at = dict.fromkeys(experts, 0)
        self.last_call = dict.fromkeys(experts, -1)
        self.inserted_at = dict.fromkeys(experts, -1)
        self.account = dict.fromkeys(experts, 0.0)
        self.next_use = dict.fromkeys(experts, NEVER) if first_use is None else {e: int(first_use[e]) for e in experts}
        self.under_way = []  # (asked, expert), in booking order

    # -- eviction -----------------------------------------------------------------------------------------------------------

    def current_score(self, expert):
        eviction, score = self.policy["eviction"], self.score[expert]
        if eviction == "decayed_count":
            return self.decayed(score, self.scored_at[expert])
        if eviction == "lfru":
            return score / (self.clock - self.last_call[expert] + 1)
        if eviction.startswith("belady"):
            return -self.next_use[expert]
        if eviction == "slru":
            return (expert in self.protected, score)
        return score

    def decayed(self, value, since):
        return value * 0.5 ** ((self.clock - since) / self.policy["half_life"])

    def age_order(self, expert):
        return (self.current_score(expert), self.last_call[expert], expert)

    def call(self, expert, next_use=0):
        eviction = self.policy["eviction"]
        if eviction == "lru":
            self.score[expert] = self.clock + 1
        elif eviction in ("plain_count", "plain_count_forget", "lfru"):
            self.score[expert] += 1
        elif eviction == "decayed_count":
            self.score[expert] = self.current_score(expert) + 1
            self.scored_at[expert] = self.clock
        elif eviction.startswith("belady"):
            self.next_use[expert] = next_use
        elif eviction == "slru" and expert in self.residents and self.inserted_at[expert] != self.clock:
            self.promote(expert)
        self.last_call[expert] = self.clock
        if expert in self.untried:
            self.untried.remove(expert)
            self.useful += 1

    def promote(self, expert):
        self.protected.add(expert)
        self.score[expert] = self.clock + 1
        self.last_call[expert] = self.clock
        if len(self.protected) > max(1, self.num_slots * 8 // 10):
            oldest = min(self.protected, key=self.age_order)
            self.protected.remove(oldest)
            self.score[oldest] = self.clock + 1

    def victim(self, pinned, newcomer):
        """Who would leave: -1 for a free slot, None when nobody may leave."""
        if len(self.residents) < self.num_slots:
            return -1
        candidates = self.residents - pinned
        if candidates and self.policy["eviction"] == "random":
            return sorted(candidates)[self.random_number(newcomer) % len(candidates)]
        return min(candidates, key=self.age_order) if candidates else None

    def insert(self, expert, victim, is_prefetch=False):
        if victim >= 0:
            self.residents.remove(victim)
            self.protected.discard(victim)
            if self.policy["eviction"] == "plain_count_forget":
                self.score[victim] = 0
            if victim in self.untried:
                self.untried.remove(victim)
                self.wasted += 1
        self.residents.add(expert)
        self.account[expert] = 0.0
        self.inserted_at[expert] = self.clock
        if self.policy["eviction"] in ("fifo", "slru") or (self.policy["eviction"] == "lru" and is_prefetch):
            self.score[expert] = self.clock + 1

    # -- one step -----------------------------------------------------------------------------------------------------------

    def step(self, ids, weights, scores=None, is_exact=False, predicted=(), next_use=None):
        self.clock += 1
        ids = list(ids)
        if self.policy["account_half_life"]:
            factor = 2.0 ** (-1.0 / self.policy["account_half_life"])
            self.account = {e: value * factor for e, value in self.account.items()}
        self.land(ids, predicted)
        self.pinned = {e for e in ids if e in self.residents}
        outcome = [HIT if e in self.residents else None for e in ids]
        computed, evicted = list(ids), [-1] * len(ids)
        misses = [rank for rank, what in enumerate(outcome) if what is None]
        waits = misses if is_exact else self.waits(misses, ids, weights, scores)
        for rank in misses:
            if rank in waits:
                evicted[rank], outcome[rank] = self.fetch(ids[rank], evicted, outcome, next_use and next_use[rank]), FETCHED
        stand_ins = self.stand_ins(ids, scores)
        for rank in misses:
            if outcome[rank] is not None:
                continue
            what, computed[rank] = self.fall_back(rank, ids[rank], stand_ins, scores)
            if what == FORCED:
                evicted[rank] = self.fetch(ids[rank], evicted, outcome, next_use and next_use[rank])
                stand_ins = [e for e in stand_ins if e != evicted[rank]]
            outcome[rank] = what
        self.score_calls(ids, outcome, computed, next_use)
        self.rows.append((outcome, computed, evicted, self.add_mass(ids, weights, outcome)))

    def land(self, ids, predicted):
        landed = set()
        while self.under_way and self.under_way[0][0] + self.policy["admission_delay"] <= self.clock:
            asked, expert = self.under_way.pop(0)
            self.arrive(ids, asked, expert, ADMISSION, landed)
        num_asked = 0
        for expert in predicted:
            if expert >= 0 and expert not in self.residents and num_asked < self.policy["max_prefetches"]:
                num_asked += 1
                self.arrive(ids, self.clock, expert, PREFETCH, landed)

    def arrive(self, ids, asked, expert, kind, landed):
        victim, reason = -2, ALREADY_RESIDENT
        if expert not in self.residents:
            victim = self.victim({e for e in ids if e in self.residents} | landed, expert)
            reason = NO_VICTIM if victim is None else LANDED
            if victim is None:
                victim = -2
            else:
                self.insert(expert, victim, kind == PREFETCH)
                landed.add(expert)
                if kind == PREFETCH:
                    self.untried.add(expert)
                    self.prefetched += 1
        self.arrivals.append((asked, self.clock, self.layer, expert, victim, kind, reason))

    def fetch(self, expert, evicted, outcome, next_use):
        """Who left; -1 for a free slot, -2 when the newcomer is not inserted."""
        victim = self.victim(self.pinned, expert)
        policy = self.policy
        is_refused = False
        if victim >= 0 and policy["insertion"] == "cap":
            inserted = sum(o in (FETCHED, FORCED) and e != -2 for o, e in zip(outcome, evicted, strict=True))
            is_refused = inserted >= policy["insertion_cap"]
        if victim >= 0 and policy["insertion"] == "tinylfu":
            is_refused = self.decayed(*self.frequency[expert]) + 1 <= self.decayed(*self.frequency[victim])
        if victim >= 0 and policy["eviction"] == "belady_bypass":
            is_refused = is_refused or next_use >= self.next_use[victim]
        if is_refused or policy["eviction"] == "static":
            return -2
        self.insert(expert, victim)
        self.pinned.add(expert)
        return victim

    # -- miss rules ---------------------------------------------------------------------------------------------------------

    def waits(self, misses, ids, weights, scores):
        rule, always = self.policy["miss_rule"], self.policy["wait_ranks"]
        others = [rank for rank in misses if rank not in always]
        if rule == "protect":
            scale = 1 / self.policy["top_k"] if self.policy["threshold_unit"] == "uniform" else 1.0
            left = [rank for rank in others if float(weights[rank]) < float(self.policy["gate_threshold"]) * scale]
        elif rule.endswith("budget"):
            left = self.within_budget(others, weights, 2 if rule == "squared_budget" else 1)
        else:
            left = self.paired_by_score(others, ids, scores)
        return [rank for rank in misses if rank not in left]

    def within_budget(self, others, weights, power):
        left, spent = [], 0.0
        for rank in reversed(others):
            spent += float(weights[rank]) ** power
            if spent > self.policy["budget"] or self.policy["budget"] == 0:
                break
            left.append(rank)
        return left

    def paired_by_score(self, others, ids, scores):
        value = [float(score) for score in scores]
        by_score = sorted(range(self.num_experts), key=lambda e: (-value[e], e))
        stand_ins = [e for e in by_score if e in self.residents and e not in ids and value[e] > -math.inf]
        chosen_from = [v for v in value if v > -math.inf]
        worst_first = sorted(others, key=lambda rank: -by_score.index(ids[rank]))
        outside = [e for e in by_score if e not in ids]
        left = []
        for rank, stand_in in zip(worst_first, stand_ins, strict=False):
            if self.policy["miss_rule"] == "cache_prior":
                is_good = value[stand_in] + self.policy["bonus"] * (max(chosen_from) - min(chosen_from)) > value[ids[rank]]
            else:
                is_good = len(ids) + outside.index(stand_in) < self.policy["best_ranks"]
            if not is_good:
                break
            left.append(rank)
        return left

    # -- fallbacks ----------------------------------------------------------------------------------------------------------

    def stand_ins(self, ids, scores):
        outside = sorted(self.residents - set(ids))
        if self.policy["fallback"] == "substitute" and scores is not None:
            outside = [e for e in outside if float(scores[e]) > -math.inf]
            outside.sort(key=lambda e: -float(scores[e]))  # stable: the lower id first among equals
        return outside

    def fall_back(self, rank, expert, stand_ins, scores):
        """(outcome, who computes); FORCED when nobody can."""
        fallback = self.policy["fallback"]
        if fallback == "drop":
            return DROPPED, -1
        if fallback == "low_precision":
            return LOW_PRECISION, expert
        if fallback == "cpu":
            return CPU, expert
        chosen = None
        if fallback == "buddy":
            chosen = next((int(b) for b in self.buddies[expert] if b in stand_ins), None)
        elif stand_ins:
            chosen = stand_ins[0] if fallback == "substitute" else stand_ins[self.random_number(rank) % len(stand_ins)]
        if chosen is None:
            return FORCED, expert
        stand_ins.remove(chosen)
        self.pinned.add(chosen)
        return SUBSTITUTED, chosen

    def random_number(self, which):
        number = self.policy["seed"] % MODULUS
        for value in (self.layer, self.clock, which, 1):
            number = ((number ^ (number >> 15)) * 48271 + value + 1) % MODULUS
            number = ((number ^ (number >> 13)) * 69621) % MODULUS
        return number

    # -- after the step -----------------------------------------------------------------------------------------------------

    def score_calls(self, ids, outcome, computed, next_use):
        for rank, expert in enumerate(ids):
            if outcome[rank] <= FORCED or self.policy["counted_calls"] == "all":
                self.call(expert, 0 if next_use is None else next_use[rank])
                if self.policy["insertion"] == "tinylfu":
                    self.frequency[expert] = (self.decayed(*self.frequency[expert]) + 1, self.clock)
            if outcome[rank] == SUBSTITUTED and self.policy["stand_ins_count"]:
                self.call(computed[rank])

    def add_mass(self, ids, weights, outcome):
        mass, num_booked = 0.0, 0
        in_flight, a_step = (math.inf if self.policy[n] is None else self.policy[n] for n in ("max_in_flight", "max_bookings"))
        for rank, expert in enumerate(ids):
            if outcome[rank] <= FORCED:
                continue
            if outcome[rank] in (SUBSTITUTED, DROPPED):
                mass += float(weights[rank])
            if self.policy["admission"] == "background":
                self.account[expert] += float(weights[rank])
                is_under_way = any(expert == other for _, other in self.under_way)
                is_full = len(self.under_way) >= in_flight or num_booked >= a_step
                if self.account[expert] >= self.policy["mass_threshold"] and not is_under_way and not is_full:
                    self.under_way.append((self.clock, expert))
                    num_booked += 1
        return mass
