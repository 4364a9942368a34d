"""Weights to start from: an exported folder, a checkpoint, a state dict, or some parts of one. Plain tensors only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

WRAPPERS = ("_orig_mod.", "module.")  # what torch.compile and DDP put into names


def warm_start(model: nn.Module, path: str | Path, parts: Sequence[str] | None = None, *, strict: bool = True) -> None:
    """Copies weights from ``path`` into ``model``.

    Args:
        path: an exported folder, or a file: ``.ckpt``, ``.safetensors``, or a state dict of ``torch.save``.
        parts: which, by name ("image_encoder", "image_projection"); None: all.
        strict: refuse where anything of those parts is missing, left over or of another shape; else say so and go on.

    Raises:
        ValueError: listing everything that does not fit; or for a file that cannot be read safely.
    """
    weights = plain_names(read_weights(Path(path)))
    own = model.state_dict()
    for part in parts or ():
        known = sorted({name.split(".")[0] for name in own})
        if not any(_within(name, part) for name in own):
            raise ValueError(f"init_parts: the model has no part {part!r}; it has {', '.join(known)}")
        if not any(_within(name, part) for name in weights):
            there = ", ".join(sorted({name.split(".")[0] for name in weights})[:12])
            raise ValueError(f"init_parts: {path} has no part {part!r}; it has {there}")

    def wanted(name: str) -> bool:
        return parts is None or any(_within(name, part) for part in parts)

    missing = [name for name in own if wanted(name) and name not in weights]
    left_over = [name for name in weights if wanted(name) and name not in own]
    fitting = {name: value for name, value in weights.items() if wanted(name) and name in own}
    reshaped = [
        f"{name} {tuple(value.shape)} for {tuple(own[name].shape)}"
        for name, value in fitting.items()
        if value.shape != own[name].shape
    ]
    said = [
        f"{kind}: {', '.join(names)}"
        for kind, names in (("missing", missing), ("left over", left_over), ("of another shape", reshaped))
        if names
    ]
    if said and strict:
        raise ValueError(f"{path} does not fit the model; {'; '.join(said)}. init_strict=false takes what fits")
    for line in said:
        log.warning("%s: %s", path, line)
    taken = {name: value for name, value in fitting.items() if value.shape == own[name].shape}
    if not taken:
        raise ValueError(f"{path} holds nothing that fits the model: names like {', '.join(list(weights)[:3])}")
    model.load_state_dict(taken, strict=False)
    log.info("%d of %d weights start from %s", len(taken), len(own), path)


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def plain_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as the bare model knows them: without what wrappers, and a training module around it, put in."""
    plain = {}
    for name, value in weights.items():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        plain[name] = value
    if any(name.startswith("model.") for name in plain):  # beside it stand a momentum encoder's, say
        plain = {n.removeprefix("model."): value for n, value in plain.items() if n.startswith("model.")}
    return plain


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a folder or file, by name.

    Raises:
        ValueError: naming the path.
    """
    if "://" in str(path):
        raise ValueError(f"init_from={path} is an address; download it first and give the local file")
    if path.is_dir():
        inside = path / "model.safetensors"
        if not inside.is_file():
            raise ValueError(f"init_from={path} is a folder without model.safetensors; give an exported folder or file")
        path = inside
    if not path.is_file():
        raise ValueError(f"init_from={path}: no such file or folder")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
    content = read_plain(path)
    state = content.get("state_dict", content)
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} holds no state dict of tensors")
    return state


def read_plain(path: Path) -> dict[str, Any]:
    """What ``torch.save`` wrote, tensors and plain data only: anything else could be code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling errors come in many classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read safely: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not weights")
    return content
