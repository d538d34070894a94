"""Losses estimated from what was substituted: known truths are found again, strangers are refused, and the simulator agrees."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import least_squares
from tiny_models import VOCABULARY, qwen3_next

import moecache as mc
from moecache.experiments import policy_documents
from moecache.quality.fit import FORMS, Observed, basis, fit_many
from moecache.quality.sums import cell_columns, policy_sums
from moecache.record import recording
from moecache.reference.held_out import Document

LAYERS, RANK_WEIGHTS, POWER, AGE_POWER = 2, np.array([8.0, 3.0, 1.0, 0.4]), 1.25, 1.0
SHAPE = mc.ModelShape(LAYERS, 32, 4)


def world(num_policies: int = 24, num_documents: int = 24, noise: float = 0.1, age_power: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Policies of four families whose losses follow the formula; the documents scatter around it."""
    rng = np.random.default_rng(seed)
    rows = []
    document_levels = np.exp(rng.normal(0, noise, num_documents))
    for i in range(num_policies):
        favourite = i % 4
        shares = np.where(np.arange(4) == favourite, 4.0, 1.0) * np.exp(rng.normal(0, 0.3, (LAYERS, 4)))
        amounts, log_ages = 0.02 * np.exp(rng.normal(0, 1.0)) * shares, rng.uniform(4, 11, (LAYERS, 4))
        loss = (RANK_WEIGHTS * amounts * np.exp(age_power * log_ages / 12)).sum() ** POWER
        for j in range(num_documents):
            cells = {
                f"squared_l{layer}_{g}": amounts[layer, k] for layer in range(LAYERS) for k, g in enumerate(("r0", "r1", "r2_3", "r4_up"))
            }
            cells |= {f"log_age_{c}": age for c, age in zip(cell_columns(LAYERS), log_ages.ravel(), strict=True)}
            measured = loss * document_levels[j] + loss * rng.normal(0, noise)
            rows.append({"policy": f"p{i}", "family": f"f{favourite}", "document": f"d{j}", "num_tokens": 100} | cells)
            rows[-1] |= {"mean_difference_nats": measured, "substituted_mass": amounts.sum()}
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def model() -> mc.QualityModel:
    return mc.QualityModel.fit(world(), SHAPE, num_draws=200)


def test_the_weights_of_ranks_and_the_power_are_found_again(model: mc.QualityModel) -> None:
    assert "ranks" in model.form
    assert model.left_out == ()
    assert model.fitted.powers[0] == pytest.approx(POWER, abs=0.1)
    weights = model.fitted.weights.reshape(LAYERS, 4).mean(axis=0)
    np.testing.assert_allclose(weights / weights[0], RANK_WEIGHTS / RANK_WEIGHTS[0], rtol=0.5)
    assert model.errors["squares"] > 2 * model.errors[model.form]


def test_policies_and_documents_that_were_not_fitted_lie_inside_their_intervals(model: mc.QualityModel) -> None:
    fresh = world(seed=5)
    found = model.predict(fresh).set_index("policy")
    measured = fresh.groupby("policy")["mean_difference_nats"].mean().map(np.expm1).loc[found.index]
    is_inside = (found["estimated_increase_low"] <= measured) & (measured <= found["estimated_increase_high"])
    assert is_inside.mean() >= 0.8
    assert found["estimated_increase"].corr(measured, method="spearman") > 0.95
    narrow = (found["estimated_increase_high"] / found["estimated_increase_low"]).median()
    assert 1.05 < narrow < 4.0


def test_the_age_of_calls_is_let_in_where_it_matters() -> None:
    told = mc.QualityModel.fit(world(num_policies=40, noise=0.03, age_power=AGE_POWER), SHAPE, num_draws=100)
    assert told.form.endswith("age")
    assert told.fitted.age_powers[0] == pytest.approx(AGE_POWER, abs=0.5)
    assert mc.QualityModel.fit(world(noise=0.03), SHAPE, num_draws=100, form="ranks and age").fitted.age_powers[0] == pytest.approx(
        0, abs=0.3
    )


