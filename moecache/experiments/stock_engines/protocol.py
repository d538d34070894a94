"""What every engine is asked and answers: decode these tokens one by one, say how long each took, and if asked what came out.

The tokens come from a file and are fed one after the other under teacher forcing: the engine computes the logits of the next token, and
gets the next token of the text instead of what it would have chosen. So all engines do the same work on the same text. A file of rows is
one document a row: the decoding cache (keys and values) starts anew with each, whatever memory the engine keeps experts in goes on.

    python -m moecache.experiments.stock_engines.ENGINE MODEL TOKENS.npy --warm-tokens 500 --measured-tokens 100 --threads 1

prints one line of JSON (`Measured`) as the last line of its output. A step is timed from having the token to having the logits as an array
in main memory, which every sampler needs. An engine that is killed prints nothing.

Nothing here knows an engine, and importing it loads neither torch nor an engine: memory is counted from a small start.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

TORCH_ENVIRONMENT = MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE"})  # threads that wait must not take the core from those that read
LLAMA_CPP_PYTHON = "0.3.36"  # the release that the extra `stock` installs
ADVICE = {"normal": 0, "random": 1, "sequential": 2}  # madvise's numbers


class Engine(Protocol):
    """A loaded model that decodes.

    Attributes
    ----------
    versions : of the packages that compute, by name.
    settings : what was set, and what the engine says about itself; plain JSON values.
    """

    versions: dict[str, str]
    settings: dict[str, Any]

    def begin(self) -> None:
        """Forget the document so far."""
        ...

    def step(self, token_id: int) -> NDArray[np.float32]:
        """Logits [V] of the token after this one."""
        ...

    def stats(self) -> dict[str, float]:
        """What the engine counted since it was loaded: numbers that only grow."""
        ...

    def gpu_peak_bytes(self) -> int | None:
        """The most GPU memory that was allocated at a time; None without a GPU, or where the engine does not say."""
        ...


@dataclass(frozen=True)
class Measured:
    """An engine's answer.

    Attributes
    ----------
    engine, model, versions, settings : who computed what, and how.
    threads : that compute.
    load_seconds : until the first step could be asked for.
    warm_seconds, seconds : of each token before the measured ones, and of each measured token.
    stats : what the engine counted during the measured tokens.
    peak_resident_bytes : VmHWM, mapped pages of files included.
    private_bytes : RssAnon at the end, the process's own memory.
    major_faults, read_bytes : page faults that waited for the disk, and bytes read from it, during the measured tokens.
    gpu_peak_bytes : as the engine says; None where it does not.
    """

    engine: str
    model: str
    versions: dict[str, str]
    settings: dict[str, Any]
    threads: int
    load_seconds: float
    warm_seconds: list[float]
    seconds: list[float]
    stats: dict[str, float] = field(default_factory=dict)
    peak_resident_bytes: int = 0
    private_bytes: int = 0
    major_faults: int = 0
    read_bytes: int = 0
    gpu_peak_bytes: int | None = None

    @classmethod
    def from_output(cls, output: str) -> Measured:
        """The answer in an engine's standard output: its last line.

        Raises
        ------
        ValueError : there is none.
        """
        last = output.strip().rpartition("\n")[2]
        try:
            return cls(**json.loads(last))
        except (TypeError, ValueError) as fault:
            raise ValueError(f"the engine's last line is no answer: {last[:200]!r}; did it end early?") from fault


def main(
    name: str,
    declare: Callable[[argparse.ArgumentParser], None],
    load: Callable[[argparse.Namespace], Engine],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run an engine from the command line: load it, decode, print the answer.

    Parameters
    ----------
    name : of the engine.
    declare : adds the engine's own options.
    load : loads the model; the first to import what computes, after the environment was set.
    environment : variables that are set where the caller has not set them.
    """
    parser = argparse.ArgumentParser(prog=f"python -m moecache.experiments.stock_engines.{name}", description=load.__doc__)
    _declare_common(parser)
    declare(parser)
    asked = parser.parse_args()
    documents = read_tokens(asked.tokens, asked.warm_tokens + asked.measured_tokens)
    os.environ.update({**environment, **os.environ, "OMP_NUM_THREADS": str(asked.threads)})
    start = perf_counter()
    engine = load(asked)
    if asked.advice != "normal":
        engine.settings["advised_bytes"] = advise_mappings(asked.model, asked.advice)
    load_seconds = perf_counter() - start
    engine.settings["advice"] = asked.advice
    answer = measure(name, engine, documents, asked, load_seconds)
    print(json.dumps(asdict(answer)), flush=True)
    return 0


