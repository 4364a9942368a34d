"""Which arithmetic a run is computed in, and that similarities and losses are float32 in any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from tiny_training import run, tiny_batch, tiny_model, weights

from vlretrieval import losses
from vlretrieval.training import precision
from vlretrieval.training.objective import Objective
from vlretrieval.training.optimization import adamw
from vlretrieval.training.precision import choose_precision, device_of, full_float32
from vlretrieval.training.task import RetrievalTask


@pytest.mark.parametrize(
    "device, units, chosen",
    [("cuda", True, "bf16-mixed"), ("cuda", False, "16-mixed"), ("cpu", True, "32-true"), ("mps", True, "32-true")],
)
def test_auto_is_left_to_the_device(monkeypatch, device, units, chosen):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: units or including_emulation)
    assert choose_precision("auto", device) == chosen


@pytest.mark.parametrize("asked", ["32-true", "bf16-mixed", 32, "16-mixed"])
def test_what_is_asked_for_by_name_is_taken(asked):
    assert choose_precision(asked, "cuda") == asked


@pytest.mark.parametrize("asked", ["16-mixed", "16-true", 16, "16"])
def test_float16_on_a_processor_is_refused(asked):
    with pytest.raises(ValueError, match=f"precision={asked} needs a GPU; on a CPU take auto, 32-true or bf16-mixed"):
        choose_precision(asked, "cpu")


@pytest.mark.parametrize("units", [True, False])
def test_bfloat16_without_units_is_warned_of(monkeypatch, caplog, units):
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: units)
    assert choose_precision("bf16-mixed", "cpu") == "bf16-mixed"
    assert ("about ten times as long" in caplog.text) == (not units)


@pytest.mark.parametrize(
    "asked, cuda, mps, device",
    [
        ("auto", True, False, "cuda"),
        ("gpu", True, True, "cuda"),
        ("auto", False, True, "mps"),
        ("auto", False, False, "cpu"),
        ("cpu", True, True, "cpu"),
    ],
)
def test_the_device_is_the_one_that_lightning_will_take(monkeypatch, asked, cuda, mps, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert device_of(asked) == device


def test_under_autocast_similarities_and_losses_are_those_of_float32():
    """Embeddings come from bfloat16 encoders; what is computed of them does not."""
    task = RetrievalTask(tiny_model(), Objective(losses.info_nce), None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pairs = task.encode(tiny_batch())
        assert pairs.image.embedding.dtype == torch.float32
        loss, parts = task.objective(task.model, pairs)
        with full_float32(torch.device("cpu")):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
        assert pairs.image.tokens.dtype == torch.bfloat16  # the encoders were in it
        assert task.model.match(pairs.image, pairs.text).dtype == torch.float32
    outside = task.objective._contrastive(task.model, pairs)
    assert loss.dtype == torch.float32 and parts["contrastive"].item() == outside.item()


def test_a_run_in_bfloat16_clips_steps_and_keeps_float32_weights(tmp_path: Path):
    run(tmp_path, "trainer.precision=bf16-mixed", "trainer.max_epochs=1", "checkpoints.every_n_steps=null")
    kept = weights(tmp_path / "checkpoints/last.ckpt")
    assert {value.dtype for value in kept.values()} == {torch.float32}
    assert all(torch.isfinite(value).all() for value in kept.values())


def test_with_a_loss_scaler_gradients_are_clipped_as_without():
    """What Lightning does around a float16 step, with a scaler on the CPU: unscale, clip, step."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    models = [tiny_model(0, 0), tiny_model(0, 0)]
    for model, scale in zip(models, (1.0, 2.0**10), strict=True):
        optimizer = adamw(model, lr=0.01)
        task = RetrievalTask(model, Objective(losses.info_nce, matching_weight=0.0), None)
        (task.objective(model, task.encode(tiny_batch()))[0] * scale).backward()
        if scale == 1.0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            continue
        plugin.scaler.scale(torch.ones(()))  # the scaler sets itself up with the first loss
        plugin.scaler.unscale_(optimizer)
        plugin.clip_gradients(optimizer, 0.5)
        plugin.scaler.step(optimizer)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_run_in_float16_on_a_processor_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="precision=16-mixed needs a GPU"):
        run(tmp_path, "trainer.precision=16-mixed")
