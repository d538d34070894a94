"""The command line: run a chapter, run the study, make the book, look at a trace.

Each subcommand is one function and one entry in `_COMMANDS`. What is wrong is said in a line, with what to
do, and ends the command with status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    asked = parsers()[""].parse_args(arguments)
    try:
        return asked.function(asked)
    except KeyboardInterrupt:
        print("\nmoecache: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as fault:
        print(f"moecache: {fault}", file=sys.stderr)
        return 1


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of the whole command line under "", and that of each subcommand under its name."""
    whole = argparse.ArgumentParser(prog="moecache", description="Which expert misses are worth waiting for?")
    commands = whole.add_subparsers(dest="command", required=True)
    found = {"": whole}
    for name, (function, declare) in _COMMANDS.items():
        found[name] = commands.add_parser(name, help=_purpose(function), description=_purpose(function))
        declare(found[name])
        found[name].set_defaults(function=function)
    return found


def run(asked: argparse.Namespace) -> int:
    """Rerun one chapter with parameters of your own and write it as one page."""
    from moecache.chapters.own_run import run_with

    chapter = _chapter(asked.chapter)
    target = asked.output or Path(f"{chapter.path.stem}.html")
    print(run_with(chapter, dict(asked.parameter), asked.profile, target, _clone() / "build" / "own"))
    return 0


def chapters(asked: argparse.Namespace) -> int:
    """List the chapters and their parameters."""
    from moecache.chapters.source import find_chapters

    for chapter in find_chapters(_clone() / "notebooks").values():
        print(f"{chapter.number}  {chapter.title}\n{chapter.describe()}")
    return 0


def study(asked: argparse.Namespace) -> int:
    """Run every chapter on this machine and make the book of what it measured."""
    return _make(asked.profile, asked.only)


def book(asked: argparse.Namespace) -> int:
    """Make the book from the stored results; nothing is measured."""
    return _make("stored", asked.only)


def keep(asked: argparse.Namespace) -> int:
    """Store what the last full study measured, for the book and for others, and draw the README's figure from it."""
    from moecache.chapters.keep import draw_main_figure, keep_results

    for path in [*keep_results(_clone()), draw_main_figure(_clone())]:
        print(path)
    return 0


def trace(asked: argparse.Namespace) -> int:
    """Say what is in a trace and what it can tell."""
    from moecache.trace.importers import load_trace

    geometry = {name: getattr(asked, name) for name in ("num_experts", "top_k", "norm_topk_prob")}
    print(load_trace(asked.path, memory_map=True, **geometry).report(asked.num_slots))
    return 0


def pack(asked: argparse.Namespace) -> int:
    """Make a folder with one aligned block for every expert of a checkpoint; an interrupted run goes on from where it was."""
    from moecache.stores.pack import pack as pack_checkpoint
    from moecache.stores.packed_file import PackedStore

    store = PackedStore(pack_checkpoint(asked.source, asked.target, asked.bits, order=asked.order))
    total = store.num_layers * store.num_experts
    gib = store.header.file_bytes / 2**30
    print(f"{asked.target}: {total} experts of {store.layout.expert_bytes} bytes in {store.num_layers} layers, {gib:.2f} GiB")
    store.close()
    return 0


def export_gguf(asked: argparse.Namespace) -> int:
    """Write a checkpoint as a GGUF file, for llama.cpp."""
    from moecache.export_gguf import export_gguf as export

    path = export(asked.source, asked.target, asked.bits)
    print(f"{path}: {path.stat().st_size / 2**30:.2f} GiB")
    return 0


def widen(asked: argparse.Namespace) -> int:
    """Write a reference model with experts of real size: the same text and routes, many times the bytes."""
    from moecache.reference.loading import model_folder
    from moecache.widen import widen as widen_model

    given = {name: getattr(asked, name) for name in ("hidden_size", "expert_width", "num_layers", "layout", "padding")}
    print(widen_model(model_folder(asked.model), asked.target, **given))
    return 0


def plan(asked: argparse.Namespace) -> int:
    """Say what fits into a memory and how fast it would be, from a model's configuration alone."""
    from moecache.policy import PRESETS
    from moecache.runtime.plan import plan as plan_model

    policy = next(preset for preset in PRESETS if preset.label == asked.policy)
    given = {name: getattr(asked, name) for name in ("device", "bits", "context_tokens", "host_memory", "hardware")}
    print(plan_model(asked.path, asked.memory, policy=policy, **given).report())
    return 0


def _make(edition: str, only: Sequence[str]) -> int:
    from moecache.chapters.render import make_book
    from moecache.chapters.study import EDITIONS, run_chapters

    root = _clone()
    page = make_book(root, run_chapters(root, EDITIONS[edition], only), is_part=bool(only))
    print(f"[moecache] the book is at {page}")
    return 0


