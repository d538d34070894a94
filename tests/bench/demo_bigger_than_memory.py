"""A model of 12.9 GB writes in less than a third of its size, and writes what it writes with all of it in memory.

    python tests/bench/demo_bigger_than_memory.py [--memory "3.2 GB"] [--cap "4 GB"] [--prompts 4] [--tokens 48]

What a newcomer does: a reference model is widened to experts of real size (`moecache widen`, the same text and routes), packed
(`moecache pack`), opened with `moecache.offload` and asked to write. The process that writes runs in a memory cgroup (`memory_cap`); a
second one without a limit loads the same checkpoint whole with transformers alone and writes after the same prompts. Both decode greedily,
step by step in bfloat16, and without oneDNN where they compute one token: that switch changes roundings, so both have it.

Prompts are held-out word problems, each after three solved ones. Under "fetch every miss" the texts must be the same, token for token;
under the rules that substitute they may differ. JSON lines are printed, all of them MEASURED:

- `machine`: versions, sizes, the cap.
- `loading`: what loading without experts takes beside the imports, on the first two layers (6.5 GB), and its bound.
- `writing`: for each policy, and for the model that is whole, the system's own peaks (`peak_bytes` with pages of files, `peak_rss_bytes`
  of the process) and seconds a written token.
- `texts`: for each policy how many written tokens are the same as the whole model's, and how many up to the first that differs.
- `logits`: one prompt read token by token: how far logits under "fetch every miss" lie from the whole model's, bit for bit if 0.
- `text`: the texts themselves.

It needs 26 GB of disk, and 13 GB of memory for the whole model. A stored run is `results/demo_bigger_than_memory.jsonl`; other work ran
beside it, so its seconds are no measurement of speed (`bench_runtime.py` is one).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import moecache as mc
from moecache import hf_internals
from moecache.experiments.memory_cap import CappedRun, run_capped
from moecache.provenance import provenance
from moecache.reference.answers import held_out_questions, is_right
from moecache.reference.loading import load_tokenizer, quiet_library
from moecache.reference.packages import cache_folder
from moecache.runtime.budget import parse_bytes
from moecache.runtime.call import around, num_tokens, without_onednn

NAME = "reference-512"
TIMEOUT_SECONDS = 900
POLICIES = {policy.label: policy for policy in (mc.FETCH_EVERY_MISS, mc.QUALITY_FIRST, mc.SPEED_FIRST)}
WHOLE = "all experts in memory"


# What runs in a process of its own


def write(folder: Path, label: str, logits: Path, memory: str, num_prompts: int, max_new_tokens: int) -> dict[str, Any]:
    """Load, write after every prompt, and tell what was written and how long it took; `label` names a policy, or WHOLE."""
    start = perf_counter()
    model = _whole(folder) if label == WHOLE else mc.offload(folder, POLICIES[label], memory=memory, reserve=0)
    opened, texts, seconds = perf_counter() - start, [], []
    for ids in _prompts(num_prompts):
        start = perf_counter()
        texts.append(_written(model, ids, max_new_tokens))
        seconds.append((perf_counter() - start) / len(texts[-1]))
    stats = {} if label == WHOLE else {**model.moecache.stats(), "slots": model.moecache.num_slots.tolist()}
    if label in (WHOLE, mc.FETCH_EVERY_MISS.label):
        np.save(logits, _read(model, _prompts(1)[0]))
    return {"texts": texts, "seconds_per_token": float(np.median(seconds)), "seconds_to_open": opened, "stats": stats}


def load_without_experts(folder: Path) -> dict[str, int]:
    """Bytes that loading adds to the peak of the imports, and those of the dense weights."""
    from moecache.runtime.loading import load_dense

    before = _peak_rss_bytes()
    model = load_dense(folder)
    dense = sum(weight.numel() * weight.element_size() for weight in (*model.parameters(), *model.buffers()))
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"imports_bytes": before, "dense_bytes": dense, "checkpoint_bytes": files, "peak_rss_bytes": _peak_rss_bytes()}


def _whole(folder: Path) -> Any:
    """The model as transformers loads it, with the kernels that the runtime uses for one token."""
    from transformers import AutoModelForCausalLM

    with quiet_library():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()
    model.set_experts_implementation("grouped_mm")
    around(model, lambda arguments: without_onednn() if num_tokens(arguments) == 1 else torch.no_grad())
    return model


def _prompts(number: int) -> list[list[int]]:
    tokenizer = load_tokenizer(NAME)
    return [[0, *tokenizer.encode(question.prompt).ids] for question in held_out_questions("word_problems", number)]


def _written(model: Any, ids: list[int], max_new_tokens: int) -> list[int]:
    given = torch.tensor([ids])
    found = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0)
    return found[0, len(ids) :].tolist()


@torch.no_grad()
def _read(model: Any, ids: list[int]) -> np.ndarray:
    """Logits [T, V] of a text read token by token."""
    keyword, cache, rows = hf_internals.cache_keyword(model), None, []
    for token in ids:
        output = model(input_ids=torch.tensor([[token]]), use_cache=True, **{keyword: cache})
        cache = hf_internals.decoding_cache(output)
        rows.append(output.logits[0, 0].to(torch.float32))
    return torch.stack(rows).numpy()


def _peak_rss_bytes() -> int:
    rows = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(rows["VmHWM"].split()[0])


# What starts them and compares


def prepare(num_layers: int | None, pack: bool) -> tuple[Path, Path]:
    """The widened checkpoint and the packed one, by the commands that a user has; made where they are missing."""
    widened = cache_folder() / "widened" / (f"{NAME}-{num_layers}-layers" if num_layers else f"{NAME}-all-layers")
    packed = widened.with_name(f"{widened.name}-packed")
    command = [sys.executable, "-m", "moecache.cli"]
    if not widened.exists():
        layers = ["--num-layers", str(num_layers)] if num_layers else []
        subprocess.run([*command, "widen", str(widened), "--model", NAME, "--layout", "fused", *layers], check=True, stdout=sys.stderr)
    if pack and not packed.exists():
        subprocess.run([*command, "pack", str(widened), str(packed)], check=True, stdout=sys.stderr)
    return widened, packed


def run_part(cap: int | None, *arguments: str) -> tuple[CappedRun, Any]:
    """Run a part of this script in a process of its own, under a cap; what it printed as JSON."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    run = run_capped([sys.executable, __file__, *arguments], cap, TIMEOUT_SECONDS, env)
    if run.returncode:
        why = "killed by the cap" if run.was_killed_by_cap else "out of time" if run.is_timed_out else run.stderr[-2000:]
        raise RuntimeError(f"{arguments} under {cap} bytes ended with {run.returncode}: {why}")
    return run, json.loads(run.stdout.splitlines()[-1])


