"""A loss or gradient that is not finite: the step is skipped and written down; too many in a row end the run."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from vlretrieval.training.callbacks import Checkpoints
from vlretrieval.training.gather import gather_rows, highest
from vlretrieval.training.metrics_file import written
from vlretrieval.training.sharding import total_norm

log = logging.getLogger(__name__)


class NonFiniteGuard(Callback):
    """Keeps NaN and infinity out of the weights, and so out of every checkpoint.

    All ranks skip, or none. A skipped step takes its place in the schedule; weights and moments stay as they were.

    Args:
        checkpoints: names the last good one when the run is ended.
        path: JSON lines, one a skipped step, with the caption indices of all ranks' batches.
        max_in_a_row: skipped steps in a row at which the run ends.
    """

    def __init__(self, checkpoints: Checkpoints, path: str | Path, max_in_a_row: int = 5):
        if max_in_a_row < 1:
            raise ValueError(f"max_in_a_row={max_in_a_row} must be at least 1")
        self.checkpoints, self.path, self.max_in_a_row = checkpoints, Path(path), max_in_a_row
        self.in_a_row = self.skipped = 0
        self._index: list[Tensor] = []  # of the batches since the last optimizer step
        self._losses: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.skipped = state["in_a_row"], state["skipped"]

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._index.append(batch.index)

    def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        self._losses = []

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        loss = torch.stack(self._losses).sum()
        norm = gradient_norm(optimizer)
        if written(trainer):
            module.log("train/gradient_norm", norm)
        # the scaler of float16 probes for the largest factor: infinite gradients are its way, and it skips by itself
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        bad = not bool(torch.isfinite(loss) if scaled else torch.isfinite(loss + norm))
        index, self._index = torch.cat(self._index), []
        if not highest(int(bad), module.device):
            self.in_a_row = 0
            return
        optimizer.zero_grad(set_to_none=True)  # an optimizer leaves parameters without a gradient alone
        self.in_a_row += 1
        self.skipped += 1
        captions = gather_rows(index).tolist()
        if trainer.is_global_zero:
            self._write(trainer, float(loss), float(norm), captions)
        if self.in_a_row >= self.max_in_a_row:
            raise ValueError(self._ending(trainer.global_step))

    def _write(self, trainer: pl.Trainer, loss: float, norm: float, captions: list[int]) -> None:
        line = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "loss": loss if math.isfinite(loss) else str(loss),
            "gradient_norm": norm if math.isfinite(norm) else str(norm),
            "captions": captions,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk is no reason to end the run
            log.warning("%s could not be written (%s): %s", self.path, error, json.dumps(line))
        log.warning(
            "step %d skipped: loss %g, gradient norm %g on rank 0; its captions are in %s",
            trainer.global_step,
            loss,
            norm,
            self.path,
        )

    def _ending(self, step: int) -> str:
        good = self.checkpoints.newest()
        where = f"the last good checkpoint is {good}" if good else "no checkpoint was written yet"
        return (
            f"loss or gradient were not finite in {self.in_a_row} steps in a row, up to step {step}: {where}; the "
            f"batches are in {self.path}; lower optimizer.lr, or look at those captions and pictures"
        )


def gradient_norm(optimizer: Optimizer) -> Tensor:
    """Euclidean norm of all gradients together; 0 where there is none."""
    return total_norm(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
