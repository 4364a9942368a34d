"""Fully sharded training (FSDP2) as a user starts it, on two CPU processes; its arithmetic on what is not sharded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from tiny_training import STEPS, TINY, assert_same_bits, config, last_weights, run, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import fake_pg

from vlretrieval.deploy.checkpoint import load_checkpoint
from vlretrieval.training import sharding
from vlretrieval.training.checkpoint_io import AtomicCheckpointIO
from vlretrieval.training.fit import build_trainer, write_features
from vlretrieval.training.sharding import clip_gradients, total_norm
from vlretrieval.training.watch.sanity import without_gradient

ROOT = Path(__file__).parent.parent
SETTINGS = ["model.image_encoder.dropout=0", "ema_decay=0.9", "loss=momentum", "loss.momentum.queue=21"]


def sharded(folder: Path, *overrides: str, settings: list[str] = SETTINGS) -> None:
    """A run on two processes that Lightning's launcher starts."""
    words = [*TINY, *settings, f"output_dir={folder}", "trainer=fsdp2", "trainer.devices=2", *overrides]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts/train.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "returned a view tensor" not in done.stderr


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    sharded(folder)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run(folder, *SETTINGS)
    return folder


def assert_close(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == got.keys() and len(expected) > 80  # the momentum encoder and its queue too
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
def test_its_checkpoint_is_that_of_one_process_and_opens_there(one, two):
    assert_close(last_weights(one), last_weights(two))
    path = two / f"checkpoints/step-{STEPS:08d}.ckpt"
    content = torch.load(path, weights_only=True)
    alone = torch.load(one / path.relative_to(two), weights_only=True)
    assert {type(t) for t in content["state_dict"].values()} == {torch.Tensor}
    moments, expected = (found["optimizer_states"][0]["state"] for found in (content, alone))
    assert moments.keys() == expected.keys() and len(moments) > 40
    for number, entries in expected.items():
        torch.testing.assert_close(moments[number]["exp_avg"], entries["exp_avg"], rtol=1e-3, atol=1e-4)
    for name, value in alone["training_weights"]["weights"].items():
        torch.testing.assert_close(content["training_weights"]["weights"][name], value, rtol=1e-3, atol=1e-4, msg=name)
    for name, value in load_checkpoint(path).build().state_dict().items():
        assert torch.equal(value, content["state_dict"][f"model.{name}"])


@pytest.mark.slow
def test_it_resumes_to_the_same_bits_and_one_process_takes_over(one, two, tmp_path):
    for folder in (tmp_path / "again", tmp_path / "alone"):
        (folder / "checkpoints").mkdir(parents=True)
        shutil.copy(two / "checkpoints/step-00000003.ckpt", folder / "checkpoints")
    sharded(tmp_path / "again", "resume=true")
    assert_same_bits(last_weights(two), last_weights(tmp_path / "again"))
    run(tmp_path / "alone", *SETTINGS, "resume=true")
    assert_close(last_weights(two), last_weights(tmp_path / "alone"))


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_of_one_process(one, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(one / "checkpoints/step-00000009.ckpt", tmp_path / "checkpoints")
    sharded(tmp_path, "resume=true")
    assert_close(last_weights(one), last_weights(tmp_path))
    assert weights(tmp_path / "checkpoints/last.ckpt").keys() == last_weights(one).keys()


@pytest.mark.slow
def test_towers_with_depthwise_convolutions_and_stored_features_train_as_on_one_process(tmp_path):
    """Their weights are in another memory format; stored features enter the encoder by another door than pixels."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    torch.save(timm.create_model("test_efficientnet", num_classes=0).state_dict(), tmp_path / "tower.pt")
    words = [
        "model/image_encoder=timm",
        "model.image_encoder.base.name=test_efficientnet",
        "model.image_encoder.depth=1",
    ]
    words += [f"model.image_encoder.base.pretrained={tmp_path}/tower.pt", "freeze=[image_encoder.base]"]
    words += ["model.image_encoder.dropout=0", f"data.image_features={tmp_path}/features"]
    write_features(config(tmp_path / "written", *words), print)
    run(tmp_path / "one", *words)
    sharded(tmp_path / "two", *words, settings=[])
    expected, got = last_weights(tmp_path / "one"), last_weights(tmp_path / "two")
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("most", [0.5, 1000.0])
def test_of_plain_gradients_norm_and_clip_are_torch_s(most):
    parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.tensor(2.0))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for twin, parameter in zip(twins, parameters, strict=True):
        twin.grad = parameter.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(twins, most)
    assert torch.equal(total_norm(p.grad for p in parameters), norm)
    clip_gradients(parameters, most)
    for twin, parameter in zip(twins, parameters, strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad)
    clip_gradients(parameters, 0.01, "value")
    assert all(p.grad.abs().max() <= 0.01 for p in parameters)


@pytest.fixture
def second_of_two():
    """A process group whose other process is only pretended."""
    store = fake_pg.FakeStore()
    dist.init_process_group("fake", rank=1, world_size=2, store=store)
    yield
    dist.destroy_process_group()


def test_a_rank_that_holds_no_row_of_a_weight_looks_for_its_gradient_too(second_of_two):
    model = torch.nn.Linear(3, 1)  # its one row is the first rank's
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        assert parameter.to_local().numel() == 0
    without_gradient(torch.nn.Sequential(model))


def test_without_gradients_the_norm_is_nought():
    assert total_norm([]).item() == 0.0


def test_an_older_torch_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(sharding.torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ValueError, match=r"needs torch 2.14 or newer, and this is 2.9.1\+cpu; take trainer=ddp"):
        sharding.Sharded()


def test_what_does_not_go_with_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="compile=true does not go with trainer=fsdp2; set compile=false"):
        build_trainer(config(tmp_path, "trainer=fsdp2", "trainer.devices=1", "compile=true"), [], AtomicCheckpointIO())
    with pytest.raises(ValueError, match="does not support .*precision='16-mixed'.* 32-true, bf16-mixed"):
        pl.Trainer(strategy=sharding.Sharded(), precision="16-mixed", accelerator="cpu")
