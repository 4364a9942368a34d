"""What a training run outlives: kills between any two lines, a full disk, other workers, odd and broken batches."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from tiny_training import STEPS, assert_same_bits, last_weights, run, tiny_batch, tiny_model, weights

from vlretrieval import losses
from vlretrieval.commands.run_folder import run_folder
from vlretrieval.data.loader import TrainLoader
from vlretrieval.training.callbacks import Checkpoints
from vlretrieval.training.checkpoint_io import checkpoint_fault, newest_first
from vlretrieval.training.gather import over_ranks
from vlretrieval.training.momentum import Momentum
from vlretrieval.training.nonfinite import NonFiniteGuard
from vlretrieval.training.objective import Objective
from vlretrieval.training.resume import resume_path
from vlretrieval.training.task import RetrievalTask

STATEFUL = ["loss=momentum", "loss.momentum.queue=24", "ema_decay=0.9"]


def from_step(whole: Path, folder: Path, *steps: int) -> Path:
    """A run folder as it is when its process was killed after ``steps`` had been saved."""
    (folder / "checkpoints").mkdir(parents=True)
    for step in steps:
        shutil.copy(whole / f"checkpoints/step-{step:08d}.ckpt", folder / "checkpoints")
    return folder


@pytest.fixture
def loss_scaler(monkeypatch):
    """float16 with a loss scaler, on the CPU: it starts far too high, so that it steps down, and then up again."""

    def precision(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1)
        return MixedPrecision("16-mixed", "cpu", scaler)

    monkeypatch.setattr(_AcceleratorConnector, "_check_and_init_precision", precision)


@pytest.mark.slow  # float16 on a CPU
def test_scaler_queue_momentum_and_average_survive(tmp_path, loss_scaler):
    run(tmp_path / "whole", *STATEFUL)
    scales = [
        torch.load(path, weights_only=True)["MixedPrecision"]["scale"]
        for path in sorted(newest_first(tmp_path / "whole/checkpoints"))
    ]
    assert min(scales) < scales[0] and scales[-1] > min(scales)  # down in the first steps, and up in later ones
    folder = from_step(tmp_path / "whole", tmp_path / "resumed", 6)
    run(folder, *STATEFUL, "resume=true")
    expected, got = (
        torch.load(where / f"checkpoints/step-{STEPS:08d}.ckpt", weights_only=True)
        for where in (tmp_path / "whole", folder)
    )
    assert expected["MixedPrecision"] == got["MixedPrecision"]
    assert {"momentum.image_queue", "momentum.written"} <= expected["state_dict"].keys()
    assert_same_bits(expected["state_dict"], got["state_dict"])
    assert_same_bits(expected["training_weights"]["weights"], got["training_weights"]["weights"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


def test_a_run_whose_last_checkpoint_is_truncated_ends_with_the_same_bits_and_other_workers_do_not_matter(
    whole, tmp_path, caplog
):
    folder = from_step(whole, tmp_path / "run", 4, 9)
    torn = folder / "checkpoints/step-00000009.ckpt"
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    run(folder, "resume=true", "data.num_workers=1")
    assert_same_bits(last_weights(whole), last_weights(folder))
    assert "step-00000009.ckpt: not a whole checkpoint" in caplog.text and "taking the one before" in caplog.text
    assert "going on with another data.num_workers: 0 in the checkpoint, 1 now" in caplog.text


def test_before_the_first_checkpoint_there_is_none_to_go_on_from_and_without_a_whole_one_there_is_an_error(
    tmp_path, caplog
):
    (tmp_path / "step-00000003.ckpt.partial").write_bytes(b"a part")
    assert resume_path(tmp_path) is None and "no checkpoint was saved yet" in caplog.text
    assert resume_path(tmp_path / "absent") is None
    (tmp_path / "best.ckpt").write_bytes(b"someone removed the others")
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        resume_path(tmp_path)


@pytest.mark.slow
def test_a_run_ended_before_its_first_checkpoint_starts_anew_with_resume_true(whole, tmp_path, caplog):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-00000003.ckpt.partial").write_bytes(b"a part")
    given = torch.load(whole / "checkpoints/step-00000003.ckpt", weights_only=True)
    torch.save({"state_dict": given["state_dict"]}, tmp_path / "start.ckpt")
    start = f"init_from={tmp_path}/start.ckpt"
    run(tmp_path, "resume=true", start)
    run(tmp_path / "anew", start)
    assert "no checkpoint was saved yet" in caplog.text and not list((tmp_path / "checkpoints").glob("*.partial"))
    assert_same_bits(last_weights(tmp_path / "anew"), last_weights(tmp_path))


def test_a_kill_between_a_save_and_its_name_as_the_best_costs_no_best_checkpoint(whole, tmp_path):
    best = torch.load(whole / "checkpoints/best.ckpt", weights_only=True)["global_step"]
    folder = from_step(whole, tmp_path / "run", best)
    run(folder, "resume=true")
    assert_same_bits(weights(whole / "checkpoints/best.ckpt"), weights(folder / "checkpoints/best.ckpt"))


@pytest.mark.slow
def test_a_kill_before_lightning_logs_an_epoch_costs_no_validation_figures(tmp_path, monkeypatch):
    """Lightning logs them after the epoch's checkpoint is written, and a run that goes on from there has no other."""

    class Killed(BaseException): ...

    plain = Checkpoints.save

    def save(self, trainer):
        plain(self, trainer)
        if trainer.global_step == 8:
            raise Killed

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(Killed):
        run(tmp_path, "checkpoints.every_n_steps=null")
    monkeypatch.undo()
    run(tmp_path, "resume=true")
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("val/rsum")
    measured = [line.split(",")[lines[0].split(",").index("step")] for line in lines[1:] if line.split(",")[column]]
    assert measured == ["3", "7", "11"]


