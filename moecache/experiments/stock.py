"""Against stock engines at equal memory: the same checkpoint, the same tokens, the same cap, engine after engine.

Each *run* is one engine in a process of its own under a memory cgroup, on a cold page cache: it reads a text token by token (teacher
forcing), first a warm-up that is not timed, then the measured tokens. A *cell* is a precision and a cap. A *repeat* is the whole
comparison once, on a text of its own: every engine in every cell, each repeat beginning with another engine, so that what the machine
does meanwhile meets all.

    cap = dense weights + an allowance for the process + a share of the experts' bytes

The cap is the same for all; what it is beside a GPU is said in `stock_places`. Engines that map files get what is best for them in a
sweep beforehand: threads where the engine has them, and the read-ahead of the disk. A run that the cap kills, or whose policy does not
fit, is a result without a number.

Runs are kept one by one as they end: an interrupted comparison goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd
from tqdm import tqdm

from moecache import results
from moecache.experiments import inputs, stock_agreement, stock_places, stock_runs
from moecache.experiments.stock_files import StockError
from moecache.experiments.stock_places import PROCESSOR, Place
from moecache.experiments.stock_runs import DEFAULT, RAN, Cell, Choice, Engine, Text

EXPERIMENT, SWEEP_EXPERIMENT, AGREEMENT_EXPERIMENT, PART = "11_comparison", "11_sweep", "11_agreement", "11_run"
STOCK = "llama.cpp"
SWEEP_REPEAT = 0  # its document is read by no repeat

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(STOCK, "llama_cpp", package="llama_cpp", bits=(16, 4), maps_files=True, has_threads=True),
        Engine("accelerate, disk offload", "accelerate_offload", package="accelerate", maps_files=True),
        Engine("transformers, mapped files", "transformers_mmap", maps_files=True, has_gpu_form=False),
        Engine("moecache, fetch every miss", "ours", policy="fetch every miss", bits=(16, 4)),
        Engine("moecache, 0.15 rule", "ours", policy="0.15 rule", bits=(16, 4)),
        Engine("moecache, quality-first", "ours", policy="quality-first", bits=(16, 4)),
        Engine("moecache, speed-first", "ours", policy="speed-first", bits=(16, 4)),
    )
}


class Options(NamedTuple):
    """What a sweep tries."""

    thread_counts: Sequence[int]  # of engines that have them; empty: as the engine is
    read_ahead_kib: Sequence[int]  # of engines that map files; empty: as the disk is


def engines_named(names: Sequence[str], place: Place = PROCESSOR) -> list[Engine]:
    """The engines of these names, or of all; on a GPU without those that have no form for one.

    Raises
    ------
    ValueError : an unknown name; lists those that exist.
    """
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        raise ValueError(f"no engine {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, ENGINES))}")
    engines = [ENGINES[name] for name in names] or list(ENGINES.values())
    return [engine for engine in engines if engine.has_gpu_form or not place.is_gpu]


def cells_of(fractions: Sequence[float], low_bit_fractions: Sequence[float] = (), place: Place = PROCESSOR) -> list[Cell]:
    """The cells: shares of the experts' bytes in 16 bits, and in 4; not in 4 on a GPU, for which this runtime has no such products."""
    low = [] if place.is_gpu else low_bit_fractions
    return [Cell(16, float(fraction)) for fraction in fractions] + [Cell(4, float(fraction)) for fraction in low]


def check(text: Text, engines: Sequence[Engine]) -> None:
    """See that the machine has what a comparison needs.

    Raises
    ------
    StockError : an engine that is not installed; on a GPU also no GPU, an engine built without one, or no stock engine among them.
    ValueError : main memory beside a GPU that is no larger than the process's allowance.
    """
    place = text.place
    if place.is_gpu:
        stock_places.check_gpu(place)
        if place.host_mebibytes <= text.process_mebibytes:
            raise ValueError(
                f"host_mebibytes={place.host_mebibytes} leaves no main memory beside process_mebibytes={text.process_mebibytes}; give more"
            )
        if all(engine.policy for engine in engines):
            able = ", ".join(repr(engine.name) for engine in engines_named([], place) if not engine.policy)
            raise StockError(f"device={place.device!r}: no stock engine is left to compare with; name one of {able} in engine_names")
    stock_runs.check_installed(engines)
    if any(engine.module == "llama_cpp" for engine in engines):
        stock_places.check_llama_offload(place)


