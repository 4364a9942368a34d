"""A tracker that cannot end a run: when it fails, one warning says so, and metrics.csv goes on alone."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.loggers import Logger

log = logging.getLogger(__name__)


class GuardedLogger(Logger):
    """Passes everything on to ``logger`` until it fails for the first time (no network, no login, a killed helper).

    Args:
        logger: Lightning's logger of some tracker.
    """

    def __init__(self, logger: Logger):
        super().__init__()
        self.logger = logger
        self.failed = False

    @property
    def name(self) -> str | None:
        return self._asked(lambda: self.logger.name)

    @property
    def version(self) -> int | str | None:
        return self._asked(lambda: self.logger.version)

    @property
    def save_dir(self) -> str | None:
        return self._asked(lambda: self.logger.save_dir)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._asked(lambda: self.logger.log_metrics(dict(metrics), step))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self._asked(lambda: self.logger.log_hyperparams(params, *args, **kwargs))

    def save(self) -> None:
        self._asked(self.logger.save)

    def finalize(self, status: str) -> None:
        self._asked(lambda: self.logger.finalize(status))

    def _asked(self, do: Callable[[], Any]) -> Any:
        if self.failed:
            return None
        try:
            return do()
        except Exception as error:
            self.failed = True
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning(
                "%s failed: %s; the run goes on without it, and metrics.csv has every figure",
                type(self.logger).__name__,
                first,
            )
            return None
