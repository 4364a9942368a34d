"""What the attention tests share: modules with biases that show, inputs, masks, and how near is near."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from vlretrieval.model.attention import MultiHeadAttention

# What a result may differ from float64, over its largest entry: a few units in the last place, as sums of some hundred
# terms are rounded on the way (float32 has 24 significant bits, float16 11, bfloat16 8).
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}

BATCH, QUERIES, KEYS, DIM, CONTEXT_DIM, HEADS, HEAD_DIM = 2, 4, 5, 12, 10, 4, 6
KV_HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
MASKS = [
    "no mask",
    "key padding",
    "one mask for all",
    "a mask each",
    "a mask each head",
    "padding and mask",
    "some rows blind",
]


def build(kind: str = "self", kv_heads: int = HEADS, **options) -> MultiHeadAttention:
    """A float64 module whose biases are not 0, so that a forgotten one shows."""
    torch.manual_seed(0)
    module = MultiHeadAttention(
        DIM,
        HEADS,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        context_dim=CONTEXT_DIM if kind == "cross" else None,
        **options,
    ).double()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return module


def inputs(kind: str, keys: int | None = None) -> tuple[Tensor, Tensor | None]:
    """x and its context (None for self-attention), float64, which take gradients."""
    torch.manual_seed(1)
    keys = keys or (QUERIES if kind == "self" else KEYS)
    x = torch.randn(BATCH, QUERIES, DIM, dtype=torch.float64, requires_grad=True)
    if kind == "self":
        return x, None
    return x, torch.randn(BATCH, keys, CONTEXT_DIM, dtype=torch.float64, requires_grad=True)


def masks(kind: str, which: str) -> dict[str, Tensor]:
    """Arguments of forward; every query may attend to something but in "some rows blind"."""
    keys = QUERIES if kind == "self" else KEYS
    torch.manual_seed(2)
    key_mask = torch.rand(BATCH, keys) > 0.4
    key_mask[:, 0] = True
    full = torch.rand(BATCH, QUERIES, keys) > 0.4
    full[..., 0] = True
    per_head = torch.rand(BATCH, HEADS, QUERIES, keys) > 0.4
    per_head[..., 0] = True
    blind = full.clone()
    blind[0, 1] = blind[1, 2] = False
    return {
        "no mask": {},
        "key padding": {"key_mask": key_mask},
        "one mask for all": {"mask": full[0]},
        "a mask each": {"mask": full},
        "a mask each head": {"mask": per_head},
        "padding and mask": {"key_mask": key_mask, "mask": full},
        "some rows blind": {"mask": blind},
    }[which]


def allowed_pairs(
    keys: int, causal: bool = False, key_mask: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """(B, H, Lq, Lk) bool, entry by entry from what the arguments say."""
    allowed = torch.ones(BATCH, HEADS, QUERIES, keys, dtype=torch.bool)
    for b, h, i, j in itertools.product(*map(range, allowed.shape)):
        where = {2: (i, j), 3: (b, i, j), 4: (b, h, i, j)}
        allowed[b, h, i, j] = (
            (not causal or j <= i)
            and (key_mask is None or bool(key_mask[b, j]))
            and (mask is None or bool(mask[where[mask.ndim]]))
        )
    return allowed


def gradients(output: Tensor, *of: Tensor | None) -> list[Tensor]:
    torch.manual_seed(3)
    return list(torch.autograd.grad((output * torch.randn_like(output)).sum(), [t for t in of if t is not None]))


def assert_near(given: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert (given - want).abs().max() <= tolerance * max(want.abs().max().item(), 1e-30)


def qkv_weights(module: MultiHeadAttention) -> list[tuple[Tensor, Tensor]]:
    inner, inner_kv = module.num_heads * module.head_dim, module.num_kv_heads * module.head_dim
    if module.context_dim is None:
        sizes = [inner, inner_kv, inner_kv]
        return list(zip(module.qkv.weight.split(sizes), module.qkv.bias.split(sizes), strict=True))
    kv = zip(module.kv.weight.chunk(2), module.kv.bias.chunk(2), strict=True)
    return [(module.q.weight, module.q.bias), *kv]
