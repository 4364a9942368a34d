"""Threads come from the cores that are really there, and are never promised twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from vlretrieval.commands.threads import available_cores, cpu_quota, set_threads, threads_for


@given(st.integers(1, 256), st.integers(1, 16), st.integers(0, 32))
def test_threads_of_all_ranks_and_workers_fit_the_cores_where_one_each_fits(
    cores: int, ranks: int, workers: int
) -> None:
    threads = threads_for(cores, ranks, workers)
    assert threads >= 1
    assert threads == 1 or ranks * (threads + workers) <= cores


def test_a_containers_quota_is_seen(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(tmp_path) == 0.5 and available_cores(tmp_path) == 1
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("300000")
    assert cpu_quota(tmp_path) == 3.0


def test_affinity_is_seen(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_a_setting_of_the_users_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    set_threads(OmegaConf.create({"trainer": {"devices": 2}, "data": {"num_workers": 1}}))
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_ranks_on_this_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for config, local_ranks in (({"trainer": {"devices": 2}}, None), ({"trainer": {"devices": "auto"}}, "2")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks) if local_ranks else None
        set_threads(OmegaConf.create(config))
        assert os.environ["OMP_NUM_THREADS"] == str(threads_for(available_cores(), 2, 0))
