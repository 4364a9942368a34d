"""Writes a sheet of queries, answers and maps of heads every n epochs, from the outcome of a validation."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from vlretrieval.evaluation.fonts import font_for
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.outcome import Evaluation
from vlretrieval.evaluation.picture_sheet import picture_sheet
from vlretrieval.training.gather import world

log = logging.getLogger(__name__)


class Pictures:
    """Called after each validation; draws every n-th epoch's and the last's. A sheet that cannot be drawn ends no run.

    Args:
        folder: where ``epoch_004.png`` and its text go.
        inputs: the validation split as the model is shown it.
        every_n_epochs: how often.
        queries: of each direction.
        font: a font file for the captions; None: any of the system's that has their letters.
    """

    def __init__(
        self, folder: str | Path, inputs: Inputs, every_n_epochs: int, queries: int = 6, font: str | None = None
    ):
        if queries < 1:
            raise ValueError(f"pictures.queries={queries} must be at least 1")
        if font is not None:
            font_for("a", 12, font)  # a file that is no font is told now, and not after an epoch
        self.folder, self.inputs, self.every_n_epochs = Path(folder), inputs, every_n_epochs
        self.queries, self.font = queries, font
        self._told = False

    def __call__(self, model: Any, outcome: Evaluation, epoch: int, last: bool) -> None:
        if epoch % self.every_n_epochs and not last:
            return
        started_at = time.perf_counter()
        path = self.folder / f"epoch_{epoch:03d}.png"
        try:
            sheet = picture_sheet(
                outcome,
                self.inputs,
                model,
                queries=self.queries,
                title=f"epoch {epoch}",
                beside=path.with_suffix(".txt").name,
                font=self.font,
            )
            if world()[0] == 0:  # where weights are sharded all ranks draw, since none can compute alone
                sheet.write(path)
        except OSError as error:  # a full disk
            log.warning("%s could not be written: %s", path, error)
            return
        if sheet.unseen and not self._told:
            self._told = True
            log.warning(
                "%d captions are not drawn in %s, since no font of this system has their letters: they are in %s; give "
                "a font with pictures.font=FILE (for Chinese, the package fonts-noto-cjk brings one)",
                sheet.unseen,
                path.name,
                path.with_suffix(".txt").name,
            )
        log.info("%s drawn in %.1f s", path, time.perf_counter() - started_at)
