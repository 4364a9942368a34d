"""One thread that does the model's work: what waits together is done together, and what is too much is turned away.

A batch is what has come in while the last one was worked on: a lone request never waits for company.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


class Busy(Exception):
    """More work waits than is allowed."""


@dataclass
class Job:
    key: Hashable
    payload: Any
    future: Future


class Batcher:
    """Works off jobs in the order they came, jobs of one key together.

    Args:
        work: (key, payloads) -> a result for each, in order; a result that is an Exception is raised to its caller
            alone. What it raises itself is raised to all callers of the batch.
        largest: jobs of a batch at most.
        waiting: jobs that may wait; one more is refused.
    """

    def __init__(self, work: Callable[[Any, Sequence[Any]], Sequence[Any]], largest: int = 16, waiting: int = 64):
        if largest < 1 or waiting < 1:
            raise ValueError(f"largest={largest} and waiting={waiting} must be at least 1")
        self._work, self._largest, self._limit = work, largest, waiting
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.batches = self.done = 0
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that wait now."""
        return len(self._jobs)

    @property
    def full(self) -> bool:
        """Whether one more job would be refused."""
        return len(self._jobs) >= self._limit or self._closed

    def submit(self, key: Hashable, payload: Any) -> Future:
        """A job's future.

        Raises:
            Busy: as many wait as may.
        """
        with self._changed:
            if self.full:
                raise Busy
            job = Job(key, payload, Future())
            self._jobs.append(job)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Take no more; return when all that waits is done."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _next(self) -> list[Job]:
        """Waits for work. Jobs of other keys keep their places."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            batch: list[Job] = []
            others: list[Job] = []
            while self._jobs and len(batch) < self._largest:
                job = self._jobs.popleft()
                if job.future.cancelled():
                    continue
                (batch if not batch or job.key == batch[0].key else others).append(job)
            self._jobs.extendleft(reversed(others))
            return batch

    def _run(self) -> None:
        while True:
            batch = self._next()
            if not batch:
                if self._closed and not self._jobs:
                    return
                continue
            batch = [job for job in batch if job.future.set_running_or_notify_cancel()]
            if not batch:
                continue
            try:
                results = self._work(batch[0].key, [job.payload for job in batch])
            except Exception as error:
                results = [error] * len(batch)
            self.batches, self.done = self.batches + 1, self.done + len(batch)
            for job, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    job.future.set_exception(result)
                else:
                    job.future.set_result(result)
