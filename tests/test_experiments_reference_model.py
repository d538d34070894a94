"""Chapter 01's measurements on tiny models and worked streams: baselines, routing, controls, and what the page says of them."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny_models
import torch
from matplotlib.figure import Figure

from moecache.experiments import (
    baselines,
    public_routes,
    reference_controls,
    reference_model,
    reference_report,
    reference_routing_report,
    reference_tables,
    reference_values_report,
)
from moecache.figures import reference as drawn
from moecache.hf_internals import RouterOutput
from moecache.policy import FETCH_EVERY_MISS
from moecache.reference import Document
from moecache.score import score
from moecache.simulate import simulate
from moecache.trace import ModelShape, RouterTrace

TOKENIZER = SimpleNamespace(decode=lambda ids: "x" * len(ids))


def documents(num_documents=8, num_tokens=40):
    generator = np.random.default_rng(1)
    return [
        Document(
            generator.integers(0, tiny_models.VOCABULARY, num_tokens).astype(np.int32),
            ["code", "prose"][i % 2],
            f"cluster {i // 2}",
            f"{i}",
        )
        for i in range(num_documents)
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_models.qwen3_next(num_layers=2, num_experts=32, top_k=4)


@pytest.fixture(scope="module")
def text(model):
    return reference_model.reading(model, TOKENIZER, documents())


@pytest.fixture(scope="module")
def ablation(model):
    return reference_controls.ablation(model, documents(), seed=0)


def made_reading(calls_of_document, num_experts):
    """A reading of hand-made routes [T, K], one layer, of documents (domain, cluster, routes)."""
    parts, found = [], []
    for place, (domain, cluster, ids) in enumerate(calls_of_document):
        ids = np.asarray(ids)
        starts = np.arange(len(ids)) == 0
        weights = np.full((len(ids), 1, ids.shape[1]), 1 / ids.shape[1], np.float32)
        parts.append((ids[:, None], weights, starts))
        found.append(Document(np.zeros(len(ids), np.int32), domain, cluster, str(place)))
    ids, weights, starts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    shape = ModelShape(1, num_experts, ids.shape[2])
    trace = RouterTrace.from_arrays(ids, weights, document_start=starts, shape=shape)
    return reference_model.Reading(tuple(found), np.zeros(0), np.zeros(0), trace, np.zeros(0), np.zeros(0))


@pytest.mark.parametrize("history", [[0, 1, 2, 3], [5, 5, 5, 5], [9, 8, 1, 2], [3]])
def test_ngram_probabilities_sum_to_one(history):
    """After a history that was seen, one that was not, and one whose end was."""
    stream = np.concatenate([np.arange(8), np.random.default_rng(0).integers(0, 9, 300)])
    model = baselines.fit_ngram(stream, vocabulary_size=10)
    total = sum(math.exp(-model.losses(np.array([*history, token]))[-1]) for token in range(10))
    assert total == pytest.approx(1.0, abs=1e-12)


def test_bigram_by_hand():
    """The text 0 1 0 1 0 2 has the bigrams 01 (twice), 10 (twice), 02 (once): n1 = 1, n2 = 2, D = 1/5. As what a token follows,
    0 stands after {1}, 1 after {0}, 2 after {0}: three single counts, D = 1 for want of pairs, so the unigram is even over 3."""
    model = baselines.fit_ngram(np.array([0, 1, 0, 1, 0, 2]), vocabulary_size=3, order=2)
    expected = (2 - 1 / 5) / 3 + (1 / 5) * 2 / 3 * (1 / 3)
    assert math.exp(-model.losses(np.array([0, 1]))[0]) == pytest.approx(expected)
    unseen_history = math.exp(-model.losses(np.array([2, 1]))[0])
    assert unseen_history == pytest.approx(1 / 3)


def test_ngram_learns_from_longer_histories():
    """In this stream the next token is a sum of the last one and the one four before it: three tokens do not tell it."""
    generator = np.random.default_rng(2)
    stream = generator.integers(0, 4, 4000)
    for place in range(4, stream.size):
        stream[place] = (stream[place - 4] + stream[place - 1]) % 4 if generator.random() < 0.9 else stream[place]
    losses = [baselines.fit_ngram(stream[:3000], 4, order).losses(stream[3000:]).mean() for order in (3, 5)]
    assert losses[1] < 0.7 * losses[0]
    assert losses[0] == pytest.approx(math.log(4), abs=0.1)


def test_ngram_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="order=6 must lie between 1 and 5"):
        baselines.fit_ngram(np.arange(100), 4096, order=6)
    with pytest.raises(ValueError, match="do not hold one 5-gram"):
        baselines.fit_ngram(np.arange(3), 4096)


def test_xz_learns_from_text_before(monkeypatch):
    words = np.random.default_rng(3).integers(97, 123, 3000).astype(np.uint8).tobytes()
    monkeypatch.setattr(baselines, "load_texts", lambda domain, split: [SimpleNamespace(text=words.decode())])
    found = [Document(np.zeros(2001, np.int32), "code", "a", "a")]
    tokenizer = SimpleNamespace(decode=lambda ids: words[:2000].decode())
    sizes = baselines.xz_sizes(found, tokenizer, 3000).iloc[0]
    assert sizes["num_bytes"] == 2000
    assert sizes["xz_after_training_bytes"] < 0.1 * sizes["xz_bytes"]


def test_reading_agrees_with_scoring(model, text):
    frame = reference_model.by_document(text)
    expected = [np.nansum(score(model, document.tokens)) for document in documents()]
    np.testing.assert_allclose(frame["loss_nats"], expected)
    assert (frame["num_tokens"] == 39).all()
    assert (frame["num_bytes"] == 39).all()
    assert frame["document"].is_unique


def test_routing_tables_add_up(text):
    use, gates, layers = reference_model.use(text), reference_model.gates(text), reference_model.layers(text)
    assert use.groupby("layer")["calls"].sum().tolist() == [8 * 40 * 4] * 2
    np.testing.assert_allclose(gates.groupby("layer")["gate_weight"].sum(), 1, atol=1e-5)
    assert (gates.groupby("layer")["gate_weight"].diff().dropna() <= 0).all()
    called = use.groupby("layer")["expert"].nunique() / 32
    np.testing.assert_allclose(layers["called_fraction"], called)
    assert layers["use_entropy"].between(0, 1).all()
    assert layers["router_entropy"].between(0, 1).all()
    np.testing.assert_allclose(text.probability.sum(1), 1, atol=1e-3)


def test_even_and_collapsed_routing_are_told_apart():
    even = made_reading([("code", "a", [[i, i + 1] for i in range(0, 16, 2)])], 16)
    collapsed = made_reading([("code", "a", [[0, 1]] * 8)], 16)
    readings = [
        reference_model.Reading(r.documents, r.loss_nats, r.num_bytes, r.trace, np.ones((1, 1)), np.full((1, 16), 1 / 16))
        for r in (even, collapsed)
    ]
    flat, narrow = (reference_model.layers(reading).iloc[0] for reading in readings)
    assert flat["use_entropy"] == pytest.approx(1)
    assert flat["busiest_eighth_fraction"] == pytest.approx(1 / 8)
    assert narrow["use_entropy"] == pytest.approx(math.log(2) / math.log(16))
    assert (narrow["busiest_eighth_fraction"], narrow["called_fraction"]) == (1, 1 / 8)
    assert (flat["neighbour_overlap"], narrow["neighbour_overlap"]) == (0, 1)


def test_neighbours_are_not_counted_across_documents():
    apart = made_reading([("code", "a", [[0, 1], [1, 2]]), ("code", "b", [[1, 2], [3, 4]])], 8)
    assert reference_model.neighbour_overlap(apart.trace).tolist() == [0.25]


def test_hot_sets_of_planted_domains():
    """Two domains with experts of their own: halves of a domain agree, domains do not."""
    routes = [("code", "a", [[0, 1]] * 4), ("code", "b", [[0, 1]] * 4), ("prose", "c", [[6, 7]] * 4), ("prose", "d", [[6, 5]] * 4)]
    table = reference_model.overlaps(made_reading(routes, 16), 1 / 8).set_index(["domain", "other"])["overlap"]
    assert table["code", "code"] == 1
    assert table["prose", "prose"] == 0.5
    assert table["code", "prose"] == table["prose", "code"] == 0
    words = reference_values_report.hot_sets(table.reset_index().assign(layer=0))
    assert (words["hot_same"], words["hot_other"]) == (0.75, 0)
    with pytest.raises(ValueError, match="documents of prose come from 1 cluster"):
        reference_model.overlaps(made_reading(routes[:3], 16), 1 / 8)


def test_slots_for_a_hit_rate_are_the_fewest_of_each_layer(text):
    target = reference_model.target_slots_by_layer(text.trace, 0.7, 80)
    for layer, slots in zip(target["layer"], target["num_slots"], strict=True):
        rates = []
        for number in (slots - 1, slots):
            run = simulate(text.trace, FETCH_EVERY_MISS, int(number), keep="summary", warmup_tokens=80)
            rates.append(run.warm_counts[layer, 0] / (240 * 4))
        assert rates[0] < 0.7 <= rates[1]


def router_output(num_tokens=50, num_experts=32, top_k=4):
    logits = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(4))
    weights, ids = logits.softmax(-1).topk(top_k)
    shuffled = torch.tensor([2, 0, 3, 1])  # a router whose calls do not come in rank order
    return RouterOutput(logits, weights[:, shuffled], ids[:, shuffled])


def test_controls_exchange_experts_and_nothing_else():
    output = router_output()
    changes = reference_controls.changes(num_layers=2, num_experts=32, seed=0)
    assert set(changes) == {"experts shuffled", "random experts", "the next best experts", "no routed experts"}
    for name in ("experts shuffled", "random experts", "the next best experts"):
        changed = changes[name](1, output)
        assert torch.equal(changed.weights, output.weights)
        assert (torch.tensor([row.unique().numel() for row in changed.ids]) == 4).all()
        assert not (changed.ids == output.ids).any()
    shuffled = changes["experts shuffled"](0, output).ids
    assert torch.unique(torch.stack([output.ids.flatten(), shuffled.flatten()], 1), dim=0).shape[0] == output.ids.unique().numel()
    drawn_ids = changes["random experts"](0, output).ids
    assert not (drawn_ids[:, :, None] == output.ids[:, None]).any()
    assert (changes["no routed experts"](0, output).weights == 0).all()


def test_the_heaviest_call_gets_the_best_of_the_next():
    output = router_output()
    changed = reference_controls.changes(1, 32, seed=0)["the next best experts"](0, output)
    ranked = output.logits.argsort(dim=1, descending=True)
    for rank in range(4):
        column = output.weights.argsort(dim=1, descending=True)[:, rank : rank + 1]
        assert torch.equal(changed.ids.gather(1, column)[:, 0], ranked[:, 4 + rank])


def test_ablation_is_paired_and_leaves_the_model_alone(model, ablation):
    wide = ablation.pivot_table(index="document", columns="policy", values="mean_difference_nats")
    assert wide.shape == (8, 5)
    assert (wide["unchanged"] == 0).all()
    assert (wide.drop(columns="unchanged") != 0).all(axis=None)
    again = reference_controls.ablation(model, documents(), seed=0)
    pd.testing.assert_frame_equal(again, ablation)


def controls(low):
    names = ["experts shuffled", "random experts", "the next best experts", "no routed experts"]
    return pd.DataFrame({"model": "m", "policy": names, "factor": 9.0, "low": [low, 3.0, 0.5, 3.0], "high": 12.0})


def test_verdict_on_routing_follows_the_interval():
    assert reference_values_report.hurts(controls(1.6), 1.5) == "matters"
    assert reference_values_report.hurts(controls(1.4), 1.5) == "matters, but less than was asked for"
    assert reference_values_report.hurts(controls(0.9), 1.5) == "cannot be shown to matter"
    assert "only model" in reference_values_report.everywhere({"a": controls(1.6)}, 1.5)
    assert "1 of the 2 models" in reference_values_report.everywhere({"a": controls(1.6), "b": controls(1.4)}, 1.5)


def test_ages_are_compared_where_both_are_shown():
    tables = {"m": controls(1.6), "m-early": controls(1.6).assign(factor=4.0)}
    domains = {name: pd.DataFrame({"domain": ["code", "prose", "all"], "perplexity": values}) for name, values in PERPLEXITIES.items()}
    cards = {"m": {"training_tokens": 25e6}, "m-early": {"training_tokens": 6e6}}
    words = reference_values_report.ages("m", cards, domains, tables)
    assert "From 6.0 to 25.0 million tokens the perplexity went from 20.0 to 9.0; it is lower in 1 of 2 domains" in words
    assert "by 9.0, where they multiplied that of the first stage by 4.0" in words
    alone = {"m": cards["m"]}
    assert "one age only" in reference_values_report.ages("m", alone, domains, tables)


PERPLEXITIES = {"m": [8.0, 7.0, 9.0], "m-early": [22.0, 6.0, 20.0]}


def test_controls_come_dearest_first_with_holm(ablation):
    table = reference_report.controls(ablation, "m")
    assert table["factor"].is_monotonic_decreasing
    assert (table["low"] <= table["factor"]).all()
    assert (table["factor"] <= table["high"]).all()
    assert reference_report.controls_table(table).shape == (4, 7)
    assert reference_values_report.controls(ablation, table, 1.5)["num_ablation_clusters"] == 4


def losses(own, ngram):
    """Six documents of two domains in six clusters; losses a token, ten tokens and twenty bytes each."""
    names = [f"d{i}" for i in range(6)]
    frame = pd.DataFrame({"document": names, "domain": ["code"] * 3 + ["prose"] * 3, "cluster": names, "num_tokens": 10, "num_bytes": 20})
    noise = 1 + 0.01 * np.arange(6)
    return frame.assign(loss_nats=10 * own * noise), pd.DataFrame({"document": names, "loss_nats": 10.0 * ngram})


XZ = pd.DataFrame({"domain": ["code", "prose"], "num_bytes": 60, "xz_bytes": 30, "xz_after_training_bytes": 15})


def test_domains_are_pooled_by_token_and_by_byte():
    own, ngram = losses(2.0, 3.0)
    table = reference_report.domains(own, ngram, XZ).set_index("domain")
    assert list(table.index) == ["code", "prose", "all"]
    assert table.loc["all", "perplexity"] == pytest.approx(math.exp(2 * 1.025))
    assert table.loc["all", "bits"] == pytest.approx(2 * 1.025 / math.log(2) / 2)
    assert table.loc["code", "ngram_bits"] == pytest.approx(3 / math.log(2) / 2)
    assert (table.loc["all", "xz_bits"], table.loc["all", "xz_after_bits"]) == (4, 2)
    assert (table["perplexity_low"] < table["perplexity"]).all()
    assert reference_report.domain_table(table.reset_index()).shape == (3, 8)
    beside = reference_report.by_model({"a": table.reset_index(), "b": table.reset_index()})
    assert list(beside.columns) == ["perplexity (bits a byte)", "a", "b"]
    assert beside.loc[2, "a"] == f"{math.exp(2 * 1.025):.1f} ({2 * 1.025 / math.log(2) / 2:.2f})"


@pytest.mark.parametrize(("ngram_loss", "words", "num_better"), [(3.0, "better than counting does", 2), (1.0, "no better", 0)])
def test_prose_on_language_follows_the_data(ngram_loss, words, num_better):
    own, ngram = losses(2.0, ngram_loss)
    table = reference_report.domains(own, ngram, XZ)
    versus = reference_report.against_ngram(own, ngram, "model").iloc[0]
    found = reference_values_report.language(table, versus)
    assert found["beats"].startswith(words)
    assert found["num_better"] == num_better
    assert found["gain"] == pytest.approx(ngram_loss - 2.05)


def test_locality_is_named_by_what_is_public():
    layers = pd.DataFrame({"neighbour_overlap": [0.1, 0.2]})
    row = {"neighbour_overlap": 0.15, "lru_quarter": 0.7, "lru_quarter_low": 0.6, "lru_quarter_high": 0.8, "target_slots": 100}
    row |= {"num_experts": 512, "top_k": 10}
    targets = pd.DataFrame({"num_slots": [90, 120]})
    found = reference_values_report.locality(row, layers, targets)
    assert (found["locality"], found["position"], found["target_high"]) == ("fewer", "inside", 120)
    found = reference_values_report.locality(row | {"neighbour_overlap": 0.6, "lru_quarter": 0.99}, layers, targets)
    assert (found["locality"], found["position"]) == ("more", "outside")


def test_tasks_are_counted_with_an_interval():
    frame = pd.DataFrame({"domain": ["word_problems"] * 10 + ["interpreter"] * 10, "template": [f"t{i % 5}" for i in range(20)]})
    frame = frame.assign(is_right=[True] * 9 + [False] * 11, is_right_by_repeating=False)
    table = reference_report.task_table({"model": frame})
    assert table["solved"].tolist() == [0.9, 0.0]
    assert table["num_templates"].tolist() == [5, 5]
    assert table.loc[0, "low"] < 0.9 < table.loc[0, "high"]
    words = reference_values_report.tasks(table, "model")
    assert (words["useful"], words["lost"]) == ("word problems", "Less than half is solved of: interpreter.")
    assert reference_report.task_words(table).loc[1, "solved [95 %]"] == "0% [0%, 28%]"


def test_repeating_the_answer_before_is_scored():
    question = SimpleNamespace(domain="word_problems", prompt="A.\n2 + 2 = 4\nAnswer: 4\n\nB.\n1 + 2 = 3\nAnswer: 3\n\nC?\n", answer="3")
    assert reference_model._answer_before(question) == "3"
    lines = SimpleNamespace(domain="interpreter", prompt=">>> min([2, 1])\n1\n\n>>> min([3, 2])\n2\n\n>>> min([9, 7])\n", answer="7")
    assert reference_model._answer_before(lines) == "2"


def test_public_figures_are_consistent():
    for weights in public_routes.GATE_WEIGHTS.values():
        assert sum(weights) == pytest.approx(1, abs=0.005)
        assert list(weights) == sorted(weights, reverse=True)
    gpt = public_routes.ROUTING.set_index("model").loc[public_routes.GPT_OSS]
    assert gpt["lru_quarter"] == pytest.approx(645_603 / 981_120, abs=0.001)  # hits of an independent replay of the same routes
    assert set(public_routes.ROUTING["model"]) == set(public_routes.SOURCES)


def test_card_counts_the_parameters_of_a_token():
    card = reference_model.card("reference-512")
    expert = 3 * card["hidden_size"] * card["expert_width"]
    idle = card["num_layers"] * (card["num_experts"] - card["top_k"]) * expert
    assert card["total_parameters"] - card["active_parameters"] == idle
    assert reference_model.training_log("reference-512")["num_tokens"].is_monotonic_increasing
    table = reference_report.sizes([card])
    assert list(table.columns) == ["", "reference-512", "Qwen3-Next-80B-A3B"]
    small = card | {"model": "small", "num_experts": 64, "top_k": 8, "weight_rule": "as the softmax gives them"}
    both = reference_report.sizes([card, small]).set_index("")
    assert list(both.columns) == ["reference-512", "small", "Qwen3-Next-80B-A3B", "OLMoE-1B-7B"]
    assert both.loc["gate weights"].tolist() == ["renormalised", "as the softmax gives them"] * 2


def test_unknown_table_is_named():
    with pytest.raises(ValueError, match=r"no table 'loss'; choose one of documents"):
        reference_tables.measure("loss")


def test_figures_are_drawn_and_ask_for_their_columns(text, ablation):
    own, ngram = losses(2.0, 3.0)
    domains = reference_report.domains(own, ngram, XZ)
    hits = pd.DataFrame({"policy": "LRU", "eviction": "lru", "half_life_tokens": 0.0, "num_slots": [8, 16] * 4, "calls": 100})
    hits = hits.assign(document=np.arange(8) // 2, hits=[40, 60, 45, 62, 43, 58, 44, 66])
    rates = reference_routing_report.hit_rates({"own": hits}, {"own": 32})
    pictures = {
        drawn.training_curve: reference_report.together({"m": reference_model.training_log("reference-512")}),
        drawn.bits_per_byte: reference_report.bits_long({"a": domains, "b": domains}),
        drawn.hit_rate_by_share: rates,
        drawn.controls: pd.concat([reference_report.controls(ablation, name) for name in "ab"]),
    }
    for draw, frame in pictures.items():
        assert isinstance(draw(frame), Figure)
        with pytest.raises(ValueError, match="the frame lacks"):
            draw(frame.iloc[:, :1])
    assert isinstance(drawn.hot_set_overlap(reference_model.overlaps(text, 0.125), chance=0.125), Figure)
    at_quarter = reference_routing_report.describe_hit_rates(rates)
    assert "own 43%" in at_quarter
