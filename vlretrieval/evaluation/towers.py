"""A frozen tower held against what was stored of it.

What is stored is known by the hash of the tower's weights, and by its answer to a fixed question, since equal weights
with another number of heads, another pooling or another mean pixel are another tower.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vlretrieval.data.features import Features, refusal
from vlretrieval.data.tokenizers import Tokenizer, pad
from vlretrieval.deploy.checkpoint import weights_hash
from vlretrieval.evaluation.encode import evaluating

ENCODERS = {"image": "image_encoder", "text": "text_encoder", "negatives": "text_encoder"}
QUESTION = "Two dogs, one of them brown, run to the left of a red car; 雪地中奔跑的狗。"


def tower_name(model: nn.Module, part: str) -> str:
    """The module whose output is stored: the encoder, or the tower below what an :class:`OnTop` puts on it."""
    name = ENCODERS[part.partition("_")[0]]  # image_1, ...: augmented copies
    return f"{name}.base" if hasattr(model.get_submodule(name), "base") else name


def answer(tower: nn.Module, part: str, image_size: int, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """(dim,) pooled and (token dim,) mean token, float32, of a fixed picture of noise or a fixed text."""
    inputs: tuple[Tensor, ...]
    if part.startswith("image"):
        noise = np.random.default_rng(0).integers(0, 256, (1, 3, image_size, image_size), dtype=np.uint8)
        inputs = (torch.from_numpy(noise),)
    else:
        inputs = pad(tokenizer([QUESTION]), tokenizer.pad_id, limit=tokenizer.context_length)
    with evaluating(tower) as device:
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


def check_tower(model: nn.Module, part: str, features: Features, image_size: int, tokenizer: Tokenizer) -> None:
    """Refuse features of another tower than the model's.

    Raises:
        ValueError: one line, with the ways out.
    """
    name = tower_name(model, part)
    tower = model.get_submodule(name)
    now = identity(tower, answer(tower, part, image_size, tokenizer))
    if now["weights"] != features.about.get("weights"):
        told = f"{now['weights']} here and was {features.about.get('weights')}"
        raise refusal(
            features.path, f"stale: the hash of the {name}'s weights is {told}; init_from=... starts from others"
        )
    if not _same_answer(now["answer"], features):
        raise refusal(
            features.path, f"stale: the {name} has these weights, but other settings (heads, pooling, mean, ...)"
        )


def _same_answer(now: list[list[float]], features: Features) -> bool:
    before = features.about.get("answer")
    if not isinstance(before, list) or [len(vector) for vector in before] != [len(vector) for vector in now]:
        return False
    # Another device or thread count rounds differently. What answers alike to within half precision is the same tower.
    pairs = ((torch.tensor(a), torch.tensor(b)) for a, b in zip(now, before, strict=True))
    return all(bool((a - b).abs().max() <= 0.002 * b.abs().max()) for a, b in pairs)
