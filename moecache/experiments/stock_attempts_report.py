"""What the chapter against stock engines says of the attempts to close a gap, from the rows of `stock_attempts`.

Nothing is measured here.
"""

from __future__ import annotations

import pandas as pd

from moecache.experiments.stock import STOCK
from moecache.experiments.stock_attempts import USES
from moecache.experiments.stock_runs import RAN

FIRST = "as compared"
RULE = "0.15 rule"  # begins the name of the attempt that is not exact


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """`summary` as a page shows it."""
    table = summary(frame)
    uses = zip(table["waiting, ms"], table["experts, ms"], table[["dense, ms", "routing, ms", "overhead, ms"]].sum(axis=1), strict=True)
    ended = ["" if outcome == RAN else f" ({outcome})" for outcome in table["outcome"]]
    return pd.DataFrame(
        {
            "cap": table["cap"],
            "attempt": table["attempt"] + ended,
            "slots": table["slots"],
            "tokens/s": table["tokens/s"],
            f"times {STOCK}": table[f"times {STOCK}"],
            "hits": ["" if pd.isna(share) else f"{share:.0%}" for share in table["hits"]],
            "MiB read": table["MiB read"],
            "waits, products, rest, ms": ["" if pd.isna(wait) else f"{wait:.0f}, {own:.0f}, {rest:.0f}" for wait, own, rest in uses],
        }
    )


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Means over repeats, a row per cell and attempt."""
    rows = []
    for (cell, attempt), runs in frame.groupby(["cell", "attempt"], sort=False):
        ran = runs[runs["outcome"] == RAN]
        stock = frame[(frame["cell"] == cell) & (frame["attempt"] == STOCK) & (frame["outcome"] == RAN)]
        times = ran["tokens_per_second"].mean() / stock["tokens_per_second"].mean() if len(ran) and len(stock) else float("nan")
        rows.append(
            {
                "cap": cell,
                "attempt": attempt if attempt in (STOCK, "as compared") else f"+ {attempt}",
                "slots": runs["slots"].iloc[0] or "",
                "tokens/s": ran["tokens_per_second"].mean(),
                f"times {STOCK}": times,
                "hits": ran["hit_rate"].mean(),
                "MiB read": ran["read_mebibytes_per_token"].mean(),
                **{f"{use}, ms": ran[f"{use}_ms"].mean() for use in USES},
                "outcome": ", ".join(dict.fromkeys(runs["outcome"])),
            }
        )
    return pd.DataFrame(rows)


def words(frame: pd.DataFrame) -> str:
    """How far the attempts came and where the time goes, cap by cap."""
    cells = dict.fromkeys(frame["cell"])
    return " ".join(sentence for cell in cells if (sentence := _of_cell(cell, summary(pd.DataFrame(frame[frame["cell"] == cell])))))


def _of_cell(cell: str, table: pd.DataFrame) -> str:
    ran = table[table["tokens/s"].notna() & (table["attempt"] != STOCK)].set_index("attempt")
    times, exact = f"times {STOCK}", [name for name in ran.index if RULE not in name]
    if FIRST not in ran.index:
        return ""
    first, best = ran.loc[FIRST], ran.loc[exact].sort_values("tokens/s").iloc[-1]
    total = sum(first[f"{use}, ms"] for use in USES)
    rules = [name for name in ran.index if RULE in name]
    rule = f"; the 0.15 rule with these changes reaches {ran.loc[rules[0], times]:.2g} times" if rules else ""
    return (
        f"**{cell}**: fetching every miss as compared decodes {first[times]:.2g} times as many tokens as {STOCK} in the same repeats. Of "
        f"its {total:.0f} ms a token {first['waiting, ms']:.0f} are waits for reads, {first['experts, ms']:.0f} products of experts, "
        f"{first['dense, ms']:.0f} everything else in the model, {first['routing, ms'] + first['overhead, ms']:.1f} deciding and keeping "
        f"books. The best exact attempt (*{best.name}*) reaches {best[times]:.2g} times{rule}."
    )
