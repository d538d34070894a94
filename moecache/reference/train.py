"""Training of a reference model: warm-up, constant rate, and a decay that is a branch.

The main run warms up and then keeps its learning rate, so it can go on for as long as anybody likes. A model fit for
use is branched off: a copy of a constant-rate checkpoint goes on for a while with the rate falling linearly to zero
(`start_decay`); the main run is not touched. Weights, optimizer and step are saved every few minutes and on SIGINT or
SIGTERM; the same command goes on from there, and gives the curve that an uncut run would have given. Where there is no
checkpoint, on a new machine, a run goes on from published weights instead (`start_from_weights`): the same texts in the
same order, but the optimizer knows nothing yet and its rate warms up once more.

Letters: T tokens a step. This module knows the order of events in a step; what a step computes is in `network`, what it
reads in `corpus`.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moecache.reference.checkpoint import append_log, cut_log, load_checkpoint, read_log, run_folder, save_checkpoint
from moecache.reference.corpus import Corpus, training_corpus
from moecache.reference.fast import fast_layers, use_fast_parts
from moecache.reference.loading import load_model, model_folder, tokenizer_file
from moecache.reference.network import RouterTap, keep_freed_memory, make_network, mean_balance, token_losses
from moecache.reference.settings import TrainSettings

SAVE_EVERY_SECONDS = 300.0
LOG_EVERY_STEPS = 10


@dataclass(frozen=True)
class Decay:
    """A falling rate: from the constant rate at `first_step` linearly to zero after `num_steps`."""

    first_step: int
    num_steps: int


def learning_rate(step: int, settings: TrainSettings, decay: Decay | None = None, restart_step: int = 0) -> float:
    """Rate of a step (counted from 0): linear warm-up from `restart_step`, constant, then linear decay on a branch."""
    rate = settings.learning_rate * min(1.0, (step - restart_step + 1) / settings.warmup_steps)
    if decay is not None:
        rate *= max(0.0, 1.0 - (step - decay.first_step) / decay.num_steps)
    return rate


def make_optimizer(model: torch.nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, not on norms, gates' biases and embeddings' scales."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


@dataclass
class Trainer:
    """A run in memory: network, optimizer, corpus, and how many steps are done.

    `is_fast` chooses the exchanged parts of `fast` over the library's own. `restart_step` is where the optimizer began.
    """

    settings: TrainSettings
    corpus: Corpus
    folder: Path
    decay: Decay | None = None
    is_fast: bool = True
    step: int = 0
    restart_step: int = 0
    say: Callable[[str], None] = print
    is_stopping: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.model = make_network(self.settings.geometry, self.settings.seed).train()
        self.tap = RouterTap(self.model)
        if self.is_fast:
            use_fast_parts(self.model, self.tap.routers)
        self.optimizer = make_optimizer(self.model, self.settings)
        self.step, self.restart_step = load_checkpoint(self.folder, self.model, self.optimizer, self.settings)
        cut_log(self.folder, self.step)

    @property
    def num_tokens(self) -> int:
        """Tokens trained on so far."""
        return self.step * self.settings.step_tokens

    def train_step(self) -> dict[str, float]:
        """One optimizer step; returns token loss (nats), balance and gradient norm."""
        rows = torch.from_numpy(self.corpus.batch(self.step, self.settings.rows_per_step))
        rate = learning_rate(self.step, self.settings, self.decay, self.restart_step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.tap.clear()
        with fast_layers() if self.is_fast else nullcontext():
            loss = token_losses(self.model, rows).mean()
        even = mean_balance(self.tap)
        (loss + self.settings.balance_coefficient * even).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return {"loss_nats": loss.item(), "balance": even.item(), "gradient_norm": norm.item()}

    def save(self) -> None:
        """Write the checkpoint."""
        save_checkpoint(self.folder, self.model, self.optimizer, self.step, self.settings, self.restart_step)

    def stop(self, *_: object) -> None:
        """Ask the run to save and end after the step under way (also the signal handler)."""
        self.is_stopping = True

    def run(self, num_tokens: int) -> None:
        """Train until `num_tokens` are done, logging and saving on the way."""
        last_step = -(-num_tokens // self.settings.step_tokens)
        saved = logged = time.monotonic()
        window: list[dict[str, float]] = []
        while self.step < last_step and not self.is_stopping:
            window.append(self.train_step())
            if self.step % LOG_EVERY_STEPS == 0 or self.step == last_step:
                now = time.monotonic()
                self._log(window, now - logged, last_step)
                logged, window = now, []
            if time.monotonic() - saved > SAVE_EVERY_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def _log(self, window: list[dict[str, float]], seconds: float, last_step: int) -> None:
        means = {key: round(sum(entry[key] for entry in window) / len(window), 5) for key in window[0]}
        speed = len(window) * self.settings.step_tokens / seconds
        rate = learning_rate(self.step - 1, self.settings, self.decay, self.restart_step)
        entry = {"step": self.step, "num_tokens": self.num_tokens, **means, "learning_rate": rate}
        append_log(self.folder, entry | {"tokens_per_second": round(speed, 1), "time": round(time.time())})
        left_seconds = (last_step - self.step) * self.settings.step_tokens / speed
        self.say(
            f"step {self.step:6d}  {self.num_tokens / 1e6:7.3f} M tokens  loss {means['loss_nats']:.4f} nats  "
            f"balance {means['balance']:.3f}  {speed:6.0f} tokens/s  {left_seconds / 60:5.0f} min left"
        )


def start_decay(name: str, fraction: float) -> tuple[str, Decay]:
    """Copy a run's checkpoint into a branch and return the branch's name and its decay.

    Parameters
    ----------
    name : the constant-rate run.
    fraction : length of the decay as a share of the tokens trained so far.

    Raises
    ------
    ValueError : the run has no checkpoint yet.
    """
    source = run_folder(name)
    if not (source / "checkpoint.pt").exists():
        raise ValueError(f"no checkpoint in {source}: run `python -m moecache.reference train` first")
    step = int(torch.load(source / "checkpoint.pt", weights_only=True)["step"])
    branch = f"{name}-decay-{step}"
    target = run_folder(branch)
    if not target.exists():
        target.mkdir(parents=True)
        shutil.copy2(source / "log.jsonl", target / "log.jsonl")
        shutil.copy2(source / "checkpoint.pt", target / "checkpoint.pt")
    return branch, Decay(step, max(1, round(fraction * step)))


def start_from_weights(trainer: Trainer, directory: Path) -> None:
    """Give a run without a checkpoint the weights of a model folder and the place in the texts that its log ends at; save it.

    Raises
    ------
    ValueError : the run has a checkpoint already, or the folder has no log.
    MissingModelError : the folder has no weights.
    """
    if (trainer.folder / "checkpoint.pt").exists():
        raise ValueError(f"{trainer.folder} has a checkpoint, which knows more than weights do; go on without --from-weights")
    log = read_log(directory)
    if not log:
        raise ValueError(f"no log.jsonl in {directory}: how far its training came is not known")
    trainer.model.load_state_dict(load_model(directory=directory).state_dict())
    trainer.step = trainer.restart_step = int(log[-1]["step"])
    trainer.folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(directory / "log.jsonl", trainer.folder / "log.jsonl")
    trainer.save()


def train(
    num_tokens: int, settings: TrainSettings | None = None, decay_fraction: float | None = None, is_from_weights: bool = False
) -> Path:
    """Train a reference model, or a decayed branch of it, and return the run's folder.

    Parameters
    ----------
    num_tokens : where the main run stops; a branch stops where its rate is zero.
    settings : default the settings of `reference-512`.
    decay_fraction : None for the main run; else branch off with a decay of this share of the tokens so far.
    is_from_weights : begin with the committed weights, where there is no checkpoint.

    Raises
    ------
    ValueError : a branch from weights, or weights for a run that has a checkpoint.
    """
    settings = settings or TrainSettings()
    if is_from_weights and decay_fraction is not None:
        raise ValueError("--branch-decay needs a checkpoint's optimizer; train --from-weights for a while first")
    keep_freed_memory()
    corpus = training_corpus(tokenizer_file(settings.name), settings.row_tokens, settings.seed)
    branch, decay = settings.name, None
    if decay_fraction is not None:
        branch, decay = start_decay(settings.name, decay_fraction)
        num_tokens = (decay.first_step + decay.num_steps) * settings.step_tokens
    trainer = Trainer(settings, corpus, run_folder(branch), decay)
    if is_from_weights:
        start_from_weights(trainer, model_folder(settings.name))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, trainer.stop)
    print(f"{branch}: {trainer.step} steps done, training to {num_tokens / 1e6:.2f} M tokens", flush=True)
    trainer.say = lambda line: print(line, flush=True)
    trainer.run(num_tokens)
    print(f"saved in {trainer.folder} after {trainer.num_tokens / 1e6:.3f} M tokens", flush=True)
    return trainer.folder
