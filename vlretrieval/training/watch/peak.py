"""What a device can do at best: the rate of a large matrix product, and the memory that has been in use."""

from __future__ import annotations

import resource
import sys
import time

import torch

SIZES = {"cuda": 8192, "mps": 2048}  # of the square matrices; a processor's own rate is reached with less
SECONDS = 0.3


def measured_flops(device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = SECONDS) -> float:
    """FLOP/s of the best of several square matrix products, with the threads and the float32 precision of now.

    Takes about ``seconds``; draws no random number.
    """
    size = SIZES.get(device.type, 1024)
    # ramps, since a device may be faster on zeros than it is on numbers
    one = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)
    other = one.T.contiguous()
    best, stop_at = float("inf"), time.perf_counter() + seconds
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        for number in range(100):
            _wait(device)
            started_at = time.perf_counter()
            one @ other
            _wait(device)
            elapsed_s = time.perf_counter() - started_at
            best = min(best, elapsed_s) if number else best  # the first one warms up
            if number and time.perf_counter() > stop_at:
                break
    return 2 * size**3 / best


def peak_bytes(device: torch.device) -> int:
    """The most memory in use so far: a GPU's, allocated by torch in this process; otherwise the process's own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def dtype_of(precision: str) -> torch.dtype:
    """What matrix products are computed in under Lightning's ``precision``."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else torch.float32


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
