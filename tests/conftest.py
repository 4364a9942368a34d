"""What several test files share: no network, one thread, a tiny checkpoint and its export."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Time limits on single examples only find out that the machine is busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# One thread a test: the machine may have few cores, and bits are equal only for equal thread counts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

CAPTIONS = ["a red circle above a blue square", "a green star", "a small blue square to the left of a red circle"]


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Any attempt to reach beyond this machine fails the test that made it."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise AssertionError(f"a test tried to reach {address}")
        return connect(self, address)

    socket.socket.connect = guarded  # type: ignore[method-assign, assignment]
    yield
    socket.socket.connect = connect  # type: ignore[method-assign]


def tiny_config(text_to_image: int = 2, image_to_text: int = 2) -> dict[str, Any]:
    """The resolved config of a run, reduced to what a checkpoint's reader looks at. 32 px, 16 wide."""
    model = "vlretrieval.model"
    return {
        "name": "tiny",
        "heads": {"text": 2, "image": 2, "text_to_image": text_to_image, "image_to_text": image_to_text, "kv": None},
        "data": {"resize": "squash", "source": {"_target_": "vlretrieval.data.scenes.Scenes"}},
        "model": {
            "_target_": f"{model}.retrieval_model.RetrievalModel",
            "embed_dim": 8,
            "image_encoder": {
                "_target_": f"{model}.encoders.ImageEncoder",
                "image_size": 32,
                "patch_size": 8,
                "dim": 16,
                "depth": 1,
                "num_heads": 2,
            },
            "text_encoder": {
                "_target_": f"{model}.encoders.TextEncoder",
                "vocab_size": 300,
                "context_length": 24,
                "dim": 16,
                "depth": 1,
                "num_heads": 2,
            },
            "crossmodal": {
                "_target_": f"{model}.crossmodal.CrossModal",
                "text_dim": 16,
                "image_dim": 16,
                "text_to_image": text_to_image,
                "image_to_text": image_to_text,
            },
        },
    }


def save_tiny_checkpoint(
    path: Path, change: Callable[[dict[str, Any]], None] | None = None, tokenizer: Any = None, **heads: int
) -> Path:
    """A checkpoint in training's format, with random weights; ``change`` may edit its config."""
    import torch

    from vlretrieval.data.tokenizers import BpeTokenizer
    from vlretrieval.deploy.build import build_model

    config = tiny_config(**heads)
    if change is not None:
        change(config)
    torch.manual_seed(0)
    model = build_model(config["model"])
    if tokenizer is None:
        context_length = config["model"]["text_encoder"]["context_length"]
        tokenizer = BpeTokenizer(vocab_size=300, context_length=context_length).fit(CAPTIONS)
    content = {
        "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
        "global_step": 7,
        "vlretrieval": {"version": "0.0.test", "config": config, "tokenizer": tokenizer.to_dict(), "step": 7},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/tiny/checkpoints/last.ckpt of a model with both cross-modal heads."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("runs") / "tiny" / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="session")
def dual_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a plain dual encoder."""
    path = tmp_path_factory.mktemp("runs") / "dual" / "checkpoints" / "last.ckpt"
    return save_tiny_checkpoint(path, text_to_image=0, image_to_text=0)


@pytest.fixture(scope="session")
def tiny_export(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported folder of ``tiny_checkpoint``. Do not write to it."""
    from vlretrieval.deploy.export import export

    return export(tiny_checkpoint, tmp_path_factory.mktemp("exports") / "tiny")


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with five small pictures."""
    from PIL import Image, ImageDraw

    folder = tmp_path_factory.mktemp("photos")
    for number, colour in enumerate(["red", "green", "blue", "yellow", "white"]):
        picture = Image.new("RGB", (40 + number, 48), "black")
        ImageDraw.Draw(picture).ellipse((8, 8, 30, 30), fill=colour)
        picture.save(folder / f"{number}_{colour}.png")
    return folder


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process, in an empty folder: ``run_command("search", "model=x") -> (status, out, err)``."""
    import importlib
    import sys

    def run(name: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"vlretrieval-{name}", *words])
        capfd.readouterr()
        try:
            importlib.import_module(f"vlretrieval.commands.{name}").main()
            status = 0
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        out, err = capfd.readouterr()
        return status, out, err

    return run
