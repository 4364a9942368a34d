"""Where a run goes on from, and whether it is the same run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlretrieval.training.checkpoint_io import checkpoint_fault, newest_first
from vlretrieval.training.warm_start import read_plain

log = logging.getLogger(__name__)

# What a run cannot change half-way: other weights, other batches, or (the optimizer's state is restored) no effect.
FIXED = ("model", "tokenizer", "seed", "data.batch_size", "optimizer", "ema_decay", "freeze", "loss.momentum")
FREE = (
    *("name", "output_dir", "resume", "progress_bar", "logger", "checkpoints", "validation", "heads"),
    *("check", "write_features", "pictures", "early_stopping", "sweep"),
)


def resume_path(folder: Path) -> str | None:
    """The newest whole checkpoint; a damaged one is named and the one before is taken.

    None, and a line saying so, where the run was broken off before it saved anything: from the same seed it starts
    again as it did the first time.

    Raises:
        ValueError: if there are checkpoints and none can be gone on from.
    """
    if not any(folder.glob("*.ckpt")):
        log.warning("no checkpoint was saved yet in %s: starting at step 0", folder)
        return None
    for path in newest_first(folder):
        fault = checkpoint_fault(path)
        if fault is None:
            log.info("going on from %s", path)
            return str(path)
        log.warning("%s: %s; taking the one before", path, fault)
    raise ValueError(f"resume=true, but {folder} holds no whole checkpoint; start anew with another name=...")


def check_same_run(path: str | Path, config: dict[str, Any]) -> None:
    """Holds the resolved config of now against the one in the checkpoint.

    A difference in what a run cannot change is refused with both values; another one is said. Keys that only one side
    has (another version's) are left to the loading of weights.

    Raises:
        ValueError: naming each key, its value then and now.
    """
    before = read_plain(Path(path)).get("vlretrieval", {}).get("config")
    if not isinstance(before, dict):
        return
    changed = [(key, then, now) for key, then, now in differences(before, config) if not key.startswith(tuple(FREE))]
    fixed = [c for c in changed if c[0] in FIXED or c[0].startswith(tuple(f"{key}." for key in FIXED))]
    if fixed:
        said = ", ".join(f"{key} was {then} and is {now} now" for key, then, now in fixed)
        raise ValueError(
            f"resume=true, but {said}; set it back, or start a new run from the weights with init_from={path}"
        )
    for key, then, now in changed:
        log.warning("going on with another %s: %s in the checkpoint, %s now", key, then, now)


def differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves of two plain configs that both have and that differ: (dotted key, before, now)."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in before:
            if name in now:
                yield from differences(before[name], now[name], f"{key}.{name}" if key else str(name))
    elif before != now:
        yield key, before, now
