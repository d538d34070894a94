"""Topic changes: the same documents read so that the domain changes at every document, and so that it hardly ever does.

A cache that was filled by one domain meets the next with the wrong experts. To see what that costs, the same documents are read in two
orders. *Interleaved*: every document follows one of another domain. *In runs*: all documents of a domain follow one another. Tokens and
exact losses are the same; what differs is what the cache holds when a document starts. The difference between the orders, by distance from
the document's start, is the cost of the change alone, since a document begins in both.

Only documents that follow another domain in the one order and their own in the other say anything about that; those at the head of a run
do not, and are left out of that comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from moecache.experiments.paired_runs import END, Reading, Span, rows_of
from moecache.policy import Policy

INTERLEAVED, IN_RUNS = "interleaved", "in_runs"
ORDERS = (INTERLEAVED, IN_RUNS)
BINS: tuple[Span, ...] = ((0, 16), (16, 48), (48, 112), (112, 240), (240, END))
PRIMARY: tuple[Span, ...] = ((0, 48), (48, 240))
NEAR: Span = (0, 240)
SPANS = (*BINS, *PRIMARY, NEAR)


def in_runs(reading: Reading) -> Reading:
    """The same reading with the scored documents of each domain next to one another, in the order in which the domains first appear."""
    fixed = reading.num_warmup_documents
    domains = [document.domain for document in reading.documents]
    first = {domain: i for i, domain in reversed(list(enumerate(domains[fixed:])))}
    scored = sorted(range(fixed, len(domains)), key=lambda i: (first[domains[i]], i))
    return reading.reordered([*range(fixed), *scored])


def in_order(reading: Reading, order: str) -> Reading:
    """The reading in one of the two orders.

    Raises
    ------
    ValueError : an unknown order; the two are named.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; choose one of {', '.join(ORDERS)}")
    return in_runs(reading) if order == IN_RUNS else reading


def measure(reading: Reading, policies: Sequence[Policy], num_slots: int, order: str = INTERLEAVED) -> pd.DataFrame:
    """`rows_of` in one order, with the spans of a topic change and a column `order`."""
    return rows_of(in_order(reading, order), policies, num_slots, SPANS).assign(order=order)


def changed_documents(rows: pd.DataFrame) -> list[str]:
    """Documents that follow another domain when interleaved and their own in runs."""
    once = rows.drop_duplicates(["order", "document"])
    changes = once["domain"] != once["domain_before"]
    interleaved = set(once.loc[(once["order"] == INTERLEAVED) & changes, "document"])
    runs = once[(once["order"] == IN_RUNS) & ~changes]
    return [name for name in runs["document"] if name in interleaved]