def _chapter(number: str) -> Any:
    from moecache.chapters.source import find_chapters

    known = find_chapters(_clone() / "notebooks")
    if number not in known:
        listed = "\n".join(f"  {chapter.number}  {chapter.title}" for chapter in known.values())
        raise ValueError(f"no chapter {number!r}; there are:\n{listed}")
    return known[number]


def _clone() -> Path:
    if not (_ROOT / "notebooks" / "runs.yml").exists():
        raise ValueError("this command needs a clone of the study: run it from a clone's own environment (make setup)")
    return _ROOT


def _purpose(function: Callable[..., int]) -> str:
    return (function.__doc__ or "").strip()


def _declare_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", help="two digits, such as 04")
    parser.add_argument(
        "-p", dest="parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
        help="a parameter's value; may be repeated",
    )  # fmt: skip
    parser.add_argument("-o", dest="output", type=Path, help="where the page goes")
    parser.add_argument("--profile", choices=("quick", "full"), default="quick", help="where to start from")


def _declare_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", choices=("quick", "full"), default="quick", help="which parameters")
    _declare_book(parser)


def _declare_book(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[], metavar="NN", help="only these chapters")


def _declare_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("report",), help="what to do with it")
    parser.add_argument("path", type=Path, help="a trace of any format that is understood")
    parser.add_argument("--num-slots", type=int, help="slots a layer to replay it with (default: a quarter of the experts)")
    parser.add_argument("--num-experts", type=int, help="experts a layer, where the file does not say")
    parser.add_argument("--top-k", type=int, help="experts called a token, where the file does not say")
    parser.add_argument("--norm-topk-prob", action=argparse.BooleanOptionalAction, help="whether routing weights are rescaled, likewise")


def _declare_pack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a checkpoint's folder: config.json and safetensors")
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument("--bits", type=int, choices=(16, 8, 4), default=16, help="16 = experts as they are; 8, 4 = rounded")
    parser.add_argument(
        "--order", choices=("plain", "products"), default="plain",
        help="of 8 or 4 bits: plain = for every processor, experts are written out into slots; products = for processors of this one's "
        "kind, slots hold the few bits",
    )  # fmt: skip


def _declare_export_gguf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a checkpoint's folder: config.json and safetensors")
    parser.add_argument("target", type=Path, help="the file to make")
    parser.add_argument("--bits", type=int, choices=(16, 8, 4), default=16, help="16 = experts as they are; 8, 4 = in Q8_0, Q4_0")


def _declare_widen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument("--model", default="reference-512", help="a reference model's name")
    parser.add_argument("--hidden-size", type=int, default=2048, help="numbers in a hidden state: the model's times a power of four")
    parser.add_argument("--expert-width", type=int, default=512, help="units of an expert")
    parser.add_argument("--num-layers", type=int, help="only the first layers, for timing (default: all)")
    parser.add_argument("--layout", choices=("fused", "hub"), default="fused", help="all experts of a layer in one tensor, or each apart")
    parser.add_argument("--padding", choices=("zeros", "noise"), default="zeros", help="what fills experts where it changes nothing")


def _declare_plan(parser: argparse.ArgumentParser) -> None:
    from moecache.policy import PRESETS

    parser.add_argument("path", type=Path, help="a folder with config.json, or that file; no weights are needed")
    parser.add_argument("--memory", required=True, help="of the device that computes, such as '20 GiB'")
    parser.add_argument(
        "--host-memory", default="0", help="main memory for experts behind the slots (default: none; on a GPU, all experts)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--policy", choices=[preset.label for preset in PRESETS], default="quality-first", help="what is waited for")
    parser.add_argument(
        "--bits", type=int, choices=(16, 8, 4), help="of experts in slots; 8, 4 = packed for products (default: as the packed folder says)"
    )
    parser.add_argument("--context-tokens", type=int, default=4096, help="length of prompt and answer")
    parser.add_argument("--hardware", help="a profile's name (default: measure this machine; on a GPU, pcie4)")


def _declare_nothing(parser: argparse.ArgumentParser) -> None:
    pass


_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None]]] = {
    "run": (run, _declare_run),
    "chapters": (chapters, _declare_nothing),
    "study": (study, _declare_study),
    "book": (book, _declare_book),
    "keep": (keep, _declare_nothing),
    "trace": (trace, _declare_trace),
    "widen": (widen, _declare_widen),
    "pack": (pack, _declare_pack),
    "export-gguf": (export_gguf, _declare_export_gguf),
    "plan": (plan, _declare_plan),
}

if __name__ == "__main__":
    sys.exit(main())
