"""How many threads torch may use: the cores really available, shared between ranks and loader workers.

Two threads on one core are far slower than one, and a container's limit does not show in ``os.cpu_count()``.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = CGROUP) -> int:
    """Cores this process may use: its affinity, cut by the container's quota (cgroup v2, then v1). At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroup)
    return max(1, min(cores, math.floor(quota + 1e-6)) if quota else cores)


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """The container's limit in cores, None when there is none or it cannot be read."""
    try:
        if (cgroup / "cpu.max").is_file():
            limit, period = (cgroup / "cpu.max").read_text().split()
            return None if limit == "max" else int(limit) / int(period)
        limit_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((cgroup / "cpu/cpu.cfs_period_us").read_text())
        return limit_us / period_us if limit_us > 0 else None
    except (OSError, ValueError):
        return None


def threads_for(cores: int, local_ranks: int, workers: int) -> int:
    """Threads of one rank, so that all ranks and their loader workers (one thread each) fit the cores."""
    return max(1, cores // max(1, local_ranks) - workers)


def set_threads(cfg: DictConfig) -> None:
    """Say it to torch's OpenMP before torch is imported. OMP_NUM_THREADS of the user's own is left alone."""
    devices = OmegaConf.select(cfg, "trainer.devices", default=1)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", devices if isinstance(devices, int) and devices > 0 else 1))
    workers = OmegaConf.select(cfg, "data.num_workers", default=0)
    threads = threads_for(available_cores(), ranks, workers if isinstance(workers, int) else 0)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
