"""Freed memory stays with a training process: the next step wants as much again.

glibc gives each large tensor pages of its own and takes them away when it is freed, and the kernel clears every page
anew. Fine-tuning EfficientNet-Lite2 on a CPU spent half its time so: 8.5 pictures a second, and 16.7 without.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc's malloc; False where there is no glibc, or the user has settings of their own (``MALLOC_...``)."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(
        mallopt(key, value) == 1 for key, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, 1 << 26))
    )
