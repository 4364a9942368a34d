"""metrics.csv: every logged figure of a run, one row a step, kept over interruptions. Needs nothing and no one.

Lightning's own CSVLogger deletes the file of an earlier session when a run goes on in the same folder.
"""

from __future__ import annotations

import csv
import logging
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger(__name__)


def written(trainer: pl.Trainer) -> bool:
    """Whether this step's figures go to the loggers; asked before the optimizer step.

    Lightning takes the figures of every step and drops those of all but each ``log_every_n_steps``-th, and taking them
    costs more than all else that it does in a step: so they are given to it only when they are kept. (A callback that
    sets ``should_stop`` at a batch's end gets a row with the figures given last; ours raise, or wait for the epoch.)
    """
    every = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return trainer.should_stop or bool(every and (trainer.global_step + 1) % every == 0)


class MetricsFile(Logger):
    """Lightning's logger that writes one CSV file.

    When a run goes on from step s, the rows after s, which will come again, are dropped from the file.

    Args:
        path: of the file.
        flush_every: rows held in memory at most; a killed process loses no more than these.
    """

    def __init__(self, path: str | Path, flush_every: int = 20):
        super().__init__()
        if flush_every < 1:
            raise ValueError(f"flush_every={flush_every} must be at least 1")
        self.path, self.flush_every = Path(path), flush_every
        self._rows: list[dict[str, Any]] | None = None  # None: the file has not been looked at
        self._columns: list[str] = []
        self._unwritten = 0

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add figures to the row of ``step``."""
        step = -1 if step is None else step
        if self._rows is None:
            self._rows = self._earlier(step)
        if self._rows and self._rows[-1]["step"] == step:
            self._rows[-1].update(metrics)
        else:
            self._rows.append({"step": step, **metrics})
            self._unwritten += 1
        if self._unwritten >= self.flush_every:
            self.save()

    def _earlier(self, step: int) -> list[dict[str, Any]]:
        """Rows of an earlier session up to ``step``, whose figures come again or are added to."""
        if not self.path.is_file():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = [{name: text for name, text in row.items() if name and text} for row in csv.DictReader(file)]
        whole = [row for row in rows if row.get("step", "").lstrip("-").isdigit()]  # a kill may have torn the last
        return [{**row, "step": int(row["step"])} for row in whole if int(row["step"]) <= step]

    @rank_zero_only
    def save(self) -> None:
        """Write the file anew beside itself and rename it: it is whole at every moment."""
        if not self._rows:
            return
        try:
            self._write()
        except OSError as error:  # a full disk: the rows stay in memory, for the next time
            log.warning("%s could not be written: %s", self.path, error)
        self._unwritten = 0

    def _write(self) -> None:
        assert self._rows
        columns = {name: None for row in self._rows for name in row}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            writer.writerows(self._rows)
        os.replace(partial, self.path)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()
