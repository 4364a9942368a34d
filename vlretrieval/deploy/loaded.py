"""An exported model as an object: pictures and texts in, embeddings and scores out. No Lightning, no Hydra."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps
from PIL.Image import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vlretrieval.data.images import open_image, to_rgb
from vlretrieval.data.tokenizers import Tokenizer, pad, tokenizer_from_dict
from vlretrieval.data.transforms import eval_transform
from vlretrieval.deploy.build import build_model
from vlretrieval.deploy.checkpoint import load_weights
from vlretrieval.model.encoded import Encoded
from vlretrieval.model.retrieval_model import RetrievalModel

WEIGHTS, CONFIG, TOKENIZER, MANIFEST, CARD = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "manifest.json",
    "README.md",
)
CERTIFICATE = "certificate.json"
FORMAT = 1  # of the exported folder
# What an export may be, and who opens it where that is not us.
OURS = {"folder": WEIGHTS, "onnx": "image.onnx", "torch": "image.pt2"}
THEIRS = {
    "open_clip": 'open_clip.create_model_from_pretrained("local-dir:{}")',
    "clip": 'transformers.CLIPModel.from_pretrained("{}")',
}

Picture = str | PathLike[str] | Image


class LoadedModel:
    """A retrieval model with its tokenizer and preprocessing.

    Args:
        model: in evaluation mode.
        tokenizer: fitted.
        preprocess: ``image_size`` (pixels) and ``resize`` ("squash", "crop" or "pad").
        rerank_weight: of the matching logit beside logit_scale * cosine when a shortlist is ordered; None: the
            matching logit alone.
    """

    def __init__(
        self,
        model: RetrievalModel,
        tokenizer: Tokenizer,
        preprocess: dict[str, Any],
        rerank_weight: float | None = None,
    ):
        self.rerank_weight = rerank_weight
        self.model, self.tokenizer, self.preprocess = model.eval(), tokenizer, dict(preprocess)
        self._transform = eval_transform(preprocess["image_size"], preprocess["resize"])

    @property
    def can_match(self) -> bool:
        """Whether there are cross-modal heads, and so a matching score beside the cosine."""
        return self.model.crossmodal is not None

    @property
    def device(self) -> torch.device:
        return self.model.log_logit_scale.device

    def to(self, device: str | torch.device) -> LoadedModel:
        """Move the model; what the methods return lies on the CPU all the same."""
        self.model.to(device)
        return self

    def pixels(self, images: Sequence[Picture]) -> Tensor:
        """(B, 3, S, S) uint8 of picture files or PIL images.

        Raises:
            BadImage: (a ValueError) naming the file that cannot be used.
        """
        opened = (to_rgb(ImageOps.exif_transpose(i)) if isinstance(i, Image) else open_image(Path(i)) for i in images)
        return torch.stack([self._transform(image) for image in opened])

    def token_ids(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """(B, L) ids and (B, L) mask; a text longer than the context is cut, its end token kept."""
        return pad(self.tokenizer(texts), self.tokenizer.pad_id, limit=self.tokenizer.context_length)

    @torch.inference_mode()
    def encode_images(self, images: Sequence[Picture], batch_size: int = 64) -> Tensor:
        """(N, E) unit float32 embeddings of picture files or PIL images."""
        _sequence(images, "images")
        parts = [self._image(part).embedding.cpu() for part in _batches(images, batch_size)]
        return torch.cat(parts) if parts else torch.zeros(0, self.model.embed_dim)

    @torch.inference_mode()
    def encode_texts(self, texts: Sequence[str], batch_size: int = 256) -> Tensor:
        """(M, E) unit float32 embeddings."""
        _sequence(texts, "texts")
        parts = [self._text(part).embedding.cpu() for part in _batches(texts, batch_size)]
        return torch.cat(parts) if parts else torch.zeros(0, self.model.embed_dim)

    def similarity(self, images: Sequence[Picture], texts: Sequence[str], batch_size: int = 64) -> Tensor:
        """(N, M) float32 cosines of N pictures and M texts."""
        return self.encode_images(images, batch_size) @ self.encode_texts(texts, batch_size).T

    @torch.inference_mode()
    def match(self, images: Sequence[Picture], texts: Sequence[str], batch_size: int = 64) -> Tensor:
        """(N, M) float32 matching logits of the cross-modal heads, every picture with every text.

        Raises:
            ValueError: the model is a plain dual encoder.
        """
        _sequence(images, "images")
        _sequence(texts, "texts")
        if not self.can_match:
            raise ValueError("this model is a plain dual encoder: it has cosines (similarity), but no matching score")
        text = self._text(texts)
        rows = []
        for part in _batches(images, max(1, batch_size // max(1, len(texts)))):
            kept = self.model.keep_image(self._image(part))
            # each picture goes with its B / C consecutive texts
            pairs = text.index(torch.arange(len(texts), device=self.device).repeat(len(part)))
            rows.append(self.model.match_kept(kept, pairs).view(len(part), len(texts)).cpu())
        return torch.cat(rows)

    def _image(self, images: Sequence[Picture]) -> Encoded:
        return self.model.encode_image(self.pixels(images).to(self.device))

    def _text(self, texts: Sequence[str]) -> Encoded:
        ids, mask = self.token_ids(texts)
        return self.model.encode_text(ids.to(self.device), mask.to(self.device))


def _sequence(items: Sequence[Any], name: str) -> None:
    # a lone text would be taken for a list of its letters
    if isinstance(items, str | bytes | PathLike):
        raise ValueError(f"{name} takes a list; write [{items!r}]")


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def load_folder(folder: str | PathLike[str], trust: bool = False) -> LoadedModel:
    """Open what ``vlretrieval-export`` wrote. Every file is held against its checksum first.

    Args:
        trust: also open torch programs (format=torch), reading which can run code that lies in them.

    Raises:
        ValueError: one line naming the folder or file: not an export, a file missing or damaged, another format.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"model={folder}: no such folder; give one that vlretrieval-export made")
    kind = check_manifest(folder)
    if kind == "torch" and not trust:
        raise ValueError(
            f"{folder} holds torch programs, and torch runs code that lies in them as it reads them; if you trust "
            "their maker: load_model(folder, trust=True)"
        )
    return open_folder(folder, kind)


