"""A training checkpoint, opened by what it says of itself: config, tokenizer, weights. Runs nothing that lies in it."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlretrieval.data.tokenizers import Tokenizer, tokenizer_from_dict
from vlretrieval.deploy.build import build_model

KEY = "vlretrieval"  # the block that training adds to Lightning's own
MODEL_PREFIX = "model."
WRAPPERS = ("_orig_mod.", "module.")  # torch.compile's and DistributedDataParallel's


@dataclass
class Checkpoint:
    """What a ``.ckpt`` of ours holds.

    Attributes:
        path: where it lies.
        version: of vlretrieval that wrote it.
        step: optimizer steps taken.
        config: the whole resolved config of the run, plain data.
        tokenizer: as it was in training, fitted.
        weights: the model's state dict, on the CPU.
    """

    path: Path
    version: str
    step: int
    config: dict[str, Any]
    tokenizer: Tokenizer
    weights: dict[str, Tensor]

    def build(self) -> nn.Module:
        """The model with these weights, on the CPU, in evaluation mode."""
        model = build_model(self.config["model"], str(self.path))
        load_weights(model, self.weights, str(self.path))
        return model.eval()


def load_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Read a checkpoint that ``vlretrieval-train`` wrote.

    Raises:
        ValueError: one line naming the file: missing, not a checkpoint, damaged, or not one of ours.
    """
    path = checked_path(path)
    content = read_tensors(path)
    ours = content.get(KEY)
    if not isinstance(ours, dict) or "state_dict" not in content:
        found = ", ".join(sorted(map(str, content))[:8]) or "nothing"
        raise ValueError(f"{path} is a checkpoint of something else: it holds {found}, but no {KEY!r}")
    missing = [name for name in ("version", "config", "tokenizer", "step") if name not in ours]
    if missing or not isinstance(ours["config"], dict) or "model" not in ours["config"]:
        raise ValueError(f"{path} lacks {', '.join(missing) or 'a model config'}; it was not written by this project")
    return Checkpoint(
        path=path,
        version=str(ours["version"]),
        step=int(ours["step"]),
        config=ours["config"],
        tokenizer=tokenizer_from_dict(ours["tokenizer"]),
        weights=model_weights(content["state_dict"]),
    )


def checked_path(path: str | PathLike[str]) -> Path:
    """A local, whole file of torch's zip kind.

    The zip's own checksums are compared: torch writes them and never looks, and a flipped bit would load silently.
    """
    if "://" in str(path):
        raise ValueError(f"checkpoint={path} is an address; download it first and give the local file")
    path = Path(path)
    if path.is_dir():
        inside = sorted(path.rglob("*.ckpt"))
        hint = f"; did you mean {inside[0]}?" if inside else " and holds no .ckpt"
        raise ValueError(f"checkpoint={path} is a folder{hint}")
    if not path.is_file():
        raise ValueError(f"checkpoint={path}: no such file")
    if not zipfile.is_zipfile(path):
        size = path.stat().st_size
        raise ValueError(f"{path} is not a checkpoint ({size} bytes, not a whole file of torch.save)")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path} is a damaged checkpoint: {error}") from None
    if broken is not None:
        raise ValueError(f"{path} is a damaged checkpoint: {broken} in it fails its checksum; use an earlier one")
    return path


def read_tensors(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, tensors on the CPU. Only plain data and tensors are read, never other objects."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling errors come in many classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is not a checkpoint that can be read safely: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a checkpoint")
    return content


def model_weights(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The part of a training module's state that is the model's, under the names the bare model knows."""
    weights = {}
    for name, value in state_dict.items():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if name.startswith(MODEL_PREFIX):
            weights[name.removeprefix(MODEL_PREFIX)] = value
    return weights


def weights_hash(weights: dict[str, Tensor]) -> str:
    """First 16 hex digits of the sha256 over names, shapes and bits: equal only for equal weights."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Load every weight, or say which ones do not fit. Nothing keeps its random start in silence.

    Raises:
        ValueError: names missing, surplus, or of another shape.
    """
    own = model.state_dict()
    missing, surplus = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape]
    if missing or surplus or shapes:
        kinds = (("missing", missing), ("surplus", surplus), ("of another shape", sorted(shapes)))
        said = "; ".join(f"{len(n)} {kind} ({n[0]}{', ...' if n[1:] else ''})" for kind, n in kinds if n)
        raise ValueError(f"{source}: the weights do not fit the model its config describes: {said}")
    model.load_state_dict(weights, strict=True)
