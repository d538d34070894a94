"""The card of a reference model: how it was made and what it can do, measured here and now, with the machine named.

Everything on the card is read from the model folder, from the training settings or from the texts' manifest, so one
template serves every geometry. This module knows files and words; what is measured stands in `evaluate`.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from moecache.reference.checkpoint import read_log
from moecache.reference.evaluate import evaluate
from moecache.reference.loading import model_folder
from moecache.reference.packages import PACKAGES, sha256_of
from moecache.reference.settings import MIXTURE, settings_of
from moecache.reference.texts import DOMAINS, load_manifest

FILES = ("model.safetensors", "config.json", "tokenizer.json", "log.jsonl")
IMITATED = {"qwen3_next": "Qwen3-Next", "olmoe": "OLMoE"}


def write_card(name: str = "reference-512", directory: Path | str | None = None, notes: Sequence[str] = ()) -> Path:
    """Evaluate a model folder and write its card (README.md) and figures (evaluation.json).

    Parameters
    ----------
    name : the model's name, one of `settings.SETTINGS`.
    directory : the model folder, default `data/models/<name>`.
    notes : what happened during the run, a list item each.

    Returns
    -------
    Path : the card.
    """
    folder, settings = model_folder(name, directory), settings_of(name)
    figures = evaluate(name, str(folder))
    figures |= {"sha256": sha256_of(folder / "model.safetensors"), "machine": machine()}
    (folder / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n")
    log, manifest = read_log(folder), load_manifest()
    text = CARD.format(
        name=name, geometry=describe(folder), num_tokens=log[-1]["num_tokens"], steps=log[-1]["step"],
        step_tokens=settings.step_tokens, settings=settings, decay=_decay(log), machine=machine(), curve=_curve(log),
        packages=", ".join(f"{p.name} {p.version} ({p.licence})" for p in PACKAGES.values()),
        version=manifest["texts_version"], data=_data(manifest), files=_files(folder),
        num_questions=figures["num_questions"], domains=_domains(figures["domains"]),
        tasks=_table(("task", "solved"), ((d, f"{v:.0%}") for d, v in figures["tasks"].items())),
        routing=_table(("figure", "value"), figures["routing"].items()),
        notes="\n".join(f"- {note}" for note in notes) or "- Nothing unusual.",
    )  # fmt: skip
    path = folder / "README.md"
    path.write_text(text)
    return path


def describe(folder: Path) -> str:
    """A model folder's geometry in a sentence, from its configuration and the shapes of its weights."""
    config = json.loads((folder / "config.json").read_text())
    kinds = config.get("layer_types", [])
    num_linear = kinds.count("linear_attention")
    attention = f"{num_linear} linear-attention layers to {len(kinds) - num_linear} with full attention" if num_linear else "full attention"
    shared = "a gated shared expert" if config.get("shared_expert_intermediate_size") else "no shared expert"
    weights = "gate weights renormalised" if config["norm_topk_prob"] else "routing weights left as the softmax gives them"
    return (
        f"{IMITATED.get(config['model_type'], config['model_type'])}: {config['num_experts']} experts, "
        f"top-{config['num_experts_per_tok']}, {weights}, {shared}, {attention}; {config['num_hidden_layers']} layers, "
        f"hidden {config['hidden_size']}, expert width {config.get('moe_intermediate_size', config['intermediate_size'])}, "
        f"{'tied' if config['tie_word_embeddings'] else 'separate'} embeddings, {_num_parameters(folder) / 1e6:.1f} million parameters"
    )


def _num_parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118 - the file is no dict


def machine() -> str:
    """Processor, cores and versions of this machine, in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(header)
    lines = [names, ["---"] * len(names), *(list(map(str, row)) for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _domains(figures: dict[str, Any]) -> str:
    header = ("domain", "held-out documents", "loss (nats/token)", "perplexity", "bits per byte")
    parts = ((domain, figures[domain]) for domain in (*DOMAINS, "all") if domain in figures)
    rows = ((d, f["num_documents"], f"{f['loss_nats']:.3f}", f"{f['perplexity']:.2f}", f"{f['bits_per_byte']:.3f}") for d, f in parts)
    return _table(header, rows)


def _data(manifest: dict[str, Any]) -> str:
    files = manifest["files"]
    rows = ((d, s, files[f"{d}.training.jsonl"]["sha256"][:16]) for d, s in MIXTURE.items())
    return _table(("domain", "share", "training file SHA-256"), rows)


def _files(folder: Path) -> str:
    return _table(("file", "bytes", "SHA-256"), ((f, (folder / f).stat().st_size, sha256_of(folder / f)) for f in FILES))


def _curve(log: list[dict]) -> str:
    window = max(1, len(log) // 20)
    rows = []
    for first in range(0, len(log), window):
        part = log[first : first + window]
        loss = sum(entry["loss_nats"] for entry in part) / len(part)
        speed = sorted(entry["tokens_per_second"] for entry in part)[len(part) // 2]
        rows.append((f"{part[-1]['num_tokens'] / 1e6:.2f}", f"{loss:.3f}", f"{part[-1]['learning_rate']:.5f}", round(speed)))
    return _table(("million tokens", "mean training loss (nats)", "learning rate", "median tokens/s"), rows)


def _decay(log: list[dict]) -> str:
    highest = max(entry["learning_rate"] for entry in log)
    first = max(entry["num_tokens"] for entry in log if entry["learning_rate"] >= highest * 0.999)
    if first == log[-1]["num_tokens"]:
        return "constant to the end"
    return f"constant until {first / 1e6:.2f} million tokens, then linearly to zero"


CARD = """# {name}

A small mixture-of-experts language model with the routing geometry of {geometry}. It exists to study expert misses, not
to be useful. Loaded by `moecache.reference.load_model("{name}")`; `AutoModelForCausalLM.from_pretrained` reads it too.

## How it was made

{steps} steps of {step_tokens} tokens ({num_tokens} tokens), AdamW, warm-up, then {decay}. Packed rows of
{settings.row_tokens} tokens, seed {settings.seed}, rate {settings.learning_rate}, betas {settings.betas}, weight decay
{settings.weight_decay} on matrices, gradients clipped at {settings.gradient_clip}, balance coefficient
{settings.balance_coefficient}. One processor core. The log of every tenth step is `log.jsonl`.

    python -m moecache.reference texts        # rebuild the texts from pinned packages, compare hashes
    python -m moecache.reference tokenizer    # byte-level BPE, 4,096 entries
    python -m moecache.reference train --model {name} --tokens N
    python -m moecache.reference train --model {name} --branch-decay FRACTION
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

Routing on held-out text (lists go by layer, gate weights by rank, summing to 1):

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
