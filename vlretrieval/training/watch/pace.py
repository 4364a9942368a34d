"""How fast a run goes and where its time goes: pairs a second, phases, memory, share of the device's peak, time left.

The figures go to the loggers every few steps, to the progress bar, and as one line to the log at each epoch's end.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from torch import Tensor
from torch.optim import Optimizer

from vlretrieval.data.datasets import Batch
from vlretrieval.training.gather import world
from vlretrieval.training.objective import Objective
from vlretrieval.training.task import RetrievalTask
from vlretrieval.training.watch.clock import Clock
from vlretrieval.training.watch.peak import dtype_of, measured_flops, peak_bytes
from vlretrieval.training.watch.step_flops import StepFlops, Work

log = logging.getLogger(__name__)

PHASES = ("data", "forward", "backward", "optimizer")  # what is left is the trainer's own: logging, saving


@dataclass
class Span:
    """What happened in a run of steps on this rank."""

    steps: int = 0
    pairs: int = 0
    elapsed_s: float = 0.0
    seconds: dict[str, float] | None = None
    work: Work = Work()

    def add(self, other: Span) -> None:
        self.steps, self.pairs = self.steps + other.steps, self.pairs + other.pairs
        self.elapsed_s, self.work = self.elapsed_s + other.elapsed_s, self.work + other.work
        known, more = self.seconds or {}, other.seconds or {}
        self.seconds = {phase: known.get(phase, 0.0) + more.get(phase, 0.0) for phase in {**known, **more}}

    def shares(self) -> dict[str, float]:
        """Share of each phase, in percent of the time elapsed."""
        found = self.seconds or {}
        return {phase: 100 * found.get(phase, 0.0) / self.elapsed_s for phase in PHASES}


class Pace(Callback):
    """Measures each step by a few readings of the clock.

    Args:
        flops: of steps; None where the model's costs are not known.
        every_n_steps: how often figures go to the loggers; None: as often as the trainer logs.
        peak_flops: FLOP/s of the device; None measures them at the start.
    """

    def __init__(
        self, flops: StepFlops | None = None, every_n_steps: int | None = None, peak_flops: float | None = None
    ):
        self.flops, self.every_n_steps, self.peak_flops = flops, every_n_steps, peak_flops
        self.shown: dict[str, str] = {}  # for the progress bar
        self._loader: Any = None
        self._clock = Clock(torch.device("cpu"))
        self._tokens: list[Tensor] = []
        self._span, self._epoch, self._all = Span(), Span(), Span()
        self._span_at = self._session_at = 0.0
        self._waited_at = 0.0
        self._first_step = 0
        self._ended_at = -1  # the step of the last figures

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.flops is not None and self.peak_flops is None:
            self.peak_flops = measured_flops(module.device, dtype_of(str(trainer.precision)))
            log.info("this device multiplies matrices at %s", rate(self.peak_flops))
        self._clock = Clock(module.device)
        self._session_at, self._first_step = time.perf_counter(), trainer.global_step
        self.on_train_epoch_start(trainer, module)  # which a run resumed in mid-epoch is not called with

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._loader, self._epoch = trainer.train_dataloader, Span()
        self._begin()

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(module, RetrievalTask)
        self._clock.start()
        matches = module.objective.matches(module.model, module.progress)
        work, tokens = work_of(module.objective, batch, matches)
        self._tokens.append(tokens)
        self._span.work += work
        self._span.pairs += len(batch)

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        self._clock.mark("forward")

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._clock.mark("backward")

    def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        self._clock.mark("forward")

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._clock.mark("optimizer")
        self._clock.stop()
        self._span.steps += 1
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.global_step % every == 0 and trainer.global_step != self._ended_at:  # as the trainer logs
            self._end(trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._span.steps:
            self._end(trainer, module)
        if self._epoch.steps and trainer.is_global_zero:
            log.info("epoch %d: %s", trainer.current_epoch + 1, self._line(trainer, module))

    def waited(self) -> tuple[float, float]:
        """Seconds that this session's steps waited for batches, of how many in all."""
        done = Span()
        done.add(self._all)
        done.add(
            Span(elapsed_s=time.perf_counter() - self._span_at, seconds={"data": self._waited() - self._waited_at})
        )
        return (done.seconds or {}).get("data", 0.0), done.elapsed_s

    def left_s(self, trainer: pl.Trainer, module: RetrievalTask) -> float | None:
        """Seconds until the end of the run, at this session's pace, validation and saving included."""
        done = trainer.global_step - self._first_step
        if not done:
            return None
        return (time.perf_counter() - self._session_at) / done * (module.total_steps - trainer.global_step)

    def _waited(self) -> float:
        return float(getattr(self._loader, "waited_s", 0.0))

    def _begin(self) -> None:
        self._span, self._span_at, self._waited_at, self._tokens = Span(), time.perf_counter(), self._waited(), []

    def _end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, RetrievalTask)
        span, self._ended_at = self._span, trainer.global_step
        span.seconds = self._clock.read() | {"data": self._waited() - self._waited_at}
        span.elapsed_s = time.perf_counter() - self._span_at
        span.work += Work(text_tokens=int(torch.stack(self._tokens).sum()) if self._tokens else 0)
        self._epoch.add(span)
        self._all.add(span)
        figures = self.figures(span, module.device)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the row of the step's other figures
        for logger in trainer.loggers:  # has rank 0 alone write
            logger.log_metrics({f"train/{name}": value for name, value in figures.items()}, step=step)
        left = self.left_s(trainer, module)
        self.shown = {"pairs/s": f"{figures['pairs_per_s']:,.0f}"}
        if left is not None:
            self.shown["left"] = duration(left)
        self._begin()

    def figures(self, span: Span, device: torch.device) -> dict[str, float]:
        """What is logged of a span, of all ranks together where that makes sense."""
        found = {"pairs_per_s": span.pairs * world()[1] / span.elapsed_s}
        found |= {f"{phase}_percent": share for phase, share in span.shares().items()}
        found["peak_memory_gb"] = peak_bytes(device) / 1e9
        if self.flops is not None and self.peak_flops:
            found["flops_percent_of_peak"] = 100 * self.flops(span.work) / span.elapsed_s / self.peak_flops
        return found

    def _line(self, trainer: pl.Trainer, module: pl.LightningModule) -> str:
        assert isinstance(module, RetrievalTask)
        figures = self.figures(self._epoch, module.device)
        shares = ", ".join(f"{phase} {figures[f'{phase}_percent']:.0f} %" for phase in PHASES)
        line = f"{figures['pairs_per_s']:,.0f} pairs/s; {shares}; peak memory {figures['peak_memory_gb']:.2f} GB"
        if "flops_percent_of_peak" in figures:
            line += f"; {figures['flops_percent_of_peak']:.0f} % of the device's measured peak"
        left = self.left_s(trainer, module)
        return line if not left else f"{line}; {duration(left)} left"


def work_of(objective: Objective, batch: Batch, matches: bool) -> tuple[Work, Tensor]:
    """What a step on ``batch`` has to compute, and (a scalar on its device, not waited for) its text tokens."""
    tokens, texts = batch.token_mask.sum(), len(batch)
    if not matches:
        return Work(images=len(batch), texts=texts), tokens
    matched, wrong = objective.matched(len(batch)), 0
    if batch.negative_token_mask is not None:
        mask = batch.negative_token_mask[:matched]
        wrong, tokens = mask.shape[1], tokens + mask.sum()
        texts += matched * wrong
    pairs = matched * (1 + 2 * objective.matching_negatives + wrong)
    return Work(images=len(batch), texts=texts, matched=pairs, kept=matched), tokens


def rate(flops: float) -> str:
    """ "61 GFLOP/s", "350 TFLOP/s"."""
    return f"{flops / 1e12:.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "3 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class ProgressBar(RichProgressBar):
    """Lightning's, with pairs per second and the time left of the whole run.

    Args:
        pace: measures them.
    """

    def __init__(self, pace: Pace):
        super().__init__()
        self.pace = pace

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        return {**super().get_metrics(trainer, pl_module), **self.pace.shown}
