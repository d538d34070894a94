"""What the runtime itself costs beside products and waits: microseconds a layer and token, for every preset.

    python tests/bench/bench_runtime_overhead.py [--tokens 200] [--warm-tokens 100] [--slots 128]

prints JSON lines: the machine and the versions, then for each preset medians over the layers of all tokens, decoded one by one in the
trained model of 512 experts, top-10, with its real routes; its experts are tiny, so their products are not what is measured.

- `hook`: wall time from a router's output to the experts' input: routing, the kernel, landing, fetching and asking, writing weights back.
  `hook_cpu` is the same in CPU time of the computing thread, which what others do on the machine does not lengthen. Of the wall time
  `routing` is what decides and writes back, `moving` what keeps books and hands copies to the threads.
- `handing_out`: time in the experts module that is neither a product nor a wait: finding blocks, and torch's stack and sum (some 16).
- `fetched`, `substituted`: calls a layer and token.

On a shared machine a median still says what a quiet layer costs; `hook_p90` shows what the others did to it.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

import moecache as mc
from moecache import hf_internals
from moecache.provenance import provenance
from moecache.reference import held_out_documents, load_model


class Clock:
    """Time of each router hook and each experts module, by hooks around them."""

    def __init__(self, model: Any) -> None:
        self.hook: list[float] = []
        self.hook_cpu: list[float] = []
        self.routing: list[float] = []
        self.moving: list[float] = []
        self.handing_out: list[float] = []
        self.counters = model.moecache.counters
        for layer in hf_internals.moe_layers(model):
            layer.router.register_forward_hook(self._began, prepend=True)
            layer.router.register_forward_hook(self._decided)
            layer.experts.register_forward_pre_hook(self._began)
            layer.experts.register_forward_hook(self._computed)

    def _began(self, *_: Any) -> None:
        counters = self.counters
        self._before = (counters.seconds_routing, counters.seconds_overhead, counters.seconds_experts + counters.seconds_waiting)
        self._start, self._start_cpu = perf_counter(), thread_time()

    def _decided(self, *_: Any) -> None:
        self.hook.append(perf_counter() - self._start)
        self.hook_cpu.append(thread_time() - self._start_cpu)
        self.routing.append(self.counters.seconds_routing - self._before[0])
        self.moving.append(self.counters.seconds_overhead - self._before[1])

    def _computed(self, *_: Any) -> None:
        spent = perf_counter() - self._start
        self.handing_out.append(spent - (self.counters.seconds_experts + self.counters.seconds_waiting - self._before[2]))


def measure(name: str, policy: mc.Policy, num_slots: int, text: np.ndarray, num_warm: int) -> dict[str, float | str]:
    """Medians in microseconds, after the first `num_warm` tokens."""
    model = mc.offload(load_model(name), policy, num_slots)
    clock, keyword, cache = Clock(model), hf_internals.cache_keyword(model), None
    for token, token_id in enumerate(text.tolist()):
        if token == num_warm:
            first, before = len(clock.hook), model.moecache.stats()
        output = model(input_ids=torch.tensor([[token_id]]), use_cache=True, **{keyword: cache})
        cache = hf_internals.decoding_cache(output)
    stats, num_steps = model.moecache.stats(), len(clock.hook) - first
    model.moecache.close()
    rows = {kind: 1e6 * np.array(getattr(clock, kind)[first:]) for kind in ("hook", "hook_cpu", "routing", "moving", "handing_out")}
    counted = {kind: (stats[kind] - before[kind]) / num_steps for kind in ("fetched", "forced", "substituted")}
    medians = {kind: float(np.median(row)) for kind, row in rows.items()} | {"hook_p90": float(np.quantile(rows["hook"], 0.9))}
    return {"policy": policy.label, **{kind: round(value, 1) for kind, value in medians.items()}} | {
        kind: round(value, 2) for kind, value in counted.items()
    }


def main() -> None:
    """Measure every preset and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference-512")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--warm-tokens", type=int, default=100)
    parser.add_argument("--slots", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(1)
    document = np.concatenate([np.asarray(text.tokens) for text in held_out_documents(4, name=given.model)])
    text = document[: given.tokens + given.warm_tokens]
    print(json.dumps({"model": given.model, "slots": given.slots, "tokens": given.tokens} | provenance(), default=str))
    for policy in mc.PRESETS:
        print(json.dumps(measure(given.model, policy, given.slots, text, given.warm_tokens)), flush=True)


if __name__ == "__main__":
    main()
