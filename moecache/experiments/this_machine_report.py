"""What the chapter on this machine says: rates of the parts over the rounds, and the numbers of its prose. Nothing is measured here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moecache.experiments.this_machine import AGAIN, COPY, DISK, FLOAT32, ONEDNN, PARTS, PLAIN, READ, TOGETHER

NAMES = {
    READ: "read",
    COPY: "copy",
    DISK: "disk",
    AGAIN: "again",
    TOGETHER: "together",
    ONEDNN: "onednn",
    PLAIN: "plain",
    FLOAT32: "float32",
}


def rates(rounds: pd.DataFrame) -> pd.DataFrame:
    """The rounds with `gigabytes_per_second` (1e9 bytes of the units a second), `unit_ms` and `minutes` since the first round."""
    seconds = rounds["unit_seconds"]
    return rounds.assign(
        gigabytes_per_second=rounds["unit_bytes"] / seconds / 1e9, unit_ms=1e3 * seconds, minutes=rounds["at_seconds"] / 60
    )


def part_table(rounds: pd.DataFrame) -> pd.DataFrame:
    """A row a part: median, lowest and highest rate over the rounds, how far they lie apart, and the median time of a unit."""
    rows = []
    for part, found in rates(rounds).groupby("part", sort=False):
        rate = found["gigabytes_per_second"]
        rows.append(
            {
                "part": part,
                "GB/s, median": rate.median(),
                "lowest": rate.min(),
                "highest": rate.max(),
                "highest / lowest": rate.max() / rate.min(),
                "MiB a unit": found["unit_bytes"].iloc[0] / 2**20,
                "ms a unit": found["unit_ms"].median(),
            }
        )
    return pd.DataFrame(rows)


def ratio_over_rounds(rounds: pd.DataFrame, part: str, over: str) -> tuple[float, float, float]:
    """How many times faster a part is than another: the median over the rounds of the ratio within a round, the lowest and the highest."""
    wide = rates(rounds).pivot_table(index="round", columns="part", values="gigabytes_per_second")
    ratio = (wide[part] / wide[over]).to_numpy()
    return float(np.median(ratio)), float(ratio.min()), float(ratio.max())


def values(rounds: pd.DataFrame) -> dict[str, Any]:
    """The numbers of the chapter's prose about the parts."""
    found = rates(rounds)
    middle = found.groupby("part")["gigabytes_per_second"].agg(["median", "min", "max"])
    result: dict[str, Any] = {"num_rounds": int(rounds["round"].nunique()), "minutes": float(found["minutes"].max())}
    for part in PARTS:
        name, row = NAMES[part], middle.loc[part]
        result |= {f"{name}_rate": row["median"], f"{name}_low": row["min"], f"{name}_high": row["max"]}
        result[f"{name}_ms"] = found[found["part"] == part]["unit_ms"].median()
    for name, (part, over) in {"switch": (PLAIN, ONEDNN), "queue": (TOGETHER, DISK), "repeat": (AGAIN, DISK)}.items():
        ratio, low, high = ratio_over_rounds(rounds, part, over)
        result |= {f"{name}_ratio": ratio, f"{name}_ratio_low": low, f"{name}_ratio_high": high}
    return result


def hook_table(hooks: pd.DataFrame) -> pd.DataFrame:
    """A row a policy, in microseconds a layer and token."""
    return pd.DataFrame(
        {
            "policy": hooks["policy"],
            "hooks": hooks["num_hooks"],
            "median, us": hooks["median_us"],
            "9 of 10 below, us": hooks["high_us"],
            "deciding, mean us": hooks["routing_us"],
            "moving, mean us": hooks["moving_us"],
            "fetched a hook": hooks["fetched"],
            "substituted a hook": hooks["substituted"],
        }
    )


def constants_table(constants: pd.DataFrame, mebibytes: float) -> pd.DataFrame:
    """What `measure_hardware` says, as a page shows it."""
    return pd.DataFrame(
        {
            "link": constants["link"],
            "GB/s": constants["gigabytes_per_second"],
            "latency, us": 1e6 * constants["latency_seconds"],
            f"product of {mebibytes:g} MiB in float32, ms": 1e3 * constants["expert_seconds"],
        }
    )
