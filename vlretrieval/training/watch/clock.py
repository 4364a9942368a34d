"""Where the time of steps goes: marks between phases, on the clock of whatever computes them."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Seconds spent in each phase. On a GPU, whose work runs behind the processor's, the marks are its own events.

    Args:
        device: what computes.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self._device = device
        self._last: Any = None
        self._between: list[tuple[str, Any, Any]] = []  # phases not read yet, on a GPU
        self.seconds: dict[str, float] = {}

    def start(self) -> None:
        """What comes until the next mark belongs to that mark's phase."""
        self._last = self._now()

    def mark(self, phase: str) -> None:
        """The time since the last mark (or start) was ``phase``'s. Without a start before, nothing is counted."""
        if self._last is None:
            return
        now = self._now()
        if self.cuda:
            self._between.append((phase, self._last, now))
        else:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def stop(self) -> None:
        """What comes now belongs to no phase."""
        self._last = None

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last reading."""
        if self._between:
            torch.cuda.synchronize(self._device)
            for phase, before, after in self._between:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + before.elapsed_time(after) / 1000
            self._between = []
        seconds, self.seconds = self.seconds, {}
        return seconds

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
