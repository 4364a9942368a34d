"""Signals, steps that are not finite, a full disk, another run's checkpoint: what a training run does about them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_training import STEPS, TINY, assert_same_bits, last_weights, run, weights

from vlretrieval.data.loader import TrainLoader
from vlretrieval.training import preemption
from vlretrieval.training.checkpoint_io import AtomicCheckpointIO, newest_first
from vlretrieval.training.task import RetrievalTask

# everything that has a state: momentum weights and queue, average, matching and distillation, dropout
EVERYTHING = [
    "loss=momentum",
    "loss.momentum.queue=24",
    "loss.distillation_weight=0.5",
    "loss.matching_share=0.5",
    "ema_decay=0.9",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder, *EVERYTHING)
    return folder


def during_batch(monkeypatch, number: int, action) -> None:
    """Does something while batch ``number`` (from 0) is being computed."""
    plain = RetrievalTask.training_step

    def training_step(self, batch, batch_idx):
        if self._batches == number:
            action(self)
        return plain(self, batch, batch_idx)

    monkeypatch.setattr(RetrievalTask, "training_step", training_step)


def send(*signals):
    return lambda task: [os.kill(os.getpid(), signum) for signum in signals]


@pytest.mark.parametrize("step", [2, 4, 11])  # in mid-epoch, with an epoch's last step, with the last but one
def test_sigterm_saves_at_the_step_s_end_and_a_resumed_run_ends_with_the_same_bits(whole, tmp_path, monkeypatch, step):
    with monkeypatch.context() as patch:
        during_batch(patch, step - 1, send(signal.SIGTERM))
        with pytest.raises(SystemExit) as leaving:
            run(tmp_path, *EVERYTHING, "checkpoints.every_n_steps=null")
    assert leaving.value.code == 143
    saved = next(newest_first(tmp_path / "checkpoints"))
    assert saved.name == f"step-{step:08d}.ckpt"
    run(tmp_path, *EVERYTHING, "resume=true")
    assert_same_bits(last_weights(whole), last_weights(tmp_path))


def test_the_average_and_the_momentum_encoder_are_in_the_checkpoint(whole):
    content = torch.load(whole / f"checkpoints/step-{STEPS:08d}.ckpt", weights_only=True)
    state, own = content["state_dict"], content["training_weights"]["weights"]
    assert {name.removeprefix("model.") for name in state if name.startswith("model.")} == set(own)
    assert not torch.equal(state["model.text_projection.weight"], own["text_projection.weight"])
    assert int(state["momentum.written"]) == STEPS * 16 and state["momentum.image_queue"].shape == (24, 8)


def test_a_second_signal_during_the_save_does_not_break_it(tmp_path, monkeypatch):
    plain = AtomicCheckpointIO.save_checkpoint

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        send(signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM)(None)
        plain(self, checkpoint, path, storage_options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save_checkpoint)
    during_batch(monkeypatch, 1, send(signal.SIGTERM))
    with pytest.raises(SystemExit) as leaving:
        run(tmp_path)
    assert leaving.value.code == 143 and len(weights(tmp_path / "checkpoints/step-00000002.ckpt")) > 40


def test_under_slurm_sigusr1_requeues_once_after_the_save(tmp_path, monkeypatch):
    asked = []

    def scontrol(words, **_):
        assert (tmp_path / "checkpoints/step-00000002.ckpt").is_file()
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(preemption.subprocess, "run", scontrol)
    slurm = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    during_batch(monkeypatch, 1, send(signal.SIGUSR1, signal.SIGUSR1))
    with pytest.raises(SystemExit):
        run(tmp_path)
    assert asked == [["scontrol", "requeue", "7"]]


def poison(task) -> None:
    """One NaN in one embedding of one batch."""
    model = task.model
    plain = model.encode_image

    def encode_image(pixels):
        del model.encode_image
        encoded = plain(pixels)
        encoded.embedding = encoded.embedding.index_fill(1, torch.tensor([3]), torch.nan)
        return encoded

    model.encode_image = encode_image


def test_a_step_that_is_not_finite_is_skipped_and_written_down(tmp_path, monkeypatch):
    index = []
    plain = TrainLoader.__iter__
    monkeypatch.setattr(
        TrainLoader, "__iter__", lambda self: (index.append(batch.index.tolist()) or batch for batch in plain(self))
    )
    during_batch(monkeypatch, 4, poison)
    run(tmp_path, "checkpoints.every_n_steps=1")
    lines = [json.loads(line) for line in (tmp_path / "nonfinite.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4] and lines[0]["captions"] == index[4] and lines[0]["loss"] == "nan"
    before, after, last = (weights(tmp_path / f"checkpoints/step-{step:08d}.ckpt") for step in (4, 5, 12))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(value).all() for value in last.values())


def test_too_many_in_a_row_end_the_run_and_name_the_last_good_checkpoint(tmp_path, monkeypatch):
    for number in (5, 6, 7):
        during_batch(monkeypatch, number, poison)
    with pytest.raises(ValueError, match=r"3 steps in a row, up to step 7: the last good checkpoint is .*0006.ckpt"):
        run(tmp_path, "nonfinite.max_in_a_row=3")
    for name in ("last", "best"):
        kept = weights(tmp_path / f"checkpoints/{name}.ckpt")
        assert all(torch.isfinite(value).all() for value in kept.values())


@pytest.mark.parametrize(
    "override, message",
    [
        ("data.batch_size=8", "data.batch_size was 16 and is 8 now"),
        ("seed=1", "seed was 0 and is 1 now"),
        ("model.embed_dim=16", "model.embed_dim was 8 and is 16 now"),
        ("data.source.train=48", "samples was 64 in the checkpoint and is 48 now"),
        ("optimizer.lr=0.1", "optimizer.lr was 0.001 and is 0.1 now"),
    ],
)
def test_another_run_s_checkpoint_is_refused_with_both_values(whole, tmp_path, override, message):
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(whole / "checkpoints/step-00000003.ckpt", tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=message):
        run(tmp_path, *EVERYTHING, "resume=true", override)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_what_was_saved_and_the_run_goes_on(small_disk, caplog):
    io = AtomicCheckpointIO(failures_allowed=2)
    good = small_disk / "step-00000001.ckpt"
    io.save_checkpoint({"weights": torch.ones(1000)}, good)
    before = good.read_bytes()
    too_much = {"weights": torch.ones(1_000_000)}
    for failures in (1, 2):
        io.save_checkpoint(too_much, small_disk / "step-00000002.ckpt")
        assert io.failed_in_a_row == failures and "NOT SAVED" in caplog.text
    with pytest.raises(ValueError, match="for the 3. time in a row"):
        io.save_checkpoint(too_much, small_disk / "step-00000002.ckpt")
    assert list(small_disk.iterdir()) == [good] and good.read_bytes() == before
    io.save_checkpoint({"weights": torch.ones(1000)}, small_disk / "step-00000003.ckpt")
    assert io.failed_in_a_row == 0


def test_a_run_whose_disk_is_full_for_a_while_loses_no_checkpoint(tmp_path, monkeypatch, caplog):
    plain = torch.save

    def save(content, file):
        if content["global_step"] in (6, 8):
            file.write(b"a part")
            raise OSError(28, "No space left on device")
        plain(content, file)

    monkeypatch.setattr(torch, "save", save)
    result = run(tmp_path)
    saved = [int(path.stem[5:]) for path in newest_first(tmp_path / "checkpoints")]
    assert saved == [12, 9, 4, 3] and result["step"] == 12 and caplog.text.count("NOT SAVED") == 2
    assert torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)["global_step"] in (4, 12)


SIGNALLED = """
import os, signal, sys
from vlretrieval.commands.train import main
from vlretrieval.training.task import RetrievalTask
plain = RetrievalTask.training_step
def training_step(self, batch, batch_idx):
    if self._batches == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return plain(self, batch, batch_idx)
