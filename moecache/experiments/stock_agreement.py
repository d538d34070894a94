"""Do the engines compute the same model? Asked before any clock is read: their logits on the same tokens.

The reference is plain transformers with its own experts implementation. Every engine decodes the same text token by token in a process of
its own, none of them capped, and its logits are compared with the reference's at each token t:

    KL_t = sum over v of p_t(v) (log p_t(v) - log q_t(v)),    p = softmax(reference), q = softmax(engine), in float64

What is right depends on the arithmetic. This project's runtime under a policy that waits for every miss, and accelerate, use the library's
own products, so their logits must be *equal*. llama.cpp sums in another order and rounds activations elsewhere, so its differences are
those of bfloat16; it keeps keys and values in float32 for this check, because float16 is a choice of speed. On a GPU every engine's sums
are in another order than the reference's, which stays on the processor. With experts of fewer bits nothing has to agree: the same numbers
then say what an engine's rounding costs.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moecache.experiments.stock_files import Files, StockError, files_of, python, tokens_of
from moecache.experiments.stock_places import CPU, PROCESSOR, Place, place_options

PROGRAMS = "moecache.experiments.stock_engines"
REFERENCE = "transformers_mmap"
EXACT = ("ours", "accelerate_offload")
ROUNDING = ("ours", "llama_cpp")  # read experts of 4 bits
LARGEST_KL = 1e-2  # nats a token, of engines with products of their own
DOCUMENT = 0
NULL_POLICY = "fetch every miss"


class DisagreementError(RuntimeError):
    """An engine does not compute the same model; its speed means nothing."""


def measure(
    model_name: str,
    hidden_size: int,
    expert_width: int,
    modules: Sequence[str],
    num_tokens: int,
    bits: Sequence[int] = (16,),
    device: str = CPU,
) -> pd.DataFrame:
    """Compare engines with plain transformers on the beginning of a held-out document.

    Parameters
    ----------
    model_name, hidden_size, expert_width : of the widened checkpoint.
    modules : programs of `stock_engines`; the reference itself is left out, and so are programs that do not read these bits.
    num_tokens : compared.
    bits : of the experts, 16 or 4; the reference always has 16.
    device : where the engines compute; the reference computes on the processor.

    Returns
    -------
    DataFrame : `engine` (the program), `bits`, `num_tokens`, `mean_kl_nats`, `max_kl_nats`, `same_top_fraction`, `max_difference` (of
        logits), `mean_reference_logit` (absolute), `is_equal` (every logit), `must_be_equal`.

    Raises
    ------
    StockError : an engine that fails.
    """
    tokens, place = tokens_of(num_tokens, DOCUMENT), Place(device)
    asked = [(module, number) for number in bits for module in dict.fromkeys(modules) if number == 16 or module in ROUNDING]
    reference = logits_of(REFERENCE, files_of(model_name, hidden_size, expert_width, 16, REFERENCE), tokens, PROCESSOR)
    rows = []
    for module, number in asked:
        if module == REFERENCE:
            continue
        found = logits_of(module, files_of(model_name, hidden_size, expert_width, number, module), tokens, place)
        must_be_equal = number == 16 and module in EXACT and not place.is_gpu
        rows.append(
            {"engine": module, "bits": number, "num_tokens": num_tokens, **compare(reference, found), "must_be_equal": must_be_equal}
        )
    return pd.DataFrame(rows)


def logits_of(module: str, files: Files, tokens: NDArray[np.int32], place: Place) -> NDArray[np.float32]:
    """Logits [T, V] of an engine that decodes the tokens one by one in a process of its own; a GPU holds half of what it could.

    Raises
    ------
    StockError : it fails; its last lines are told.
    """
    options = {
        "llama_cpp": ["--float32-cache", "--context-tokens", str(len(tokens))],
        "ours": ["--policy", NULL_POLICY, "--slots", str(max(files.shape.top_k, files.shape.num_experts // 4))],
    }.get(module, [])
    options += place_options(module, place, files.shape.num_layers, files.shape.num_layers // 2, tier_mebibytes=0)
    with tempfile.TemporaryDirectory() as folder:
        given, logits = Path(folder) / "tokens.npy", Path(folder) / "logits.npy"
        np.save(given, tokens)
        command = [python(), "-m", f"{PROGRAMS}.{module}", str(files.model), str(given)]
        command += ["--measured-tokens", str(len(tokens)), "--logits", str(logits), *options]
        run = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        if run.returncode:
            raise StockError(f"{module} ended with status {run.returncode}:\n" + "\n".join(run.stderr.splitlines()[-8:]))
        return np.load(logits)


def compare(reference: NDArray[np.float32], found: NDArray[np.float32]) -> dict[str, float | bool]:
    """How far logits [T, V] are from a reference's, see the module and `measure`.

    Raises
    ------
    ValueError : other tokens or another vocabulary.
    """
    if reference.shape != found.shape:
        raise ValueError(f"logits [tokens, vocabulary] are compared, got {found.shape} for {reference.shape} of the reference")
    log_p, log_q = _log_softmax(reference), _log_softmax(found)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    return {
        "mean_kl_nats": float(kl.mean()),
        "max_kl_nats": float(kl.max()),
        "same_top_fraction": float((reference.argmax(axis=1) == found.argmax(axis=1)).mean()),
        "max_difference": float(np.abs(reference.astype(float) - found).max()),
        "mean_reference_logit": float(np.abs(reference).mean()),
        "is_equal": bool(np.array_equal(reference, found)),
    }


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def check(frame: pd.DataFrame) -> None:
    """See that engines with 16 bits compute the same model.

    Raises
    ------
    DisagreementError : names each that does not, with its numbers.
    """
    full = frame[frame["bits"] == 16]
    is_wrong = np.where(full["must_be_equal"], ~full["is_equal"].astype(bool), ~(full["mean_kl_nats"] < LARGEST_KL))
    if is_wrong.any():
        told = "; ".join(
            f"{row.engine}: mean KL {row.mean_kl_nats:.3g} nats, largest difference {row.max_difference:.3g}"
            for row in full[is_wrong].itertuples()
        )
        raise DisagreementError(
            f"not the same model as {REFERENCE} (equal logits, or a mean KL below {LARGEST_KL:g}, are asked for): {told}"
        )
