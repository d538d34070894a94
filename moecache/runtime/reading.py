"""An offloaded model reads documents token by token: a `Run` with decisions, token losses and measured seconds.

Every token is one forward, as in decoding, so the seconds of a token are the wall time of its forward, vocabulary head included. A prompt's
tokens (`exact_prefix_tokens`) are read one by one as well, with every miss waited for; their seconds are not those of a prompt computed at
once. The first tokens after opening are cold: leave them out with ``run.summary(first_token=...)``.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch

from moecache import hf_internals
from moecache.provenance import provenance
from moecache.run import Run
from moecache.score import as_documents, check_evaluation, describe_model, document_starts, losses_of, with_progress


def read_documents(
    engine: Any, model: Any, token_ids: Any, documents: str, exact_prefix_tokens: int, keep_logits: bool, progress: bool
) -> Run:
    """See `Runtime.read`."""
    if documents not in ("keep", "reset"):
        raise ValueError(f"documents={documents!r} is unknown; choose one of keep, reset")
    texts = as_documents(model, token_ids)
    check_evaluation(model)
    counts, mass = engine.counts_by_layer(), engine.mass_sum
    losses, seconds, logits = [], [], []
    with engine.record_trace() as recording:
        for position, text in enumerate(with_progress(texts, progress, engine.policy.label)):
            if position > 0 and documents == "reset":
                engine.reset()
            rows, took = _read(engine, model, text, exact_prefix_tokens)
            ids = torch.from_numpy(text).to(rows.device, torch.int64)
            losses += [[np.nan], losses_of(rows, ids[1:])]
            seconds.append(took)
            logits += [rows.to(torch.float32).cpu().numpy()] if keep_logits else []
    return Run(
        instrument="runtime",
        policy=engine.policy,
        shape=engine.shape,
        num_slots=engine.num_slots,
        cold_start="kept" if counts.any() else "cold",
        documents=documents,
        replay="atomic",
        document_start=document_starts(texts),
        decisions=recording.decisions(),
        counts=engine.counts_by_layer() - counts,
        mass_sum=engine.mass_sum - mass,
        loss_nats=np.concatenate(losses),
        seconds=np.concatenate(seconds),
        seconds_kind="measured",
        provenance=provenance() | {"model": describe_model(model, texts)},
        extra={"logits": np.concatenate(logits)} if keep_logits else {},
    )


@torch.no_grad()
def _read(engine: Any, model: Any, text: np.ndarray, exact_prefix_tokens: int) -> tuple[torch.Tensor, np.ndarray]:
    """Logits [T, V] and seconds [T] of one document."""
    ids = torch.from_numpy(text).to(model.device, torch.int64)
    keyword, cache, rows, seconds = hf_internals.cache_keyword(model), None, [], []
    for token in range(len(ids)):
        start = perf_counter()
        with engine.deciding_exactly(token < exact_prefix_tokens):
            output = model(input_ids=ids[None, token : token + 1], use_cache=True, **{keyword: cache})
        rows.append(output.logits[0])
        seconds.append(perf_counter() - start)
        cache = hf_internals.decoding_cache(output)
    return torch.cat(rows), np.array(seconds)
