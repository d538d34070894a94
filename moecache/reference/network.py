"""The network of a reference model, its loss, and the router's balance.

Loss = mean token loss (nats) + `balance_coefficient` x balance. The balance of a layer is
E * sum_e f_e * P_e with f_e the share of calls that went to expert e and P_e its mean router probability; it is 1 when
calls are even, and more when few experts get most (Switch Transformer, equation 4, for K calls a token). Calls are
counted with `bincount`: a one-hot table of [tokens x K, E] would need gigabytes at E = 512.

Letters: T tokens, E experts, K top-k. This module knows no data and no optimizer.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, OlmoeConfig, PreTrainedModel, Qwen3NextConfig

CONFIGURATIONS = {"qwen3_next": Qwen3NextConfig, "olmoe": OlmoeConfig}
LOSS_ROWS = 1024
"""Tokens whose logits [rows, vocabulary] exist at once; keeps them in the processor's cache."""


def keep_freed_memory() -> None:
    """Ask the C library to keep freed memory instead of returning it (glibc; elsewhere nothing happens).

    A training step frees and asks again for the same few hundred large blocks; handing them back costs a page fault
    for every 4 KB and nearly a third of the step.
    """
    if sys.platform.startswith("linux"):
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):
            trim_threshold, mmap_threshold = -1, -3
            library.mallopt(mmap_threshold, 1 << 30)
            library.mallopt(trim_threshold, (1 << 31) - 1)


def make_network(geometry: dict, seed: int) -> PreTrainedModel:
    """A freshly initialised network in float32 with the library's grouped products as experts implementation.

    Parameters
    ----------
    geometry : the library's configuration; `model_type` is one of `CONFIGURATIONS`, Qwen3-Next's where it is left out.
    """
    widths = dict(geometry)
    config = CONFIGURATIONS[widths.pop("model_type", "qwen3_next")](**widths)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_experts_implementation("grouped_mm")
    return model


class RouterTap:
    """Collects, a layer each, what the routers returned: router logits [T,E], gate weights and ids of the top-k [T,K]."""

    def __init__(self, model: nn.Module) -> None:
        self.logits: list[Tensor] = []
        self.gate_weights: list[Tensor] = []
        self.topk_ids: list[Tensor] = []
        self.routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        self._handles = [router.register_forward_hook(self._take) for router in self.routers]

    def _take(self, _module: nn.Module, _inputs: tuple, output: tuple) -> None:
        self.logits.append(output[0])
        self.gate_weights.append(output[1])
        self.topk_ids.append(output[2])

    def clear(self) -> None:
        """Forget the last forward."""
        self.logits.clear()
        self.gate_weights.clear()
        self.topk_ids.clear()

    def close(self) -> None:
        """Take the hooks off the routers."""
        for handle in self._handles:
            handle.remove()


def balance(logits: Tensor, topk_ids: Tensor) -> Tensor:
    """Balance of one layer (scalar, 1 = even) from router logits [T,E] and top-k ids [T,K]."""
    num_experts = logits.shape[-1]
    calls = torch.bincount(topk_ids.reshape(-1), minlength=num_experts).to(logits.dtype)
    return num_experts * torch.dot(calls / topk_ids.numel(), logits.softmax(-1).mean(0))


def token_losses(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Loss in nats of every token given those before it [R, n] from rows of token ids [R, n + 1]."""
    hidden = model.model(rows[:, :-1], use_cache=False).last_hidden_state
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), rows[:, 1:].reshape(-1)
    losses = [
        nn.functional.cross_entropy(model.lm_head(h), t, reduction="none")
        for h, t in zip(flat.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True)
    ]
    return torch.cat(losses).reshape(rows.shape[0], -1)


def mean_balance(tap: RouterTap) -> Tensor:
    """Balance averaged over the layers of the last forward (scalar)."""
    return torch.stack([balance(*pair) for pair in zip(tap.logits, tap.topk_ids, strict=True)]).mean()