@pytest.mark.parametrize("name", list(FORMS))
def test_many_fits_at_once_are_what_each_is_alone(name: str) -> None:
    """The slow twin: scipy's least squares of the same residuals, one draw at a time."""
    sums, form = policy_sums(world(num_policies=12, num_documents=6, age_power=0.5), LAYERS), FORMS[name]
    counts = np.random.default_rng(0).multinomial(6, np.full(6, 1 / 6), 3).astype(float)
    amounts, log_ages = sums.features(counts, form.mass)
    observed = Observed(np.log(sums.mean_losses(counts)), np.full((3, 12), 40.0), amounts, log_ages)
    fitted = fit_many(observed, form, LAYERS)
    effects, deviations = basis(form, LAYERS)
    prior = np.concatenate([deviations, [1.0 if form.age else 1e-6, 0.5]])
    for b in range(3):

        def residuals(parameters: np.ndarray, b: int = b) -> np.ndarray:
            weights = np.exp(effects @ parameters[:-2])
            total = (weights * amounts[b] * np.exp(parameters[-2] * log_ages[b] / 12)).sum(axis=1)
            return np.concatenate([np.sqrt(40.0) * (observed.log_losses[b] - np.exp(parameters[-1]) * np.log(total)), parameters / prior])

        slow = least_squares(residuals, np.zeros(len(prior)), x_scale=prior, xtol=1e-12, ftol=1e-12, gtol=1e-12, max_nfev=4000)
        assert np.exp(slow.x[-1]) == pytest.approx(fitted.powers[b], rel=1e-3)
        np.testing.assert_allclose(fitted.weights[b], np.exp(effects @ slow.x[:-2]), rtol=1e-2)


def test_what_cannot_be_fitted_is_said() -> None:
    frame = world(num_policies=8)
    with pytest.raises(ValueError, match=r"lacks .*squared_l2_r0"):
        mc.QualityModel.fit(frame, mc.ModelShape(3, 32, 4))
    with pytest.raises(ValueError, match="needs each once"):
        mc.QualityModel.fit(frame.iloc[1:], SHAPE)
    with pytest.raises(ValueError, match="3 of 8 policies have a loss a standard error above zero"):
        mc.QualityModel.fit(frame.assign(mean_difference_nats=np.where(frame["policy"] < "p5", 0.0, frame["mean_difference_nats"])), SHAPE)
    with pytest.raises(ValueError, match="at least 3"):
        mc.QualityModel.fit(frame.assign(cluster="one"), SHAPE)
    with pytest.raises(ValueError, match="choose one of mass"):
        mc.QualityModel.fit(frame, SHAPE, form="cubes")
    with pytest.raises(ValueError, match="mixes the models"):
        mc.QualityModel.fit(frame.assign(model=np.where(frame["policy"] == "p0", "a", "b")), SHAPE)


def test_a_policy_whose_loss_is_not_clear_of_zero_is_left_out_by_name() -> None:
    frame = world()
    rng = np.random.default_rng(0)
    frame.loc[frame["policy"] == "p3", "mean_difference_nats"] = rng.normal(0, 1, 24) - 0.2
    assert mc.QualityModel.fit(frame, SHAPE, num_draws=100).left_out == ("p3",)


def test_strangers_are_refused_by_name(model: mc.QualityModel) -> None:
    model.check(mc.SPEED_FIRST, SHAPE, "models/any")
    model.check(mc.Policy(fallback="substitute"), SHAPE)
    for changes, word in (({"fallback": "drop"}, "fallback='drop'"), ({"weight_rule": "inherit"}, "weight_rule='inherit'")):
        with pytest.raises(ValueError, match=word):
            model.check(mc.GATE_015.replace(**changes), SHAPE)
    with pytest.raises(ValueError, match="num_experts=64"):
        model.check(mc.GATE_015, mc.ModelShape(LAYERS, 64, 4))
    named = mc.QualityModel.fit(world(), SHAPE, model_name="models/a", form="ranks", num_draws=100)
    named.check(mc.GATE_015, SHAPE, "elsewhere/a")
    with pytest.raises(ValueError, match="model 'b'"):
        named.check(mc.GATE_015, SHAPE, "b")


