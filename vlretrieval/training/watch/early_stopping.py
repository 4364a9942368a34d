"""Early stopping on a validation metric; a run that was stopped and is resumed stays stopped."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping

from vlretrieval.training.callbacks import measured_now

log = logging.getLogger(__name__)


class StopEarly(EarlyStopping):
    """Lightning's EarlyStopping, which counts validations and not epochs: each figure once, and no old one again.

    Args:
        monitor: a validation metric, e.g. "val/rsum".
        mode: "max" or "min".
        patience: validations in a row without a better one after which the run ends.
        min_delta: what counts as better.
    """

    def __init__(self, monitor: str, mode: str, patience: int, min_delta: float = 0.0):
        if patience < 1:
            raise ValueError(f"early_stopping.patience={patience} must be at least 1; null never stops early")
        if min_delta < 0:
            raise ValueError(f"early_stopping.min_delta={min_delta} is negative")
        super().__init__(monitor, min_delta, patience, mode=mode, check_on_train_epoch_end=True)
        self._counted = -1  # the step of the last validation that was counted

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._count(trainer)  # of an epoch that had not ended when its last step was saved
        if self.wait_count >= self.patience:
            log.warning("%s; early_stopping.patience=%d goes on", self._reason(), self.wait_count + 1)
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._count(trainer) and trainer.is_global_zero:
            log.info("stopped early: %s", self._reason())

    def _count(self, trainer: pl.Trainer) -> bool:
        """Takes this step's validation into account, if there is one; whether the run is to end."""
        value = measured_now(trainer, self.monitor)
        if value is None or self._counted == trainer.global_step:
            return False
        self._counted = trainer.global_step
        stop, _ = self._evaluate_stopping_criteria(torch.tensor(value))
        trainer.should_stop = trainer.should_stop or stop  # all ranks were given the same figures
        return stop

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counted": self._counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        patience = self.patience
        super().load_state_dict(state_dict)
        self.patience = patience  # may be raised to go on
        self._counted = state_dict["counted"]

    def _reason(self) -> str:
        best = float(self.best_score)
        return f"{self.monitor} was no better than {best:.2f} in {self.wait_count} validations in a row"
