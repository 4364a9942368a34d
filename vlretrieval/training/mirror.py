"""A second logger beside metrics.csv, that may fail at any moment and costs the run one line when it does."""

from __future__ import annotations

import logging
import os
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from vlretrieval.training.metrics_file import MetricsFile

log = logging.getLogger(__name__)


class Mirror(Logger):
    """Writes every figure to ``path`` first, and then gives it to another logger.

    The other one (a service beyond the network, say) is never waited upon twice: with its first error it is said to be
    lost, and training goes on with the file alone. Started anew, a run that goes on is the same run to it.

    Args:
        path: of metrics.csv; see :class:`MetricsFile`.
        to: ``(id=) -> Logger``, given the same id in every session of one run.
        id_file: where that id is kept.
    """

    def __init__(self, path: str | Path, to: Callable[..., Logger], id_file: str | Path):
        super().__init__()
        self.local, self.id_file = MetricsFile(path), Path(id_file)
        self._to = to
        self._other: Logger | None = None
        self._lost = False

    @property
    def name(self) -> str:
        return self.local.name

    @property
    def version(self) -> str:
        return self.local.version

    @property
    def save_dir(self) -> str:
        return self.local.save_dir

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self._pass_on("log_hyperparams", params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.local.log_metrics(metrics, step)
        self._pass_on("log_metrics", dict(metrics), step)

    @rank_zero_only
    def save(self) -> None:
        self.local.save()
        self._pass_on("save")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.local.finalize(status)
        self._pass_on("finalize", status)

    def _pass_on(self, call: str, *arguments: Any) -> None:
        if self._lost:
            return
        try:
            if self._other is None:
                self._other = self._to(id=self._id())
            getattr(self._other, call)(*arguments)
        except Exception as error:  # whatever it is: the figures are in the file, and training matters more
            self._lost = True
            log.warning(
                "%s failed (%s: %s) and gets no more figures; training goes on, and %s has them all",
                type(self._other).__name__ if self._other is not None else "the second logger",
                type(error).__name__,
                " ".join(str(error).split())[:200],
                self.local.path,
            )

    def _id(self) -> str:
        """That of an earlier session, or a new one."""
        if self.id_file.is_file() and (known := self.id_file.read_text(encoding="utf-8").strip()):
            return known
        fresh = uuid.uuid4().hex[:12]
        self.id_file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.id_file.with_name(self.id_file.name + ".partial")
        partial.write_text(fresh + "\n", encoding="utf-8")
        os.replace(partial, self.id_file)
        return fresh
