"""What happens beside the steps: validation recall, and checkpoints (best and newest)."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint

from vlretrieval.training.checkpoint_io import AtomicCheckpointIO, newest_first, sweep_partials, sync_folder
from vlretrieval.training.gather import highest
from vlretrieval.training.sharding import Sharded

log = logging.getLogger(__name__)

HEADLINES = ("R@1", "R@10", "rsum", "all/cosine", "all/match")  # of a validation, on one line; the logger has them all


class Validation(Callback):
    """Measures the model on the validation split at the end of every n-th epoch, and of the last.

    Args:
        measure: ``(model, reranked) -> ({"val/t2i/R@1": 61.3, ...}, outcome)``; run by rank 0 alone, while the others
            wait; by all where the weights are sharded. ``reranked`` asks for the second stage too.
        every_n_epochs: how often.
        rerank_every_n_epochs: how often the second stage too, a multiple of ``every_n_epochs``; None: every time.
        show: called by rank 0 with ``(model, outcome, epoch, last)`` after each measuring, to draw it.
    """

    def __init__(
        self,
        measure: Callable[[torch.nn.Module, bool], tuple[Mapping[str, float], Any]],
        every_n_epochs: int = 1,
        rerank_every_n_epochs: int | None = None,
        show: Callable[[torch.nn.Module, Any, int, bool], None] | None = None,
    ):
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs={every_n_epochs} must be at least 1")
        check_multiple("validation.rerank_every_n_epochs", rerank_every_n_epochs, every_n_epochs)
        self.measure, self.every_n_epochs, self.show = measure, every_n_epochs, show
        self.rerank_every_n_epochs = rerank_every_n_epochs or every_n_epochs
        self.seconds = 0.0
        self.figures: Mapping[str, float] = {}
        self.step = -1  # that ``figures`` are of
        self.complete = False  # whether those are all that there ever are
        self._epochs = 0  # ended
        self._epochs_before: int | None = None  # as the checkpoint has it that the run goes on from

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self._epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epochs = self._epochs_before = state["epochs"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # saved after an epoch's last step and not gone on to its end: Lightning takes that epoch as ended
        if self._epochs_before is not None and self._epochs_before < trainer.current_epoch:
            self._end_epoch(trainer, module, trainer.current_epoch)
        loop = trainer.fit_loop
        progress: Any = loop.epoch_progress.current
        if loop.restarted_mid_epoch and progress.processed == progress.started:
            # It would take the epoch that begins now for the one that was broken off, and not count it as begun: a
            # second resume, from within it, would then begin that epoch again.
            loop.reset_restart_stage()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._end_epoch(trainer, module, trainer.current_epoch + 1)
        if self.step == trainer.global_step:
            for name, value in self.figures.items():
                shown = name.endswith("R@1")
                module.log(name, float(value), logger=False, prog_bar=shown, rank_zero_only=False, sync_dist=False)

    def _end_epoch(self, trainer: pl.Trainer, module: pl.LightningModule, epoch: int) -> None:
        """Measures after ``epoch`` (the first is 1), if it is its turn."""
        self._epochs = epoch
        last = epoch == trainer.max_epochs or trainer.should_stop
        if epoch % self.every_n_epochs and not last:
            return
        started_at = time.perf_counter()
        self.complete = last or epoch % self.rerank_every_n_epochs == 0
        figures: Mapping[str, float] = {}
        sharded = isinstance(trainer.strategy, Sharded)  # then no rank can compute without the others
        if trainer.is_global_zero or sharded:
            module.eval()
            average: Any = module.average
            # before inference mode: weights copied within it could not be trained
            model: Any = module.model
            with average.in_place_of(model) if average else nullcontext(), torch.inference_mode():
                figures, outcome = self.measure(model, self.complete)
                if self.show is not None:
                    self.show(model, outcome, epoch, last)
            module.train()
        if trainer.world_size > 1:
            figures = trainer.strategy.broadcast(dict(figures))
        self.figures, self.step = figures, trainer.global_step
        for logger in trainer.loggers:  # now: Lightning would after the epoch's save, and a kill between them lose it
            logger.log_metrics({**figures, "epoch": epoch - 1}, step=trainer.global_step - 1)
            logger.save()
        self.seconds += time.perf_counter() - started_at
        shown = {k: v for k, v in figures.items() if k.endswith(HEADLINES)}
        line = "  ".join(f"{name.removeprefix('val/')} {value:.1f}" for name, value in shown.items())
        log.info("epoch %d, step %d: %s", epoch, trainer.global_step, line)


def check_multiple(key: str, every: int | None, validation: int) -> None:
    """What is done with a validation's outcome can be done no more often than there is one.

    Raises:
        ValueError: naming ``key``.
    """
    if every is not None and (every < 1 or every % validation):
        raise ValueError(f"{key}={every} must be a multiple of validation.every_n_epochs={validation}, or null")


def validation_of(trainer: pl.Trainer) -> Validation | None:
    """The run's own."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, Validation)), None)


def measured_now(trainer: pl.Trainer, name: str) -> float | None:
    """A validation figure, if it was measured at this very step, and is not left from an earlier epoch."""
    validation = validation_of(trainer)
    if validation is None or validation.step != trainer.global_step or name not in validation.figures:
        return None
    return float(validation.figures[name])


