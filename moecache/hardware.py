"""`Hardware`: the few constants that turn decisions into seconds, and named profiles of them.

An expert reaches a slot over one *link* (PCIe to a GPU's memory, or a disk to main memory). Optionally the link's source is itself a
cache: a host tier of `host_ram_bytes` in front of a disk. What the device computes takes a fixed time a layer (attention, router, shared
experts) and a time per expert.

Every constant says where it comes from. `kind="nominal"` constants were calculated from published rates and measured by nobody here;
`kind="measured"` ones come from `measure_hardware()`; `kind="assumed"` is the word for constants that a caller makes up. The profiles are
data (`hardware_profiles.json`), each with its derivation.

This module knows no decisions and estimates no seconds.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

KINDS = ("nominal", "measured", "assumed")


@dataclass(frozen=True)
class Hardware:
    """Constants of one machine.

    Parameters
    ----------
    name : a short name for tables.
    link_bytes_per_second : rate of the link into the slots.
    fetch_latency_seconds : from asking to the first byte, once per transfer.
    layer_seconds : fixed time of a layer outside its routed experts; the link is idle meanwhile.
    expert_seconds : time to compute one call by a resident expert, or None: then it is expert_bytes / `device_bytes_per_second`
        (a token decoded alone reads every weight once).
    device_bytes_per_second : rate at which the device reads weights; only without `expert_seconds`.
    token_seconds : fixed time of a token outside its MoE layers (embedding, output head).
    overlap : share of the computation of ready experts that hides transfers, 0..1.
    low_precision_seconds : one call by a low-bit copy on the device; None = as long as `expert_seconds`.
    cpu_seconds : one call computed where its expert lies, beside the device; None = there is no such path.
    host_ram_bytes : room for experts in front of the disk, the least recently read block leaves; None = all experts are there.
    disk_bytes_per_second, disk_latency_seconds : the disk behind the host tier; only with `host_ram_bytes`.
    kind : "nominal", "measured" or "assumed".
    derivation : where the constants come from, in words.

    Raises
    ------
    ValueError : a constant out of range, missing, or without effect.
    """

    name: str
    link_bytes_per_second: float
    fetch_latency_seconds: float = 0.0
    layer_seconds: float = 0.0
    expert_seconds: float | None = None
    device_bytes_per_second: float | None = None
    token_seconds: float = 0.0
    overlap: float = 1.0
    low_precision_seconds: float | None = None
    cpu_seconds: float | None = None
    host_ram_bytes: int | None = None
    disk_bytes_per_second: float | None = None
    disk_latency_seconds: float = 0.0
    kind: str = "assumed"
    derivation: str = ""

    def __post_init__(self) -> None:
        _check_rates(self)
        _check_completeness(self)

    @classmethod
    def profile(cls, name: str) -> Hardware:
        """A named profile; an unknown name is a ValueError that lists the known ones."""
        known = cls.profiles()
        if name not in known:
            raise ValueError(f"hardware profile {name!r} is unknown; choose one of {', '.join(known)}, or make a Hardware(...)")
        return known[name]

    @classmethod
    def profiles(cls) -> dict[str, Hardware]:
        """Every profile of this package by name."""
        return dict(_profiles())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Hardware:
        """The inverse of `to_dict`; an unknown key is a ValueError."""
        known = {f.name for f in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"unknown hardware fields {sorted(unknown)}; known are {sorted(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def replace(self, **changes: Any) -> Hardware:
        """A copy with other constants, of kind "assumed" unless one is given."""
        return replace(self, **{"kind": "assumed", **changes})

    def behind_disk(self, disk: Hardware | str, host_ram_bytes: int) -> Hardware:
        """The same link, its source a host tier of `host_ram_bytes` in front of `disk` (whose link is then the disk)."""
        disk = as_hardware(disk)
        gib = host_ram_bytes / 2**30
        return replace(
            self,
            name=f"{self.name}, {gib:g} GiB RAM, {disk.name}",
            host_ram_bytes=host_ram_bytes,
            disk_bytes_per_second=disk.link_bytes_per_second,
            disk_latency_seconds=disk.fetch_latency_seconds,
            derivation=f"{self.derivation} Disk: {disk.derivation}",
        )

    def seconds_per_expert(self, expert_bytes: int) -> float:
        """Time to compute one call by a resident expert of this size."""
        if self.expert_seconds is not None:
            return self.expert_seconds
        assert self.device_bytes_per_second is not None
        return expert_bytes / self.device_bytes_per_second

    def seconds_per_transfer(self, expert_bytes: int) -> float:
        """Time of one expert over the link: latency + bytes / rate."""
        return self.fetch_latency_seconds + expert_bytes / self.link_bytes_per_second

    def seconds_per_disk_read(self, expert_bytes: int) -> float:
        """Time of one expert from the disk to the host tier, 0 without a disk."""
        return 0.0 if self.disk_bytes_per_second is None else self.disk_latency_seconds + expert_bytes / self.disk_bytes_per_second


def as_hardware(hardware: Hardware | str) -> Hardware:
    """A `Hardware`, or the profile of that name."""
    return Hardware.profile(hardware) if isinstance(hardware, str) else hardware


@cache
def _profiles() -> dict[str, Hardware]:
    text = files("moecache").joinpath("hardware_profiles.json").read_text(encoding="utf-8")
    return {row["name"]: Hardware.from_dict(row) for row in json.loads(text)["profiles"]}


_RATES = ("link_bytes_per_second", "device_bytes_per_second", "disk_bytes_per_second", "host_ram_bytes")
_TIMES = (
    "fetch_latency_seconds",
    "layer_seconds",
    "expert_seconds",
    "token_seconds",
    "low_precision_seconds",
    "cpu_seconds",
    "disk_latency_seconds",
)


def _check_rates(hardware: Hardware) -> None:
    for names, is_right, bound in (
        (_RATES, lambda value: 0 < value < math.inf, "above 0 and finite"),
        (_TIMES, lambda value: 0 <= value < math.inf, "0 or more and finite"),
        (("overlap",), lambda value: 0 <= value <= 1, "in 0..1"),
    ):
        for name in names:
            value = getattr(hardware, name)
            if value is not None and not is_right(value):
                raise ValueError(f"{name}={value!r} must be {bound}")
    if hardware.kind not in KINDS:
        raise ValueError(f"kind={hardware.kind!r} is unknown; choose one of {', '.join(KINDS)}")


def _check_completeness(hardware: Hardware) -> None:
    if (hardware.expert_seconds is None) == (hardware.device_bytes_per_second is None):
        raise ValueError(
            f"expert_seconds={hardware.expert_seconds!r} and device_bytes_per_second={hardware.device_bytes_per_second!r}: "
            "give exactly one of them"
        )
    if (hardware.host_ram_bytes is None) != (hardware.disk_bytes_per_second is None):
        raise ValueError(
            f"host_ram_bytes={hardware.host_ram_bytes!r} and disk_bytes_per_second={hardware.disk_bytes_per_second!r}: "
            "a host tier needs both, no host tier neither"
        )
    if hardware.disk_bytes_per_second is None and hardware.disk_latency_seconds:
        raise ValueError(f"disk_latency_seconds={hardware.disk_latency_seconds!r} has no effect without disk_bytes_per_second")
