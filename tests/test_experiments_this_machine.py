"""This machine: every part is measured in every round, rates follow from units, and the page's numbers from rates."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny_models

import moecache as mc
from moecache.experiments import this_machine, this_machine_hooks
from moecache.experiments import this_machine_report as report
from moecache.figures import this_machine as drawn

SIZE = this_machine.ExpertSize(64, 32)
BLOCK_BYTES = 3 * 64 * 32 * 2


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_machine, "WORKING_SET_BYTES", 24 * 2**20)
        found = this_machine.measure_rounds(SIZE, 2, 0.002, 0.0, 4, folder, 12 * BLOCK_BYTES)
    assert list(folder.iterdir()) == []  # the scratch file is gone
    return found


def made_up(seconds_by_part):
    """Two rounds with the seconds of a unit of each part."""
    rows = [(r, 60.0 * r, part, 5, 2_000_000, seconds[r]) for r in range(2) for part, seconds in seconds_by_part.items()]
    return pd.DataFrame(rows, columns=["round", "at_seconds", "part", "num_units", "unit_bytes", "unit_seconds"])


def test_every_part_is_measured_in_every_round(rounds):
    assert list(rounds["part"][: len(this_machine.PARTS)]) == list(this_machine.PARTS)
    assert rounds.groupby("part")["round"].nunique().eq(2).all()
    assert (rounds["unit_seconds"] > 0).all()
    disk = rounds[rounds["part"] == this_machine.DISK]
    assert disk["unit_bytes"].unique().tolist() == [BLOCK_BYTES]
    assert disk["num_units"].unique().tolist() == [4]
    float32 = rounds[rounds["part"] == this_machine.FLOAT32]
    assert float32["unit_bytes"].unique().tolist() == [2 * BLOCK_BYTES]


def test_a_file_too_small_is_refused_with_the_size_that_works():
    with pytest.raises(ValueError, match=f"give at least {8 * BLOCK_BYTES}"):
        this_machine.measure_rounds(SIZE, 1, 0.001, 0.0, 4, None, 7 * BLOCK_BYTES)


def test_oneDNN_is_on_again_afterwards(rounds):
    import torch

    assert torch.backends.mkldnn.enabled


def test_rates_and_ratios_follow_from_the_units():
    seconds = dict.fromkeys(this_machine.PARTS, (0.001, 0.002))
    seconds[this_machine.ONEDNN] = (0.004, 0.006)
    rounds = made_up(seconds)
    table = report.part_table(rounds).set_index("part")
    assert (table.loc[this_machine.READ, "lowest"], table.loc[this_machine.READ, "highest"]) == (1.0, 2.0)
    assert table.loc[this_machine.ONEDNN, "ms a unit"] == pytest.approx(5.0)
    found = report.values(rounds)
    assert (found["switch_ratio"], found["switch_ratio_low"], found["switch_ratio_high"]) == pytest.approx((3.5, 3.0, 4.0))
    assert (found["num_rounds"], found["minutes"], found["repeat_ratio"]) == (2, 1.0, 1.0)


def test_the_figure_has_a_row_for_each_part(rounds):
    figure = drawn.rates_by_part(report.rates(rounds))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(this_machine.PARTS)
    lines = figure.axes[1].get_lines()
    assert len(lines) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        part.removeprefix("disk, ") for part in this_machine.PARTS if part.startswith("disk")
    ]
    assert {line.get_marker() for line in lines} <= {line.get_marker() for line in figure.axes[0].get_lines()}
    assert figure.axes[1].get_xlabel() == "Seconds since the first round"
    with pytest.raises(ValueError, match="group of parts"):
        drawn.rates_by_part(report.rates(rounds).assign(part="network, slow"))


def test_facts_name_the_machine_and_neither_host_nor_user():
    facts = this_machine.facts().set_index("fact")["value"]
    assert {"processor", "cores", "main memory", "accelerator", "torch"} <= set(facts.index)
    assert all(isinstance(value, str) and value for value in facts)
    import getpass
    import socket

    assert not {socket.gethostname(), getpass.getuser()} & set(" ".join(facts).split())


def test_constants_are_those_of_measure_hardware(tmp_path, monkeypatch):
    def measured(expert_bytes, *, link, **_):
        rates = {"disk": 1e9, "memory": 8e9}
        return mc.Hardware("x", rates[link], 1e-4, expert_seconds=expert_bytes / 1e9, kind="measured", derivation=link)

    monkeypatch.setattr(this_machine, "measure_hardware", measured)
    rows = this_machine.constants(4096, tmp_path, 8192, 0.1)
    assert rows["gigabytes_per_second"].tolist() == [1.0, 8.0]
    assert report.constants_table(rows, 6)["latency, us"].tolist() == pytest.approx([100.0, 100.0])


def test_every_hook_after_the_warm_tokens_is_timed_and_the_model_is_whole_again():
    model = tiny_models.qwen3_next(num_experts=32, top_k=10)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    text = np.random.default_rng(0).integers(0, 60, 30)
    hooks = this_machine_hooks.measure_hooks(model, [mc.FETCH_EVERY_MISS, mc.GATE_015], 12, text, 10)
    num_layers = len(model.model.layers)
    assert hooks["num_hooks"].tolist() == [20 * num_layers] * 2
    assert (hooks["median_us"] > 0).all()
    assert (hooks["median_us"] <= hooks["high_us"]).all()
    assert hooks["fetched"].iloc[0] > hooks["fetched"].iloc[1]
    assert hooks["substituted"].tolist()[0] == 0 < hooks["substituted"].tolist()[1]
    assert all((weight == before[name]).all() for name, weight in model.state_dict().items())
    assert report.hook_table(hooks).shape[1] <= 8


def test_a_reference_model_is_read_where_the_warm_tokens_end(monkeypatch):
    documents = [SimpleNamespace(tokens=np.arange(7)), SimpleNamespace(tokens=np.arange(7, 14))]
    seen = {}
    monkeypatch.setattr(this_machine_hooks, "held_out_documents", lambda **asked: documents)
    monkeypatch.setattr(this_machine_hooks, "load_model", lambda name: name)
    monkeypatch.setattr(
        this_machine_hooks, "measure_hooks", lambda model, policies, num_slots, text, warm: seen.update(text=text, warm=warm)
    )
    this_machine_hooks.measure_hooks_of_reference("x", [], 4, 6, 3)
    assert seen["text"].tolist() == list(range(9))
    assert seen["warm"] == 3
