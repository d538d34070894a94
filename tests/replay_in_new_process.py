"""Replays stored traces in a process that must never load torch; run by the agreement tests.

Arguments: a JSON file with [trace path, policy, num_slots, keywords] rows, and where to write the decisions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import moecache as mc


def main(plan_path: str, output_path: str) -> None:
    """Simulate every row of the plan."""
    arrays = {}
    for number, (path, policy, num_slots, keywords) in enumerate(json.loads(Path(plan_path).read_text())):
        if "buddies" in keywords:
            keywords["buddies"] = np.array(keywords["buddies"])
        log = mc.simulate(mc.load_trace(path), mc.Policy.from_dict(policy), num_slots=num_slots, **keywords).decisions
        for name in ("outcome", "computed_ids", "evicted_ids", "arrivals", "substituted_mass"):
            arrays[f"{number}.{name}"] = getattr(log, name)
    assert "torch" not in sys.modules, "the simulator loaded torch"
    assert "transformers" not in sys.modules, "the simulator loaded transformers"
    np.savez(output_path, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
