"""Short names for several checkpoints or folders: what tells their paths apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def names_apart(paths: Sequence[str]) -> list[str]:
    """One name a path: its parts without those that all have in common; of one path alone, its run's or folder's name.

    ``runs/kv/MHA/seed_1/checkpoints/best.ckpt`` and ``runs/kv/MQA/seed_1/checkpoints/best.ckpt`` are MHA and MQA.

    Raises:
        ValueError: a path stands there twice.
    """
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise ValueError(f"{twice[0]} is given twice")
    if len(paths) == 1:
        path = Path(paths[0])
        return [path.parent.parent.name if path.parent.name == "checkpoints" else path.stem]
    parts = [Path(path).with_suffix("").parts for path in paths]
    if len(set(parts)) < len(parts):
        parts = [Path(path).parts for path in paths]
    start = _in_common(parts)
    end = _in_common([part[start:][::-1] for part in parts])
    names = ["/".join(part[start : len(part) - end]) for part in parts]
    return names if all(names) else list(paths)  # one path lies in another


def _in_common(parts: Sequence[tuple[str, ...]]) -> int:
    """How many first parts all have in common."""
    shared = 0
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared
