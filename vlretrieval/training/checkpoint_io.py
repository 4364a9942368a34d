"""Checkpoints that are whole or absent: written beside, synced, renamed; checked before they are read."""

from __future__ import annotations

import errno
import logging
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

log = logging.getLogger(__name__)

PARTIAL = ".partial"


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint to a temporary name in the same folder, syncs it and renames it.

    Lightning's own stages in the temporary folder and moves: across file systems that is a copy over the good file, and
    a full disk tears the one before.

    Args:
        failures_allowed: saves in a row that the disk may refuse (full, or gone for a while) before that is an error.
            What was saved before stays as it is.
    """

    def __init__(self, failures_allowed: int = 0):
        if failures_allowed < 0:
            raise ValueError(f"failures_allowed={failures_allowed} must be at least 0")
        self.failures_allowed, self.failed_in_a_row = failures_allowed, 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        try:
            self._write(checkpoint, path)
        except (OSError, RuntimeError) as error:  # torch's zip writer makes a RuntimeError of a full disk
            if not disk_refused(error):
                raise
            self.failed_in_a_row += 1
            if self.failed_in_a_row > self.failures_allowed:
                raise ValueError(
                    f"{path} could not be written, for the {self.failed_in_a_row}. time in a row: {error}; make room "
                    "and go on with resume=true"
                ) from error
            log.error(
                "NOT SAVED: %s: %s. What was saved before is whole; make room. Failure %d in a row; %d end the run.",
                path,
                error,
                self.failed_in_a_row,
                self.failures_allowed + 1,
            )
        else:
            self.failed_in_a_row = 0

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> dict:
        fault = checkpoint_fault(path)
        if fault:
            raise ValueError(f"{path}: {fault}")
        # a checkpoint can hold any code unless only plain data is read
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def disk_refused(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is the disk's: full, over quota, or an I/O error."""
    refusals = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOENT, errno.EROFS)
    while error is not None:
        if isinstance(error, OSError) and error.errno in refusals:
            return True
        error = error.__cause__ or error.__context__
    return False


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoint_fault(path: str | Path) -> str | None:
    """What is wrong with a checkpoint file, in a few words, or None: torch.load checks no CRC, this does."""
    path = Path(path)
    if not path.is_file():
        return "no such file"
    if path.stat().st_size == 0:
        return "the file is empty"
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError):
        return "not a whole checkpoint (torn, truncated, or another kind of file)"
    return f"damaged: {torn} does not match its checksum" if torn else None


def step_of(path: Path) -> int:
    """The optimizer step in a file name ``step-00000120.ckpt``; -1 for other names."""
    found = re.fullmatch(r"step-(\d+)\.ckpt", path.name)
    return int(found.group(1)) if found else -1


def newest_first(folder: Path) -> Iterator[Path]:
    """The step checkpoints of a run, newest first, by step: clocks can be set back."""
    yield from sorted((p for p in folder.glob("step-*.ckpt") if step_of(p) >= 0), key=step_of, reverse=True)


def sweep_partials(folder: Path) -> int:
    """Removes what a killed save left behind; how many."""
    partials = list(folder.glob("*" + PARTIAL))
    for partial in partials:
        partial.unlink()
    return len(partials)
