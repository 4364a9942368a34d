"""A signal to leave (SIGTERM, SIGUSR1): finish the step, save, exit with 143, all ranks together.

Lightning's own handlers save inside the handler, in the middle of a step, and hang where only one rank is told.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment

from vlretrieval.training.callbacks import Checkpoints
from vlretrieval.training.gather import highest

log = logging.getLogger(__name__)

EXIT_STATUS = 128 + signal.SIGTERM  # what schedulers read as: ended on request, may be started again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption(Callback):
    """Saves and leaves at the end of the optimizer step in which any rank was signalled.

    The handler sets a flag and does nothing else, so that a second signal cannot break a save.

    Args:
        checkpoints: saves.
        requeue: called once, by rank 0, after the save when SIGUSR1 arrived; see :func:`slurm_requeue`.
    """

    def __init__(self, checkpoints: Checkpoints, requeue: Callable[[], None] | None = None):
        self.checkpoints, self.requeue = checkpoints, requeue
        self.received = 0  # 1: leave; 2: leave and be put back into the queue
        self._leaving = False  # saved, and about to
        self._before: dict[int, Any] = {}
        self._step = -1

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if threading.current_thread() is not threading.main_thread():  # a handler can be set from nowhere else
            return
        self._before = {signum: signal.signal(signum, self._note) for signum in SIGNALS}
        # Lightning's would be called beside ours until the first step: it ends the run unsaved, with status 0, and
        # sends to the other ranks from within the handler
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        if not self._leaving:  # a process that is leaving has nothing to do but that
            self.teardown(trainer, module, "fit")

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = max(self.received, 2 if signum == signal.SIGUSR1 else 1)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:
            return  # gradients are still being accumulated, and no checkpoint holds them
        self._step = trainer.global_step
        received = highest(self.received, module.device)
        if not received:
            return
        self.checkpoints.save_once(trainer)
        if trainer.is_global_zero:
            log.warning("asked to leave: saved at step %d; go on with resume=true", self._step)
            if received == 2 and self.requeue is not None:
                self.requeue()
        self._leaving = True

    # Not there and then: Lightning has still to log the step's figures. Nor after an epoch's validation, which may take
    # longer than a scheduler waits; the resumed run makes up for it.
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._leave(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._leave(trainer)

    def _leave(self, trainer: pl.Trainer) -> None:
        if self._leaving:
            raise SystemExit(exit_status(trainer))


def exit_status(trainer: pl.Trainer) -> int:
    """143; but 0 for the processes that Lightning's own launcher started: it kills rank 0 when one of them fails."""
    environment = trainer._accelerator_connector.cluster_environment
    started_here = isinstance(environment, LightningEnvironment) and not trainer.is_global_zero
    return 0 if started_here else EXIT_STATUS


def slurm_requeue() -> Callable[[], None] | None:
    """Puts this SLURM job back into the queue; None outside SLURM."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"

    def requeue() -> None:
        try:
            done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("job %s could not be requeued: %s", job, error)
            return
        if done.returncode:
            log.warning("scontrol requeue %s failed with %d: %s", job, done.returncode, done.stderr.strip())
        else:
            log.info("job %s is back in the queue", job)

    return requeue
