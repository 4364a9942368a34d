"""metrics.csv keeps every figure, over interruptions too."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlretrieval.training.metrics_file import MetricsFile


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, steps: range, **figures: float) -> None:
    log = MetricsFile(path)
    for step in steps:
        log.log_metrics({"loss": step / 2, **figures}, step)
    log.finalize("success")


def test_figures_of_one_step_share_a_row_and_new_columns_may_come(tmp_path: Path) -> None:
    log = MetricsFile(tmp_path / "metrics.csv")
    log.log_metrics({"loss": 1.5}, 1)
    log.log_metrics({"val/t2i/R@1": 61.25}, 1)
    log.log_metrics({"loss": 1.25}, 2)
    log.save()
    assert rows(tmp_path / "metrics.csv") == [
        {"step": "1", "loss": "1.5", "val/t2i/R@1": "61.25"},
        {"step": "2", "loss": "1.25", "val/t2i/R@1": ""},
    ]


@given(first=st.integers(1, 8), start=st.integers(0, 8), more=st.integers(1, 8))
def test_a_run_that_goes_on_keeps_what_was_before_and_has_no_step_twice(
    tmp_path_factory: pytest.TempPathFactory, first: int, start: int, more: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.csv"
    write(path, range(first))
    write(path, range(start, start + more), other=1.0)
    steps = [int(row["step"]) for row in rows(path)]
    assert steps == [step for step in range(first) if step < start] + list(range(start, start + more))
    assert all(float(row["loss"]) == int(row["step"]) / 2 for row in rows(path))


def test_figures_that_come_late_join_the_last_row_of_the_earlier_session(tmp_path: Path) -> None:
    write(tmp_path / "metrics.csv", range(4))
    write(tmp_path / "metrics.csv", range(3, 4), **{"val/rsum": 300.0})
    assert rows(tmp_path / "metrics.csv")[-1] == {"step": "3", "loss": "1.5", "val/rsum": "300.0"}
    assert len(rows(tmp_path / "metrics.csv")) == 4


def test_a_killed_process_loses_no_more_than_the_rows_held(tmp_path: Path) -> None:
    log = MetricsFile(tmp_path / "metrics.csv", flush_every=4)
    for step in range(10):
        log.log_metrics({"loss": 0.0}, step)
    assert len(rows(tmp_path / "metrics.csv")) == 8


def test_a_torn_last_row_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("loss,step\n0.5,1\n0.4")
    write(tmp_path / "metrics.csv", range(2, 3))
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == ["1", "2"]


def test_a_row_holds_the_figures_of_its_own_step_however_often_rows_are_written(tmp_path: Path) -> None:
    """With accumulation, where steps and batches differ. A step too late, or left out, would show an older one's."""
    from tiny_training import run

    found = []
    for every in (1, 2):
        settings = [f"trainer.log_every_n_steps={every}", "+trainer.accumulate_grad_batches=2"]
        run(tmp_path / str(every), *settings, "checkpoints.every_n_steps=null", "validation.every_n_epochs=9")
        steps = [row for row in rows(tmp_path / str(every) / "metrics.csv") if row["train/loss"]]
        found.append({int(row["step"]): row for row in steps})
    assert list(found[0]) == [0, 1, 2, 3, 4, 5] and list(found[1]) == [1, 3, 5]
    for step, row in found[1].items():
        for name in ("loss", "contrastive", "matching", "logit_scale", "gradient_norm"):
            assert float(row[f"train/{name}"]) == float(found[0][step][f"train/{name}"]) > 0, (step, name)
