"""The routing geometry of a model, and the error of everything that is no trace of it."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np

LARGEST = 32767  # expert ids are int16


class TraceError(ValueError):
    """A trace that is damaged, foreign or impossible; the message names the value, the place and the way out.

    `place` is (token, layer) where one step is at fault, otherwise None; `reason` is the message without the place.
    """

    def __init__(self, reason: str, place: tuple[int, int] | None = None) -> None:
        super().__init__(reason if place is None else f"token {place[0]}, layer {place[1]}: {reason}")
        self.reason, self.place = reason, place


@dataclass(frozen=True)
class ModelShape:
    """The routing geometry of a model.

    Parameters
    ----------
    num_layers, num_experts, top_k : MoE layers L, experts a layer E, experts called a token K.
    expert_bytes : size of one expert, or None where it is unknown.
    scoring : "softmax" or "sigmoid".
    norm_topk_prob : whether the family rescales the routing weights of the top-k to sum to 1.

    Raises
    ------
    ValueError : numbers that are no integers, or that no model can have.
    """

    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int | None = None
    scoring: str = "softmax"
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "top_k", "expert_bytes"):
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        is_possible = 1 <= self.num_layers <= LARGEST and 1 <= self.top_k <= self.num_experts <= LARGEST
        if not is_possible or (self.expert_bytes is not None and not 0 <= self.expert_bytes < 2**63):
            raise ValueError(
                f"impossible model shape {self}: need 1 <= layers <= {LARGEST}, 1 <= top_k <= experts <= {LARGEST}, expert_bytes 0 or more"
            )
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring={self.scoring!r} is unknown; choose softmax or sigmoid")
        if not isinstance(self.norm_topk_prob, bool | np.bool_):
            raise ValueError(f"norm_topk_prob={self.norm_topk_prob!r} must be True or False")
        object.__setattr__(self, "norm_topk_prob", bool(self.norm_topk_prob))


def _integer(name: str, value: object) -> int | None:
    if value is None and name == "expert_bytes":
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}={value!r} must be an integer") from None
