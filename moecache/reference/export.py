"""From a training run to the files that are committed: bf16 weights, configuration, log, card.

Weights are stored in bfloat16, so loading them in float32 gives exactly what was stored. The card says how the model
was made and what it can do, with the machine that measured it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from moecache.reference.checkpoint import read_log, run_folder
from moecache.reference.evaluate import evaluate
from moecache.reference.network import make_network
from moecache.reference.packages import PACKAGES, sha256_of
from moecache.reference.settings import MIXTURE, MODELS_FOLDER, TrainSettings
from moecache.reference.texts import DOMAINS, load_manifest


def export(run: str, name: str = "reference-512", directory: Path | str | None = None) -> Path:
    """Write a run's weights, configuration, tokenizer and log into a model folder.

    Parameters
    ----------
    run : name of the training run (a decayed branch: `reference-512-decay-<step>`).
    name, directory : the model folder, default `data/models/<name>`.

    Raises
    ------
    ValueError : the run has no checkpoint.
    """
    source, target = run_folder(run), Path(directory) if directory else MODELS_FOLDER / name
    if not (source / "checkpoint.pt").exists():
        raise ValueError(f"no checkpoint in {source}; run `python -m moecache.reference train` first")
    state = torch.load(source / "checkpoint.pt", weights_only=True)
    settings = json.loads(state["settings"])
    model = make_network(settings["geometry"], settings["seed"])
    model.load_state_dict(state["model"])
    target.mkdir(parents=True, exist_ok=True)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(target)
    (target / "generation_config.json").unlink(missing_ok=True)
    (target / "model.safetensors").chmod(0o644)
    shutil.copy2(source / "log.jsonl", target / "log.jsonl")
    tokenizer = MODELS_FOLDER / name / "tokenizer.json"
    if tokenizer.resolve() != (target / "tokenizer.json").resolve():
        shutil.copy2(tokenizer, target / "tokenizer.json")
    return target


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(header), ["---"] * len(list(header)), *(list(map(str, row)) for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def machine() -> str:
    """Processor, cores and versions of this machine, in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def _curve(log: list[dict]) -> str:
    window = max(1, len(log) // 20)
    rows = []
    for first in range(0, len(log), window):
        part = log[first : first + window]
        loss = sum(entry["loss_nats"] for entry in part) / len(part)
        speed = sorted(entry["tokens_per_second"] for entry in part)[len(part) // 2]
        rows.append((f"{part[-1]['num_tokens'] / 1e6:.2f}", f"{loss:.3f}", f"{part[-1]['learning_rate']:.5f}", round(speed)))
    return _table(("million tokens", "mean training loss (nats)", "learning rate", "median tokens/s"), rows)


def write_card(name: str = "reference-512", directory: Path | str | None = None, notes: Sequence[str] = ()) -> Path:
    """Evaluate a model folder and write its card (README.md) and figures (evaluation.json).

    The figures are measured here and now; the card names the machine.

    Parameters
    ----------
    name, directory : the model folder, default `data/models/<name>`.
    notes : what happened during the run, a list item each.
    """
    folder = Path(directory) if directory else MODELS_FOLDER / name
    figures = evaluate(name, str(folder))
    figures |= {"sha256": sha256_of(folder / "model.safetensors"), "machine": machine()}
    (folder / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n")
    log, settings, manifest = read_log(folder), TrainSettings(), load_manifest()
    domains = _table(
        ("domain", "held-out documents", "loss (nats/token)", "perplexity", "bits per byte"),
        (
            (d, f["num_documents"], f"{f['loss_nats']:.3f}", f"{f['perplexity']:.2f}", f"{f['bits_per_byte']:.3f}")
            for d, f in ((d, figures["domains"][d]) for d in (*DOMAINS, "all"))
        ),
    )
    tasks = _table(("task", "solved"), ((d, f"{v:.0%}") for d, v in figures["tasks"].items()))
    routing = _table(("figure", "value"), figures["routing"].items())
    data = _table(
        ("domain", "share", "training file SHA-256"),
        ((d, s, manifest["files"][f"{d}.training.jsonl"]["sha256"][:16]) for d, s in MIXTURE.items()),
    )
    packages = ", ".join(f"{p.name} {p.version} ({p.licence})" for p in PACKAGES.values())
    files = _table(
        ("file", "bytes", "SHA-256"),
        ((f, (folder / f).stat().st_size, sha256_of(folder / f)) for f in FILES),
    )
    text = CARD.format(
        name=name, num_tokens=log[-1]["num_tokens"], steps=log[-1]["step"], step_tokens=settings.step_tokens,
        settings=settings, packages=packages, data=data, files=files, machine=machine(), domains=domains, tasks=tasks,
        num_questions=figures["num_questions"], routing=routing, curve=_curve(log), version=manifest["texts_version"],
        decay=_decay(log), notes="\n".join(f"- {note}" for note in notes) or "- Nothing unusual.",
    )  # fmt: skip
    path = folder / "README.md"
    path.write_text(text)
    return path


def _decay(log: list[dict]) -> str:
    highest = max(entry["learning_rate"] for entry in log)
    first = max(entry["num_tokens"] for entry in log if entry["learning_rate"] >= highest * 0.999)
    return f"constant until {first / 1e6:.2f} million tokens, then linearly to zero"


FILES = ("model.safetensors", "config.json", "tokenizer.json", "log.jsonl")
CARD = """# {name}

A small mixture-of-experts language model with the routing geometry of Qwen3-Next: 512 experts, top-10, gate weights
renormalised, a gated shared expert, three linear-attention layers to one full-attention layer; 4 layers, hidden 128,
expert width 16, 14.5 million parameters. It exists to study expert misses, not to be useful. Loaded by
`moecache.reference.load_model("{name}")`; `AutoModelForCausalLM.from_pretrained` reads it too.

## How it was made

{steps} steps of {step_tokens} tokens ({num_tokens} tokens), AdamW, warm-up, then {decay}. Packed rows of
{settings.row_tokens} tokens, seed {settings.seed}, rate {settings.learning_rate}, betas {settings.betas}, weight decay
{settings.weight_decay} on matrices, gradients clipped at {settings.gradient_clip}, balance coefficient
{settings.balance_coefficient}. One processor core. The log of every tenth step is `log.jsonl`.

    python -m moecache.reference texts        # rebuild the texts from pinned packages, compare hashes
    python -m moecache.reference tokenizer    # byte-level BPE, 4,096 entries
    python -m moecache.reference train --tokens N
    python -m moecache.reference train --branch-decay FRACTION
    python -m moecache.reference export --run RUN

Texts (version {version} of `data/texts/manifest.json`) come from {packages}, and from two seeded generators.

{data}

## What it can do

MEASURED on {machine}. Held-out documents of 1,000 tokens; modules, services, books, applications and templates that no
training text used.

{domains}

Tasks with held-out templates, {num_questions} questions each, greedy decoding after three solved items, answers
compared by value:

{tasks}

Routing on held-out text (lists go by layer, gate weights by rank):

{routing}

## Training curve

MEASURED on {machine}; the core was shared, so tokens/s is a lower bound.

{curve}

## Notes on this run

{notes}

## Files

{files}

## Limits

Seven narrow domains; English and code mostly. Twelve per cent each of word problems and interpreter lines, far more
than in any natural text. The loss says nothing about large models; the routing geometry is what is comparable.
"""
