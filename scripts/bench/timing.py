"""Paired timing and peak memory, on a CPU or a GPU.

Forms are run in turn, in an order drawn anew each round, and compared within the round: whatever slows the machine for
a while slows all of them. What is reported is the median of the rounds' ratios and their quartiles.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    seconds = interleaved(works, rounds, device, warm_up)
    first, *others = works
    return statistics.median(seconds[first]), {name: ratio(seconds[name], seconds[first]) for name in others}


def interleaved(
    works: Mapping[str, Work], rounds: int, device: torch.device, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of each work in each round."""
    draw, names = random.Random(0), list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        for name in draw.sample(names, len(names)):
            elapsed_s = timed(works[name], device)
            if number >= warm_up:
                seconds[name].append(elapsed_s)
    return seconds


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> Ratio:
    """Their seconds over ours, round by round."""
    each = [a / b for a, b in zip(theirs, ours, strict=True)]
    low, median, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    return Ratio(median, low, high)


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


def peak_resident_bytes(work: Work, device: torch.device) -> int:
    """Bytes by which the process grows at the height of ``work`` (Linux), or the GPU's allocator.

    For what frees, while it runs, memory that was there before, which :func:`peak_bytes` cannot always tell.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or what lies free in the heap would be used again, and not be seen
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
