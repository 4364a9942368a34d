"""Frozen towers and their stored output: compute it once, and train from it.

A tower is any module that gives pooled (B, dim), tokens (B, T, dim) and a mask (B, T) or None: of pixels, or of token
ids and their mask.
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
from torch import Tensor

from vlretrieval.data.datamodule import RetrievalData
from vlretrieval.data.datasets import Batch, tokenise
from vlretrieval.data.feature_copies import AugmentedCopy
from vlretrieval.data.features import (
    FeatureRows,
    FeatureWriter,
    about_images,
    about_texts,
    features_path,
    open_features,
)
from vlretrieval.data.packed import PackedTokens
from vlretrieval.data.pictures import for_each
from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer
from vlretrieval.data.transforms import EvalTransform
from vlretrieval.evaluation.encode import Tell, evaluating, silent
from vlretrieval.evaluation.towers import answer, check_tower, identity, tower_name
from vlretrieval.model.encoded import Encoded
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.length_buckets import encode_text, text_from

log = logging.getLogger(__name__)


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
    copy: AugmentedCopy | None = None,
    tell: Tell = silent,
) -> Path:
    """Compute and store what ``part``'s tower says of every item of ``split``; gives the folder of the part.

    Nothing is done for features that are there already and whole. A run that was killed goes on.

    Args:
        model: its tower is used in evaluation mode, on the device where it is.
        part: "image", "text", or "negatives" (the data's hard negatives, by the text tower).
        precision: of the tower's arithmetic; what is stored is float16.
        copy: the augmented copy of the pictures that ``part`` "image" is made of.

    Raises:
        ValueError: an output that is not finite, or beyond half precision's 65,504; with the item.
    """
    tower = model.get_submodule(tower_name(model, part))
    of = about_images(split, transform) if part == "image" else about_texts(split, tokenizer, part)
    if copy is not None:
        of = copy.about(split, transform)
    answered = answer(tower, part, transform.image_size, tokenizer)
    about = {**of, **identity(tower, answered), "precision": precision}
    path = features_path(folder, split.name, part if copy is None else copy.part)
    try:
        if open_features(path, about, split):
            log.info("%s: there already", path)
            return path
    except ValueError:
        pass
    if part == "image":
        about["contents"] = split.stamp(contents=True)
    writer = FeatureWriter(path, about)
    if writer.done:
        log.info("%s: going on after %d of %d", path, writer.done, about["items"])
    packed = None if part == "image" else _tokens(split, tokenizer, part)
    with evaluating(tower, precision) as device:
        for rows in _runs(writer.done, about["items"], batch_size):
            if packed is not None:
                inputs: tuple[Tensor, ...] = _ids(packed, tokenizer, rows)
            elif copy is not None:
                inputs = (copy.pixels(split, transform, rows),)
            else:
                inputs = (_pixels(split, transform, rows),)
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
            tell(f"{split.name} {path.name}", len(rows), about["items"])
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


def check_towers(model: RetrievalModel, data: RetrievalData) -> None:
    """Refuse to train from features of another tower, or of one that this run trains.

    Raises:
        ValueError: one line, with the ways out.
    """
    found = [(part, features) for name in ("train", "val") for part, features in data.features(name).items()]
    for part, features in found:
        name, path = tower_name(model, part), features.path
        tower = model.get_submodule(name)
        if any(parameter.requires_grad for parameter in tower.parameters()):
            key = "text" if part == "negatives" else part
            raise ValueError(
                f"{path} holds the output of a frozen {name}, and this run trains it; set freeze=[{name}], or leave "
                f"out data.{key}_features"
            )
        check_tower(model, part, features, data.image_size, data.tokenizer)
        log.info("%s: the %s's output is read from %s, %.1f MB", part, name, path, features.nbytes / 1e6)


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
        return model.image_from(batch.image.pooled.float(), batch.image.tokens.float(), batch.image.mask)
    assert batch.pixels is not None
    return model.encode_image(batch.pixels)


def text_of(model: RetrievalModel, batch: Batch, buckets: int = 1) -> Encoded:
    """The batch's captions, likewise, in ``buckets`` runs of like length."""
    if batch.text is not None and batch.text.mask is not None:
        return text_from(model, batch.text.pooled.float(), batch.text.tokens.float(), batch.text.mask, buckets)
    return encode_text(model, batch.token_ids, batch.token_mask, buckets)


def negatives_of(
    model: RetrievalModel, negatives: FeatureRows | None, matched: int, buckets: int = 1
) -> tuple[Encoded | None, Tensor | None]:
    """The data's hard negatives (B, K, ...) of the first ``matched`` pairs, and which there are: (matched, K) bool."""
    if negatives is None or negatives.mask is None or not matched:
        return None, None
    pooled, tokens, mask = (tensor[:matched].flatten(0, 1) for tensor in negatives if tensor is not None)
    encoded = text_from(model, pooled.float(), tokens.float(), mask, buckets)
    return encoded, negatives.mask[:matched].any(-1)
