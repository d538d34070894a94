"""Replay stored traces in a new process, without torch, and write the decisions to a file.

    python -m moecache.experiments.agreements_replay PLAN OUTPUT

PLAN is a JSON file with rows [path of a trace, policy as a dict, slots a layer]; OUTPUT gets the arrays of every row's decision log. A
process that never loads torch, and has the routers' words from a file alone, cannot borrow anything from the instrument that recorded
them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moecache.policy import Policy
from moecache.simulate import simulate
from moecache.trace import DecisionLog, RouterTrace

FIELDS = ("outcome", "computed_ids", "evicted_ids", "arrivals", "substituted_mass")


def replay_in_new_process(traces: Sequence[RouterTrace], policies: Sequence[Policy], num_slots: int, folder: Path) -> list[DecisionLog]:
    """The simulator's decisions about each trace under the policy of the same place; files go through `folder`.

    Raises
    ------
    RuntimeError : the process failed; its own words.
    """
    plan: list[list[Any]] = []
    for number, (trace, policy) in enumerate(zip(traces, policies, strict=True)):
        path = folder / f"{number}.safetensors"
        trace.save(path)
        plan.append([str(path), policy.to_dict(), num_slots])
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-m", __name__, str(folder / "plan.json"), str(folder / "logs.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the replay in a new process failed: {done.stderr[-2000:]}")
    with np.load(folder / "logs.npz") as file:
        return [DecisionLog(**{name: file[f"{number}.{name}"] for name in FIELDS}) for number in range(len(plan))]


def main(plan: str, output: str) -> None:
    """Simulate every row of the plan."""
    arrays = {}
    for number, (path, policy, num_slots) in enumerate(json.loads(Path(plan).read_text())):
        log = simulate(RouterTrace.load(path), Policy.from_dict(policy), num_slots=num_slots).decisions
        arrays |= {f"{number}.{name}": getattr(log, name) for name in FIELDS}
    if "torch" in sys.modules:
        raise RuntimeError("the simulator loaded torch")
    np.savez(output, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