def _declare_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="the model's file or folder, in the engine's own format")
    parser.add_argument("tokens", type=Path, help=".npy file of token ids: one document [T], or one in each row")
    parser.add_argument("--warm-tokens", type=int, default=0, help="decoded first, timed apart")
    parser.add_argument("--measured-tokens", type=int, required=True, help="decoded then")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--logits", type=Path, help="write the logits of the measured tokens [n, V] float32 to this .npy file")
    parser.add_argument("--advice", choices=sorted(ADVICE), default="normal", help="what the system is told about mapped model files")


def read_tokens(path: Path, num_tokens: int) -> list[NDArray[np.int64]]:
    """The first `num_tokens` tokens of a file, by document.

    Raises
    ------
    ValueError : no such array, or fewer tokens than asked for.
    """
    found = np.load(path, allow_pickle=False)
    if found.ndim not in (1, 2) or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"{path} must hold integer token ids [T] or [documents, T], got {found.dtype} {found.shape}")
    if not 0 < num_tokens <= found.size:
        raise ValueError(f"{path} holds {found.size} tokens, {num_tokens} were asked for; give 1 to {found.size}")
    rows = np.atleast_2d(found).astype(np.int64)
    starts = range(0, num_tokens, rows.shape[1])
    return [row[: num_tokens - start] for start, row in zip(starts, rows, strict=False)]


def measure(name: str, engine: Engine, documents: Sequence[NDArray[np.int64]], asked: argparse.Namespace, load_seconds: float) -> Measured:
    """Decode all tokens; the clock is read around each step."""
    seconds: list[float] = []
    kept: list[NDArray[np.float32]] = []
    before: dict[str, float] = {}
    for token_id in _tokens(engine, documents):
        if len(seconds) == asked.warm_tokens:
            before = engine.stats() | _counts()
        start = perf_counter()
        logits = engine.step(token_id)
        seconds.append(perf_counter() - start)
        if asked.logits is not None and len(seconds) > asked.warm_tokens:
            kept.append(np.array(logits, np.float32))
    after = engine.stats() | _counts()
    if asked.logits is not None:
        np.save(asked.logits, np.stack(kept))
    change = {key: value - before[key] for key, value in after.items()}
    return Measured(
        name, str(asked.model), engine.versions, engine.settings, asked.threads, load_seconds,
        seconds[: asked.warm_tokens], seconds[asked.warm_tokens :],
        major_faults=int(change.pop("major_faults")), read_bytes=int(change.pop("read_bytes")), stats=change, **_memory(),
        gpu_peak_bytes=engine.gpu_peak_bytes(),
    )  # fmt: skip


def _tokens(engine: Engine, documents: Sequence[NDArray[np.int64]]) -> Iterator[int]:
    for document in documents:
        engine.begin()
        yield from document.tolist()


def _counts() -> dict[str, int]:
    """Major faults and bytes read from storage by this process so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt, "read_bytes": int(lines["read_bytes"])}


def _memory() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[field].split()[0]) * 1024 for name, field in (("peak_resident_bytes", "VmHWM"), ("private_bytes", "RssAnon"))}


def advise_mappings(model: Path, advice: str) -> int:
    """Tell the system how the mapped files of a model will be used (madvise).

    Returns
    -------
    int : bytes of the mappings that were told.

    Raises
    ------
    ValueError : no file of the model is mapped by this process.
    OSError : the system refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    prefix, total = str(model.resolve()), 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith(prefix):
            continue
        first, end = (int(number, 16) for number in fields[0].split("-"))
        if library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ADVICE[advice]):
            raise OSError(ctypes.get_errno(), f"madvise({advice}) failed for {fields[5]}")
        total += end - first
    if not total:
        raise ValueError(f"--advice {advice}: this engine maps no file of {model}; leave the option out")
    return total


def declare_products(parser: argparse.ArgumentParser) -> None:
    """The option that engines share which compute with torch."""
    parser.add_argument("--onednn", action="store_true", help="products by oneDNN (default: without, which is faster for one bfloat16 row)")


def declare_device(parser: argparse.ArgumentParser) -> None:
    """The option that engines share which compute with torch on a GPU too; UNVERIFIED there."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model computes")


def missing_extra(package: str) -> ValueError:
    """The error that names the extra which a stock engine needs."""
    return ValueError(f"{package} is not installed; the stock engines need `pip install moecache[stock]`")


def missing_gpu_build() -> ValueError:
    """The error that says how llama.cpp is built for a GPU."""
    return ValueError(
        "the installed llama-cpp-python was built without support of a GPU; build it anew with CUDA's compiler: "
        f"`CMAKE_ARGS=-DGGML_CUDA=on pip install --force-reinstall --no-deps --no-cache-dir llama-cpp-python=={LLAMA_CPP_PYTHON}`"
    )
