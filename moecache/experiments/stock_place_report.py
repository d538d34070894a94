"""What the chapter against stock engines says about the place where they compute: memory of a processor, or a GPU's beside it.

On a processor these are the chapter's own sentences. On a GPU others take their place where they would be wrong, and the page says that
nobody has checked it. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from moecache.experiments.stock import ENGINES, engines_named
from moecache.experiments.stock_places import GPU, Place
from moecache.experiments.stock_runs import Text

# Shares of whole layers of the full profile's model: the stock engines place experts so.
COMMAND = f"moecache run 11 --profile full -p device {GPU} -p resident_fractions '[0.25, 0.5, 1.0]'"
MEBIBYTES_PER_GIBIBYTE = 1024


def is_on_gpu(frame: pd.DataFrame) -> bool:
    """Whether rows of runs are a GPU's."""
    return "gpu_budget_mebibytes" in frame


def place_values(text: Text, names: Sequence[str], low_bit_fractions: Sequence[float]) -> dict[str, str]:
    """Values of the prose that depend on the place.

    Parameters
    ----------
    text : of the comparison.
    names : of the engines that were asked for; none = all.
    low_bit_fractions : caps in 4 bits that were asked for.
    """
    return _gpu_words(text, names, low_bit_fractions) if text.place.is_gpu else _processor_words(text)


def _processor_words(text: Text) -> dict[str, str]:
    return {
        "place_words": "",
        "budget_words": (
            f"A cap is the dense weights, {text.process_mebibytes} MiB for the process, and the stated share of the experts' bytes; it is "
            "the same for every engine."
        ),
        "left_out_words": "",
        "peak_words": (
            "*Peak* is what the operating system counted for the whole run, cached pages of files included; *resident* the most that the "
            "process itself had in memory, mapped pages included"
        ),
        "kernel_words": "kernels for GPUs, where this runtime has not been measured against anything",
        "regime_words": "*page faults of mapped files on one disk*",
        "machine_words": "its disk",
        "command_words": (
            f"At equal *GPU* memory it is `{COMMAND}`: shares of whole layers, in which stock engines place experts on a GPU, and "
            "`host_mebibytes` as the cap of main memory. **UNVERIFIED**: that was written without a GPU and has never been run on one."
        ),
    }


def _gpu_words(text: Text, names: Sequence[str], low_bit_fractions: Sequence[float]) -> dict[str, str]:
    place = text.place
    gibibytes = place.host_mebibytes / MEBIBYTES_PER_GIBIBYTE
    return {
        "place_words": (
            "**UNVERIFIED**: this page compares on a GPU, with code that was written without one and that nobody has checked. Experts that "
            "do not fit there come from main memory or from the disk. The plan is about main memory: nothing on this page is planned, and "
            "no claim is judged."
        ),
        "budget_words": (
            "Dense weights and the stated share of the experts' bytes are what an engine may place on the GPU. It is told so and nothing "
            "enforces it: this runtime gets slots for single experts, the others whole layers of experts, rounded down, and what a layer "
            f"needs while it computes comes on top. The cap of main memory is {gibibytes:.3g} GiB, the same for every engine and share. Of "
            f"that this runtime page-locks at most {place.host_mebibytes - text.process_mebibytes} MiB; whether the cap counts page-locked "
            "memory was not looked at."
        ),
        "left_out_words": _left_out_words(place, names, low_bit_fractions),
        "peak_words": (
            "*Peak* is what the operating system counted of main memory for the whole run, cached pages of files included; *GPU peak* the "
            "most that torch had allocated there (llama.cpp does not tell its own)"
        ),
        "kernel_words": "kernels for GPUs, where this runtime computes with torch's",
        "regime_words": "*experts in main memory and on one disk, a model on one GPU*",
        "machine_words": "its GPU and the link to it, its disk",
        "command_words": "This page is its form at equal *GPU* memory.",
    }


def _left_out_words(place: Place, names: Sequence[str], low_bit_fractions: Sequence[float]) -> str:
    """Engines and cells that were asked for and have no form on a GPU."""
    kept = {engine.name for engine in engines_named(names, place)}
    told = [f"*{name}*, which has no form for a GPU" for name in names or ENGINES if name not in kept]
    if low_bit_fractions:
        told.append("the caps in 4 bits, for which this runtime has products on processors only")
    return f"Left out: {'; '.join(told)}." if told else ""


def host_words(frame: pd.DataFrame, text: Text) -> str:
    """Whether main memory holds all experts beside a GPU, so that the disk is no part of the comparison."""
    room = text.place.host_mebibytes - text.process_mebibytes
    if (frame["experts_mebibytes"] > room).any():
        return ""
    return "Main memory has room for all experts, so once they have been read nothing has to come from the disk."
