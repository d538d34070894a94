"""moecache's runtime under one of the presets, its experts in slots and on disk."""

from __future__ import annotations

import argparse
import json
from typing import Any

from moecache.experiments.stock_engines import protocol
from moecache.policy import PRESETS

NOT_COUNTS = ("policy", "hit_rate", "torch_threads", "omp_wait_policy")


def declare(parser: argparse.ArgumentParser) -> None:
    """The engine's own options."""
    parser.add_argument("--policy", choices=[preset.label for preset in PRESETS], default=PRESETS[0].label, help="what is waited for")
    parser.add_argument("--gate-threshold", type=float, help="another threshold than the policy's, for a router that does not call ten")
    parser.add_argument("--max-in-flight", type=int, help="background copies under way in a layer at most (default: the policy's)")
    parser.add_argument("--fields", type=json.loads, default={}, help="the policy's fields as JSON, where they are none of a preset's")
    parser.add_argument("--slots", type=int, required=True, help="experts a layer in memory")
    parser.add_argument("--readers", type=int, help="threads that read (default: the runtime's)")
    parser.add_argument("--host-mebibytes", type=int, default=0, help="main memory for the experts read last, behind the slots; 0: none")
    protocol.declare_device(parser)
    parser.set_defaults(onednn=False)


def load(asked: argparse.Namespace) -> Any:
    """Decode with moecache's runtime."""
    import moecache
    from moecache.experiments.stock_engines.stepping import Stepped

    policy = next(preset for preset in PRESETS if preset.label == asked.policy)
    changed = {name: getattr(asked, name) for name in ("gate_threshold", "max_in_flight") if getattr(asked, name) is not None}
    policy = moecache.Policy.from_dict({**policy.replace(**changed, label=policy.label).to_dict(), **asked.fields})
    readers = {} if asked.readers is None else {"num_readers": asked.readers}
    tier = {"host_memory": f"{asked.host_mebibytes} MiB"} if asked.host_mebibytes else {}
    model = moecache.offload(asked.model, policy, asked.slots, device=asked.device, **tier, **readers)

    def stats() -> dict[str, float]:
        return {name: value for name, value in model.moecache.stats().items() if name not in NOT_COUNTS}

    settings = {"policy": policy.label, **changed, "slots": asked.slots, **tier}
    return Stepped(model, asked, stats, settings, {"moecache": moecache.__version__})


if __name__ == "__main__":
    raise SystemExit(protocol.main("ours", declare, load, protocol.TORCH_ENVIRONMENT))
