"""Training: the same seed gives the same curve, a cut changes nothing, a decay branch leaves the main run alone."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from moecache.reference import checkpoint, train
from moecache.reference.corpus import Corpus
from moecache.reference.fast import REPLACEMENTS, fast_layers, use_fast_parts
from moecache.reference.fast_convolution import causal_convolution
from moecache.reference.fast_delta import SEGMENT, delta_rule
from moecache.reference.fast_linear import use_bfloat16_products
from moecache.reference.fast_router import topk_of
from moecache.reference.loading import MissingModelError
from moecache.reference.network import RouterTap, balance, make_network, mean_balance, token_losses
from moecache.reference.settings import GEOMETRY_64, GEOMETRY_512, SETTINGS, TrainSettings, settings_of

TINY = GEOMETRY_512 | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
TINY_64 = GEOMETRY_64 | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
QUICK = TrainSettings(name="tiny", geometry=TINY, rows_per_step=2, row_tokens=40, warmup_steps=5)
QUICK_64 = replace(QUICK, name="tiny-64", geometry=TINY_64, balance_coefficient=0.01)
both_geometries = pytest.mark.parametrize("settings", [QUICK, QUICK_64], ids=lambda settings: settings.name)


def make_trainer(folder, is_fast=True, decay=None, settings=QUICK):
    stream = (np.arange(4000, dtype=np.uint16) * 7 // 3) % 64
    corpus = Corpus({"a": stream}, {"a": 1.0}, settings.row_tokens, settings.seed)
    return train.Trainer(settings, corpus, folder, decay, is_fast, say=lambda line: None)


def losses_of(trainer, num_steps):
    return [trainer.train_step()["loss_nats"] for _ in range(num_steps)]


@both_geometries
def test_the_same_seed_gives_the_same_first_steps_and_the_loss_falls(tmp_path, settings):
    first, again = (losses_of(make_trainer(tmp_path / n, settings=settings), 20) for n in ("a", "b"))
    assert first == again
    assert first[-1] < first[0] - 0.1
    other = losses_of(make_trainer(tmp_path / "c", settings=replace(settings, seed=2)), 2)
    assert other[0] != first[0]


@both_geometries
def test_a_cut_resumes_to_the_same_curve(tmp_path, settings):
    whole = losses_of(make_trainer(tmp_path / "whole", settings=settings), 12)
    cut = make_trainer(tmp_path / "cut", settings=settings)
    before = losses_of(cut, 7)
    cut.save()
    losses_of(cut, 2)
    resumed = make_trainer(tmp_path / "cut", settings=settings)
    assert resumed.step == 7
    assert before + losses_of(resumed, 5) == whole


@both_geometries
def test_the_fast_products_give_the_librarys_curve_up_to_rounding(tmp_path, settings):
    fast, plain = (losses_of(make_trainer(tmp_path / str(is_fast), is_fast, settings=settings), 10) for is_fast in (True, False))
    assert fast == pytest.approx(plain, rel=5e-3)


def publish(trainer, directory):
    """A model folder as `export` leaves it, of a run that went 30 steps."""
    trainer.run(30 * trainer.settings.step_tokens)
    torch.nn.Module.to(trainer.model, torch.bfloat16)
    trainer.model.save_pretrained(directory)
    (directory / "log.jsonl").write_bytes((trainer.folder / "log.jsonl").read_bytes())


@both_geometries
def test_a_new_machine_goes_on_from_published_weights_with_a_warm_up(tmp_path, settings):
    settings = replace(settings, learning_rate=5e-3)
    publish(make_trainer(tmp_path / "old", settings=settings), tmp_path / "published")
    next_loss = losses_of(make_trainer(tmp_path / "old", settings=settings), 1)[0]
    anew = make_trainer(tmp_path / "new", settings=settings)
    train.start_from_weights(anew, tmp_path / "published")
    assert (anew.step, len(checkpoint.read_log(anew.folder))) == (30, 3)
    found = losses_of(anew, 8)
    assert found[0] == pytest.approx(next_loss, rel=0.01)
    assert found[-1] < found[0] - 0.1
    anew.save()
    again = make_trainer(tmp_path / "new", settings=settings)
    assert (again.step, again.restart_step) == (38, 30)
    assert train.learning_rate(30, settings, restart_step=30) == pytest.approx(5e-3 / 5)
    assert train.learning_rate(34, settings, restart_step=30) == 5e-3
    with pytest.raises(ValueError, match="has a checkpoint"):
        train.start_from_weights(again, tmp_path / "published")


def test_weights_that_cannot_be_gone_on_from_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no log\.jsonl in"):
        train.start_from_weights(make_trainer(tmp_path / "new"), tmp_path)
    checkpoint.append_log(tmp_path, {"step": 10})
    with pytest.raises(MissingModelError, match=r"config\.json"):
        train.start_from_weights(make_trainer(tmp_path / "new"), tmp_path)
    with pytest.raises(ValueError, match="--branch-decay needs a checkpoint's optimizer"):
        train.train(1, QUICK, decay_fraction=0.1, is_from_weights=True)


def test_settings_are_found_by_name():
    assert [settings_of(name).name for name in SETTINGS] == list(SETTINGS)
    with pytest.raises(ValueError, match="no reference model named 'reference-65'; there are reference-512, reference-64"):
        settings_of("reference-65")


def test_a_run_logs_saves_and_stops_where_it_is_told(tmp_path):
    trainer = make_trainer(tmp_path)
    lines = []
    trainer.say = lines.append
    trainer.run(num_tokens=25 * QUICK.step_tokens - 1)
    log = checkpoint.read_log(tmp_path)
    assert [entry["step"] for entry in log] == [10, 20, 25]
    assert log[-1]["num_tokens"] == trainer.num_tokens == 25 * QUICK.step_tokens
    assert len(lines) == 3
    assert "nats" in lines[0]
    assert not list(tmp_path.glob("*.tmp"))
    assert make_trainer(tmp_path).step == 25


def test_a_stop_signal_saves_after_the_step_under_way(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.say = lambda line: trainer.stop()
    trainer.run(num_tokens=10**6)
    assert trainer.step == train.LOG_EVERY_STEPS
    assert make_trainer(tmp_path).step == train.LOG_EVERY_STEPS


def test_log_lines_after_the_checkpoint_are_written_again_not_twice(tmp_path):
    for step in (10, 20, 30):
        checkpoint.append_log(tmp_path, {"step": step})
    checkpoint.cut_log(tmp_path, 20)
    assert [entry["step"] for entry in checkpoint.read_log(tmp_path)] == [10, 20]


def test_other_settings_are_named(tmp_path):
    make_trainer(tmp_path).save()
    with pytest.raises(ValueError, match=r"'learning_rate': \(0\.002, 0\.5\)"):
        make_trainer(tmp_path, settings=replace(QUICK, learning_rate=0.5))


def test_rate_warms_up_stays_and_falls_to_zero_on_a_branch():
    rates = [train.learning_rate(step, QUICK) for step in range(10)]
    assert rates[:5] == pytest.approx([QUICK.learning_rate * (i + 1) / 5 for i in range(5)])
    assert set(rates[4:]) == {QUICK.learning_rate}
    decay = train.Decay(first_step=100, num_steps=4)
    branch = [train.learning_rate(step, QUICK, decay) / QUICK.learning_rate for step in range(100, 105)]
    assert branch == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_a_decay_branch_continues_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "cache_folder", lambda: tmp_path)
    with pytest.raises(ValueError, match="no checkpoint in"):
        train.start_decay("tiny", 0.2)
    main = make_trainer(checkpoint.run_folder("tiny"))
    main.run(10 * QUICK.step_tokens)
    before = (main.folder / "checkpoint.pt").read_bytes()
    branch, decay = train.start_decay("tiny", 0.5)
    assert decay == train.Decay(10, 5)
    trainer = make_trainer(checkpoint.run_folder(branch), decay=decay)
    assert trainer.step == 10
    trainer.run(15 * QUICK.step_tokens)
    assert checkpoint.read_log(trainer.folder)[-1]["learning_rate"] == pytest.approx(QUICK.learning_rate / 5)
    assert (main.folder / "checkpoint.pt").read_bytes() == before
    assert json.loads((main.folder / "log.jsonl").read_text().splitlines()[-1])["step"] == 10


def test_balance_is_one_when_even_and_rises_with_crowding():
    ids = torch.arange(16).reshape(8, 2) % 8
    assert balance(torch.zeros(8, 8), ids).item() == pytest.approx(1)
    logits = torch.zeros(8, 8)
    logits[:, 0] = 5.0
    crowded = balance(logits, torch.zeros(8, 2, dtype=torch.long)).item()
    assert crowded == pytest.approx(8 * logits.softmax(-1)[0, 0].item())


def test_token_losses_are_those_of_the_librarys_logits():
    model = make_network(TINY, 3).eval()
    rows = torch.randint(0, 64, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(rows[:, :-1], use_cache=False).logits
        expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
        torch.testing.assert_close(token_losses(model, rows), expected)


def gradients(model, rows):
    model.zero_grad()
    tap = RouterTap(model)
    (token_losses(model, rows).mean() + mean_balance(tap)).backward()
    tap.close()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_the_exchanged_parts_give_the_librarys_gradients():
    model = make_network(TINY, 3).train()
    rows = torch.randint(0, 64, (2, 71), generator=torch.Generator().manual_seed(0))
    plain = gradients(model, rows)
    use_fast_parts(model, RouterTap(model).routers, is_bfloat16=False)
    with fast_layers():
        fast = gradients(model, rows)
    for name, gradient in plain.items():
        torch.testing.assert_close(fast[name], gradient, rtol=2e-3, atol=1e-6 + 1e-4 * gradient.abs().max().item(), msg=name)
    assert all(getattr(modeling_qwen3_next, name) is not function for name, function in REPLACEMENTS.items())


def test_topk_is_the_librarys_and_ties_go_to_the_lower_id():
    rows = torch.rand(50, 20, generator=torch.Generator().manual_seed(0))
    assert topk_of(rows.numpy(), 5).tolist() == rows.topk(5).indices.tolist()
    assert topk_of(np.float32([[0.1, 0.4, 0.1, 0.4]]), 3).tolist() == [[1, 3, 0]]


def test_a_convolution_with_bias_is_refused():
    with pytest.raises(ValueError, match="only no bias"):
        causal_convolution(torch.zeros(1, 2, 3), torch.zeros(2, 4), torch.zeros(2))


def plain_delta_rule(query, key, value, g, beta):
    """The recurrence as it is written, in the tensors' own precision; query and key normalised by the caller."""
    state = torch.zeros(*value.shape[:1], value.shape[2], key.shape[3], value.shape[3], dtype=value.dtype)
    out = []
    for t in range(value.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = value[:, t] - torch.einsum("bhdv,bhd->bhv", state, key[:, t])
        state = state + torch.einsum("bhd,bhv->bhdv", key[:, t], beta[:, t, :, None] * error)
        out.append(torch.einsum("bhdv,bhd->bhv", state, query[:, t]))
    return torch.stack(out, 1)


def test_compiled_delta_rule_equals_the_recurrence_in_double_precision():
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2 * SEGMENT + 5, 3, 4)] * 2 + [(2, 2 * SEGMENT + 5, 3, 6)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    g = -torch.rand(shapes[0][:3], generator=generator) * torch.tensor([0.01, 0.5, 8.0])
    beta = torch.rand(shapes[0][:3], generator=generator)
    weights = torch.randn(shapes[2], generator=generator)
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.clone().to(dtype).requires_grad_() for x in (q, k, v, g, beta)]
        if dtype == torch.float32:
            out = delta_rule(*inputs)[0]
        else:
            normal = [modeling_qwen3_next.l2norm(x) for x in inputs[:2]]
            out = plain_delta_rule(normal[0] * q.shape[-1] ** -0.5, normal[1], *inputs[2:])
        (out * weights).sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for fast, exact in zip(*results, strict=True):
        torch.testing.assert_close(fast, exact.float(), rtol=1e-4, atol=1e-5)


def test_bfloat16_products_are_close_and_keep_float32_around_them():
    layer = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False), torch.nn.Linear(16, 4))
    rows = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0))
    plain = layer(rows)
    plain.square().sum().backward()
    before = layer[0].weight.grad.clone()
    layer.zero_grad()
    use_bfloat16_products(layer)
    rounded = layer(rows)
    rounded.square().sum().backward()
    assert rounded.dtype == layer[0].weight.grad.dtype == torch.float32
    assert not torch.equal(rounded, plain)
    torch.testing.assert_close(rounded, plain, rtol=0.02, atol=0.02)
    torch.testing.assert_close(layer[0].weight.grad, before, rtol=0.05, atol=0.05)
