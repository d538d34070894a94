"""What an emulation costs beside the plain forward of the same text, and beside stepped emulation.

    python tests/bench/bench_emulate.py [--documents 8] [--tokens 256] [--repeats 3] [--device cpu]

prints JSON lines: the machine and the versions, then for each way of running its seconds a pass and their ratio to the plain forward
(token losses included). Ways are interleaved, A B C A B C, and the smallest of the repeats counts; stepped emulation reads the first tokens
of one document only, and is compared by token. On a shared machine only the ratios within one run mean something.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import moecache as mc
from moecache.emulate import emulate_policies
from moecache.provenance import provenance
from moecache.reference import held_out_documents, load_model
from moecache.score import score

POLICIES = (mc.FETCH_EVERY_MISS, mc.threshold(0.15), mc.threshold(0.1), mc.FIRST_CHOICE)
NUM_SLOTS = 128


def ways(model: Any, texts: list[np.ndarray]) -> dict[str, Callable[[], object]]:
    """What is timed; the first is what the ratios refer to."""
    return {
        "plain forward": lambda: score(model, texts),
        "fetch every miss": lambda: mc.emulate(model, texts, POLICIES[0], NUM_SLOTS),
        "threshold 0.15": lambda: mc.emulate(model, texts, POLICIES[1], NUM_SLOTS),
        "threshold 0.15, layer error": lambda: mc.emulate(model, texts, POLICIES[1], NUM_SLOTS, layer_error=True),
        "threshold 0.15, beside the exact model": lambda: mc.emulate(model, texts, POLICIES[1], NUM_SLOTS, compare_with_exact=True),
        "four policies at once": lambda: emulate_policies(model, texts, POLICIES, NUM_SLOTS),
    }


def main() -> None:
    """Time every way and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference-512")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--stepped-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(given.model).to(given.device)
    texts = [np.asarray(text.tokens)[: given.tokens] for text in held_out_documents(given.documents, name=given.model)]
    num_tokens = sum(text.size for text in texts)
    print(json.dumps({"model": given.model, "tokens": num_tokens, "device": given.device} | provenance(), default=str))
    timed = ways(model, texts)
    best = dict.fromkeys(timed, float("inf"))
    mc.emulate(model, texts[:1], POLICIES[1], NUM_SLOTS)  # compiled before the clock runs
    for _ in range(given.repeats):
        for name, run in timed.items():
            start = time.process_time() if given.device == "cpu" else time.perf_counter()
            run()
            best[name] = min(best[name], (time.process_time() if given.device == "cpu" else time.perf_counter()) - start)
    for name, seconds in best.items():
        passes = len(POLICIES) if name == "four policies at once" else 1
        print(
            json.dumps({"way": name, "seconds": round(seconds / passes, 4), "of_plain": round(seconds / passes / best["plain forward"], 3)})
        )
    short = texts[0][: given.stepped_tokens]
    start = time.process_time()
    mc.emulate(model, short, POLICIES[1], NUM_SLOTS, stepped=True)
    a_token = (time.process_time() - start) / short.size
    print(
        json.dumps({"way": "stepped", "seconds_a_token": a_token, "of_one_pass": round(a_token / (best["threshold 0.15"] / num_tokens), 1)})
    )


if __name__ == "__main__":
    main()
