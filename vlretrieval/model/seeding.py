"""A seed a head, for studies of heads: which draw a head starts from, apart from all else that is drawn."""

from __future__ import annotations

from torch import nn

from vlretrieval.model.attention import MultiHeadAttention

APART = 1_000_003  # seeds of neighbouring runs and layers never meet


def seed_heads(model: nn.Module, seed: int) -> None:
    """Draw every head group (query heads that share K/V) of every attention anew, each from a seed of its own.

    The seed of a group follows from ``seed``, the number of its layer and its own number, so the same head of the same
    model starts alike in every run, whatever was drawn before it. W_O is drawn from torch's global state.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    for number, layer in enumerate(layers):
        first = APART * (APART * seed + number)
        layer.reset_parameters([(first + group) % 2**61 for group in range(layer.num_kv_heads)])
