"""The training loader: hands out whole batches and knows where it is, so that a resumed run goes on from there."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from vlretrieval.data.datasets import Batch, Step, TrainPairs
from vlretrieval.data.ordering import EpochOrder
from vlretrieval.data.worker_faults import WorkerLost, full_shared_memory, lost_worker


class TrainLoader:
    """Batches of ``pairs`` in the order of ``order``; iterating again gives the next epoch.

    An epoch is used up once its first batch is handed out. The loader is lazy: ``iter()`` alone changes nothing, which
    matters since Lightning calls it early and, around a resume, more than once.

    Args:
        pairs: turns a ``Step`` into a ``Batch``.
        order: the samples of every step.
        num_workers: processes that make batches; 0 makes them here. With everything in memory a batch costs about a
            millisecond, and 0 is right.
        pin_memory: page-locked batches, for a GPU.
        timeout_s: how long to wait for a worker before it counts as hung; 0 for ever.
    """

    def __init__(
        self,
        pairs: TrainPairs,
        order: EpochOrder,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        timeout_s: float = 0,
    ) -> None:
        self.pairs, self.order = pairs, order
        self.num_workers, self.pin_memory, self.timeout_s = num_workers, pin_memory, timeout_s
        self.epoch = 0
        self.handed_out = 0  # batches of self.epoch handed out
        self.waited_s = 0.0  # that whoever iterates has waited for batches so far
        self._resumed = False
        self._running: Iterator[Batch | _Fault] | None = None

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        if self.handed_out and not self._resumed:
            self.epoch, self.handed_out = self.epoch + 1, 0
        self._resumed = False
        running = self._running = self._batches(self.epoch, self.handed_out)
        try:
            while True:
                asked_at = time.perf_counter()
                batch = self._next(running)
                self.waited_s += time.perf_counter() - asked_at
                if batch is None:
                    return
                # Counted before it is handed out: a checkpoint written during step k holds k + 1 batches.
                self.handed_out += 1
                yield batch
        finally:
            _end_workers(running)

    def _next(self, running: "Iterator[Batch | _Fault]") -> Batch | None:
        try:
            batch = next(running, None)
        except Exception as error:
            try:
                lost = self.lost_worker(error)
            except RuntimeError as told:  # torch's handler of the worker's end may raise just now
                lost = self.lost_worker(told)
            if lost is None:
                raise
            raise lost from error
        if isinstance(batch, _Fault):
            raise batch.error
        return batch

    def close(self) -> None:
        """End the workers of the epoch that is being iterated."""
        _end_workers(self._running)

    def lost_worker(self, error: BaseException) -> WorkerLost | None:
        """What to tell in place of ``error`` where a worker's end lies behind it; None where all workers live.

        Not only ``next`` fails of it: torch raises as soon as the system tells of the worker's end, wherever the main
        process is then.
        """
        what = f"batch {self.handed_out} of epoch {self.epoch} was waited for"
        found = lost_worker(getattr(self._running, "_workers", ()), what)
        return found or full_shared_memory(error, self.num_workers)

    def _batches(self, epoch: int, first: int) -> "Iterator[Batch | _Fault]":
        steps = _Steps(self.order, epoch, first)
        if self.num_workers == 0 and not self.pin_memory:
            return (self.pairs[step] for step in steps)
        return iter(
            DataLoader(
                _AsDataset(self.pairs),
                batch_size=None,
                sampler=steps,
                num_workers=self.num_workers,
                collate_fn=_same,
                pin_memory=self.pin_memory,
                timeout=self.timeout_s if self.num_workers else 0,
                worker_init_fn=ignore_stop_signals,
                prefetch_factor=4 if self.num_workers else None,
            )
        )

    @property
    def sampler(self) -> "TrainLoader":
        """Where Lightning looks for ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` unless the loader is in it, or past it, already.

        Needed only where epochs are cut short from outside (Lightning's limit_train_batches): a checkpoint from the
        end of a cut epoch looks like one from its middle.
        """
        if epoch > self.epoch:
            self.epoch, self.handed_out, self._resumed = epoch, 0, True

    def state_dict(self) -> dict[str, int]:
        """Where the loader is, and what must be equal for that to mean the same batches."""
        return {"epoch": self.epoch, "handed_out": self.handed_out, **self._must_match()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after ``state``.

        Raises:
            ValueError: naming both values where the seed, the set's size, the global batch size or the order differ.
        """
        for name, here in self._must_match().items():
            was = state.get(name, 0)
            if was != here:
                raise ValueError(
                    f"cannot go on in the middle of the data: {name} was {was} in the checkpoint and is "
                    f"{here} now; set it back, or start a new run from the checkpoint's weights"
                )
        self.epoch, self.handed_out = int(state["epoch"]), int(state["handed_out"])
        self._resumed = self.handed_out < len(self)  # a finished epoch is followed by the next one

    def _must_match(self) -> dict[str, int]:
        order = self.order
        return {
            "seed": order.seed,
            "samples": order.size,
            "batch_size": order.batch_size,
            "shards_together": order.together,
        }


class _Steps(Sampler[Step]):
    """The steps of one epoch from ``first`` on."""

    def __init__(self, order: EpochOrder, epoch: int, first: int) -> None:
        self.order, self.epoch, self.first = order, epoch, first

    def __iter__(self) -> Iterator[Step]:
        return (Step(self.epoch, self.order.batch(self.epoch, i)) for i in range(self.first, len(self.order)))

    def __len__(self) -> int:
        return len(self.order) - self.first


class _Fault:
    """What a user can put right (a bad picture), on its way from a worker: torch would make a RuntimeError of it."""

    def __init__(self, error: ValueError) -> None:
        self.error = error


class _AsDataset(Dataset[Batch | _Fault]):
    def __init__(self, pairs: TrainPairs) -> None:
        self.pairs = pairs

    def __getitem__(self, step: Step) -> Batch | _Fault:
        if get_worker_info() is None:
            return self.pairs[step]
        try:
            batch = self.pairs[step]
        except ValueError as error:
            return _Fault(error)
        # Put into shared memory here, where a lack of it is an error that reaches the main process. Left to the queue's
        # own thread, the batch is dropped with a traceback, and the main process waits for it for ever.
        return batch.in_shared_memory()


def _end_workers(running: Any) -> None:
    # A traceback may hold on to them, and since they ignore SIGTERM the process would then wait for them at its end.
    if hasattr(running, "_shutdown_workers"):
        running._shutdown_workers()


def _same(batch: Any) -> Any:
    return batch


def ignore_stop_signals(worker_id: int) -> None:
    """For a loader worker: leave SIGTERM and SIGINT to the main process, which saves first; and use one thread.

    A scheduler signals the whole process group. A worker that dies of it makes the main process fail before it saved.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
