"""moecache: which expert misses of a mixture-of-experts model are worth waiting for?

Routers call experts that are not resident. Each such miss can be waited for (exact, slow), or a resident expert can stand in (fast,
lossy). One compiled kernel decides, and every instrument carries out its decisions: the simulator replays recorded router scores, the
emulator changes a live model's routing, so that hit rates, losses and seconds speak of the same decisions.

Importing this package loads neither torch nor transformers; the names that need them load on first use.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from moecache.cache import CapacityError, ExpertCache
from moecache.cost import TimeEstimate, cost_sensitivity, estimate_seconds, with_seconds
from moecache.hardware import Hardware
from moecache.hardware_probe import measure_hardware
from moecache.kernel import KERNEL_VERSION, Admission, ArrivalKind, Count, Eviction, Fallback, Insertion, Landing, MissRule, Outcome
from moecache.metrics import perplexity_increase
from moecache.pareto import pareto_front
from moecache.policy import (
    FETCH_EVERY_MISS,
    FIRST_CHOICE,
    GATE_015,
    PRESETS,
    QUALITY_FIRST,
    SPEED_FIRST,
    SUBSTITUTE_EVERY_MISS,
    CountedCalls,
    Policy,
    ThresholdUnit,
    WeightRule,
    cache_prior,
    first_j,
    mass_budget,
    max_rank,
    only_rank_substituted,
    threshold,
)
from moecache.quality import QualityEstimate, QualityModel
from moecache.quality_rows import quality_rows
from moecache.run import Run
from moecache.simulate import simulate
from moecache.sweep import sweep
from moecache.synthetic import synthetic_trace
from moecache.trace import DecisionLog, ModelShape, RouterTrace, TraceError
from moecache.trace.importers import load_trace
from moecache.trace_report import TraceReport

if TYPE_CHECKING:
    from moecache.emulate import emulate, emulate_policies
    from moecache.generate import Generation, emulated_generation, emulated_generations
    from moecache.intervene import inject, intervene
    from moecache.record import record
    from moecache.runtime.offload import offload
    from moecache.runtime.plan import plan

__version__ = "0.1.0"

_NEEDS_TORCH = {
    "plan": "moecache.runtime.plan",
    "record": "moecache.record",
    "emulate": "moecache.emulate",
    "emulate_policies": "moecache.emulate",
    "Generation": "moecache.generate",
    "emulated_generation": "moecache.generate",
    "emulated_generations": "moecache.generate",
    "intervene": "moecache.intervene",
    "offload": "moecache.runtime.offload",
    "inject": "moecache.intervene",
}

__all__ = [
    "FETCH_EVERY_MISS",
    "FIRST_CHOICE",
    "GATE_015",
    "KERNEL_VERSION",
    "PRESETS",
    "QUALITY_FIRST",
    "SPEED_FIRST",
    "SUBSTITUTE_EVERY_MISS",
    "Admission",
    "ArrivalKind",
    "CapacityError",
    "Count",
    "CountedCalls",
    "DecisionLog",
    "Eviction",
    "ExpertCache",
    "Fallback",
    "Generation",
    "Hardware",
    "Insertion",
    "Landing",
    "MissRule",
    "ModelShape",
    "Outcome",
    "Policy",
    "QualityEstimate",
    "QualityModel",
    "RouterTrace",
    "Run",
    "ThresholdUnit",
    "TimeEstimate",
    "TraceError",
    "TraceReport",
    "WeightRule",
    "cache_prior",
    "cost_sensitivity",
    "emulate",
    "emulate_policies",
    "emulated_generation",
    "emulated_generations",
    "estimate_seconds",
    "first_j",
    "inject",
    "intervene",
    "load_trace",
    "mass_budget",
    "max_rank",
    "measure_hardware",
    "offload",
    "only_rank_substituted",
    "pareto_front",
    "perplexity_increase",
    "plan",
    "quality_rows",
    "record",
    "simulate",
    "sweep",
    "synthetic_trace",
    "threshold",
    "with_seconds",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'moecache' has no attribute {name!r}")


class _Package(ModuleType):
    """Keeps `moecache.record` a function: importing the submodule of that name would put the module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_namesake = name in _NEEDS_TORCH and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if is_namesake else value)


sys.modules[__name__].__class__ = _Package