def test_a_model_survives_its_file(model: mc.QualityModel, tmp_path: Any) -> None:
    model.save(tmp_path / "quality.json")
    again = mc.QualityModel.load(tmp_path / "quality.json")
    pd.testing.assert_frame_equal(again.predict(world()), model.predict(world()))
    assert json.dumps(again.to_dict()) == json.dumps(model.to_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["quality.json"]


def test_no_substitution_costs_nothing_and_far_estimates_say_so(model: mc.QualityModel) -> None:
    nothing = model.estimate(np.zeros(8), np.zeros(8))
    assert nothing.increase == nothing.low == nothing.high == 0.0
    assert model.estimate(np.full(8, 10.0), np.zeros(8)).is_extrapolated
    assert not nothing.is_extrapolated


@pytest.fixture(scope="module")
def trace() -> mc.RouterTrace:
    return mc.synthetic_trace(300, LAYERS, 32, 4, document_tokens=60, expert_bytes=2**20)


POLICIES = [mc.FETCH_EVERY_MISS, mc.FIRST_CHOICE, mc.SPEED_FIRST.replace(mass_threshold=0.2, label="speed")]


@pytest.mark.parametrize("form", ["ranks and age", "mass"])
def test_the_simulator_gives_what_the_rows_give(trace: mc.RouterTrace, form: str) -> None:
    fitted = mc.QualityModel.fit(world(), SHAPE, form=form, num_draws=100)
    starts = np.flatnonzero(trace.document_start)
    warm = int(starts[2])
    for policy in POLICIES:
        run = mc.simulate(trace, policy, 8, warmup_tokens=warm, quality=fitted)
        rows = mc.quality_rows(run, trace).assign(num_tokens=np.diff(np.append(starts, trace.num_tokens)))
        for first, part in ((0, rows), (warm, rows[rows["document"] >= 2])):
            expected = fitted.predict(part)["estimated_increase"].iloc[0]
            assert run.summary(first)["estimated_increase"] == pytest.approx(expected, rel=1e-9)
        assert run.summary()["quality_kind"] == "estimated"
        few = mc.simulate(trace, policy, 8, warmup_tokens=warm, quality=fitted, keep="summary")
        assert few.decisions is None
        assert few.summary(warm)["estimated_increase"] == run.summary(warm)["estimated_increase"]
    assert mc.simulate(trace, mc.FETCH_EVERY_MISS, 8, quality=fitted).summary()["estimated_increase_high"] == 0.0


def test_the_simulator_refuses_what_the_model_does_not_know(trace: mc.RouterTrace, model: mc.QualityModel) -> None:
    with pytest.raises(ValueError, match="fallback='drop'"):
        mc.simulate(trace, mc.FIRST_CHOICE.replace(fallback="drop"), 8, quality=model)
    with pytest.raises(ValueError, match="replay='sequential'"):
        mc.simulate(trace, mc.FETCH_EVERY_MISS, 8, replay="sequential", quality=model)
    with pytest.raises(ValueError, match=r"estimated from tokens \[0\], not from 60"):
        mc.simulate(trace, mc.FIRST_CHOICE, 8, quality=model).summary(60)
    assert "estimated_increase" not in mc.simulate(trace, mc.FIRST_CHOICE, 8).summary()


def test_a_sweep_has_the_estimates_and_keeps_them_apart_by_model(trace: mc.RouterTrace, model: mc.QualityModel, tmp_path: Any) -> None:
    options: dict[str, Any] = {"num_workers": 1, "progress": False, "store": tmp_path, "warmup_tokens": 60}
    table = mc.sweep(trace, POLICIES, 8, quality=model, **options)
    one = mc.simulate(trace, POLICIES[1], 8, warmup_tokens=60, quality=model).summary(60)
    assert table["estimated_increase"][1] == one["estimated_increase"]
    assert table["estimated_increase"][0] == 0.0
    assert "estimated_increase" not in mc.sweep(trace, POLICIES, 8, **options)
    pd.testing.assert_frame_equal(mc.sweep(trace, POLICIES, 8, quality=model, **options), table)
    with pytest.raises(ValueError, match="1 combinations cannot be replayed"):
        mc.sweep(trace, [*POLICIES, mc.GATE_015.replace(weight_rule="inherit", label="inherit")], 8, quality=model, **options)


def test_rows_of_an_emulated_run_are_those_of_the_experiments_and_of_the_simulator() -> None:
    language_model = qwen3_next(num_layers=4).eval()
    rng = np.random.default_rng(0)
    documents = [Document(name=f"d{i}", domain="any", cluster=f"d{i}", tokens=rng.integers(0, VOCABULARY, 40, np.int32)) for i in range(3)]
    texts, policy = [d.tokens for d in documents], mc.threshold(0.5, label="0.5")
    exact = policy_documents.exact_losses_of(language_model, documents)
    expected = policy_documents.measure(language_model, documents, [("threshold", policy)], 6, num_warmup_documents=1, layer_error=False)
    with recording(language_model) as recorder:
        run = mc.emulate(language_model, texts, policy, 6)
    heard = recorder.trace(texts)
    rows = mc.quality_rows(run, heard, exact, num_warmup_documents=1)
    columns = [c for c in rows.columns if c not in ("policy", "document")]
    assert rows["squared_l1_r0"].gt(0).any()
    pd.testing.assert_frame_equal(rows[columns], expected[columns], rtol=1e-5)
    simulated = mc.quality_rows(mc.simulate(heard, policy, 6), heard)
    pd.testing.assert_frame_equal(simulated[1:].reset_index(drop=True)[columns[2:]], rows[columns[2:]])
    alone = mc.quality_rows(mc.simulate(mc.record(language_model, texts), policy, 6), mc.record(language_model, texts))
    cells = [c for c in columns if c.startswith("squared_")]
    assert alone[cells].equals(simulated[cells]) is False  # the exact model's later layers are routed otherwise
    assert alone["squared_l0_r0"].equals(simulated["squared_l0_r0"])  # the first layer's are not
