"""What stands around a forward of an offloaded model: one at a time, one sequence, and the right kernels of the CPU.

`around` puts a context around a module's forward on the instance, so that it holds whoever calls it (a user, `generate`, an instrument) and
takes itself away again. Policies, experts and memory are not known here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from moecache import hf_internals

Arguments = dict[str, Any]


def around(module: nn.Module, context: Callable[[Arguments], AbstractContextManager[None]]) -> Callable[[], None]:
    """Run a module's forward inside ``context(arguments)``; the arguments are by name. Returns what undoes it.

    Nothing of it is captured by `torch.compile`, which therefore changes nothing: experts and their addresses differ from token to token.
    """
    before, forward = module.__dict__.get("forward"), module.forward
    names = hf_internals.argument_names(module)

    @functools.wraps(forward)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with context(dict(zip(names, args, strict=False)) | kwargs):
            return forward(*args, **kwargs)

    def undo() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before

    module.__dict__["forward"] = torch.compiler.disable(inside)
    return undo


def num_tokens(arguments: Arguments) -> int:
    """Tokens of the one sequence that a forward is given.

    Raises
    ------
    ValueError : a batch, whose sequences would share slots without sharing time, or no tokens at all.
    """
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    if given is None:
        raise ValueError("an offloaded model needs input_ids or inputs_embeds")
    if given.shape[0] != 1:
        raise ValueError(f"an offloaded model computes one sequence at a time, got a batch of {given.shape[0]}; call it once for each")
    return int(given.shape[1])


def token_ids(arguments: Arguments) -> torch.Tensor | None:
    """The ids [T] of the tokens, None where the model was given embeddings."""
    given = arguments.get("input_ids")
    return None if given is None else given[0]


def is_start(arguments: Arguments, keyword: str) -> bool:
    """True where the forward has no decoding cache, or an empty one: a sequence begins."""
    cache = arguments.get(keyword)
    return cache is None or cache.get_seq_length() == 0


@contextmanager
def without_onednn() -> Iterator[None]:
    """Compute without oneDNN inside the block: products of one bfloat16 row are then about twice as fast on a CPU.

    The switch belongs to the process. It changes the rounding of bfloat16, so compare only with a model under the same switch.
    """
    flags = torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=flags[0], _fp32_precision=None)  # type: ignore[arg-type]
