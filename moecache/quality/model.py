"""The loss of a policy estimated without running the model: ESTIMATED, from what was substituted.

A model is fitted once to policies that the emulator ran, one row a (policy, document): how much they lost, and what they substituted by
layer and rank group (`moecache.substituted_calls`). What is substituted can be read off router scores and a decision log alone, so the
simulator can then say what a policy that nobody ran would lose: `simulate(trace, policy, num_slots, quality=model)`.

An estimate has an interval of two parts. The fitted documents are a sample: whole clusters of them are drawn and the fit repeated. And the
formula is not the truth: each draw is off by what the fit was off by, for a family of policies that it had not seen, on documents
that it had not seen.

The model knows one language model, one fallback and one weight rule, and refuses others: a random stand-in or a dropped call makes errors
of another kind. It does not know what a stand-in's output does to later layers' routers: a recorded trace holds the routing of the
exact model, and an estimate from it speaks of that routing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd

from moecache.kernel import Fallback
from moecache.policy import Policy, WeightRule
from moecache.policy.checks import parse_enum
from moecache.quality.draws import CLEAR, draw, error_of_families_left_out, misfits, observed
from moecache.quality.fit import FORMS, Array, Fitted, fit_many, predict_nats
from moecache.quality.sums import PolicySums, policy_sums
from moecache.substituted_calls import describe_substituted
from moecache.trace import DecisionLog, ModelShape, RouterTrace

ESTIMATED = "estimated"
FEWEST_POLICIES = 4
FAR = 1.5  # an estimate above the largest fitted loss by this factor is extrapolated
LARGEST_NATS = 700.0  # whose exponential is still a number


@dataclass(frozen=True)
class QualityEstimate:
    """What a policy is estimated to lose.

    Attributes
    ----------
    loss_nats : mean difference of token losses against the exact model.
    increase, low, high : perplexity increase as a fraction, and its interval.
    confidence : of the interval.
    is_extrapolated : whether the estimate lies far above every loss that the model was fitted to.
    kind : always "estimated".
    """

    loss_nats: float
    increase: float
    low: float
    high: float
    confidence: float
    is_extrapolated: bool
    kind: str = ESTIMATED

    def summary(self) -> dict[str, Any]:
        """As `Run.summary` shows it."""
        return {
            "estimated_increase": self.increase,
            "estimated_increase_low": self.low,
            "estimated_increase_high": self.high,
            "quality_kind": self.kind,
            "is_extrapolated": self.is_extrapolated,
        }


@dataclass(frozen=True, eq=False)
class QualityModel:
    """A fitted relation between what is substituted and what is lost.

    Attributes
    ----------
    shape, model_name : of the language model that it speaks of.
    fallback, weight_rule : of the policies that it was fitted to.
    form : a key of `moecache.quality.fit.FORMS`.
    fitted : the parameters, one fit.
    draws : the parameters of B bootstrap fits.
    misfits : [B] log of (loss / estimate) of policies and documents that were not fitted.
    confidence : of intervals.
    largest_loss_nats : of the fitted policies.
    left_out : labels of policies whose loss was not a standard error above zero.
    errors : for each form, the root mean square of log (loss / estimate) of families that were left out.
    """

    shape: ModelShape
    model_name: str
    fallback: Fallback
    weight_rule: WeightRule
    form: str
    fitted: Fitted
    draws: Fitted
    misfits: np.ndarray
    confidence: float
    largest_loss_nats: float
    left_out: tuple[str, ...]
    errors: dict[str, float]

    def __repr__(self) -> str:
        factor = np.exp(self.errors[self.form])
        return f"QualityModel({self.model_name or self.shape}, {self.form!r}, off by a factor of {factor:.2f} on unseen families)"

    @classmethod
    def fit(
        cls,
        frame: pd.DataFrame,
        shape: ModelShape,
        *,
        model_name: str = "",
        form: str | None = None,
        forms: Sequence[str] = tuple(FORMS)[1:],
        fallback: Fallback | str = Fallback.SUBSTITUTE,
        weight_rule: WeightRule | str = WeightRule.OWN,
        confidence: float = 0.9,
        num_draws: int = 500,
        seed: int = 0,
    ) -> QualityModel:
        """Fit to emulated policies.

        Parameters
        ----------
        frame : DataFrame
            One row per (policy, document), the same documents for each: ``policy``, ``document``, ``num_tokens``,
            ``mean_difference_nats``, ``substituted_mass``, ``squared_l{l}_{g}`` and ``log_age_l{l}_{g}``; where they are there,
            ``cluster`` (drawn together) and ``family`` (left out together). `moecache.quality_rows.quality_rows` makes them of a run.
        shape : ModelShape
            Of the language model.
        model_name : str
            Its name; traces of models with another name are refused. Default: ``frame["model"]``.
        form : str, optional
            One of `FORMS`; None chooses among `forms` the one that predicts families that were left out best.
        forms : sequence of str
            Candidates, simplest first.
        fallback, weight_rule
            Of all policies in the frame.
        confidence : float
            Of the intervals of estimates.
        num_draws : int
            Bootstrap draws of clusters.
        seed : int

        Returns
        -------
        QualityModel

        Raises
        ------
        ValueError
            If columns are missing, a policy lacks a document, fewer than four policies have a loss a standard error above zero, or there
            are fewer than three clusters.
        """
        sums = policy_sums(frame, shape.num_layers)
        losses = sums.mean_losses(np.ones((1, sums.num_clusters)))[0]
        is_clear = losses > CLEAR * sums.standard_errors()
        if is_clear.sum() < FEWEST_POLICIES:
            raise ValueError(
                f"{int(is_clear.sum())} of {len(losses)} policies have a loss a standard error above zero: at least {FEWEST_POLICIES} are "
                "needed; score more documents, or policies that substitute more"
            )
        kept = sums.of_policies(np.flatnonzero(is_clear))
        candidates = [_known(name) for name in ([form] if form is not None else forms)]
        errors = {name: error_of_families_left_out(kept, name, shape.num_layers) for name in candidates}
        chosen = min(errors, key=lambda name: errors[name])
        counts = draw(kept.num_clusters, num_draws, seed)
        return cls(
            shape=shape,
            model_name=model_name or _one_name(frame),
            fallback=parse_enum(Fallback, fallback, "fallback"),
            weight_rule=parse_enum(WeightRule, weight_rule, "weight_rule"),
            form=chosen,
            fitted=fit_many(observed(kept, np.ones((1, kept.num_clusters)), chosen), FORMS[chosen], shape.num_layers),
            draws=fit_many(observed(kept, counts, chosen), FORMS[chosen], shape.num_layers),
            misfits=misfits(kept, counts, chosen, shape.num_layers, seed),
            confidence=confidence,
            largest_loss_nats=float(losses[is_clear].max()),
            left_out=tuple(label for label, clear in zip(sums.policies, is_clear, strict=True) if not clear),
            errors=errors,
        )

    def check(self, policy: Policy, shape: ModelShape, model_name: str = "") -> None:
        """Refuse what the model was not fitted to.

        Raises
        ------
        ValueError
            For another fallback, weight rule or language model.
        """
        for name, fitted in (("fallback", self.fallback), ("weight_rule", self.weight_rule)):
            if not policy.waits_for_every_miss and (got := getattr(policy, name)) != fitted:
                raise ValueError(
                    f"{name}={_word(got)!r} of policy {policy.label!r}: this quality model was fitted to {_word(fitted)!r} and says "
                    "nothing of others; emulate such policies and fit another model"
                )
        for name in ("num_layers", "num_experts", "top_k", "scoring", "norm_topk_prob"):
            if (got := getattr(shape, name)) != getattr(self.shape, name):
                raise ValueError(f"{name}={got}, but this quality model was fitted to a model with {getattr(self.shape, name)}")
        if model_name and self.model_name and PurePath(model_name).name != PurePath(self.model_name).name:
            raise ValueError(f"the trace is of model {model_name!r}, but this quality model was fitted to {self.model_name!r}; fit another")

    def loss_nats(self, amounts: Array, log_ages: Array) -> Array:
        """Estimated loss [...] of amounts and log2 ages [..., C] (C = 1 and the mass for form "mass")."""
        one = Fitted(*(part[0] for part in self.fitted))
        return predict_nats(one, np.asarray(amounts)[..., None, :], np.asarray(log_ages)[..., None, :])[..., 0]

    def estimate(self, amounts: Array, log_ages: Array) -> QualityEstimate:
        """Estimate with its interval, of amounts and log2 ages [C]."""
        point = float(self.loss_nats(amounts, log_ages))
        drawn = predict_nats(self.draws, amounts[None, None], log_ages[None, None])[:, 0] * np.exp(self.misfits)
        tail = (1 - self.confidence) / 2
        low, high = np.expm1(np.minimum(np.quantile(drawn, [tail, 1 - tail]), LARGEST_NATS))
        increase = float(np.expm1(min(point, LARGEST_NATS)))
        return QualityEstimate(point, increase, float(low), float(high), self.confidence, point > FAR * self.largest_loss_nats)

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Estimate the policies of a frame with the columns that `fit` needs, the losses apart.

        Returns
        -------
        DataFrame
            ``policy``, ``estimated_nats`` and the columns of `QualityEstimate.summary`, one row a policy.
        """
        sums = policy_sums(frame, self.shape.num_layers, with_losses=False)
        amounts, log_ages = sums.features(np.ones((1, sums.num_clusters)), FORMS[self.form].mass)
        found = [self.estimate(amounts[0, p], log_ages[0, p]) for p in range(len(sums.policies))]
        rows = [{"policy": label, "estimated_nats": e.loss_nats, **e.summary()} for label, e in zip(sums.policies, found, strict=True)]
        return pd.DataFrame(rows)

    def estimate_windows(self, trace: RouterTrace, log: DecisionLog, warmup_tokens: int) -> dict[int, QualityEstimate]:
        """Estimates of all tokens and of those from `warmup_tokens` on, by first token."""
        window = (np.arange(trace.num_tokens) >= warmup_tokens).astype(np.int64) - (warmup_tokens == 0)
        described = describe_substituted(trace.topk_ids, trace.gate_weights, log.outcome, window)
        tokens = np.bincount(window).astype(np.float64)
        squared = (described["squared"] * tokens[:, None, None]).reshape(tokens.size, -1)
        masses = np.bincount(window, log.substituted_mass.mean(axis=1, dtype=np.float64)).astype(np.float64)
        aged = squared * described["log_age"].reshape(squared.shape)
        sums = PolicySums(("",), ("",), tokens, np.full((1, tokens.size), np.nan), masses[None], squared[None], aged[None])
        starts = (0, warmup_tokens)[: tokens.size]
        windows = np.triu(np.ones((tokens.size, tokens.size)))  # the first holds both parts, the second only the warm one
        amounts, log_ages = sums.features(windows, FORMS[self.form].mass)
        return {first: self.estimate(amounts[i, 0], log_ages[i, 0]) for i, first in enumerate(starts)}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives the same model."""
        names = ("model_name", "form", "confidence", "largest_loss_nats", "errors")
        parts = {part: getattr(self, part)._asdict() for part in ("fitted", "draws")}
        return {
            **{name: getattr(self, name) for name in names},
            "shape": asdict(self.shape),
            "fallback": self.fallback.name.lower(),
            "weight_rule": str(self.weight_rule),
            "left_out": list(self.left_out),
            "misfits": self.misfits.tolist(),
            **{part: {name: values.tolist() for name, values in arrays.items()} for part, arrays in parts.items()},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QualityModel:
        """A model from `to_dict`."""
        given: dict[str, Any] = dict(values)
        for part in ("fitted", "draws"):
            given[part] = Fitted(**{k: np.array(v, np.float64) for k, v in values[part].items()})
        given |= {"shape": ModelShape(**values["shape"]), "misfits": np.array(values["misfits"], np.float64)}
        given |= {"fallback": Fallback[values["fallback"].upper()], "weight_rule": WeightRule(values["weight_rule"])}
        given["left_out"] = tuple(values["left_out"])
        return cls(**given)

    def save(self, path: str | Path) -> None:
        """Write as JSON, under a temporary name first."""
        temporary = Path(f"{path}.part")
        temporary.write_text(json.dumps(self.to_dict()), encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | Path) -> QualityModel:
        """Read what `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def _known(form: str) -> str:
    if form not in FORMS:
        raise ValueError(f"form={form!r} is unknown; choose one of {', '.join(FORMS)}")
    return form


def _word(value: Any) -> str:
    return value.name.lower() if isinstance(value, Fallback) else str(value)


def _one_name(frame: pd.DataFrame) -> str:
    names = sorted(set(frame["model"])) if "model" in frame else [""]
    if len(names) > 1:
        raise ValueError(f"the frame mixes the models {names}; a quality model speaks of one")
    return str(names[0])
