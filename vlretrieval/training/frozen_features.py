"""Frozen towers and their stored output: compute it once, hold a tower against it, and train from it.

A tower is any module that gives pooled (B, dim), tokens (B, T, dim) and a mask (B, T) or None: of pixels, or of token
ids and their mask. What is stored is known by the hash of the tower's weights, and by its answer to a fixed question,
since equal weights with another number of heads, another pooling or another mean pixel are another tower.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from vlretrieval.data.datamodule import RetrievalData
from vlretrieval.data.datasets import Batch, tokenise
from vlretrieval.data.features import (
    FeatureRows,
    Features,
    FeatureWriter,
    about_images,
    about_texts,
    features_path,
    open_features,
    refusal,
)
from vlretrieval.data.packed import PackedTokens
from vlretrieval.data.pictures import for_each
from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer, pad
from vlretrieval.data.transforms import EvalTransform
from vlretrieval.deploy.checkpoint import weights_hash
from vlretrieval.evaluation.encode import Tell, evaluating, silent
from vlretrieval.model.crossmodal import Encoded
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.precision import full_float32

log = logging.getLogger(__name__)

TOWERS = {"image": "image_encoder", "text": "text_encoder", "negatives": "text_encoder"}
QUESTION = "Two dogs, one of them brown, run to the left of a red car; 雪地中奔跑的狗。"


def write_features(
    model: RetrievalModel,
    split: Split,
    part: str,
    folder: str | Path,
    *,
    transform: EvalTransform,
    tokenizer: Tokenizer,
    batch_size: int = 64,
    precision: str = "float32",
    tell: Tell = silent,
) -> Path:
    """Compute and store what ``part``'s tower says of every item of ``split``; gives the folder of the part.

    Nothing is done for features that are there already and whole. A run that was killed goes on.

    Args:
        model: its tower is used in evaluation mode, on the device where it is.
        part: "image", "text", or "negatives" (the data's hard negatives, by the text tower).
        precision: of the tower's arithmetic; what is stored is float16.

    Raises:
        ValueError: an output that is not finite, or beyond half precision's 65,504; with the item.
    """
    tower = model.get_submodule(TOWERS[part])
    of = about_images(split, transform) if part == "image" else about_texts(split, tokenizer, part)
    answered = answer(tower, part, transform.image_size, tokenizer)
    about = {**of, **identity(tower, answered), "precision": precision}
    path = features_path(folder, split.name, part)
    try:
        if open_features(path, about):
            log.info("%s: there already", path)
            return path
    except ValueError:
        pass
    writer = FeatureWriter(path, about)
    if writer.done:
        log.info("%s: going on after %d of %d", path, writer.done, about["items"])
    packed = None if part == "image" else _tokens(split, tokenizer, part)
    with evaluating(tower, precision) as device:
        for rows in _runs(writer.done, about["items"], batch_size):
            inputs = (_pixels(split, transform, rows),) if packed is None else _ids(packed, tokenizer, rows)
            pooled, tokens, mask = tower(*(tensor.to(device) for tensor in inputs))
            if mask is None:
                mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
            try:
                writer.write(_numbers(pooled), _numbers(tokens[mask]), mask.sum(1).cpu().numpy())
            except OverflowError as fault:
                name = split.image_ids[rows[0]] if part == "image" else f"number {rows[0]}"
                raise ValueError(
                    f"{part} features from {name!r} on: a value of {fault.args[1]:g} does not fit into half precision "
                    "(65,504 at most, and finite); train this tower's run from its inputs, without features"
                ) from None
            tell(part, len(rows), about["items"])
    return writer.finish()


def _numbers(tensor: Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()


def _runs(first: int, items: int, size: int) -> Iterator[range]:
    return (range(start, min(start + size, items)) for start in range(first, items, size))


def _pixels(split: Split, transform: EvalTransform, rows: range) -> Tensor:
    pixels = np.empty((len(rows), 3, transform.image_size, transform.image_size), dtype=np.uint8)

    def fill(place: int) -> None:
        pixels[place] = transform(split.picture(rows[place])).numpy()

    for_each(fill, range(len(rows)))
    return torch.from_numpy(pixels)


def _tokens(split: Split, tokenizer: Tokenizer, part: str) -> PackedTokens:
    if part == "text":
        return tokenise(split, tokenizer)
    return PackedTokens(tokenizer(list(split.negatives.texts)), tokenizer.pad_id)


def _ids(packed: PackedTokens, tokenizer: Tokenizer, rows: range) -> tuple[Tensor, Tensor]:
    ids, mask = packed.gather(np.arange(rows.start, rows.stop), limit=tokenizer.context_length)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def answer(tower: nn.Module, part: str, image_size: int, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """(dim,) pooled and (token dim,) mean token, float32, of a fixed picture of noise or a fixed text."""
    inputs: tuple[Tensor, ...]
    if part == "image":
        noise = np.random.default_rng(0).integers(0, 256, (1, 3, image_size, image_size), dtype=np.uint8)
        inputs = (torch.from_numpy(noise),)
    else:
        inputs = pad(tokenizer([QUESTION]), tokenizer.pad_id, limit=tokenizer.context_length)
    with evaluating(tower) as device, full_float32(device):
        pooled, tokens, _ = tower(*(tensor.to(device) for tensor in inputs))
    return pooled[0].float().cpu(), tokens[0].float().mean(0).cpu()


def identity(tower: nn.Module, answered: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """What a tower is known by: ``weights``, ``answer`` (the first numbers of each), and the widths of its output."""
    return {
        "weights": weights_hash(tower.state_dict()),
        "answer": [[round(value, 6) for value in vector[:16].tolist()] for vector in answered],
        "pooled_dim": len(answered[0]),
        "token_dim": len(answered[1]),
    }


def check_towers(model: RetrievalModel, data: RetrievalData) -> None:
    """Refuse to train from features of another tower, or of one that this run trains.

    Raises:
        ValueError: one line, with the ways out.
    """
    for part, features in data.features().items():
        name, path = TOWERS[part], features.path
        tower = model.get_submodule(name)
        if any(parameter.requires_grad for parameter in tower.parameters()):
            key = "text" if part == "negatives" else part
            raise ValueError(
                f"{path} holds the output of a frozen {name}, and this run trains it; set freeze=[{name}], or leave "
                f"out data.{key}_features"
            )
        now = identity(tower, answer(tower, part, data.image_size, data.tokenizer))
        if now["weights"] != features.about.get("weights"):
            told = f"{now['weights']} here and was {features.about.get('weights')}"
            raise refusal(path, f"stale: the hash of the {name}'s weights is {told}; init_from=... starts from others")
        if not _same_answer(now["answer"], features):
            raise refusal(path, f"stale: the {name} has these weights, but other settings (heads, pooling, mean, ...)")
        log.info("%s: the %s's output is read from %s, %.1f MB", part, name, path, features.nbytes / 1e6)


def _same_answer(now: list[list[float]], features: Features) -> bool:
    before = features.about.get("answer")
    if not isinstance(before, list) or [len(vector) for vector in before] != [len(vector) for vector in now]:
        return False
    # Another device or thread count rounds differently. What answers alike to within half precision is the same tower.
    pairs = ((torch.tensor(a), torch.tensor(b)) for a, b in zip(now, before, strict=True))
    return all(bool((a - b).abs().max() <= 0.002 * b.abs().max()) for a, b in pairs)


class CheckTowers(Callback):
    """``check_towers`` of a resumed run, whose weights come with the checkpoint."""

    def __init__(self, data: RetrievalData) -> None:
        self.data = data

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        model: Any = module.model
        check_towers(model, self.data)


def image_of(model: RetrievalModel, batch: Batch) -> Encoded:
    """The batch's pictures, from the frozen tower's features where the batch has them."""
    if batch.image is not None:
        return model.project_image(batch.image.pooled.float(), batch.image.tokens.float(), batch.image.mask)
    assert batch.pixels is not None
    return model.encode_image(batch.pixels)


def text_of(model: RetrievalModel, batch: Batch) -> Encoded:
    """The batch's captions, likewise."""
    if batch.text is not None:
        return model.project_text(batch.text.pooled.float(), batch.text.tokens.float(), batch.text.mask)
    return model.encode_text(batch.token_ids, batch.token_mask)


def negatives_of(
    model: RetrievalModel, negatives: FeatureRows | None, matched: int
) -> tuple[Encoded | None, Tensor | None]:
    """The data's hard negatives (B, K, ...) of the first ``matched`` pairs, and which there are: (matched, K) bool."""
    if negatives is None or negatives.mask is None or not matched:
        return None, None
    pooled, tokens, mask = (tensor[:matched].flatten(0, 1) for tensor in negatives if tensor is not None)
    return model.project_text(pooled.float(), tokens.float(), mask), negatives.mask[:matched].any(-1)
