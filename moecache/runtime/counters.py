"""What a runtime did, counted once: bytes by source, stalls, seconds by use.

Bytes are those that the transfer's threads delivered into blocks; each belongs to the reason for which the copy was asked:

| source | the copy was asked for because |
|---|---|
| cold_start | the expert is resident before the first token |
| demand | a call waits for it while decoding (fetched and forced) |
| prefill | a prompt's tokens call it; once a chunk |
| background | its mass account was full, or it was predicted |

A *stall* is a wait that was not hidden behind the step's other products, whoever asked for the copy. A background copy is *late* when its
expert is needed before it is complete; it is *wasted* when its expert leaves, or is not wanted on arrival, before any call was computed
from it. What was decided (hits, fetched, substituted ...) is counted by the kernel.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

SOURCES = ("cold_start", "demand", "prefill", "background")


@dataclass
class Counters:
    """Totals since the runtime was opened.

    `seconds_total` is the wall time of forwards; of it `seconds_routing` went into decisions, `seconds_overhead` into asking for
    copies and keeping books, `seconds_waiting` into stalls and `seconds_experts` into products of routed experts. The rest, attention,
    other dense layers and the library, is `seconds_dense`. On a GPU these are seconds of the host, which runs ahead of the device.
    """

    num_forwards: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    bytes_by_source: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    reads_by_source: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    num_stalls: int = 0
    num_late: int = 0
    num_without_staging: int = 0
    num_wasted: int = 0
    wasted_bytes: int = 0
    num_failed_copies: int = 0
    seconds_total: float = 0.0
    seconds_routing: float = 0.0
    seconds_overhead: float = 0.0
    seconds_waiting: float = 0.0
    seconds_experts: float = 0.0

    @property
    def seconds_dense(self) -> float:
        """Wall time of forwards that is none of the others."""
        return self.seconds_total - self.seconds_routing - self.seconds_overhead - self.seconds_waiting - self.seconds_experts

    def add_read(self, source: str, num_bytes: int) -> None:
        """Count one finished copy, or what arrived of it."""
        self.bytes_by_source[source] += num_bytes
        self.reads_by_source[source] += 1

    def to_dict(self) -> dict[str, float | int]:
        """Flat plain numbers by name."""
        values = asdict(self)
        by_source = {f"{kind}_{source}": values[f"{kind}_by_source"][source] for kind in ("bytes", "reads") for source in SOURCES}
        rest = {name: value for name, value in values.items() if not isinstance(value, dict)}
        return {**rest, "seconds_dense": self.seconds_dense, **by_source}
