"""Weights to start from: an exported folder, a checkpoint, a state dict, or some parts of one. Plain tensors only."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlretrieval.data.tokenizers import Tokenizer, tokenizer_from_dict
from vlretrieval.deploy.loaded import MANIFEST, check_manifest
from vlretrieval.model.positions import Positions
from vlretrieval.training.checkpoint_io import checkpoint_fault

log = logging.getLogger(__name__)

WRAPPERS = ("_orig_mod.", "module.")  # what torch.compile and DDP put into names
TOKEN_EMBEDDING = "text_encoder.embedding.weight"  # its rows are words of one tokenizer


def warm_start(
    model: nn.Module, path: str | Path, parts: Sequence[str] | None = None, *, strict: bool = True, words: bool = True
) -> None:
    """Copies weights from ``path`` into ``model``; learned positions of pictures of another size are interpolated.

    Args:
        path: an exported folder, or a file: ``.ckpt``, ``.safetensors``, or a state dict of ``torch.save``.
        parts: which, by name ("image_encoder", "image_projection"); None: all.
        strict: refuse where anything of those parts is missing, left over or of another shape; else say so and go on.
        words: whether its token ids mean the same words (:func:`same_words`); False leaves the token embedding out.

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
        return (words or name != TOKEN_EMBEDDING) and (parts is None or any(_within(name, part) for part in parts))

    missing = [name for name in own if wanted(name) and name not in weights]
    left_over = [name for name in weights if wanted(name) and name not in own]
    fitting = {
        name: _positions(model, name, value, own[name])
        for name, value in weights.items()
        if wanted(name) and name in own
    }
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


def _positions(model: nn.Module, name: str, value: Tensor, own: Tensor) -> Tensor:
    """A weight, or if it is positions for another number of places, those for the model's own."""
    module = model.get_submodule(name.rpartition(".")[0])
    if value.shape == own.shape or not isinstance(module, Positions):
        return value
    fitted = module.fitted(value)
    if fitted is None:
        return value
    log.info("%s: fitted from %d to %d places", name, len(value), len(own))
    return fitted


def same_words(
    tokenizer: Tokenizer, path: str | Path, parts: Sequence[str] | None = None, *, strict: bool = True
) -> tuple[Tokenizer, bool]:
    """The tokenizer that goes with weights from ``path``, and whether their token ids mean the same words as its own.

    A trainable tokenizer with the source's settings that is not fitted yet is replaced by the source's: fitted anew on
    other captions, row i of the token embedding would stand for another word.

    Args:
        tokenizer: of this run.
        parts: as for :func:`warm_start`; without the token embedding among them any tokenizer will do.
        strict: refuse another tokenizer; else say so, and the embedding is to be left out.

    Raises:
        ValueError: naming what differs.
    """
    if parts is not None and not any(_within(TOKEN_EMBEDDING, part) for part in parts):
        return tokenizer, True
    theirs, ours = read_tokenizer(Path(path)), tokenizer.to_dict()
    if theirs is None:
        log.warning("%s holds no tokenizer: that its token embedding knows the same words is taken on trust", path)
        return tokenizer, True
    free = {"context_length"} if tokenizer.fitted else {"context_length", "model"}
    differing = [key for key in theirs.keys() | ours.keys() if key not in free and ours.get(key) != theirs.get(key)]
    if not differing:
        if tokenizer.fitted:
            return tokenizer, True
        log.info("the tokenizer is that of %s", path)
        return tokenizer_from_dict({**theirs, "context_length": ours["context_length"]}), True
    said = ", ".join(
        f"tokenizer.{key} is {ours.get(key)} here and {theirs.get(key)} there"
        if isinstance(theirs.get(key), str | int | float)
        else "the vocabularies differ"
        for key in sorted(differing)
    )
    if strict:
        raise ValueError(
            f"{path} was trained with another tokenizer ({said}): the rows of its token embedding mean other words. "
            "Set the tokenizer as it was there, leave text_encoder out of init_parts, or start that embedding anew "
            "with init_strict=false"
        )
    log.warning("%s: another tokenizer (%s); %s starts anew", path, said, TOKEN_EMBEDDING)
    return tokenizer, False


def read_tokenizer(path: Path) -> dict[str, Any] | None:
    """The tokenizer beside or inside weights, as plain data; None where there is none."""
    if path.is_dir():
        file = path / "tokenizer.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if path.suffix == ".safetensors":
        file = path.with_name("tokenizer.json")
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if not path.is_file():
        raise ValueError(f"init_from={path}: no such file or folder")
    ours = read_plain(path).get("vlretrieval")
    return ours.get("tokenizer") if isinstance(ours, dict) else None


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
        if (path / MANIFEST).is_file():
            check_manifest(path)
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
    fault = checkpoint_fault(path) if zipfile.is_zipfile(path) else None
    if fault:  # torch.load looks at no checksum
        raise ValueError(f"init_from={path}: {fault}")
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
