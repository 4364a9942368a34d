"""Work shared by several processes, with a result that does not tell how many there were.

Whole batches are dealt out, not samples: a batch is the same whoever computes it, so its floats are the same to the
last digit with 1, 2 or 3 processes, and nothing is padded or repeated that would have to be dropped again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class Processes:
    """Who shares the work. The default is this process alone, even in a distributed run (a validation on rank 0)."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def all() -> Processes:
        """All of the process group, which must be initialised; this process alone where there is none."""
        if dist.is_available() and dist.is_initialized():
            return Processes(dist.get_rank(), dist.get_world_size())
        return Processes()

    def share(self, batches: Sequence[Batch], compute: Callable[[Batch], T], at_once: int = 64) -> Iterator[T]:
        """``compute(batch)`` for each batch in order, on every process, each batch computed by one of them.

        Args:
            compute: gives CPU tensors or plain data.
            at_once: batches of a process between two exchanges; bounds what travels and is held at a time.
        """
        if self.count == 1:
            yield from map(compute, batches)
            return
        for start in range(0, len(batches), at_once * self.count):
            group = batches[start : start + at_once * self.count]
            mine = [compute(batch) for batch in group[self.rank :: self.count]]
            gathered: list[Any] = [None] * self.count
            dist.all_gather_object(gathered, mine)
            yield from (gathered[place % self.count][place // self.count] for place in range(len(group)))


@contextmanager
def process_group(hours: float = 6) -> Iterator[Processes]:
    """The processes that a launcher (torchrun) started, joined for the length of the block; alone without a launcher.

    Args:
        hours: how long a process waits for the others; they share the work, so they come together often.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield Processes.all()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo", timeout=timedelta(hours=hours))  # what is exchanged lies on the CPU
    try:
        yield Processes.all()
    finally:
        dist.destroy_process_group()
