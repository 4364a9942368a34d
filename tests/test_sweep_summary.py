"""The summary of a sweep: means over seeds, failed jobs among them, folders that tell what is in them."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from PIL import Image

from vlretrieval.commands.launch import command
from vlretrieval.commands.sweep import job_folder, swept_keys
from vlretrieval.training.watch import sweep_summary
from vlretrieval.training.watch.sweep_summary import Job, settings_of, value_at, write_summary


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


JOBS = [
    Job(0, {"heads.image": "1", "seed": "1"}, "r/0", 60.0, 100, 10.0),
    Job(1, {"heads.image": "1", "seed": "2"}, "r/1", 62.0, 100, 14.0),
    Job(2, {"heads.image": "3", "seed": "1"}, "r/2", error="num_heads=3 does not divide dim=16"),
    Job(3, {"heads.image": "3", "seed": "2"}, "r/3", 50.0, 300, 20.0),
]


def test_jobs_of_one_setting_are_averaged_and_a_failed_one_is_counted_and_not_averaged(tmp_path: Path) -> None:
    settings = settings_of(reversed(JOBS))
    assert [str(setting) for setting in settings] == ["heads.image=1", "heads.image=3"]
    write_summary(tmp_path / "summary.csv", settings, "val/rsum")
    one, three = table(tmp_path / "summary.csv")
    assert one == {
        **{"heads.image": "1", "jobs": "2", "failed": "0", "parameters": "100", "seconds": "12"},
        **{"val/rsum mean": "61", "val/rsum min": "60", "val/rsum max": "62", "val/rsum std": f"{2**0.5:.10g}"},
    }
    assert (three["jobs"], three["failed"], three["val/rsum mean"], three["val/rsum std"]) == ("2", "1", "50", "")


def test_a_setting_whose_jobs_all_failed_is_in_the_table_the_file_and_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of([JOBS[0], JOBS[2]], repeats=["seed"])
    sweep_summary.print_table(settings, "val/rsum", "2 jobs")
    out = capsys.readouterr().out
    assert "heads.image=3" in out and "failed" in out
    assert "num_heads=3 does not divide dim=16" in " ".join(out.split())
    pytest.importorskip("matplotlib")
    sweep_summary.plot(tmp_path / "summary.png", settings, "val/rsum")
    assert Image.open(tmp_path / "summary.png").size[0] > 400
    assert [path.name for path in tmp_path.iterdir()] == ["summary.png"]


def test_a_figure_is_read_from_the_row_of_the_best_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,val/x\n3,10\n4,\n7,12\n11,9\n")
    assert value_at(tmp_path / "metrics.csv", "val/x", 8) == 12
    assert value_at(tmp_path / "metrics.csv", "val/y", 8) is None
    assert value_at(tmp_path / "none.csv", "val/x", 8) is None


def test_a_folder_is_named_by_number_and_by_what_was_swept() -> None:
    plain = ["-m", "name=a", "trainer.max_epochs=2"]
    words = [*plain, "heads.image=1,2", "model/text_encoder=small,tiny", "seed=range(3)"]
    swept = swept_keys(words)
    assert swept == ["heads.image", "model/text_encoder", "seed"]
    job = ["name=a", "heads.image=2", "model/text_encoder=small", "seed=0", "trainer.max_epochs=2"]
    assert job_folder(3, job, swept) == "3_heads.image-2_model-text_encoder-small_seed-0"
    assert job_folder(0, ["loss.x='a b/[c]'"], ["loss.x"]) == "0_loss.x-a-b-c"
    assert len(job_folder(0, ["x=" + "y" * 500], ["x"])) <= 120
    assert job_folder(7, job, []) == "7"


Sweep = Callable[..., int]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sweep:
    """Run ``-m`` over a stand-in for training; its exit status."""
    monkeypatch.chdir(tmp_path)

    @command("train")
    def main(cfg: DictConfig) -> dict[str, Any]:
        if cfg.seed == 17:
            raise SystemExit(143)
        if cfg.seed == 13:
            raise ValueError("seed=13 is unlucky; take another")
        result = {"best_step": 4, "val/rsum": 100.0 * cfg.heads.image + cfg.seed, "parameters": 7, "seconds": 1.0}
        Path(cfg.output_dir).mkdir(parents=True)
        (Path(cfg.output_dir) / "metrics.csv").write_text(f"step,val/t2i/R@1\n4,{cfg.seed}\n")
        return result

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["vlretrieval-train", *words])
        try:
            main()
        except SystemExit as leaving:
            return int(leaving.code or 0)
        return 0

    return run


def test_a_sweep_ends_with_a_summary_that_holds_its_failed_job_too(
    sweep: Sweep, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep("-m", "name=a", "heads.image=2", "seed=12,13") == 2
    out, err = capfd.readouterr()
    folder = tmp_path / "runs" / "a"
    jobs = table(folder / "jobs.csv")
    assert [job["status"] for job in jobs] == ["done", "failed"]
    assert jobs[1]["error"].startswith("seed=13 is unlucky; take another")
    assert jobs[0]["output_dir"] == "runs/a/0_seed-12"
    assert [row["val/rsum mean"] for row in table(folder / "summary.csv")] == ["212"]
    assert "2, 1 failed" in out and "error: seed=13" in err
    names = {path.name for path in folder.iterdir()}
    assert {"summary.csv", "jobs.csv", "jobs", "0_seed-12"} <= names
    assert not any(name.isdigit() for name in names), "Hydra makes no folder of its own"


@pytest.mark.slow
def test_the_metric_of_a_sweep_is_set_by_config_and_the_plot_may_be_missing(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert sweep("-m", "name=b", "seed=3,5", "sweep.metric=val/t2i/R@1", "sweep.repeats=[]") == 0
    assert [row["val/t2i/R@1 mean"] for row in table(tmp_path / "runs/b/summary.csv")] == ["3", "5"]
    assert "no plot without matplotlib" in capfd.readouterr().out
    assert not (tmp_path / "runs/b/summary.png").exists()


@pytest.mark.slow
def test_a_job_that_is_killed_is_in_the_summary(sweep: Sweep, tmp_path: Path) -> None:
    assert sweep("-m", "name=d", "seed=12,17") == 143
    assert [job["error"] for job in table(tmp_path / "runs/d/jobs.csv")] == ["", "it was stopped before its end"]


@pytest.mark.slow
def test_a_single_run_leaves_no_summary(sweep: Sweep, tmp_path: Path) -> None:
    assert sweep("name=c", "seed=3") == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["c"]
    assert not list(tmp_path.rglob("summary.csv"))