def check_place(text: Text, names: Sequence[str]) -> None:
    """On a GPU `check`, before anything is made; stored results of a processor are shown where nothing is installed."""
    if text.place.is_gpu:
        check(text, engines_named(names, text.place))


def schedule(engines: Sequence[Engine], cells: Sequence[Cell], num_repeats: int) -> list[tuple[int, Cell, Engine]]:
    """Every run in order: repeats outside, cells within, engines innermost and each time turned on by one."""
    rounds = [(repeat, cell) for repeat in range(1, num_repeats + 1) for cell in cells]
    return [
        (repeat, cell, engine) for repeat, cell in rounds for engine in _turned([e for e in engines if cell.bits in e.bits], repeat - 1)
    ]


def _turned(engines: list[Engine], by: int) -> list[Engine]:
    first = by % max(len(engines), 1)
    return engines[first:] + engines[:first]


def sweep(text: Text, engines: Sequence[Engine], cells: Sequence[Cell], options: Options, measured_tokens: int) -> pd.DataFrame:
    """Try threads and read-ahead for every engine that has them, in every cell.

    Threads first, at the first read-ahead; then the other read-aheads with the best threads.

    Parameters
    ----------
    text : of the comparison; its document for the sweep is another.
    measured_tokens : timed in each run.

    Returns
    -------
    DataFrame : a row per run, as of `stock_runs.run_once`.

    Raises
    ------
    ValueError : no engine has anything to choose.
    """
    text = text._replace(measured_tokens=measured_tokens)
    asked = [(cell, engine) for cell in cells for engine in engines if cell.bits in engine.bits]
    frames = [frame for cell, engine in asked for frame in _swept(text, engine, cell, options)]
    if not frames:
        raise ValueError(f"nothing to sweep in {options} for {', '.join(engine.name for engine in engines)}: give two values of an option")
    return pd.concat(frames, ignore_index=True)


def _choices(engine: Engine, options: Options) -> tuple[list[int], list[int]]:
    """Threads and read-aheads to try for an engine."""
    return list(options.thread_counts) if engine.has_threads else [], list(options.read_ahead_kib) if engine.maps_files else []


def _has_choice(engine: Engine, options: Options) -> bool:
    return any(len(tried) > 1 for tried in _choices(engine, options))


def _swept(text: Text, engine: Engine, cell: Cell, options: Options) -> Iterator[pd.DataFrame]:
    threads, ahead = _choices(engine, options)
    if not _has_choice(engine, options):
        return
    first = ahead[0] if ahead else DEFAULT
    found = [_part(text, engine, cell, Choice(number, first), SWEEP_REPEAT) for number in threads or [DEFAULT]]
    yield from found
    best = best_choice(pd.concat(found), engine, cell, options)
    yield from (_part(text, engine, cell, best._replace(read_ahead_kib=kib), SWEEP_REPEAT) for kib in ahead[1:])


def best_choice(swept: pd.DataFrame, engine: Engine, cell: Cell, options: Options) -> Choice:
    """The fastest choice of a sweep; where no run had a rate, or nothing was swept, the first of each option."""
    threads, ahead = (tried[0] if tried else DEFAULT for tried in _choices(engine, options))
    is_asked = (swept["engine"] == engine.name) & (swept["bits"] == cell.bits) & (swept["resident_fraction"] == cell.resident_fraction)
    rows = swept[is_asked & (swept["outcome"] == RAN)]
    if rows.empty:
        return Choice(threads, ahead)
    best = rows.iloc[int(rows["tokens_per_second"].to_numpy(float).argmax())]
    return Choice(int(best["asked_threads"]), int(best["asked_read_ahead_kib"]))


