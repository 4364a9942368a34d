"""The bench of attention runs, and prints its goals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench" / "attention.py"


@pytest.mark.slow
def test_the_bench_runs_and_says_which_goals_are_met(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--quick", "--rounds", "1", "--only", "speed,gqa,kept,claims,memory"]
    run = subprocess.run(
        [*command, "--json", str(figures)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    for heading in ("Speed, float32", "Shared K/V", "Kept K/V", "Said of it", "Peak memory", "Goals"):
        assert heading in run.stdout
    goals = json.loads(figures.read_text())["goals"]
    assert len(goals) > 40
    assert all(
        met for met, line in goals if line.startswith("peak memory, inference")
    )  # bytes are the same at any hour
