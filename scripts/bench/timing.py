"""Paired timing and peak memory, on a CPU or a GPU.

Forms are run in turn, in an order drawn anew each round, and compared within the round: whatever slows the machine for
a while slows all of them. What is reported is the median of the rounds' ratios and their quartiles.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Work = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """How many times as fast the first form was: the median over rounds, and its quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def paired(
    works: Mapping[str, Work], rounds: int, device: torch.device, warm_up: int = 2
) -> tuple[float, dict[str, Ratio]]:
    """Median seconds of the first work, and for each of the others its time over the first's."""
    draw, names = random.Random(0), list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        for name in draw.sample(names, len(names)):
            elapsed_s = timed(works[name], device)
            if number >= warm_up:
                seconds[name].append(elapsed_s)
    first = seconds[names[0]]
    ratios = {}
    for name in names[1:]:
        each = [theirs / ours for theirs, ours in zip(seconds[name], first, strict=True)]
        low, median, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
        ratios[name] = Ratio(median, low, high)
    return statistics.median(first), ratios


def timed(work: Work, device: torch.device) -> float:
    """Seconds: between events on a GPU; of the processor with one thread (a busy machine matters less); or wall."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started_at = clock()
    work()
    return clock() - started_at


def peak_bytes(work: Work, device: torch.device) -> int:
    """Bytes that ``work`` allocates at its height, over what was there before."""
    work()  # lazily made buffers are not the work's
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
