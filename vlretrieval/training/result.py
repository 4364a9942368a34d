"""What a run comes to: figures by name, and as a number the one by which runs are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Result(dict[str, Any]):
    """Figures of a finished run. ``float(result)`` is the best of the monitored metric, which a sweeper optimises.

    Args:
        figures: plain data.
        monitor: the key among them that runs are compared by.
    """

    def __init__(self, figures: Mapping[str, Any], monitor: str):
        super().__init__(figures)
        self.monitor = monitor

    def __float__(self) -> float:
        value = self[self.monitor]
        if value is None:
            raise ValueError(f"{self.monitor} was never finite in this run, so there is nothing to compare it by")
        return float(value)
