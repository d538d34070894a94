"""What is the same for every policy over one document is computed once: all that comes before the first layer's experts.

No policy changes anything before the experts of the first MoE layer: neither the token mixer there, nor its router, nor its shared
experts, nor any dense layer below. The first forward of a document keeps what these modules returned, and the forwards of the other
policies are handed the same tensors in the same order. So they get the bits that they would have computed.

It holds one document's tensors at a time, and only in one-pass forwards: stepping fills a decoding cache on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from moecache import hf_internals


class SharedStart:
    """Keeps, document by document, what the modules before the first layer's experts returned."""

    def __init__(self, model: Any) -> None:
        self.modules = hf_internals.before_first_experts(model)
        self.begin()

    def begin(self) -> None:
        """Start another document."""
        self._kept: dict[nn.Module, list[Any]] | None = None

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Around one forward: the first of a document computes and keeps, the others are handed what it kept."""
        kept: dict[nn.Module, list[Any]] = {module: [] for module in self.modules}
        try:
            for module in self.modules:
                ready = None if self._kept is None else iter(self._kept[module])
                hf_internals.replace_forward(module, _keep(module.forward, kept[module]) if ready is None else _hand_out(ready))
            yield
        finally:
            for module in self.modules:
                hf_internals.restore_forward(module)
        if self._kept is None:
            self._kept = kept


def _keep(own: Callable[..., Any], kept: list[Any]) -> Callable[..., Any]:
    def forward(*args: Any, **keywords: Any) -> Any:
        kept.append(own(*args, **keywords))
        return kept[-1]

    return forward


def _hand_out(ready: Iterator[Any]) -> Callable[..., Any]:
    def forward(*args: Any, **keywords: Any) -> Any:
        return next(ready)

    return forward
