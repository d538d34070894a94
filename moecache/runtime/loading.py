"""Loading a model without its experts: everything else is there, on the device, and works as the library left it.

The library loads quantized checkpoints through a seam of its own: a *quantizer* may change the model after it was built without memory
and before weights are read. Ours changes nothing but this: it takes the experts' parameters out. Their keys then have no place in the
model, so they are neither allocated nor read, and tied weights, buffers and dtypes are the library's own work. The peak of memory is that
of the dense weights and once more the largest of them. They are the process's own, at aligned addresses: a file that changes later changes
nothing, and products do not round by where in a file a weight happened to lie.

What is loaded cannot compute: an experts implementation has to find the experts' weights elsewhere. Stores and slots are not known here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moecache import hf_checkpoints
from moecache.stores.checkpoint import Checkpoint, read_checkpoint, read_config

METHOD = "moecache"
ALIGNMENT_BYTES = 64  # what torch gives its own memory


@register_quantization_config(METHOD)
class _WithoutExperts(QuantizationConfigMixin):
    """Says to the library that the experts are elsewhere."""

    def __init__(self) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]


@register_quantizer(METHOD)
class _Stripper(HfQuantizer):
    """Takes the experts' parameters out before weights are read."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        hf_checkpoints.strip_experts(model)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """A model without experts must not be saved as if it were whole."""
        return False

    @property
    def is_trainable(self) -> bool:
        """It is for inference."""
        return False


def load_dense(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | str = "auto") -> Any:
    """Load a causal language model without its experts, in evaluation mode.

    Parameters
    ----------
    folder : a checkpoint (`config.json` and safetensors), or a folder made by `moecache pack`.
    device : where the dense weights go.
    dtype : of the dense weights; "auto" = as the checkpoint says.

    Returns
    -------
    transformers.PreTrainedModel
        `model.moecache_checkpoint` holds the checkpoint's headers, with the keys that nobody reads in `unknown_keys`.

    Raises
    ------
    StoreError : files that are missing, truncated, or not safetensors.
    ValueError : a checkpoint that is already quantized, or dense weights that it does not have.
    """
    folder = Path(folder)
    read_config(folder)
    with hf_checkpoints.reading_instead_of_mapping():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map=None if str(device) == "cpu" else str(device),
            quantization_config=_WithoutExperts(),  # type: ignore[call-arg]
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    model, told = loaded
    if missing := sorted(told["missing_keys"]):
        raise ValueError(
            f"{folder} lacks {len(missing)} weights outside its experts: {', '.join(missing[:3])}; it is not a whole checkpoint"
        )
    if left := [name for name, weight in (*model.named_parameters(), *model.named_buffers()) if weight.is_meta]:
        raise ValueError(f"{folder}: {len(left)} weights were not loaded: {', '.join(left[:3])}")
    for weight in (*model.parameters(), *model.buffers()):
        if weight.data_ptr() % ALIGNMENT_BYTES:
            weight.data = weight.data.clone()
    model.moecache_checkpoint = read_checkpoint(folder, model)
    return model.eval()


def checkpoint_of(model: Any) -> Checkpoint:
    """The headers of the checkpoint that a model was loaded from by `load_dense`."""
    return model.moecache_checkpoint