def compare(
    text: Text, engines: Sequence[Engine], cells: Sequence[Cell], swept: pd.DataFrame, options: Options, num_repeats: int
) -> pd.DataFrame:
    """Run every engine in every cell, repeat by repeat.

    Returns
    -------
    DataFrame : a row per run in the order in which they ran, as of `stock_runs.run_once`.
    """
    stock_runs.compile_ahead(text, engines)
    chosen = {(engine, cell): best_choice(swept, engine, cell, options) for cell in cells for engine in engines}
    frames = []
    with tqdm(schedule(engines, cells, num_repeats), unit="run", desc="against stock engines") as bar:
        for repeat, cell, engine in bar:
            bar.set_postfix_str(f"{engine.name}, {cell.words}, repeat {repeat}")
            frames.append(_part(text, engine, cell, chosen[engine, cell], repeat))
    return pd.concat(frames, ignore_index=True)


def _part(text: Text, engine: Engine, cell: Cell, choice: Choice, repeat: int) -> pd.DataFrame:
    """One run, from disk where it has ended before."""
    asked = {**text.asked(), "engine": engine.name, **cell._asdict(), **choice._asdict(), "repeat": repeat}

    def run() -> pd.DataFrame:
        return pd.DataFrame([stock_runs.run_once(text, engine, cell, choice, repeat)])

    return results.load_or_run(PART, asked, run, inputs=inputs.reference_inputs(text.model_name), is_part=True).frame


def measure(
    text: Text, names: Sequence[str], cells: Sequence[Cell], options: Options, num_repeats: int, sweep_tokens: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The stored comparison and the sweep before it.

    Returns
    -------
    DataFrame : the comparison, see `compare`.
    DataFrame : the sweep, see `sweep`.

    Raises
    ------
    StockError : what `check` finds missing, or an engine that failed for another reason than its memory.
    """
    engines = engines_named(names, text.place)
    asked = {**text.asked(), "engines": [engine.name for engine in engines], "cells": [list(cell) for cell in cells], **options._asdict()}
    hashes = inputs.reference_inputs(text.model_name)

    def run_sweep() -> pd.DataFrame:
        check(text, engines)
        return sweep(text, engines, cells, options, sweep_tokens)

    swept = pd.DataFrame(columns=list(stock_runs.COLUMNS))
    if any(_has_choice(engine, options) for engine in engines):
        swept = results.load_or_run(SWEEP_EXPERIMENT, {**asked, "sweep_tokens": sweep_tokens}, run_sweep, inputs=hashes).frame

    def run_all() -> pd.DataFrame:
        check(text, engines)
        return compare(text, engines, cells, swept, options, num_repeats)

    more = {"sweep_tokens": sweep_tokens, "num_repeats": num_repeats}
    return results.load_or_run(EXPERIMENT, {**asked, **more}, run_all, inputs=hashes).frame, swept


def agreement(text: Text, names: Sequence[str], cells: Sequence[Cell], num_tokens: int) -> pd.DataFrame:
    """See that the engines compute the same model, before any clock is read.

    Returns
    -------
    DataFrame : as of `stock_agreement.measure`.

    Raises
    ------
    DisagreementError : an engine computes another model.
    StockError : what `check` finds missing, or an engine that fails.
    """
    engines = engines_named(names, text.place)
    asked: dict[str, Any] = {
        **dict(zip(("model_name", "hidden_size", "expert_width"), text[:3], strict=True)),
        "modules": list(dict.fromkeys(engine.module for engine in engines)),
        "num_tokens": num_tokens,
        "bits": sorted({cell.bits for cell in cells}, reverse=True),
    }
    if text.place.is_gpu:
        asked["device"] = text.place.device

    def run() -> pd.DataFrame:
        check(text, engines)
        return stock_agreement.measure(**asked)

    found = results.load_or_run(AGREEMENT_EXPERIMENT, asked, run, inputs=inputs.reference_inputs(text.model_name)).frame
    stock_agreement.check(found)
    return found
