"""The attention core against slow twins: a loop over heads from the paper, the textbook module, torch's own modules."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    BATCH,
    CONTEXT_DIM,
    DIM,
    HEAD_DIM,
    HEADS,
    KEYS,
    KV_HEADS,
    MASKS,
    QUERIES,
    TOLERANCE,
    allowed_pairs,
    assert_near,
    build,
    gradients,
    inputs,
    masks,
    qkv_weights,
)
from torch import Tensor, nn

from vlretrieval.model.attention import MultiHeadAttention


def head_projections(module: MultiHeadAttention, head: int) -> list[tuple[Tensor, Tensor]]:
    """(weight, bias) of W_Q, W_K, W_V of one query head, cut out of the merged matrices."""
    width, group = module.head_dim, head // (module.num_heads // module.num_kv_heads)
    inner, inner_kv = module.num_heads * width, module.num_kv_heads * width
    if module.context_dim is None:
        parts = [
            (module.qkv, head * width),
            (module.qkv, inner + group * width),
            (module.qkv, inner + inner_kv + group * width),
        ]
    else:
        parts = [(module.q, head * width), (module.kv, group * width), (module.kv, inner_kv + group * width)]
    return [(linear.weight[at : at + width], linear.bias[at : at + width]) for linear, at in parts]


def loop_attention(module: MultiHeadAttention, x: Tensor, context: Tensor | None, allowed: Tensor) -> Tensor:
    """Picture by picture, head by head, query by query (arXiv:1706.03762, sec. 3.2)."""
    context = x if context is None else context
    out = []
    for b in range(len(x)):
        heads = []
        for h in range(module.num_heads):
            (w_q, b_q), (w_k, b_k), (w_v, b_v) = head_projections(module, h)
            q, k, v = x[b] @ w_q.T + b_q, context[b] @ w_k.T + b_k, context[b] @ w_v.T + b_v
            rows = []
            for i in range(len(q)):
                seen = allowed[b, h, i]  # a query that sees nothing sums over nothing
                weight = torch.exp(k[seen] @ q[i] / math.sqrt(module.head_dim))
                rows.append((weight / weight.sum()) @ v[seen])
            heads.append(torch.stack(rows))
        out.append(torch.cat(heads, dim=-1) @ module.out.weight.T + module.out.bias)
    return torch.stack(out)


@pytest.mark.parametrize("which", MASKS)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
def test_equals_a_loop_over_heads_in_value_and_gradient(kv_heads, kind, causal, which):
    module, (x, context), given = build(kind, kv_heads, causal=causal), inputs(kind), masks(kind, which)
    out = module(x, context, **given)
    slow = loop_attention(module, x, context, allowed_pairs(QUERIES if kind == "self" else KEYS, causal, **given))
    assert_near(out, slow)
    wanted = (x, context, *module.parameters())
    for fast_grad, slow_grad in zip(gradients(out, *wanted), gradients(slow, *wanted), strict=True):
        # a key bias shifts all scores of a row alike, so its true gradient is 0 and both are rounding
        assert (fast_grad - slow_grad).abs().max() <= 1e-12 * max(1.0, slow_grad.abs().max())


class Textbook(nn.Module):
    """The module of the textbooks: ``forward(q, k, v, mask) -> output, per-head weights``, four linear layers."""

    def __init__(self, dim: int, context_dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d, dim) for d in (dim, context_dim, context_dim, dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        def split(x: Tensor) -> Tensor:
            return x.view(len(x), -1, self.num_heads, self.head_dim).permute(0, 2, 1, 3)

        q, k, v = split(self.w_q(q)), split(self.w_k(k)), split(self.w_v(v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / self.head_dim**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out = torch.einsum("bhqk,bhkd->bhqd", weights, v).permute(0, 2, 1, 3).reshape(len(q), -1, self.w_o.in_features)
        return self.w_o(out), weights


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_equals_the_textbook_module_in_output_and_in_every_heads_weights(kind):
    module = MultiHeadAttention(DIM, HEADS, context_dim=CONTEXT_DIM if kind == "cross" else None).double()
    x, context = inputs(kind)
    book = Textbook(DIM, CONTEXT_DIM if kind == "cross" else DIM, HEADS).double()
    q, k, v = qkv_weights(module)
    with torch.no_grad():
        for linear, (weight, bias) in zip((book.w_q, book.w_k, book.w_v), (q, k, v), strict=True):
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        book.w_o.load_state_dict(module.out.state_dict())
    mask = masks(kind, "a mask each")["mask"]
    seen: list[Tensor] = []
    module.observer = seen.append
    out = module(x, context, mask=mask)
    source = x if context is None else context
    want, want_weights = book(x, source, source, mask[:, None])
    assert_near(out, want)
    assert_near(seen[0].double(), want_weights, TOLERANCE[torch.float32])


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_equals_torchs_multihead_attention_with_its_weights(kind, padded):
    module = MultiHeadAttention(DIM, HEADS, context_dim=CONTEXT_DIM if kind == "cross" else None).double()
    other_dim = CONTEXT_DIM if kind == "cross" else None
    theirs = nn.MultiheadAttention(DIM, HEADS, kdim=other_dim, vdim=other_dim, batch_first=True).double()
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = qkv_weights(module)
    with torch.no_grad():
        if kind == "self":
            theirs.in_proj_weight.copy_(torch.cat([w_q, w_k, w_v]))
        else:
            for parameter, weight in zip(
                (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight), (w_q, w_k, w_v), strict=True
            ):
                parameter.copy_(weight)
        theirs.in_proj_bias.copy_(torch.cat([b_q, b_k, b_v]))
        theirs.out_proj.load_state_dict(module.out.state_dict())
    x, context = inputs(kind)
    source = x if context is None else context
    key_mask = masks(kind, "key padding")["key_mask"] if padded else None
    seen: list[Tensor] = []
    module.observer = seen.append
    out = module(x, context, key_mask=key_mask)
    padding = None if key_mask is None else ~key_mask  # theirs is True where a key is left out
    want, weights = theirs(x, source, source, key_padding_mask=padding, average_attn_weights=False)
    assert_near(out, want)
    assert_near(seen[0].double(), weights, TOLERANCE[torch.float32])
    assert_near(out, theirs(x, source, source, key_padding_mask=padding, need_weights=False)[0])


def test_equals_torchs_scaled_dot_product_attention_with_its_weights():
    module, (x, context), given = build("cross"), inputs("cross"), masks("cross", "a mask each head")
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = qkv_weights(module)
    q, k, v = F.linear(x, w_q, b_q), F.linear(context, w_k, b_k), F.linear(context, w_v, b_v)
    q, k, v = (t.reshape(BATCH, -1, HEADS, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
    heads = F.scaled_dot_product_attention(q, k, v, attn_mask=given["mask"])
    assert_near(module(x, context, **given), module.out(heads.transpose(1, 2).reshape(BATCH, QUERIES, -1)))


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_equal_full_heads_whose_keys_and_values_are_repeated(kv_heads, kind):
    grouped, full, (x, context) = build(kind, kv_heads), build(kind, HEADS), inputs(kind)
    q, k, v = qkv_weights(grouped)

    def repeat(part: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(
            t.unflatten(0, (kv_heads, HEAD_DIM)).repeat_interleave(HEADS // kv_heads, dim=0).flatten(0, 1) for t in part
        )

    with torch.no_grad():
        for mine, theirs in zip(qkv_weights(full), (q, repeat(k), repeat(v)), strict=True):
            for parameter, value in zip(mine, theirs, strict=True):
                parameter.copy_(value)
        full.out.load_state_dict(grouped.out.state_dict())
    given = masks(kind, "padding and mask")
    assert_near(grouped(x, context, **given), full(x, context, **given))


def test_one_head_is_plain_attention():
    torch.manual_seed(0)
    module = MultiHeadAttention(DIM, 1, bias=False).double()
    x, _ = inputs("self")
    (w_q, w_k, w_v) = module.qkv.weight.chunk(3)
    weights = torch.softmax((x @ w_q.T) @ (x @ w_k.T).mT / DIM**0.5, dim=-1)
    assert_near(module(x), weights @ (x @ w_v.T) @ module.out.weight.T)


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["", "qk-norm"])
def test_kept_keys_and_values_give_what_recomputing_them_gives(qk_norm, kv_heads, kind):
    module, (x, context) = build(kind, kv_heads, qk_norm=qk_norm), inputs(kind)
    context = torch.randn(BATCH, 3, DIM, dtype=torch.float64) if context is None else context
    kept = module.project_context(context)
    assert torch.equal(module(x, kept), module(x, context))
    assert kept.key.shape == (BATCH, kv_heads, context.shape[1], HEAD_DIM)
    assert kept.nbytes == 2 * 8 * BATCH * kv_heads * context.shape[1] * HEAD_DIM
    rows = torch.tensor([1, 0, 1])
    assert_near(module(x[rows], kept.index(rows)), module(x, kept)[rows])


def test_a_few_rows_of_self_attention_equal_those_rows_of_all():
    module, (x, _) = build("self", 2, qk_norm=True), inputs("self")
    assert_near(module(x[:, :2], x), module(x)[:, :2])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
def test_lower_precision_stays_within_the_stated_tolerance(kv_heads, kind, dtype):
    torch.manual_seed(0)
    exact = MultiHeadAttention(64, 4, num_kv_heads=kv_heads, context_dim=48 if kind == "cross" else None)
    module = exact.to(dtype)
    x = torch.randn(2, 9, 64, dtype=dtype)
    context = torch.randn(2, 33, 48, dtype=dtype) if kind == "cross" else None
    key_mask = torch.arange(9 if context is None else 33).expand(2, -1) < torch.tensor([[9], [5]])
    out = module(x, context, key_mask=key_mask).double()
    module.double()
    want = module(x.double(), None if context is None else context.double(), key_mask=key_mask)
    assert_near(out, want, TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
def test_compiles_without_a_graph_break(kv_heads, kind):
    module, (x, context), given = build(kind, kv_heads, qk_norm=True), inputs(kind), masks(kind, "padding and mask")
    compiled = torch.compile(module, fullgraph=True)
    out, want = compiled(x, context, **given), module(x, context, **given)
    assert_near(out, want)
    wanted = (x, context, *module.parameters())
    for grad, want_grad in zip(gradients(out, *wanted), gradients(want, *wanted), strict=True):
        assert (grad - want_grad).abs().max() <= 1e-12 * max(1.0, want_grad.abs().max())


def test_the_maps_are_the_weights_that_made_the_output():
    module, (x, context) = build("cross", 2), inputs("cross")
    seen: list[Tensor] = []
    module.observer = seen.append
    out = module(x, context)
    value = module.project_context(context).value.repeat_interleave(2, dim=1)
    assert_near(module.out((seen[0].double() @ value).transpose(1, 2).flatten(2)), out, TOLERANCE[torch.float32])
