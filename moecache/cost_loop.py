"""The event loop behind simulated seconds: one link, one device, an optional host tier. `cost.py` says what it means.

Only arrays and constants come in; policies, hardware names and bytes are unknown here. Letters: T tokens, L MoE layers, E experts a
layer, n background copies. Step s is token s // L, layer s % L.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from moecache.kernel import Outcome

FETCHED, FORCED, DROPPED = int(Outcome.FETCHED), int(Outcome.FORCED), int(Outcome.DROPPED)
LOW_PRECISION, CPU = int(Outcome.LOW_PRECISION), int(Outcome.CPU)

_jit = njit(nogil=True, cache=True)


class Costs(NamedTuple):
    """Seconds of each thing, for one size of expert."""

    layer: float
    token: float
    expert: float
    low_precision: float
    cpu: float
    overlap: float
    link: float  # one expert over the link
    disk: float  # one expert from the disk
    num_host_blocks: int  # -1 = no disk: every block is in host memory


class Copies(NamedTuple):
    """Background copies in the order in which they land: a copy's number is its urgency."""

    layer: np.ndarray  # [n] int64
    expert: np.ndarray  # [n] int64
    is_landing: np.ndarray  # [n] bool, False = dropped on arrival
    first_landing: np.ndarray  # [T*L + 1] int64: copies first_landing[s] .. first_landing[s+1] - 1 land at step s
    booked: np.ndarray  # [n] int64, copies in the order in which they were asked for
    first_booking: np.ndarray  # [T*L + 1] int64, into `booked`


class Totals(NamedTuple):
    """[T] per token, filled in place."""

    compute: np.ndarray
    blocking: np.ndarray
    stall: np.ndarray
    link_busy: np.ndarray
    transfers: np.ndarray
    disk_reads: np.ndarray


class Link(NamedTuple):
    """Background copies that the link has yet to move."""

    queue: np.ndarray  # [n] int64, copies asked for and not finished, the most urgent first
    ends: np.ndarray  # [2] int64, queue[ends[0] : ends[1]] is in use
    remaining: np.ndarray  # [n] float64 seconds of each copy still to move, -1 = not asked for yet
    under_way: np.ndarray  # [L,E] int64 copy of that expert that has not landed, -1 = none; of two, the one that lands first
    next_copy: np.ndarray  # [n] int64, the copy that is under way beside it and lands later, -1 = none


class Host(NamedTuple):
    """The host tier as a ring in order of reading; the last node is the ring's head."""

    before: np.ndarray  # [blocks + 1] int64, -1 = not in host memory
    after: np.ndarray  # [blocks + 1] int64
    room: np.ndarray  # [1] int64, free blocks; -1 = there is no disk


def new_link(num_copies: int, num_layers: int, num_experts: int) -> Link:
    under_way = np.full((num_layers, num_experts), -1, np.int64)
    next_copy = np.full(num_copies, -1, np.int64)
    return Link(np.empty(num_copies, np.int64), np.zeros(2, np.int64), np.full(num_copies, -1.0), under_way, next_copy)


def new_host(num_host_blocks: int, num_blocks: int) -> Host:
    before, after = np.full(num_blocks + 1, -1, np.int64), np.full(num_blocks + 1, -1, np.int64)
    before[-1] = after[-1] = num_blocks
    return Host(before, after, np.array([num_host_blocks], np.int64))


@_jit
def run_tokens(outcome, computed_ids, copies, costs, totals, link, host):
    """Every step in order; fills `totals`."""
    num_tokens, num_layers, _ = outcome.shape
    for token in range(num_tokens):
        for layer in range(num_layers):
            step = token * num_layers + layer
            busy = _move_in_background(link, costs.layer)
            stall = _land(copies, costs, totals, link, host, token, step)
            transfer = _fetch(outcome[token, layer], computed_ids[token, layer], costs, totals, link, host, token, layer)
            for place in range(copies.first_booking[step], copies.first_booking[step + 1]):
                _book(copies, costs, totals, link, host, token, copies.booked[place])
            compute, wait = _expert_phase(outcome[token, layer], costs, transfer)
            busy += _move_in_background(link, compute + wait - transfer)
            totals.compute[token] += costs.layer + compute
            totals.blocking[token] += wait
            totals.stall[token] += stall
            totals.link_busy[token] += busy + stall + transfer
        totals.compute[token] += costs.token
        totals.link_busy[token] += _move_in_background(link, costs.token)