def compared(label: str, texts: list[list[int]], whole: list[list[int]]) -> dict[str, Any]:
    """How many written tokens are the whole model's."""
    pairs = list(zip(texts, whole, strict=True))
    same = [sum(a == b for a, b in zip(*pair, strict=False)) for pair in pairs]
    leading = [next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair))) for pair in pairs]
    counts = {"same_tokens": sum(same), "leading_tokens": sum(leading), "whole_models_tokens": sum(map(len, whole))}
    return {"what": "texts", "policy": label, "prompts": len(pairs), "same_texts": sum(a == b for a, b in pairs), **counts}


def writing_row(label: str, cap: int | None, run: CappedRun, told: Any) -> dict[str, Any]:
    """Peaks and seconds of one process."""
    kept = ("hit", "fetched", "substituted", "hit_rate", "bytes_demand", "bytes_prefill", "slots", "torch_threads")
    row = {"what": "writing", "policy": label, "cap_bytes": cap, "peak_bytes": run.peak_bytes, "peak_rss_bytes": run.peak_rss_bytes}
    times = {name: round(told[name], 4) for name in ("seconds_per_token", "seconds_to_open")}
    return row | times | {name: told["stats"][name] for name in kept if name in told["stats"]}


def demonstrate(given: argparse.Namespace, scratch: Path) -> None:
    """Run everything and print; logits pass through files in `scratch`."""
    widened, packed = prepare(None, pack=True)
    cap, size = parse_bytes(given.cap), sum(path.stat().st_size for path in packed.iterdir())
    show(what="machine", label="MEASURED", model_bytes=size, cap_bytes=cap, cap_fraction=cap / size, memory=given.memory, **provenance())
    settings = (given.memory, str(given.prompts), str(given.tokens))
    run, whole = run_part(None, "write", str(widened), WHOLE, str(scratch / "whole.npy"), *settings)
    show(**writing_row(WHOLE, None, run, whole))
    tokenizer, questions = load_tokenizer(NAME), held_out_questions("word_problems", given.prompts)
    texts = {WHOLE: whole["texts"]}
    for label in POLICIES:
        run, told = run_part(cap, "write", str(packed), label, str(scratch / f"{label}.npy"), *settings)
        show(**writing_row(label, cap, run, told))
        show(**compared(label, told["texts"], whole["texts"]))
        texts[label] = told["texts"]
        if label == mc.FETCH_EVERY_MISS.label:
            difference = np.abs(np.load(scratch / f"{label}.npy") - np.load(scratch / "whole.npy"))
            show(what="logits", tokens=len(difference), largest_difference=float(difference.max()))
    for index, question in enumerate(questions):
        written = {label: tokenizer.decode(found[index]) for label, found in texts.items()}
        right = {label: is_right(question, text) for label, text in written.items()}
        show(what="text", prompt=question.prompt.rsplit("\n\n", 1)[-1], written=written, is_right=right)
    _, loading = run_part(None, "load", str(prepare(2, pack=False)[0]))
    beside = loading["peak_rss_bytes"] - loading["imports_bytes"] - loading["dense_bytes"]
    show(what="loading", **loading, beside_imports_and_dense_bytes=beside, bound_bytes=200_000_000)


def show(**row: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(row, default=str), flush=True)


def main() -> None:
    """The demonstration, or one of its parts."""
    if sys.argv[1:2] == ["write"]:
        folder, label, logits, memory, num_prompts, max_new_tokens = sys.argv[2:]
        show(**write(Path(folder), label, Path(logits), memory, int(num_prompts), int(max_new_tokens)))
        return
    if sys.argv[1:2] == ["load"]:
        show(**load_without_experts(Path(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="3.2 GB", help="for dense weights, decoding cache and slots")
    parser.add_argument("--cap", default="4 GB", help="of the process, all its memory and pages of files counted")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="most tokens written after a prompt")
    with tempfile.TemporaryDirectory() as scratch:
        demonstrate(parser.parse_args(), Path(scratch))


if __name__ == "__main__":
    main()
