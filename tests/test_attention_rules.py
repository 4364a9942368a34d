"""What must always hold of the attention core: masks, maps, gates, initialisation, refusals."""

from __future__ import annotations

import math

import pytest
import torch
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
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vlretrieval.model.attention import KeyValue, MultiHeadAttention, attend, attention_weights, join_masks
from vlretrieval.model.seeding import seed_heads


@given(seed=st.integers(0, 10**6), kv_heads=st.sampled_from([1, 2, 4]), keys=st.integers(1, 9))
def test_permuting_keys_together_with_their_mask_changes_nothing(seed, kv_heads, keys):
    module = build("cross", kv_heads)
    torch.manual_seed(seed)
    x, context = torch.randn(BATCH, QUERIES, DIM).double(), torch.randn(BATCH, keys, CONTEXT_DIM).double()
    key_mask, order = torch.rand(BATCH, keys) > 0.5, torch.randperm(keys)
    out = module(x, context, key_mask=key_mask)
    assert_near(module(x, context[:, order], key_mask=key_mask[:, order]), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
def test_appending_padding_changes_nothing(kv_heads, dtype):
    module, (x, _) = build("self", kv_heads).to(dtype), inputs("self")
    x = x.detach().to(dtype)
    padded = torch.cat([x, 1e3 * torch.randn(BATCH, 6, DIM, dtype=dtype)], dim=1)
    key_mask = torch.arange(QUERIES + 6).expand(BATCH, -1) < QUERIES
    out, out_padded = module(x), module(padded, key_mask=key_mask)[:, :QUERIES]
    assert_near(out_padded, out, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", KV_HEADS.values(), ids=KV_HEADS)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_a_row_that_may_attend_to_nothing_is_0_and_passes_no_gradient_on_every_path(causal, kv_heads, dtype):
    torch.manual_seed(0)
    query = torch.randn(2, 4, 3, 8, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(2, kv_heads, 6, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    mask = torch.ones(2, 1, 3, 6, dtype=torch.bool)
    mask[0, :, 1] = False
    with torch.no_grad():
        assert (attend(query, key, value, mask, causal=causal)[0, :, 1] == 0).all()
    out = attend(query, key, value, mask, causal=causal)
    assert (out[0, :, 1] == 0).all() and out.isfinite().all()
    assert (out[0, :, [0, 2]] != 0).all()
    weights = attention_weights(query, key, mask, causal=causal)
    assert (weights[0, :, 1] == 0).all() and weights.isfinite().all()
    for grad in torch.autograd.grad(
        out[0, :, 1].float().square().sum() + out[0, :, 1].float().sum(), (query, key, value)
    ):
        assert (grad == 0).all()


def test_a_batch_item_that_is_all_padding_gets_the_output_bias_alone_and_harms_no_other():
    module, (x, context) = build("cross"), inputs("cross")
    key_mask = torch.ones(BATCH, KEYS, dtype=torch.bool)
    key_mask[1] = False
    out = module(x, context, key_mask=key_mask)
    assert torch.equal(out[1], module.out.bias.expand(QUERIES, DIM))
    alone = module(x[:1], context[:1], key_mask=key_mask[:1])
    assert_near(out[:1], alone)
    for grad, want in zip(gradients(out[:1], x, context), gradients(alone, x, context), strict=True):
        assert (grad[1] == 0).all()
        assert_near(grad, want)
    for grad in torch.autograd.grad(
        module(x, context, key_mask=key_mask)[1].square().sum(), (x, context, module.q.weight)
    ):
        assert (grad == 0).all()
    without_bias = build("cross", bias=False)
    assert (without_bias(x, context, key_mask=key_mask)[1] == 0).all()


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("which", MASKS)
def test_looking_at_the_maps_changes_no_bit_and_their_rows_sum_to_1(kind, which):
    module, (x, context), given = build(kind, 2).float(), inputs(kind), masks(kind, which)
    x, context = x.float(), None if context is None else context.float()
    unseen = module(x, context, **given)
    seen: list[Tensor] = []
    module.observer = seen.append
    assert torch.equal(module(x, context, **given), unseen)
    (weights,) = seen
    keys = QUERIES if kind == "self" else KEYS
    assert weights.shape == (BATCH, HEADS, QUERIES, keys)  # one map a head, not their mean
    allowed = allowed_pairs(keys, **given)
    assert (weights[~allowed] == 0).all()
    assert_near(weights.sum(-1), allowed.any(-1).float(), TOLERANCE[torch.float32])


def test_a_closed_head_is_exactly_0_and_the_others_are_untouched():
    module, (x, context) = build("cross", 2), inputs("cross")
    want = module(x, context)
    module.gate = torch.ones(HEADS)
    assert torch.equal(module(x, context), want)
    module.gate = torch.tensor([1.0, 0.0, 1.0, 1.0])
    closed = module(x, context)
    columns = slice(HEAD_DIM, 2 * HEAD_DIM)
    without = module.out.weight.detach().clone()
    without[:, columns] = 0
    module.gate = None
    with torch.no_grad():
        module.out.weight.copy_(without)
    assert_near(closed, module(x, context))
    module.gate = torch.zeros(HEADS)
    assert torch.equal(module(x, context), module.out.bias.expand_as(want))


def test_every_projection_is_drawn_on_its_own_by_glorots_rule():
    torch.manual_seed(0)
    module = MultiHeadAttention(512, 8, num_kv_heads=2)
    for weight, fan in zip(
        (*module.qkv.weight.split([512, 128, 128]), module.out.weight), (1024, 640, 640, 1024), strict=True
    ):
        bound = math.sqrt(6 / fan)
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert (module.qkv.bias == 0).all() and (module.out.bias == 0).all()


def test_a_seed_a_head_means_the_same_head_wherever_it_stands():
    torch.manual_seed(0)
    one = MultiHeadAttention(DIM, HEADS, head_seeds=[5, 6, 7, 8])
    torch.manual_seed(1)
    two = MultiHeadAttention(DIM, HEADS, head_seeds=[8, 5, 5, 9])
    parts = [[part.chunk(HEADS) for part in module.qkv.weight.chunk(3)] for module in (one, two)]
    for q_k_v in range(3):
        first, second = parts[0][q_k_v], parts[1][q_k_v]
        assert (
            torch.equal(first[0], second[1]) and torch.equal(first[0], second[2]) and torch.equal(first[3], second[0])
        )
        assert not torch.equal(first[0], first[1])
    assert not torch.equal(parts[0][0][0], parts[0][1][0])  # W_Q and W_K of one seed are not alike
    with pytest.raises(ValueError, match="head_seeds has 2 seeds for 4 key/value groups"):
        MultiHeadAttention(DIM, HEADS, head_seeds=[1, 2])


def test_every_head_of_a_model_can_have_a_seed_of_its_own():
    def build(global_seed, seed):
        torch.manual_seed(global_seed)
        model = torch.nn.ModuleList([MultiHeadAttention(DIM, HEADS), MultiHeadAttention(DIM, HEADS, num_kv_heads=2)])
        seed_heads(model, seed)
        return [head for layer in model for head in layer.qkv.weight.chunk(12 if layer.num_kv_heads == HEADS else 8)]

    first, again, other = build(0, seed=7), build(1, seed=7), build(0, seed=8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in [*first[:i], *other])


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_heads_are_free_4_dim_squared_weights_whatever_their_number(heads):
    with torch.device("meta"):
        module = MultiHeadAttention(4096, heads, bias=False)
    assert sum(p.numel() for p in module.parameters()) == 4 * 4096**2 == 67_108_864


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_causal_heads_do_not_see_what_comes_later(causal):
    module, (x, _) = build("self", 2, causal=causal), inputs("self")
    changed = x.detach().clone()
    changed[:, 3:] += 1
    same = torch.isclose(module(changed), module(x)).all(-1).all(0)
    assert same.tolist() == [causal, causal, causal, False]


def test_qk_norm_bounds_the_scores_however_large_the_tokens():
    module, (x, _) = build("self", qk_norm=True), inputs("self")
    seen: list[Tensor] = []
    module.observer = seen.append
    module(1e4 * x)
    # |q| = |k| = sqrt(D) after the norm, so scores lie in +-sqrt(D) and no weight can reach 1 or 0
    bound = 1 / (1 + (QUERIES - 1) * math.exp(2 * math.sqrt(HEAD_DIM)))
    assert seen[0].min() >= bound * 0.999


def test_dropout_is_of_training_only_and_keeps_the_mean():
    module, (x, context) = build("cross", dropout=0.3), inputs("cross")
    plain = build("cross")
    assert torch.equal(module.eval()(x, context), plain(x, context))
    torch.manual_seed(0)
    many = torch.stack([module.train()(x, context) for _ in range(2000)])
    assert not torch.equal(many[0], many[1])
    error = (many.mean(0) - plain(x, context)).abs() / (many.std(0) / 2000**0.5)
    assert error.max() < 5


def test_masks_are_bool_and_say_so():
    ones = torch.ones(BATCH, KEYS)
    with pytest.raises(ValueError, match="key_mask is torch.float32; give a bool mask"):
        join_masks(ones, None)
    with pytest.raises(ValueError, match="mask is torch.int64; give a bool mask, True where a query may attend"):
        join_masks(None, ones.long())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(dim=384, num_heads=7), "num_heads=7 does not divide dim=384; the nearest that does is 6"),
        (
            dict(dim=12, num_heads=4, num_kv_heads=3),
            "num_kv_heads=3 does not divide num_heads=4; the nearest that does is 2",
        ),
        (dict(dim=12, num_heads=0), "num_heads=0, num_kv_heads=0: both must be at least 1"),
        (dict(dim=12, num_heads=4, dropout=1.0), "dropout=1.0 is not a probability below 1"),
    ],
)
def test_impossible_heads_are_refused_with_the_way_out(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**arguments)


def test_cross_attention_without_a_context_is_refused():
    with pytest.raises(ValueError, match="cross-attention needs a context"):
        build("cross")(inputs("cross")[0])


def test_kept_keys_and_values_are_read_in_place():
    module, (_, context) = build("cross", 1), inputs("cross")
    kept = module.project_context(context)
    assert isinstance(kept, KeyValue)
    assert kept.key.untyped_storage().data_ptr() == kept.value.untyped_storage().data_ptr()  # one product made both


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_shared_keys_and_values_are_never_repeated_in_memory(kv_heads):
    query = torch.randn(4, 64, 12, 16).transpose(1, 2)
    key, value = (torch.randn(4, 64, kv_heads, 16).transpose(1, 2) for _ in range(2))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile, torch.inference_mode():
        out = attend(query, key, value)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = sum(max(0, event.nbytes()) for event in events)
    # the output, the sums of the softmax, and a kernel's working space a thread; repeated K/V would be twice the output
    assert out.nbytes <= allocated < 1.5 * out.nbytes
