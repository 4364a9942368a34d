"""The folder of one training run: made once, never mixed with another run, never left half-written.

Only rank 0 touches it. It holds config.yaml (resolved), train.log, checkpoints/ and metrics; a folder with nothing
but the first two holds no run yet.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from omegaconf import DictConfig, OmegaConf

from vlretrieval.commands.log import log_to_file

BEFORE_A_RUN = {"config.yaml", "train.log", ".lock"}


def holds_run(folder: Path) -> bool:
    """Whether training has written anything into the folder."""
    return folder.is_dir() and any(p.name not in BEFORE_A_RUN for p in folder.iterdir())


@contextmanager
def run_folder(cfg: DictConfig, rank: int = 0) -> Iterator[Path]:
    """Open ``cfg.output_dir`` for a new run, or with ``cfg.resume`` for an old one, and keep others out of it.

    An error before the first result leaves nothing behind, so that the corrected command can simply be run again.

    Raises:
        ValueError: the folder holds a run and resume is false; or the reverse; or another process writes to it.
    """
    folder = Path(cfg.output_dir)
    if rank > 0:
        yield folder
        return
    check_folder(folder, bool(cfg.resume))
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        take(lock, folder)
        OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
        log = log_to_file(folder / "train.log")
        try:
            yield folder
        except BaseException:
            if made and not holds_run(folder):
                shutil.rmtree(folder, ignore_errors=True)
                remove_empty(made[1:])
            raise
        finally:
            logging.getLogger().removeHandler(log)
            log.close()


def check_folder(folder: Path, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir={folder} is a file; give another output_dir=")
    if holds_run(folder) and not resume:
        raise ValueError(f"{folder} already holds a run; continue it with resume=true or start another with name=...")
    if resume and not (holds_run(folder) or (folder / "config.yaml").is_file()):  # the latter: ended in start-up
        raise ValueError(f"resume=true, but {folder} holds no run; start one with resume=false or give its name=...")


def take(lock: IO[str], folder: Path) -> None:
    """Hold the folder as long as this process lives (the system lets go of it even after a kill)."""
    try:
        # not flock: loader workers would inherit it, and hold it for seconds after this process was killed
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(f"another process is writing to {folder}; wait for it or give another name=...") from None
    except OSError:  # a file system without locks
        logging.getLogger(__name__).warning("%s cannot be locked; do not start two runs in it", folder)


def remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
