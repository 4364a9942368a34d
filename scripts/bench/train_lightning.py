"""What Lightning adds to a step: our task under its Trainer, with the guards of every run, against a bare loop.

Both do the same arithmetic: forward, backward, the guard's gradient norm, clipping, optimizer, schedule. They take
turns within one run, some steps each, so that whatever slows the machine slows both.
"""

from __future__ import annotations

import itertools
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from train_forms import OurStep, our_task

from vlretrieval.data.datasets import Batch
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.callbacks import Checkpoints
from vlretrieval.training.nonfinite import NonFiniteGuard, gradient_norm
from vlretrieval.training.optimization import warmup_cosine
from vlretrieval.training.preemption import Preemption

CLIP = 1.0  # conf/trainer/default.yaml's gradient_clip_val
TURN = 10  # steps; as often as the logger is written to


class BareLoop(OurStep):
    """What the Trainer does to the weights, in a loop of our own."""

    def __init__(self, model: RetrievalModel, batches: Sequence[Batch], steps: int):
        super().__init__(model, batches)
        self.schedule = warmup_cosine(self.optimizer, steps)
        self.number = 0

    def __call__(self) -> Tensor:
        torch.manual_seed(self.number)
        self.number += 1
        loss = self.loss(next(self.batches))
        self.optimizer.zero_grad()
        loss.backward()
        if bool(torch.isfinite(loss + gradient_norm(self.optimizer))):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
        with torch.no_grad():
            self.model.log_logit_scale.clamp_(0, math.log(100))
        self.schedule.step()
        return loss.detach()


class Turns(Callback):
    """After every :data:`TURN` steps of the Trainer the bare loop has as many; seconds a step of each turn of both."""

    def __init__(self, bare: Callable[[], Tensor], device: torch.device):
        self.bare, self.device = bare, device
        self.lightning_s: list[float] = []
        self.bare_s: list[float] = []
        self._since = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % TURN:
            return
        if self._since:  # the first turn warms up
            self.lightning_s.append((self.now() - self._since) / TURN)
        before = self.now()
        for _step in range(TURN):
            self.bare()
        self._since = self.now()
        if self.lightning_s:
            self.bare_s.append((self._since - before) / TURN)

    def now(self) -> float:
        """Seconds: of the processor with one thread of a CPU, as everywhere in this bench, else wall."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif torch.get_num_threads() == 1:
            return time.process_time()
        return time.perf_counter()


class Loader:
    """The same few batches, so many steps."""

    def __init__(self, batches: Sequence[Batch], steps: int):
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(itertools.cycle(self.batches), self.steps)


class Data(pl.LightningDataModule):
    """Hands the loader over."""

    def __init__(self, loader: Loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Loader:
        return self.loader


def take_turns(build: Callable[[], RetrievalModel], batches: Sequence[Batch], turns: int) -> Turns:
    """Seconds a step under Lightning and in the bare loop, for ``turns`` turns of both.

    Args:
        build: gives the model; it is called twice, and both are drawn alike.
    """
    device, steps = batches[0].pixels.device, (turns + 1) * TURN
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    measured = Turns(BareLoop(models[0], batches, steps), device)
    task = our_task(models[1], scheduler=warmup_cosine)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few workers, of logging often
        keeper = Checkpoints(Path(folder) / "checkpoints", "val/rsum")
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if device.type == "cuda" else "32-true",
            logger=CSVLogger(folder),
            callbacks=[NonFiniteGuard(keeper, Path(folder) / "nonfinite.jsonl"), Preemption(keeper), measured],
            gradient_clip_val=CLIP,
            log_every_n_steps=TURN,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
        )
        trainer.fit(task, datamodule=Data(Loader(batches, steps)))
    return measured


def batch_for(seconds: float, build: Callable[[], RetrievalModel], batches_of: Callable[[int], Sequence[Batch]]) -> int:
    """The batch size, a power of two from 4 to 512, at which a bare step takes about ``seconds``."""
    size = 4
    while size < 512:
        batches = batches_of(size)
        step = BareLoop(build(), batches, steps=10)
        step()
        device = batches[0].pixels.device
        turns = Turns(step, device)
        before = turns.now()
        for _ in range(3):
            step()
        elapsed_s = (turns.now() - before) / 3
        if elapsed_s * math.sqrt(2) >= seconds:
            return size
        size *= 2
    return size