def test_a_signal_before_the_first_step_is_as_good_as_any(tmp_path, monkeypatch):
    """Between Lightning's handlers and the first step, where the run would end unsaved, with status 0."""
    plain = TrainLoader.__iter__

    def early(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(self)

    monkeypatch.setattr(TrainLoader, "__iter__", early)
    with pytest.raises(SystemExit) as leaving:
        run(tmp_path)
    assert leaving.value.code == 143
    assert next(newest_first(tmp_path / "checkpoints")).name == "step-00000001.ckpt"


@pytest.mark.parametrize("step", [4, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_a_run_that_left_after_an_epoch_s_last_step_makes_up_for_the_validation(whole, tmp_path, monkeypatch, step):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        plain = RetrievalTask.training_step

        def training_step(self, batch, batch_idx):
            if self._batches == step - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return plain(self, batch, batch_idx)

        patch.setattr(RetrievalTask, "training_step", training_step)
        with pytest.raises(SystemExit):
            run(folder, "trainer.log_every_n_steps=1")
    run(folder, "trainer.log_every_n_steps=1", "resume=true")
    assert_same_bits(last_weights(whole), last_weights(folder))
    assert_same_bits(weights(whole / "checkpoints/best.ckpt"), weights(folder / "checkpoints/best.ckpt"))
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    table = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    assert [int(row["step"]) for row in table if row["val/rsum"]] == [3, 7, 11]
    assert [int(row["step"]) for row in table if row["train/loss"]] == list(range(STEPS))


HOLDER = """
import os, sys, time
from omegaconf import OmegaConf
from vlretrieval.commands.run_folder import run_folder
with run_folder(OmegaConf.create({"output_dir": sys.argv[1], "resume": False})):
    if os.fork() == 0:  # as a loader worker is
        time.sleep(60)
        os._exit(0)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_run_s_workers_do_not_keep_its_folder_locked(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert holder.stdout.readline() == b"ready\n"
        holder.kill()
        holder.wait(30)
        from omegaconf import OmegaConf

        with run_folder(OmegaConf.create({"output_dir": str(tmp_path / "run"), "resume": False})) as folder:
            assert (folder / "config.yaml").is_file()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.stdout.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds four checkpoints of the tiny run."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_in_the_end_loses_nothing_and_more_room_ends_it_well(
    whole, small_disk, caplog
):
    size = (whole / "checkpoints/step-00000012.ckpt").stat().st_size
    (small_disk / "other").write_bytes(bytes(2 * 2**20 - 3 * size))
    with pytest.raises(ValueError, match="in a row.*make room and go on with resume=true"):
        run(small_disk / "run", "checkpoints.failures_allowed=1", "checkpoints.every_n_steps=1")
    saved = list(newest_first(small_disk / "run/checkpoints"))
    assert saved and all(checkpoint_fault(path) is None for path in saved) and "NOT SAVED" in caplog.text
    for path in saved:
        step = int(path.stem[5:])
        if step % 3 == 0:
            assert_same_bits(weights(whole / f"checkpoints/{path.name}"), weights(path))
    (small_disk / "other").unlink()
    run(small_disk / "run", "resume=true", "checkpoints.keep=1")
    assert_same_bits(last_weights(whole), last_weights(small_disk / "run"))


EVERY_LOSS = {
    "info_nce": dict(),
    "sigmoid": dict(contrastive=losses.sigmoid_loss),
    "hinge": dict(contrastive=losses.max_hinge),
    "momentum": dict(momentum=Momentum(queue=6)),
    "everything": dict(ranking_weight=1.0, distillation_weight=1.0, matching_negatives=3, length_buckets=3),
    "in chunks": dict(ranking_weight=1.0, distillation_weight=1.0, chunk=3),
}
ODD_BATCHES = {
    "one picture": dict(images=[5] * 8),
    "one pair": dict(rows=1),
    "one pair without negatives": dict(rows=1, negatives=1),
    "two of one picture, one other": dict(rows=3, images=[4, 4, 9]),
}


@pytest.mark.parametrize("odd", ODD_BATCHES)
@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_odd_batches_have_a_finite_loss_and_finite_gradients(loss, odd):
    batch = tiny_batch(**ODD_BATCHES[odd])
    if odd == "one pair without negatives":
        batch.negative_token_mask[:] = False
    settings = {"contrastive": losses.info_nce, **EVERY_LOSS[loss]}
    task = RetrievalTask(tiny_model(), Objective(settings.pop("contrastive"), **settings), None)
    for _ in range(2):  # the second meets a queue
        value, _ = task.objective(task.model, task.encode(batch))
    value.backward()
    assert torch.isfinite(value)
    assert all(torch.isfinite(p.grad).all() for p in task.model.parameters() if p.grad is not None)


def two_ranks(function, folder: Path) -> list:
    """What ``function(rank)`` returned on each of two ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    mp.start_processes(one_rank, args=(function, str(folder)), nprocs=2, start_method="fork")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def one_rank(rank: int, function, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(function(rank), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def trainer_at(step: int, rank: int) -> SimpleNamespace:
    precision = SimpleNamespace(scaler=None)
    logged = {"log_every_n_steps": 1, "should_stop": False}
    return SimpleNamespace(
        global_step=step, current_epoch=0, is_global_zero=rank == 0, precision_plugin=precision, **logged
    )


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(tmp_path):
    def step(rank: int) -> bool:
        weight = torch.nn.Parameter(torch.ones(3))
        guard = NonFiniteGuard(Checkpoints(tmp_path, "val/rsum"), tmp_path / "nonfinite.jsonl")
        module = SimpleNamespace(device=torch.device("cpu"), log=lambda *_: None)
        guard.on_train_batch_start(trainer_at(7, rank), module, SimpleNamespace(index=torch.tensor([rank, 9])), 0)
        loss = (weight * (torch.nan if rank else 1.0)).sum()
        guard.on_before_backward(trainer_at(7, rank), module, loss)
        loss.backward()
        guard.on_before_optimizer_step(trainer_at(7, rank), module, torch.optim.SGD([weight], lr=1.0))
        return weight.grad is None

    assert two_ranks(step, tmp_path) == [True, True]
    assert '"captions": [0, 9, 1, 9]' in (tmp_path / "nonfinite.jsonl").read_text()


def test_logged_figures_are_those_of_all_ranks_together(tmp_path):
    def figures(rank: int) -> dict[str, torch.Tensor]:
        return over_ranks({"loss": torch.tensor(1.0 + rank), "matching": torch.tensor(4.0 * rank)})

    assert two_ranks(figures, tmp_path) == [{"loss": 1.5, "matching": 2.0}] * 2


def test_ranks_that_do_not_see_the_same_checkpoints_end_with_a_word_about_it(tmp_path):
    def begin(rank: int) -> str:
        module = SimpleNamespace(device=torch.device("cpu"))
        try:
            Checkpoints(tmp_path, "val/rsum").on_train_start(trainer_at(12 * rank, rank), module)
        except ValueError as error:
            return str(error)
        return "nothing"

    for said in two_ranks(begin, tmp_path):
        assert "the ranks go on from different steps, 0 to 12" in said and "a folder that all machines share" in said
