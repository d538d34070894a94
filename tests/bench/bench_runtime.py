"""How fast an offloaded model decodes: reads, seconds per token, the gain against the link, the simulator's error, and accelerate.

    python tests/bench/bench_runtime.py [--quick] [--parts disk links accelerate] > bench_runtime.jsonl

prints JSON lines. The first says what was run, with the machine and the versions; each other one is a row of a table, named by "table":

- disk: `reads` (the runtime's demand reads against a plain reader of the same blocks), `by_policy`, `predicted`, `curve`; and, block of
  tokens by block, `read_blocks` and `blocks`.
- links: the same without the reads, over emulated links from all experts in main memory, and `crossings`.
- accelerate: `runs`, `against`, `logits`: each engine in a process of its own under a cap of memory. It needs root on Linux and accelerate
  (`pip install accelerate==1.15.0`, or an interpreter that has it in MOECACHE_STOCK_PYTHON); where it cannot run, `skipped` says why.
- `targets`: what was aimed at, and what was measured.

What the columns mean is told by `moecache.experiments.runtime_curve` and `runtime_against_accelerate`. The checkpoint is the trained model
of 512 experts widened to experts of 6 MiB, its first two layers (6.5 GB, and as much again packed), made where it is missing; --quick takes
small experts. One thread of torch; other work on the machine must rest meanwhile, or run at a lower priority (`nice`, told in the first
line). About 7 minutes, and 17 GB of free memory for the links.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

import argparse
import json
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pandas as pd

from moecache.experiments import runtime_against_accelerate as accelerate
from moecache.experiments import runtime_curve as measures
from moecache.experiments.runtime_checkpoint import QUICK, REAL, timed_checkpoint, timed_text
from moecache.experiments.runtime_reads import compared_reads
from moecache.experiments.runtime_seconds import LATENCY_SECONDS, LINKS, Plan, Timed, timed_on_disk, timed_on_links
from moecache.provenance import provenance

KEPT = ["link", "policy", "block", "seconds", "num_preempted", "bytes_demand"]
PARTS = ("disk", "links", "accelerate")
HELD = 0.01  # share of late reads up to which a link counts as kept by this machine
QUICK_PLAN = Plan(num_slots=64, warm_tokens=24, num_blocks=4, block_tokens=6)
QUICK_LINKS = {"emulated 0.1 GB/s": 1e8, "emulated 1 GB/s": 1e9}
QUICK_CAP_BYTES = 900_000_000

Table = tuple[str, pd.DataFrame]
Target = tuple[str, str, float | None, float]  # what, bound, target, measured


def disk_tables(timed: Timed) -> Iterator[Table]:
    """What the disk's run says."""
    reads = compared_reads(timed.reads) | {"sustained_bytes_per_second": timed.sustained_bytes_per_second}
    table, predicted = measures.by_policy(timed), measures.predicted(timed)
    yield "reads", pd.DataFrame([reads])
    yield "read_blocks", timed.reads
    yield "blocks", timed.blocks[KEPT]
    yield "by_policy", table
    yield "predicted", predicted
    yield "curve", measures.curve(timed)
    yield (
        "targets",
        _targets(
            ("demand reads against a plain reader", "at least", 0.85, reads["ratio"]),
            *_bound_rows(table, "on the disk"),
            ("simulator's error on the disk, largest", "reported", None, predicted["error_fraction"].abs().max()),
            ("simulator's error on the disk, largest, median block", "reported", None, predicted["error_fraction_median"].abs().max()),
        ),
    )


def _bound_rows(table: pd.DataFrame, where: str) -> Iterator[Target]:
    for column, how in (("bound_ratio", "all blocks"), ("bound_ratio_median", "median block")):
        worst = table.loc[table[column].idxmax()]
        yield f"seconds against the bound {where}, worst policy ({worst['policy']}), {how}", "at most", 1.15, worst[column]


def links_tables(timed: Timed) -> Iterator[Table]:
    """What the links' run says."""
    table, predicted, points = measures.by_policy(timed), measures.predicted(timed), measures.curve(timed)
    yield "blocks", timed.blocks[KEPT]
    yield "by_policy", table
    yield "predicted", predicted
    yield "curve", points
    yield "crossings", measures.crossings(points)
    held = predicted[predicted["late_fraction"] <= HELD]
    kept = f"{held['link'].nunique()} links that this machine keeps"
    yield (
        "targets",
        _targets(
            (f"simulator's error on {kept}, largest", "at most", 0.15, held["error_fraction"].abs().max()),
            (f"simulator's error on {kept}, largest, median block", "at most", 0.15, held["error_fraction_median"].abs().max()),
            ("simulator's error on all links, largest", "reported", None, predicted["error_fraction"].abs().max()),
            ("simulator's error on all links, largest, median block", "reported", None, predicted["error_fraction_median"].abs().max()),
            *_bound_rows(table, "over links"),
        ),
    )


def _targets(*rows: Target) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=["what", "bound", "target", "measured"])
    compare = {"at least": lambda row: row["measured"] >= row["target"], "at most": lambda row: row["measured"] <= row["target"]}
    table["is_met"] = [bool(compare[row["bound"]](row)) if row["bound"] in compare else None for _, row in table.iterrows()]
    return table


def part_tables(part: str, is_quick: bool) -> Iterator[Table]:
    """Measure one part."""
    checkpoint, plan = timed_checkpoint(QUICK if is_quick else REAL), QUICK_PLAN if is_quick else Plan()
    text = timed_text(plan.num_tokens)
    if part == "disk":
        yield from disk_tables(timed_on_disk(checkpoint.packed, text, plan))
    elif part == "links":
        yield from links_tables(timed_on_links(checkpoint.packed, text, QUICK_LINKS if is_quick else LINKS, plan))
    else:
        yield from accelerate_tables(checkpoint, is_quick)


def accelerate_tables(checkpoint: Any, is_quick: bool) -> Iterator[Table]:
    """Run both engines under a cap, or say why not."""
    if reason := accelerate.why_not():
        yield "skipped", pd.DataFrame([{"part": "accelerate", "reason": reason}])
        return
    quick = {"cap_bytes": QUICK_CAP_BYTES, "warm_tokens": 20, "measured_tokens": 20, "threads": (1,)}
    options: dict[str, Any] = quick if is_quick else {"threads": (1, 4)}
    runs, logits = accelerate.timed_under_cap(checkpoint, timed_text(200), **options)
    against = accelerate.against(runs)
    yield "runs", runs
    yield "against", against
    yield "logits", logits
    if len(against):
        yield "targets", _targets(("accelerate's best seconds against our best", "at least", 10.0, against["ratio_to_best"].iloc[0]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small experts and few tokens: shows that it runs, measures nothing")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    asked = parser.parse_args()
    for part in asked.parts:
        start = perf_counter()
        tables = list(part_tables(part, asked.quick))
        setting = {
            "part": part,
            "is_quick": asked.quick,
            "torch_threads": 1,
            "omp_wait_policy": os.environ["OMP_WAIT_POLICY"],
            "nice": os.nice(0),
        }
        setting |= {"link_latency_seconds": LATENCY_SECONDS, **provenance(seconds=perf_counter() - start)}
        print(json.dumps(setting, default=str))
        for name, table in tables:
            for row in table.to_dict("records"):
                print(json.dumps({"part": part, "table": name, **_plain(row)}), flush=True)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN, and seven digits are more than enough."""
    values = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
    return {
        name: None if value != value else float(f"{value:.7g}") if isinstance(value, float) else value for name, value in values.items()
    }


if __name__ == "__main__":
    main()