if os.environ["RANK"] == os.environ.get("SIGNALLED_RANK"):
    RetrievalTask.training_step = training_step
main()
"""


def two_ranks(folder: Path, port: int, *overrides: str, signalled: int = -1) -> list[int]:
    """Starts two processes as torchrun does; their exit statuses."""
    words = [*TINY, f"output_dir={folder}", "trainer=ddp", "trainer.devices=2", "loss.matching_start=0.5", *overrides]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"TORCHELASTIC_RUN_ID": "test", "GLOO_SOCKET_IFNAME": "lo", "SIGNALLED_RANK": str(signalled)}
    shared |= {"GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SIGNALLED, *words],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        return [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_either_of_two_ranks_ends_both_and_resumes_to_the_same_bits(tmp_path, told):
    port = 29610 + 10 * told
    assert two_ranks(tmp_path / "whole", port) == [0, 0]
    assert two_ranks(tmp_path / "told", port + 1, signalled=told) == [143, 143]
    assert next(newest_first(tmp_path / "told/checkpoints")).name == "step-00000005.ckpt"
    assert two_ranks(tmp_path / "told", port + 2, "resume=true") == [0, 0]
    assert_same_bits(last_weights(tmp_path / "whole"), last_weights(tmp_path / "told"))


def test_frozen_config_key_reaches_the_run(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run(tmp_path, "freeze=[image_encoder]", "trainer.max_epochs=1", "checkpoints.every_n_steps=1")
    first, last = (weights(tmp_path / f"checkpoints/step-{step:08d}.ckpt") for step in (1, 4))
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {name for name in first if name.startswith("model.image_encoder.")}


def test_a_run_broken_off_at_an_epoch_s_end_and_again_in_the_next_one_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    """The first time between the save of an epoch's last step and that of its end; Lightning miscounts epochs there."""
    words = [*EVERYTHING, "checkpoints.every_n_steps=2"]
    run(tmp_path / "whole", *words)
    save = AtomicCheckpointIO.save_checkpoint

    class BrokenOff(BaseException):
        pass

    def broken_off(step: int, times: int) -> None:
        seen = []

        def limited(self, checkpoint, path, **more):
            seen.extend([path] if f"step-{step:08d}" in str(path) else [])
            if len(seen) == times:
                raise BrokenOff
            return save(self, checkpoint, path, **more)

        monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", limited)
        with pytest.raises(BrokenOff):
            run(tmp_path / "broken", *words, "resume=true")

    broken_off(4, times=2)
    broken_off(8, times=1)
    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save)
    run(tmp_path / "broken", *words, "resume=true")
    assert_same_bits(last_weights(tmp_path / "whole"), last_weights(tmp_path / "broken"))
