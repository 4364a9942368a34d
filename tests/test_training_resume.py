"""A run that was broken off and resumed ends with the very same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_training import assert_same_bits, last_weights, run

from vlretrieval.training.checkpoint_io import AtomicCheckpointIO, checkpoint_fault, newest_first
from vlretrieval.training.resume import resume_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


@pytest.mark.parametrize("step", [3, 4, 9])  # in mid-epoch, at an epoch's end, in mid-epoch later
def test_a_resumed_run_ends_with_the_same_weights_to_the_last_bit(whole, tmp_path, step):
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(whole / f"checkpoints/step-{step:08d}.ckpt", tmp_path / "checkpoints")
    run(tmp_path, "resume=true")
    assert_same_bits(last_weights(whole), last_weights(tmp_path))


def test_a_torn_checkpoint_is_named_and_the_one_before_is_taken(whole, tmp_path, caplog):
    for step in (3, 4):
        shutil.copy(whole / f"checkpoints/step-{step:08d}.ckpt", tmp_path)
    newest = tmp_path / "step-00000004.ckpt"
    newest.write_bytes(newest.read_bytes()[:-5000])
    assert resume_path(tmp_path).endswith("step-00000003.ckpt")
    assert "step-00000004.ckpt: not a whole checkpoint" in caplog.text


def test_a_flipped_bit_is_found(whole, tmp_path):
    good = (whole / "checkpoints/step-00000003.ckpt").read_bytes()
    assert checkpoint_fault(whole / "checkpoints/step-00000003.ckpt") is None
    at = good.index(b"model.log_logit_scale") // 2 + len(good) // 2  # amid the tensors
    (tmp_path / "flipped.ckpt").write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    assert "does not match its checksum" in checkpoint_fault(tmp_path / "flipped.ckpt")


@pytest.mark.parametrize("content, fault", [(b"", "empty"), (b"garbage" * 99, "not a whole checkpoint")])
def test_no_whole_checkpoint_is_an_error_that_says_what_to_do(tmp_path, content, fault, caplog):
    (tmp_path / "step-00000001.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match="holds no whole checkpoint; start anew with another name="):
        resume_path(tmp_path)
    assert fault in caplog.text


def test_a_failed_save_keeps_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    saver = AtomicCheckpointIO()
    saver.save_checkpoint({"good": torch.ones(3)}, path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match="No space left on device; make room and go on with resume=true"):
        saver.save_checkpoint({"bad": torch.zeros(3)}, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_newest_is_by_step_and_not_by_clock(tmp_path):
    for step in (20, 3, 100):
        (tmp_path / f"step-{step:08d}.ckpt").touch()
    assert [p.name for p in newest_first(tmp_path)] == [f"step-{s:08d}.ckpt" for s in (100, 20, 3)]
