"""Which patches each word's heads look at, for a text and a picture of an index; from the kept K/V, no file is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vlretrieval.deploy.index.opened import Index
from vlretrieval.model.attention import MultiHeadAttention

KINDS = {"text_to_image": "text to image", "image_to_text": "image to text"}


def attention_of(index: Index, id: str, text: str) -> dict[str, Any]:
    """The maps of every cross-modal head, plain data.

    A text-to-image head has a map for each word, of the patches that the word looks at (the mean over its tokens), and
    one for the whole text; its last layer is computed for the start token alone, which speaks for the whole text. An
    image-to-text head's map of a word says how much each patch looks at it.

    Returns:
        {"id", "text", "match", "side", "resize", "words", "heads"}; a head is {"kind", "layer", "head", "whole",
        "words"}, ``whole`` a list of side * side weights and ``words`` one such list a word, or None.

    Raises:
        KeyError: no such picture.
        ValueError: the model has no cross-modal heads that attend.
    """
    item = index.item(id)
    crossmodal = index.model.model.crossmodal
    layers = [] if crossmodal is None else [layer for name in KINDS for layer in cross_layers(crossmodal, name)]
    if not layers:
        raise ValueError("this model has no cross-modal heads to look into")
    ids, _ = index.model.token_ids([text])
    words, token_of = words_of(index.model.tokenizer, ids[0].tolist())
    with torch.inference_mode(), observed([layer for _, _, layer in layers]) as seen:
        logit = index.model.model.match_kept(index.kept([item.row]), index.encode_text(text))
    heads, side = [], 0
    for (name, depth, _), weights in zip(layers, seen, strict=True):
        for number, one in enumerate(weights[0].float().cpu()):
            over_patches = one if name == "text_to_image" else one.T  # (L or 1, P)
            side = int(over_patches.shape[1] ** 0.5)
            grid = over_patches[:, over_patches.shape[1] - side * side :]  # a class patch has no place
            real = grid if len(grid) == 1 else grid[: token_of[-1][-1] + 2] if token_of else grid
            each = None if len(grid) == 1 else [rounded(grid[tokens].mean(0)) for tokens in token_of]
            heads.append(
                {"kind": KINDS[name], "layer": depth + 1, "head": number + 1, "whole": rounded(real.mean(0))}
                | {"words": each}
            )
    resize = index.model.preprocess["resize"]
    return {
        "id": id,
        "text": text,
        "match": float(logit[0]),
        "side": side,
        "resize": resize,
        "words": words,
        "heads": heads,
    }


def cross_layers(crossmodal: Any, name: str) -> list[tuple[str, int, MultiHeadAttention]]:
    """(kind, depth, cross-attention) of each layer of one kind of head."""
    head = getattr(crossmodal, name)
    return [] if head is None else [(name, depth, block.cross) for depth, block in enumerate(head.blocks)]


@contextmanager
def observed(layers: Sequence[MultiHeadAttention]) -> Iterator[list[Tensor]]:
    """The weights (B, H, L, P) of each layer that is called, in the order of the calls."""
    seen: list[Tensor] = []
    for layer in layers:
        layer.observer = seen.append
    try:
        yield seen
    finally:
        for layer in layers:
            layer.observer = None


def words_of(tokenizer: Any, ids: Sequence[int]) -> tuple[list[str], list[list[int]]]:
    """Words of a text and, for each, the places of its tokens among ``ids``; start, end and padding belong to none."""
    special = {tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id}
    words: list[str] = []
    places: list[list[int]] = []
    before, tokens, waiting = "", [], []
    for place, token in enumerate(ids):
        if token in special:
            continue
        tokens.append(token)
        waiting.append(place)
        now = tokenizer.decode(tokens)
        if now.endswith("\ufffd") and place + 1 < len(ids) and ids[place + 1] not in special:
            continue  # a letter of several bytes that ends in a later token
        piece = now[len(before) :]
        # what is written without blanks (Chinese) is cut into its tokens
        if not words or piece[:1].isspace() or (piece and ord(piece[-1]) > 0x2E7F):
            words.append(piece.strip())
            places.append(waiting)
        else:
            words[-1] += piece
            places[-1] += waiting
        before, waiting = now, []
    return words, places


def rounded(weights: Tensor) -> list[float]:
    return [round(value, 5) for value in weights.tolist()]
