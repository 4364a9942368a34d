"""The formats of an export: what each can hold, how it is written, and how it is opened as its users will."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from vlretrieval.data.tokenizers import Tokenizer
from vlretrieval.deploy.export_graphs import graphs_of
from vlretrieval.deploy.export_huggingface import OpenedClip, clip_refusal, write_clip_folder
from vlretrieval.deploy.export_onnx import check_installed, write_onnx
from vlretrieval.deploy.export_open_clip import OpenClipParts, OpenedOpenClip, write_open_clip_folder
from vlretrieval.deploy.export_parts import parts_of
from vlretrieval.deploy.export_precision import PRECISIONS, stored
from vlretrieval.deploy.export_torch import write_torch
from vlretrieval.deploy.graph_model import interface_of
from vlretrieval.deploy.loaded import CONFIG, TOKENIZER, WEIGHTS, open_folder, write_json
from vlretrieval.model.retrieval_model import RetrievalModel


@dataclass(frozen=True)
class Ready:
    """What is exported.

    Attributes:
        model: in evaluation mode, on the CPU; without cross-modal heads where they are left out.
        tokenizer: the model's own.
        config: of the exported folder: model, preprocess, rerank, ...
        precision: one of those that the format holds.
    """

    model: RetrievalModel
    tokenizer: Tokenizer
    config: dict[str, Any]
    precision: str

    @property
    def image_size(self) -> int:
        return int(self.config["preprocess"]["image_size"])


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        precisions: those that it holds; ``why_not`` says of the others why.
        check: raises a ValueError with the reason if it cannot hold a model, before anything is written.
        write: writes the files into a folder, and returns what kind of export it is (see ``loaded.OURS, THEIRS``).
    """

    name: str
    precisions: tuple[str, ...]
    why_not: str
    check: Callable[[Ready], None]
    write: Callable[[Path, Ready], str]


def check_precision(format: str, precision: str) -> Format:
    """The format by its name, if it holds the precision.

    Raises:
        ValueError: an unknown name, or the reason why the two do not go together.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format} is not known; choose {', '.join(FORMATS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision} is not known; choose {', '.join(PRECISIONS)}")
    found = FORMATS[format]
    if precision not in found.precisions:
        raise ValueError(
            f"format={format} cannot hold precision={precision}: {found.why_not}; it holds "
            f"{', '.join(found.precisions)}"
        )
    return found


def opened(folder: Path, kind: str) -> Any:
    """The model in a folder just written, opened as its users will."""
    theirs = {"open_clip": OpenedOpenClip, "clip": OpenedClip}
    return theirs[kind](folder) if kind in theirs else open_folder(folder, kind).model


def write_ours(folder: Path, ready: Ready, **more: Any) -> None:
    """config.json and tokenizer.json, which our own loader reads."""
    write_json(folder / CONFIG, ready.config | more)
    write_json(folder / TOKENIZER, ready.tokenizer.to_dict())


def write_folder(folder: Path, ready: Ready, **more: Any) -> str:
    """Weights as safetensors; fp16 and bf16 are read back into float32."""
    save_file(stored(ready.model.state_dict(), ready.precision), folder / WEIGHTS)
    write_ours(folder, ready, **more)
    return "folder"


def write_graphs_onnx(folder: Path, ready: Ready) -> str:
    graphs = graphs_of(ready.model, ready.image_size)
    write_onnx(folder, graphs, ready.tokenizer.context_length, ready.precision)
    write_ours(folder, ready, interface=interface_of(ready.model))
    return "onnx"


def write_graphs_torch(folder: Path, ready: Ready) -> str:
    graphs = graphs_of(ready.model, ready.image_size)
    write_torch(folder, graphs, ready.tokenizer.context_length, ready.precision)
    write_ours(folder, ready, interface=interface_of(ready.model))
    return "torch"


def write_open_clip(folder: Path, ready: Ready) -> str:
    parts = open_clip_parts(ready)
    write_open_clip_folder(folder, parts.model_cfg, parts.preprocess_cfg, parts.state_dict, ready.precision)
    return "open_clip"


def open_clip_parts(ready: Ready) -> OpenClipParts:
    """The model as open_clip describes it.

    Raises:
        ValueError: why it cannot be described so.
    """
    return parts_of(ready.model, ready.tokenizer, ready.config["preprocess"])


def write_huggingface(folder: Path, ready: Ready) -> str:
    """A CLIPModel where the architecture is CLIP's, else our own folder, which needs no remote code either."""
    parts, reason = clip_parts(ready)
    if parts is not None:
        write_clip_folder(folder, parts, ready.tokenizer, ready.precision)
        return "clip"
    return write_folder(
        folder, ready, model_type="vlretrieval", architectures=["RetrievalModel"], not_a_clip_model=reason
    )


def clip_parts(ready: Ready) -> tuple[OpenClipParts | None, str]:
    """The parts of a model that transformers' CLIPModel can hold; or None, and why not."""
    try:
        parts = open_clip_parts(ready)
    except ValueError as error:
        return None, str(error).removeprefix("format=open_clip: ")
    reason = clip_refusal(parts, ready.tokenizer)
    return (None, reason) if reason else (parts, "")


def nothing_to_check(ready: Ready) -> None:
    """It holds whatever our models are."""


def check_huggingface(ready: Ready) -> None:
    if clip_parts(ready)[0] is not None and importlib.util.find_spec("transformers") is None:
        raise ValueError("format=huggingface needs transformers; run: pip install 'vlretrieval[huggingface]'")


def check_onnx(ready: Ready) -> None:
    check_installed()
    graphs_of(ready.model, ready.image_size)


def check_torch(ready: Ready) -> None:
    graphs_of(ready.model, ready.image_size)


def check_open_clip(ready: Ready) -> None:
    open_clip_parts(ready)


FLOATS = ("fp32", "fp16", "bf16")
ONLY_ONNX = "its readers know no 8-bit weights with scales; take format=onnx"
FORMATS = {
    format.name: format
    for format in (
        Format("folder", FLOATS, ONLY_ONNX, nothing_to_check, write_folder),
        Format("onnx", PRECISIONS, "", check_onnx, write_graphs_onnx),
        Format("torch", FLOATS, ONLY_ONNX, check_torch, write_graphs_torch),
        Format("open_clip", FLOATS, ONLY_ONNX, check_open_clip, write_open_clip),
        Format("huggingface", FLOATS, ONLY_ONNX, check_huggingface, write_huggingface),
    )
}
