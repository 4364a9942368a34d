"""Blocks, stacks and pooling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vlretrieval.model.attention import MultiHeadAttention
from vlretrieval.model.positions import Positions
from vlretrieval.model.transformer import Block, Mlp, Transformer, pool_tokens

DIM, HEADS = 16, 4


def stack(seed: int = 0, **options: Any) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(DIM, 2, HEADS, **options).double()


def tokens(batch: int = 3, length: int = 6) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, length, DIM, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1}, {"qk_norm": True}], ids=str)
def test_without_positions_a_stack_is_permutation_equivariant(options: dict[str, Any]) -> None:
    model, x, order = stack(**options), tokens(), torch.randperm(6)
    torch.testing.assert_close(model(x[:, order]), model(x)[:, order])


def test_a_causal_stack_is_not() -> None:
    model, x = stack(causal=True), tokens()
    assert not torch.allclose(model(x.flip(1)), model(x).flip(1))


def test_padding_is_never_attended_to_and_items_do_not_mix() -> None:
    model, x = stack(), tokens()
    lengths = torch.tensor([6, 3, 4])
    mask = torch.arange(9) < lengths[:, None]
    padded = torch.cat([x, 1e3 * torch.randn(3, 3, DIM, dtype=torch.float64)], dim=1)
    out = model(padded, key_mask=mask)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(out[row, :length], model(padded[row : row + 1, :length])[0])


def test_a_block_is_norm_attention_norm_mlp_on_a_residual_stream() -> None:
    torch.manual_seed(0)
    block, x = Block(DIM, HEADS).double(), tokens()
    assert block.attention is not None
    attended = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(block(x), attended + block.mlp(block.mlp_norm(attended)))


def test_an_mlp_has_2_ratio_dim_squared_weights() -> None:
    assert sum(p.numel() for p in Mlp(DIM, 4.0).parameters() if p.ndim == 2) == 2 * 4 * DIM**2


@pytest.mark.parametrize("position", ["rotary", "none"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_the_first_rows_alone_equal_the_first_rows_of_all(causal: bool, position: str) -> None:
    torch.manual_seed(0)
    cross = MultiHeadAttention(DIM, 2, context_dim=10)
    block = Block(DIM, HEADS, cross=cross, causal=causal, qk_norm=True).double()
    context, mask = torch.randn(3, 5, 10, dtype=torch.float64), torch.arange(6) < torch.tensor([[6], [3], [4]])
    rotate = Positions(position, DIM, DIM // HEADS, (6,)).rotate((6,), context.device)
    arguments = dict(key_mask=mask, rotate=rotate, context=context)
    torch.testing.assert_close(block(tokens(), first=2, **arguments), block(tokens(), **arguments)[:, :2])


def test_a_context_serves_its_run_of_rows_as_if_it_were_repeated() -> None:
    torch.manual_seed(0)
    block = Block(DIM, HEADS, cross=MultiHeadAttention(DIM, 2, context_dim=10)).double()
    x, context = tokens(batch=6), torch.randn(2, 5, 10, dtype=torch.float64)
    context_mask = torch.tensor([[1, 1, 1, 0, 1], [1, 0, 1, 1, 0]]).bool()
    grouped = block(x, context=context, context_mask=context_mask)
    repeated = block(x, context=context.repeat_interleave(3, 0), context_mask=context_mask.repeat_interleave(3, 0))
    torch.testing.assert_close(grouped, repeated)
    assert block.cross is not None
    torch.testing.assert_close(
        block(x, context=block.cross.project_context(context), context_mask=context_mask), grouped
    )


@pytest.mark.parametrize("heads", [0, HEADS])
def test_a_row_meets_its_run_of_contexts_as_if_it_were_repeated(heads: int) -> None:
    torch.manual_seed(0)
    block = Block(DIM, heads, cross=MultiHeadAttention(DIM, 2, context_dim=10, num_kv_heads=1)).double()
    x, context = tokens(batch=2), torch.randn(6, 5, 10, dtype=torch.float64)
    mask, context_mask = (
        torch.arange(6) < torch.tensor([[6], [4]]),
        torch.arange(5) < torch.tensor([[5, 3, 4, 1, 2, 5]]).T,
    )
    met = block(x, key_mask=mask, context=context, context_mask=context_mask)
    repeated = dict(key_mask=mask.repeat_interleave(3, 0), context=context, context_mask=context_mask)
    torch.testing.assert_close(met, block(x.repeat_interleave(3, 0), **repeated))


def test_a_block_with_cross_attention_asks_for_its_context() -> None:
    with pytest.raises(ValueError, match="needs a context"):
        Block(DIM, HEADS, cross=MultiHeadAttention(DIM, 2, context_dim=10))(tokens().float())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputing_activations_changes_no_bit_of_output_or_gradient(dropout: float) -> None:
    x, mask = tokens(), torch.arange(6) < torch.tensor([[6], [3], [4]])
    found = []
    for checkpointing in (False, True):
        model = stack(dropout=dropout, activation_checkpointing=checkpointing).train()
        torch.manual_seed(5)
        out = model(x, key_mask=mask)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


def test_recomputing_keeps_less() -> None:
    def kept(**options: Any) -> int:
        sizes: dict[int, int] = {}

        def remember(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            out = stack(**options).train()(tokens())
        assert out.requires_grad
        return sum(sizes.values())

    assert kept(activation_checkpointing=True) < 0.5 * kept()


def test_pooling_takes_the_first_the_last_real_or_the_mean_of_real_tokens() -> None:
    x = tokens()
    mask = torch.arange(6) < torch.tensor([[6], [3], [1]])
    assert torch.equal(pool_tokens(x, mask, "first"), x[:, 0])
    assert torch.equal(pool_tokens(x, mask, "last"), torch.stack([x[0, 5], x[1, 2], x[2, 0]]))
    assert torch.equal(pool_tokens(x, None, "last"), x[:, -1])
    torch.testing.assert_close(pool_tokens(x, mask, "mean"), torch.stack([x[0].mean(0), x[1, :3].mean(0), x[2, 0]]))
    torch.testing.assert_close(pool_tokens(x, None, "mean"), x.mean(1))
    with pytest.raises(ValueError, match="pool='max' is not known; choose one of first, mean, last"):
        pool_tokens(x, None, "max")


@pytest.mark.parametrize("how", ["first", "last", "mean"])
def test_an_empty_text_pools_to_something_finite_with_finite_gradients(how: str) -> None:
    model, x = stack(), tokens().requires_grad_()
    mask = torch.arange(6) < torch.tensor([[6], [0], [4]])
    pooled = pool_tokens(model(x, key_mask=mask), mask, how)
    pooled.square().sum().backward()
    assert pooled.isfinite().all() and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_compiles_without_a_graph_break(checkpointing: bool) -> None:
    model = stack(num_kv_heads=2, activation_checkpointing=checkpointing).train()
    x, mask = tokens(), torch.arange(6) < torch.tensor([[6], [3], [4]])
    compiled = torch.compile(model, fullgraph=True)
    out, want = compiled(x, key_mask=mask), model(x, key_mask=mask)
    torch.testing.assert_close(out, want)
    parameters = list(nn.Module.parameters(model))
    for grad, want_grad in zip(
        torch.autograd.grad(out.sum(), parameters), torch.autograd.grad(want.sum(), parameters), strict=True
    ):
        torch.testing.assert_close(grad, want_grad)