class Checkpoints(Checkpoint):
    """Keeps the best checkpoint by a validation metric and the newest few by step.

    ``best.ckpt`` is the best, ``step-N.ckpt`` the newest ``keep`` (two, so that a torn one has a predecessor),
    ``last.ckpt`` another name of the newest.

    Args:
        folder: where they go.
        monitor: a validation metric, e.g. "val/rsum".
        mode: "max" or "min".
        every_n_steps: optimizer steps between saves; None saves at the end of each epoch only.
        keep: step checkpoints kept.
        failures_allowed: saves in a row that may fail (a full disk); the earlier checkpoints stay, and the run goes on.
    """

    def __init__(
        self,
        folder: str | Path,
        monitor: str,
        mode: str = "max",
        every_n_steps: int | None = None,
        keep: int = 2,
        failures_allowed: int = 3,
    ):
        if mode not in ("max", "min"):
            raise ValueError(f"mode={mode!r} is not known; choose max or min")
        if not monitor.startswith("val/"):
            raise ValueError(f"checkpoints.monitor={monitor} must be measured on the validation split: val/...")
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        self.folder, self.monitor, self.mode = Path(folder), monitor, mode
        self.every_n_steps, self.keep = every_n_steps, keep
        self.io = AtomicCheckpointIO(failures_allowed)
        self.best_value: float | None = None
        self.best_step = -1
        self._saved_step = -1

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK):
                raise ValueError(
                    f"checkpoints cannot be written to {self.folder}: it is read-only; set another output_dir"
                )
            sweep_partials(self.folder)

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.best_value, "best_step": self.best_step, "monitor": self.monitor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # another metric's best is no yardstick for this one
        if state["monitor"] == self.monitor:
            self.best_value, self.best_step = state["best_value"], state["best_step"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step = trainer.global_step
        newest, oldest = highest(step, module.device), -highest(-step, module.device)
        if newest != oldest:  # a folder that not all machines see, say
            raise ValueError(
                f"the ranks go on from different steps, {oldest} to {newest}; all of them must see the checkpoints in "
                f"{self.folder}: set output_dir to a folder that all machines share"
            )
        value = measured_now(trainer, self.monitor)
        if value is not None and self._better(value):  # of an epoch that had not ended when its last step was saved
            self.best_value, self.best_step = value, step
        self._name_best(trainer)

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._name_best(trainer)

    def _name_best(self, trainer: pl.Trainer) -> None:
        """Gives the best checkpoint its name, if the run was ended between its save and that."""
        source, name = self.folder / f"step-{self.best_step:08d}.ckpt", self.folder / "best.ckpt"
        if trainer.is_global_zero and source.is_file() and not (name.is_file() and name.samefile(source)):
            link(source, name)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if self.every_n_steps and step % self.every_n_steps == 0 and step != self._saved_step:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        value = measured_now(trainer, self.monitor)
        before = self.best_value, self.best_step
        if value is not None and self._better(value):
            self.best_value, self.best_step = value, trainer.global_step
        if not self.save(trainer):
            self.best_value, self.best_step = before
        self._name_best(trainer)
        validation = validation_of(trainer)
        if validation is not None and validation.step == trainer.global_step and validation.complete:
            self._check_monitor(validation.figures)

    def save(self, trainer: pl.Trainer) -> bool:
        """Saves this step; all ranks must call it. False on rank 0 if the disk would not take it."""
        step = trainer.global_step
        path = self.folder / f"step-{step:08d}.ckpt"
        trainer.save_checkpoint(path)
        self._saved_step = step
        if self.io.failed_in_a_row:
            return False
        if trainer.is_global_zero:
            link(path, self.folder / "last.ckpt")
            for old in list(newest_first(self.folder))[self.keep :]:
                old.unlink()
        return True

    def save_once(self, trainer: pl.Trainer) -> None:
        """Saves this step unless that has been done."""
        if trainer.global_step != self._saved_step:
            self.save(trainer)

    def newest(self) -> Path | None:
        """The newest checkpoint written so far."""
        return next(newest_first(self.folder), None)

    def _check_monitor(self, figures: Mapping[str, float]) -> None:
        if self.monitor not in figures:
            close = get_close_matches(self.monitor, figures, n=3, cutoff=0.3)
            raise ValueError(
                f"checkpoints.monitor={self.monitor} is not measured; did you mean {' or '.join(close) or 'val/rsum'}? "
                "Go on with resume=true and one that is"
            )

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best_value is None:
            return True
        return value > self.best_value if self.mode == "max" else value < self.best_value


def link(source: Path, name: Path) -> None:
    """Another name for a file, replaced in one step; a copy where the file system has no hard links."""
    fresh = name.with_name(name.name + ".partial")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh)
    except OSError:
        shutil.copyfile(source, fresh)
    fresh.replace(name)
    sync_folder(name.parent)


class Describe(Callback):
    """Makes a checkpoint self-describing: the resolved config and the tokenizer, as plain data.

    Args:
        description: ``{"version", "config", "tokenizer"}``.
    """

    def __init__(self, description: dict[str, Any]):
        self.description = description

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["vlretrieval"] = {**self.description, "step": trainer.global_step}
