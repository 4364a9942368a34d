"""Early stopping on a validation metric; a run that was stopped and is resumed stays stopped."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping

from vlretrieval.training.callbacks import validation_of

log = logging.getLogger(__name__)


class StopEarly(EarlyStopping):
    """Lightning's EarlyStopping, which counts validations and not epochs: an old figure is not counted again.

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

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.wait_count >= self.patience:
            log.warning("%s; early_stopping.patience=%d goes on", self._reason(), self.wait_count + 1)
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.monitor not in validation_of(trainer).figures:
            return
        super().on_train_epoch_end(trainer, module)
        if trainer.should_stop and trainer.is_global_zero:
            log.info("stopped early: %s", self._reason())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        patience = self.patience
        super().load_state_dict(state_dict)
        self.patience = patience  # may be raised to go on

    def _reason(self) -> str:
        return (
            f"{self.monitor} was no better than {float(self.best_score):.2f} in {self.wait_count} validations in a row"
        )
