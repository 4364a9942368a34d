"""The kill test itself: it passes on a few trials, and would fail if a figure or a weight were another."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "chaos" / "kill_resume.py"


@pytest.fixture(scope="module")
def kill_resume() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kill_resume", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_resume"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_times_may_differ_between_two_runs_and_figures_may_not(kill_resume: ModuleType, tmp_path: Path) -> None:
    columns = "step,train/loss,train/pairs_per_s,train/data_percent,train/flops_percent_of_peak,train/peak_memory_gb"
    for name, rows in {
        "whole": ["0,1.5,10.0,1.0,2.0,0.5", "1,1.25,11.0,1.0,2.0,0.5"],
        "same": ["0,1.5,99.0,9.0,9.0,0.9", "1,1.25,98.0,9.0,9.0,0.9"],
        "other": ["0,1.5,10.0,1.0,2.0,0.5", "1,1.2500001,11.0,1.0,2.0,0.5"],
        "short": ["0,1.5,10.0,1.0,2.0,0.5"],
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("\n".join([columns, *rows]) + "\n")
    found = {
        name: kill_resume.rows_that_differ(tmp_path / "whole", tmp_path / name) for name in ("same", "other", "short")
    }
    assert found == {"same": [], "other": [1], "short": [1]}


def test_one_bit_of_a_weight_is_a_difference(kill_resume: ModuleType) -> None:
    weight = torch.tensor([1.0, 2.0])
    other = torch.tensor([1.0, torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)).item()])
    assert not list(kill_resume.differences({"a": [weight]}, {"a": [weight.clone()]}))
    assert list(kill_resume.differences({"a": [weight]}, {"a": [other]}))
    assert list(kill_resume.differences({"a": 1}, {"b": 1}))


@pytest.mark.slow
def test_runs_that_are_killed_end_as_the_undisturbed_one(tmp_path: Path) -> None:
    words = ["--warm", "--sigkill", "2", "--sigterm", "1", "--seed", "3", "--folder", str(tmp_path / "chaos")]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout and done.stdout.count(": same; ended at") == 3