@_jit
def _expert_phase(outcome, costs, transfer):
    """Seconds of computation (with what the CPU takes longer than the device), and seconds of waiting for the fetches."""
    num_fetched, num_ready, num_low, num_cpu = 0, 0, 0, 0
    for rank in range(outcome.size):
        if outcome[rank] == FETCHED or outcome[rank] == FORCED:
            num_fetched += 1
        elif outcome[rank] == LOW_PRECISION:
            num_low += 1
        elif outcome[rank] == CPU:
            num_cpu += 1
        elif outcome[rank] != DROPPED:
            num_ready += 1
    ready = num_ready * costs.expert + num_low * costs.low_precision
    wait = max(0.0, transfer - costs.overlap * ready)
    device = ready + num_fetched * costs.expert
    return device + max(0.0, num_cpu * costs.cpu - (device + wait)), wait


@_jit
def _fetch(outcome, computed_ids, costs, totals, link, host, token, layer):
    """Link seconds of the step's fetches; a copy of the same expert under way becomes the fetch."""
    seconds = 0.0
    for rank in range(outcome.size):
        if outcome[rank] == FETCHED or outcome[rank] == FORCED:
            copy = link.under_way[layer, computed_ids[rank]]
            if copy >= 0:
                seconds += link.remaining[copy]
                link.remaining[copy] = 0.0
            else:
                seconds += _ask_for_block(costs, totals, host, token, layer * link.under_way.shape[1] + np.int64(computed_ids[rank]))
    return seconds


@_jit
def _book(copies, costs, totals, link, host, token, copy):
    """Put a copy in the link's queue, by urgency."""
    if link.remaining[copy] >= 0:
        return  # it landed before its booking could be served
    layer, expert = copies.layer[copy], copies.expert[copy]
    earlier = link.under_way[layer, expert]
    if earlier >= 0 and earlier < copy:  # it lands first, and serves this one too
        link.remaining[copy], link.next_copy[earlier] = 0.0, copy
        return
    if earlier >= 0:  # this one lands first, and moves what is missing
        link.remaining[copy], link.remaining[earlier] = link.remaining[earlier], 0.0
        link.next_copy[copy] = earlier
    else:
        link.remaining[copy] = _ask_for_block(costs, totals, host, token, layer * link.under_way.shape[1] + expert)
    link.under_way[layer, expert] = copy
    place = link.ends[1]
    while place > link.ends[0] and link.queue[place - 1] > copy:
        link.queue[place] = link.queue[place - 1]
        place -= 1
    link.queue[place] = copy
    link.ends[1] += 1


@_jit
def _land(copies, costs, totals, link, host, token, step):
    """Seconds to finish the copies that land now; a dropped one goes on in its own time."""
    stall = 0.0
    for copy in range(copies.first_landing[step], copies.first_landing[step + 1]):
        _book(copies, costs, totals, link, host, token, copy)
        if link.under_way[copies.layer[copy], copies.expert[copy]] == copy:
            link.under_way[copies.layer[copy], copies.expert[copy]] = link.next_copy[copy]
        if copies.is_landing[copy]:
            stall += link.remaining[copy]
            link.remaining[copy] = 0.0
    return stall


@_jit
def _move_in_background(link, idle):
    """Give `idle` seconds of the link to the queue; the seconds used."""
    left = idle
    while link.ends[0] < link.ends[1] and left > 0:
        copy = link.queue[link.ends[0]]
        part = min(left, link.remaining[copy])
        link.remaining[copy] -= part
        left -= part
        if link.remaining[copy] > 0:
            break
        link.ends[0] += 1
    return idle - left


@_jit
def _ask_for_block(costs, totals, host, token, block):
    """Count one transfer; its seconds, with the disk's where the block is not in host memory."""
    totals.transfers[token] += 1
    if costs.num_host_blocks < 0:
        return costs.link
    is_in_host = host.before[block] >= 0
    if costs.num_host_blocks > 0:
        _touch(host, block)
    if is_in_host:
        return costs.link
    totals.disk_reads[token] += 1
    return costs.disk + costs.link


@_jit
def _touch(host, block):
    """Make a block the one read last; when there is no room, the one read least recently leaves."""
    head = host.before.size - 1
    if host.before[block] >= 0:
        _unlink(host, block)
    elif host.room[0] > 0:
        host.room[0] -= 1
    else:
        _unlink(host, host.after[head])
    host.before[block], host.after[block] = host.before[head], head
    host.after[host.before[head]] = block
    host.before[head] = block


@_jit
def _unlink(host, block):
    host.after[host.before[block]] = host.after[block]
    host.before[host.after[block]] = host.before[block]
    host.before[block] = -1
