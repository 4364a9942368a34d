"""Why a loader worker is gone, in one line with the way out: torch names a process number and no cause."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

SHARED_MEMORY_FULL = (
    "batches do not fit into shared memory (/dev/shm): {told}; give the container more (docker run --shm-size=8g, or "
    "--ipc=host), make data.batch_size or data.num_workers (now {workers}) smaller, or set data.num_workers=0"
)
_LIKELY = {
    signal.SIGKILL: "most likely by the system for want of memory; make data.num_workers (now {workers}) or "
    "data.batch_size smaller, or give the job more memory",
    signal.SIGBUS: "most likely since shared memory (/dev/shm) is full; give the container more (docker run "
    "--shm-size=8g, or --ipc=host), make data.num_workers (now {workers}) smaller, or set data.num_workers=0",
    signal.SIGSEGV: "a fault in native code, most likely a picture decoder's; data.num_workers=0 shows where, and "
    "vlretrieval-data doctor finds the pictures that cannot be read",
}


class WorkerLost(ValueError):
    """A loader worker ended, or could not hand over its batch, for a reason that lies outside the program."""


def lost_worker(workers: Iterable[BaseProcess], what: str) -> WorkerLost | None:
    """The error for the first of ``workers`` that died; None while all live.

    Args:
        workers: of one loader, in order.
        what: what was waited for, "batch 12 of epoch 0".
    """
    everyone = list(workers)
    for number, worker in enumerate(everyone):
        worker.join(0.1)  # its end is told by a broken pipe, a little before it has an exit code
        code = worker.exitcode
        if code:
            return WorkerLost(f"loader worker {number} (process {worker.pid}) {_told(code, len(everyone))}; {what}")
    return None


def _told(code: int, workers: int) -> str:
    if code > 0:
        return f"left with exit code {code}, which no code of this project does; data.num_workers=0 shows where"
    number = signal.Signals(-code)
    why = _LIKELY.get(number, "by someone outside; data.num_workers=0 does without workers")
    return f"was killed by {number.name}, {why.format(workers=workers)}"


def full_shared_memory(error: BaseException, workers: int) -> WorkerLost | None:
    """The error for a batch that found no room in shared memory; None for any other ``error``."""
    text = str(error)
    if "shared memory" not in text and "torch_shm" not in text:
        return None
    told = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), type(error).__name__)
    return WorkerLost(SHARED_MEMORY_FULL.format(told=told, workers=workers))
