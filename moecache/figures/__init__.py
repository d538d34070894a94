"""Figures of the study: each takes a tidy frame and returns a matplotlib ``Figure``.

A figure belongs to nobody's global state: it is made without pyplot, so nothing stays open and nothing leaks
into the next one. All share one style, one colour for each family of policies and each eviction, and print in
their corner whether what they show was MEASURED, SIMULATED or ESTIMATED. Colours are told apart by
colour-blind readers, and no figure tells families apart by colour alone.

- ``forest``: what each policy costs, with intervals, beside what it substituted.
- ``increase_by_mass``: one point per policy, perplexity increase against substituted gate mass.
- ``miss_rule_frontier``, ``loss_by_rank``, ``loss_by_count_and_mass``: miss rules by how often they wait, and by what they substitute.
- ``loss_by_predictor``, ``fan``: what orders the policies' losses, and what smaller samples would have said.
- ``hit_rate_by_capacity``, ``gate_weight_by_rank``, ``expert_use``: what a router and a cache do.
- ``step_picture``: the slots before, the calls and the slots after one token at one layer.

This package does not know where its numbers come from, and it computes none beyond what drawing needs.
"""

from moecache.figures.frontier import loss_by_count_and_mass, loss_by_rank, miss_rule_frontier
from moecache.figures.mass import fan, loss_by_predictor
from moecache.figures.quality import forest, increase_by_mass
from moecache.figures.slots import CallView, StepView, slot_history
from moecache.figures.step import step_picture
from moecache.figures.style import EVICTION_STYLES, FAMILY_STYLES, KINDS
from moecache.figures.traces import expert_use, gate_weight_by_rank, hit_rate_by_capacity

__all__ = [
    "EVICTION_STYLES",
    "FAMILY_STYLES",
    "KINDS",
    "CallView",
    "StepView",
    "expert_use",
    "fan",
    "forest",
    "gate_weight_by_rank",
    "hit_rate_by_capacity",
    "increase_by_mass",
    "loss_by_count_and_mass",
    "loss_by_predictor",
    "loss_by_rank",
    "miss_rule_frontier",
    "slot_history",
    "step_picture",
]
