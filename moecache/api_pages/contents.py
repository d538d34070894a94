"""Which public names stand on which page of the reference, and in which order.

A page has parts; a part begins with the docstring of the module that teaches its idea and goes on with its names. Names of the package
itself (`moecache.__all__`) are given without a module, others with the module that a user imports them from.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import moecache


@dataclass(frozen=True)
class Part:
    """A heading, the module whose docstring explains what follows, and the names."""

    heading: str
    module: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class ReferencePage:
    """A page of the reference: its file's name, title, one sentence, and parts."""

    file: str
    title: str
    purpose: str
    parts: tuple[Part, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names in order."""
        return tuple(name for part in self.parts for name in part.names)


def all_of(module: str) -> tuple[str, ...]:
    """The names that a module exports, with the module before each."""
    return tuple(f"{module}.{name}" for name in import_module(f"moecache.{module}").__all__)


def find(name: str) -> Any:
    """The object of a name in `PAGES`."""
    module, _, own = name.rpartition(".")
    return getattr(import_module(f"moecache.{module}") if module else moecache, own)


def full_name(name: str) -> str:
    """The name as it is imported."""
    return f"moecache.{name}"


_POLICIES = ReferencePage(
    "policies", "Policies", "What waits, what stands in, who is evicted and who is admitted.",
    (
        Part("A policy", "policy", ("Policy", "threshold", "first_j", "only_rank_substituted", "mass_budget", "cache_prior", "max_rank")),
        Part("Presets", "", ("PRESETS", "FETCH_EVERY_MISS", "GATE_015", "FIRST_CHOICE", "SUBSTITUTE_EVERY_MISS", "QUALITY_FIRST",
                             "SPEED_FIRST")),
        Part("What a policy's fields may hold", "", ("MissRule", "ThresholdUnit", "Fallback", "WeightRule", "Eviction", "Insertion",
                                                     "Admission", "CountedCalls")),
    ),
)  # fmt: skip
_TRACES = ReferencePage(
    "traces", "Traces", "What routers said: record it, read it, make it up, say what it can tell.",
    (
        Part("A trace", "trace", ("RouterTrace", "ModelShape", "DecisionLog", "TraceError")),
        Part("Recorded", "record", ("record",)),
        Part("Read from a file", "trace.importers", ("load_trace",)),
        Part("Made up", "synthetic", ("synthetic_trace",)),
        Part("What a trace can tell", "trace_report", ("TraceReport",)),
        Part("Tables from a calibration text", "calibrate", ("calibrate.most_called", "calibrate.buddy_table",
                                                             "calibrate.predict_previous_token")),
    ),
)  # fmt: skip
_DECISIONS = ReferencePage(
    "decisions", "Decisions", "The slots under one policy, and what a log of decisions says.",
    (
        Part("The cache", "cache", ("ExpertCache", "CapacityError")),
        Part("What became of calls and copies", "", ("Outcome", "ArrivalKind", "Landing", "Count", "KERNEL_VERSION")),
        Part("A run", "run", ("Run",)),
    ),
)  # fmt: skip
_SIMULATION = ReferencePage(
    "simulation", "Simulation and seconds", "Replay traces under policies, and estimate the time of what was decided.",
    (
        Part("Replay", "simulate", ("simulate",)),
        Part("Many replays", "sweep", ("sweep", "pareto_front")),
        Part("Hardware", "hardware", ("Hardware", "measure_hardware")),
        Part("Seconds", "cost", ("estimate_seconds", "with_seconds", "TimeEstimate", "cost_sensitivity")),
    ),
)  # fmt: skip
_EMULATION = ReferencePage(
    "emulation", "Emulation and quality", "What the model computes under a policy, and what that costs in quality.",
    (
        Part("Whole documents", "emulate", ("emulate", "emulate_policies")),
        Part("Generation", "generate", ("emulated_generation", "emulated_generations", "Generation")),
        Part("Interventions", "intervene", ("intervene", "inject")),
        Part("The exact model", "score", ("score.score", "perplexity_increase")),
        Part("Copies in few bits", "low_bit", ("low_bit.low_bit_copies", "low_bit.low_bit_expert_bytes", "low_bit.quantised_model",
                                               "low_bit.LowBitCopies")),
        Part("Waiting for what matters", "contribution", ("contribution.contribution_oracle",)),
        Part("The loss estimated from a trace", "quality.model", ("QualityModel", "QualityEstimate", "quality_rows")),
        Part("Models that are understood", "families", ("families.model_shape",)),
    ),
)  # fmt: skip
_RUNTIME = ReferencePage(
    "runtime", "Runtime", "Open a model that is bigger than its memory, and say beforehand what fits.",
    (
        Part("Opening a model", "runtime.offload", ("offload",)),
        Part("The engine", "runtime.engine", ("runtime.engine.Runtime", "runtime.engine.BusyError")),
        Part("Planning", "runtime.plan", ("plan", "runtime.plan.Plan")),
        Part("Where experts lie", "stores.store", ("stores.store.open_store", "stores.blocks.Store", "stores.blocks.StoreError")),
        Part("Packing", "stores.pack", ("stores.pack.pack",)),
        Part("Models of real size", "widen", ("widen.widen",)),
    ),
)  # fmt: skip
_STATISTICS = ReferencePage(
    "statistics", "Statistics", "Paired losses: effects, intervals, tests, and what could not have been seen.",
    (Part("moecache.stats", "stats", all_of("stats")),),
)  # fmt: skip
_STUDY = ReferencePage(
    "study", "Results and reference models", "What chapters use: stored answers, and the models that they read.",
    (
        Part("Stored results", "results", ("results.load_or_run", "results.Result", "results.MissingResult")),
        Part("Reference models", "reference", all_of("reference")),
    ),
)  # fmt: skip
_FIGURES = ReferencePage(
    "figures", "Figures", "Tidy frames drawn in one style.",
    (Part("moecache.figures", "figures", all_of("figures")),),
)  # fmt: skip

PAGES = (_POLICIES, _TRACES, _DECISIONS, _SIMULATION, _EMULATION, _RUNTIME, _STATISTICS, _STUDY, _FIGURES)
