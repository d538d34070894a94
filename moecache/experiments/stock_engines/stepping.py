"""Stepping a transformers model, whoever brings its experts: what the three engines that run in torch share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from moecache import hf_internals
from moecache.runtime.call import without_onednn


class Stepped:
    """A transformers model that decodes; see `protocol.Engine`.

    Parameters
    ----------
    model : causal language model.
    asked : the command line, for `threads` and `onednn`.
    stats : what is counted, numbers that only grow.
    settings, versions : beside those of torch.
    """

    def __init__(
        self,
        model: Any,
        asked: argparse.Namespace,
        stats: Callable[[], dict[str, float]] = dict,
        settings: dict[str, Any] | None = None,
        versions: dict[str, str] | None = None,
    ) -> None:
        torch.set_num_threads(asked.threads)
        self._model, self._cache, self.stats = model, None, stats
        self._keyword = hf_internals.cache_keyword(model)
        self._device = model.get_input_embeddings().weight.device
        self._kernels = nullcontext if asked.onednn else without_onednn
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__, **(versions or {})}
        self.settings = {"dtype": str(model.dtype).removeprefix("torch."), "onednn": asked.onednn, **(settings or {})}
        if self._device.type == "cuda":
            self.settings["gpu"] = torch.cuda.get_device_name(self._device)

    def begin(self) -> None:
        """Forget the document so far."""
        self._cache = None

    def step(self, token_id: int) -> NDArray[np.float32]:
        """Logits [V] of the token after this one."""
        with torch.inference_mode(), self._kernels():
            output = self._model(input_ids=torch.tensor([[token_id]], device=self._device), use_cache=True, **{self._keyword: self._cache})
        self._cache = hf_internals.decoding_cache(output)
        return output.logits[0, -1].to(torch.float32).cpu().numpy()

    def gpu_peak_bytes(self) -> int | None:
        """The most that torch had allocated on the GPU; None without one."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
