"""The page on bringing one's own trace: its code runs as it stands, on a table like the one it describes."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
from streams import random_stream

import moecache as mc

PAGE = Path(__file__).parents[1] / "book" / "own_traces.md"


def test_the_code_of_the_page_reads_json_lines(tmp_path, monkeypatch, capsys):
    ids, weights, _ = random_stream(2, 40, 2, 64, 4)
    token, layer, rank = (axis.ravel() for axis in np.indices(ids.shape))
    columns = {"pos": token, "layer": layer, "k": rank, "expert": ids.ravel(), "w": weights.ravel(), "request": token // 20}
    table = pd.DataFrame(columns).sample(frac=1, random_state=0).sort_values("request", kind="stable")
    table.to_json(tmp_path / "calls.jsonl", orient="records", lines=True, double_precision=15)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    trace = names["trace"]
    assert isinstance(trace, mc.RouterTrace)
    np.testing.assert_array_equal(trace.topk_ids, ids)
    np.testing.assert_array_equal(trace.gate_weights, weights)
    assert np.flatnonzero(trace.document_start).tolist() == [0, 20]
    assert "128" in capsys.readouterr().out