def open_folder(folder: Path, kind: str) -> LoadedModel:
    """As :func:`load_folder`, of a folder whose files have been checked."""
    config = read_json(folder / CONFIG)
    if config.get("format") != FORMAT:
        raise ValueError(f"{folder / CONFIG}: format={config.get('format')}, but this version reads format {FORMAT}")
    for block in ("model", "preprocess"):
        if not isinstance(config.get(block), dict):
            raise ValueError(f"{folder / CONFIG} has no block {block!r}")
    if kind == "folder":
        model: Any = build_model(config["model"], str(folder / CONFIG))
        if not isinstance(model, RetrievalModel):
            raise ValueError(f"{folder / CONFIG}: model._target_ is a {type(model).__name__}, not a RetrievalModel")
        load_weights(model, read_weights(folder / WEIGHTS), str(folder / WEIGHTS))
    else:
        from vlretrieval.deploy.graph_model import GraphModel, onnx_graphs, torch_graphs

        model = GraphModel({"onnx": onnx_graphs, "torch": torch_graphs}[kind](folder), config["interface"])
    tokenizer = tokenizer_from_dict(read_json(folder / TOKENIZER))
    return LoadedModel(model, tokenizer, config["preprocess"], config.get("rerank", {}).get("weight"))


def check_manifest(folder: Path) -> str:
    """Hold each file against the sha256 that the export wrote down. Returns what kind of export it is."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} is not an exported model: it has no {MANIFEST}; make one with vlretrieval-export")
    manifest = read_json(folder / MANIFEST)
    files, kind = manifest.get("files"), manifest.get("kind", "folder")
    if kind in THEIRS:
        raise ValueError(f"{folder} is for another library; open it with {THEIRS[kind].format(folder)}")
    if kind not in OURS:
        raise ValueError(f"{folder / MANIFEST}: kind={kind!r} is not known to this version")
    if not isinstance(files, dict) or not {OURS[kind], CONFIG, TOKENIZER} <= files.keys():
        raise ValueError(f"{folder / MANIFEST} does not list {OURS[kind]}, {CONFIG} and {TOKENIZER}")
    for name, expected in files.items():
        path = folder / name
        if path.parent != folder:
            raise ValueError(f"{folder / MANIFEST} names {name!r}, which is not a file of the folder")
        if not path.is_file():
            raise ValueError(f"{path} is missing; export again")
        # The card is for people, who may well edit it.
        if name != CARD and sha256(path) != expected:
            raise ValueError(f"{path} is damaged or was changed: its sha256 is not the one in {MANIFEST}; export again")
    return str(kind)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; export again") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not an object")
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False, sort_keys=False) + "\n", encoding="utf-8")


def read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
