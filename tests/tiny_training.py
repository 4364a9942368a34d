"""A training run of seconds, a model of 16 wide, and a batch: for the tests of training."""

from __future__ import annotations

from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from vlretrieval.data.datasets import Batch
from vlretrieval.model.crossmodal import CrossModal
from vlretrieval.model.encoders import ImageEncoder, TextEncoder
from vlretrieval.model.retrieval_model import RetrievalModel

CONF = Path(__file__).parent.parent / "conf"
STEPS = 12  # of the run below: 3 epochs of 4
TINY = [
    "name=tiny",
    "data.source.train=64",
    "data.source.val=8",
    "data.source.test=8",
    "data.source.image_size=32",
    "data.batch_size=16",
    "data.captions_per_image=one",
    "model.image_encoder.image_size=32",
    "model.image_encoder.dim=16",
    "model.image_encoder.depth=1",
    "model.image_encoder.dropout=0.1",
    "model.text_encoder.dim=16",
    "model.text_encoder.depth=1",
    "model.embed_dim=8",
    "validation.settings.negatives_per_kind=5",
    "progress_bar=false",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=3",
    "checkpoints.every_n_steps=3",
    "checkpoints.keep=99",
]


def config(folder: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[*TINY, f"output_dir={folder}", *overrides])


def run(folder: Path, *overrides: str) -> dict:
    from vlretrieval.training.fit import train

    return train(config(folder, *overrides))


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def last_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the run's last step."""
    return weights(folder / f"checkpoints/step-{STEPS:08d}.ckpt")


def assert_same_bits(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == got.keys() and len(expected) > 40
    for name, value in expected.items():
        assert torch.equal(value, got[name]), name


def tiny_model(text_to_image=2, image_to_text=2, joint=0, dropout=0.0, patch_dropout=0.0, **model):
    torch.manual_seed(0)
    return RetrievalModel(
        ImageEncoder(32, 8, 16, 1, 2, dropout=dropout, patch_dropout=patch_dropout),
        TextEncoder(50, 16, 16, 1, 2, dropout=dropout),
        CrossModal(16, 16, text_to_image, image_to_text, joint, text_self_heads=2, dropout=dropout),
        embed_dim=8,
        **model,
    )


def tiny_batch(rows=8, negatives=2, images=None, short=True):
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 13, (rows,), generator=g)
    mask = torch.arange(12)[None] < lengths[:, None]
    wrong = torch.randint(1, 50, (rows, negatives, 12), generator=g)
    wrong_mask = (torch.arange(12) < torch.randint(3, 13, (rows, negatives, 1), generator=g)).clone()
    if short:
        wrong_mask[0, -1] = False  # one caption has a negative fewer
    ids = torch.arange(rows) if images is None else torch.as_tensor(images)
    return Batch(
        torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8, generator=g),
        torch.randint(1, 50, (rows, 12), generator=g),
        mask,
        ids,
        torch.arange(rows),
        torch.arange(rows),
        wrong,
        wrong_mask,
    )
