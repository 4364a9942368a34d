"""The main job through the commands a user types: train, evaluate, export, search; and what may go wrong in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]

TINY = [
    "experiment=quickstart",
    "progress_bar=false",
    "data.source.train=48",
    "data.source.val=8",
    "data.source.test=8",
    "data.batch_size=16",
    "trainer.max_epochs=2",
    "trainer.accelerator=cpu",
    "validation.every_n_epochs=1",
    "model.image_encoder.dim=16",
    "model.image_encoder.depth=1",
    "model.text_encoder.dim=16",
    "model.text_encoder.depth=1",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which runs/tiny was trained by the command, in a process of its own."""
    folder = tmp_path_factory.mktemp("work")
    done = train(folder, "name=tiny", "logger=wandb")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def train(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*(launcher or (sys.executable,)), "-m", "vlretrieval.commands.train", *TINY, *words]
    # no HOME and no key: what an offline logger must do without
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def work(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, in the folder in which ``run_command`` runs."""
    shutil.copytree(finished / "runs", tmp_path / "runs")
    return tmp_path


def test_a_run_folder_holds_config_checkpoints_and_log_and_an_offline_tracker_needs_no_login(finished: Path) -> None:
    run = finished / "runs" / "tiny"
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "train.log", "checkpoints", "result.json", "wandb"} <= names
    assert {"best.ckpt", "last.ckpt"} <= {path.name for path in (run / "checkpoints").iterdir()}
    assert list((run / "wandb").glob("offline-run-*/*.wandb"))
    assert "a dual encoder with" in (run / "train.log").read_text()
    assert [path.name for path in finished.iterdir() if not path.name.startswith(".")] == ["runs"]


def test_evaluate_export_and_search_follow_from_the_checkpoint_alone(
    work: Path, run_command: Run, photos: Path
) -> None:
    best = "checkpoint=runs/tiny/checkpoints/best.ckpt"
    status, out, err = run_command("evaluate", best, "bootstrap=10", "rerank.top_k=1000")
    assert (status, err) == (0, "") and "the whole gallery" in out
    figures = json.loads((work / "runs/tiny/evaluation/test/metrics.json").read_text())
    assert {"protocol", "first_stage", "reranked", "hard_negatives"} <= figures.keys()

    assert run_command("export", best)[0] == 0
    card = (work / "runs/tiny/export/README.md").read_text()
    assert "| first stage | t2i |" in card and "trained on | Scenes" in card

    status, out, _ = run_command("search", "model=runs/tiny/export", f"images={photos}", "text=zyzzyva, 红色的圆 ☃")
    assert status == 0 and "ordered by match" in out, "a word never seen is spelt in bytes, and is no error"


def test_going_on_needs_resume_and_a_new_run_another_name(work: Path, run_command: Run) -> None:
    before = (work / "runs/tiny/checkpoints/last.ckpt").read_bytes()
    status, out, err = run_command("train", *TINY, "name=tiny")
    assert (status, out) == (2, "") and "resume=true" in err and "name=" in err
    assert (work / "runs/tiny/checkpoints/last.ckpt").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=karpathy", "data.json=gone.json", "data.images=gone"], "gone.json"),
        (["heads.text=3"], "num_heads=3 does not divide dim=16; the nearest that does is"),
        (["heads.text_to_image=4", "heads.kv=3"], "3"),
        (["data.source.val=0"], "val"),
        (["model.image_encoder.patch_size=7"], "patch_size=7 does not divide image_size"),
        (["logger.path=/proc/nowhere/metrics.csv", "output_dir=/proc/nowhere"], "/proc/nowhere"),
        (["resume=true"], "resume=true, but runs/new holds no run"),
        (["trainer.precision=fp8"], "fp8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_found_out_later_is_one_line_too_and_leaves_no_run(
    tmp_path: Path, run_command: Run, words: list[str], said: str
) -> None:
    tiny = [word for word in TINY if "source" not in word] if "data=karpathy" in words else TINY
    status, _, err = run_command("train", *tiny, "name=new", *words)
    assert status == 2
    assert len(err.splitlines()) == 1 and err.startswith("vlretrieval-train: error: ") and said in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["evaluate", "export"])
@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [("gone.ckpt", "no such file"), ("a.png", "not a checkpoint"), ("epoch=3,best of 'all'.ckpt", "no such file")],
)
def test_a_checkpoint_that_is_none_is_told_and_nothing_is_written(
    tmp_path: Path, run_command: Run, photos: Path, command: str, checkpoint: str, said: str
) -> None:
    shutil.copy(next(photos.iterdir()), tmp_path / "a.png")
    status, out, err = run_command(command, f"checkpoint={checkpoint}")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and said in err and checkpoint in err
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_an_unknown_split_is_told(work: Path, run_command: Run) -> None:
    status, _, err = run_command("evaluate", "checkpoint=runs/tiny/checkpoints/best.ckpt", "split=tset")
    assert status == 2 and len(err.splitlines()) == 1 and "tset" in err and "test" in err
    assert not (work / "runs/tiny/evaluation").exists()


@pytest.mark.slow
def test_two_processes_share_one_run_folder_however_they_are_started(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    for name, launcher in (("own", ()), ("torchrun", torchrun)):
        done = train(tmp_path, f"name={name}", "trainer=ddp", "trainer.devices=2", launcher=launcher)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("a dual encoder with") == 1, "rank 1 is silent"
        assert (tmp_path / "runs" / name / "metrics.csv").is_file()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["own", "torchrun"]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["runs"]


@pytest.mark.slow
def test_a_sweep_trains_each_job_in_its_own_folder(tmp_path: Path) -> None:
    done = train(tmp_path, "-m", "name=sweep", "heads.kv=1,null", "trainer=ddp", "trainer.devices=2")
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in ("0_heads.kv-1", "1_heads.kv-null"):
        assert (tmp_path / "runs" / "sweep" / folder / "checkpoints" / "best.ckpt").is_file()
    assert "heads.kv=null" in done.stdout and (tmp_path / "runs" / "sweep" / "summary.csv").is_file()
