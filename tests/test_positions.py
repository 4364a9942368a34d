"""Positions: what adding and turning must do, and that they end blindness to order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vlretrieval.model.attention import MultiHeadAttention
from vlretrieval.model.positions import KINDS, Positions, grid_places, sinusoid

DIM, HEADS, HEAD_DIM = 16, 2, 8


def turned(position: Positions, heads: Tensor, shape: tuple[int, ...]) -> Tensor:
    rotate = position.rotate(shape, heads.device)
    assert rotate is not None
    return rotate(heads)


def test_sinusoids_are_the_papers_values() -> None:
    table = sinusoid(torch.tensor([0.0, 1.0, 3.0]), 4)
    slow = [[torch.tensor(place / 10000 ** (2 * i / 4)) for i in (0, 1)] for place in (0.0, 1.0, 3.0)]
    want = torch.stack([torch.stack([*(a.sin() for a in row), *(a.cos() for a in row)]) for row in slow])
    torch.testing.assert_close(table, want)


def test_places_of_a_grid_are_in_reading_order() -> None:
    rows, columns = grid_places(2, 3)
    assert rows.tolist() == [0, 0, 0, 1, 1, 1] and columns.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rotary_scores_depend_on_the_distance_alone(dtype: torch.dtype) -> None:
    """RoFormer, arXiv:2104.09864, eq. 11: <turn(q, m), turn(k, n)> is a function of m - n."""
    torch.manual_seed(0)
    position = Positions("rotary", DIM, HEAD_DIM, (12,))
    query, key = (torch.randn(1, 1, 1, HEAD_DIM, dtype=dtype).expand(1, 12, 1, HEAD_DIM) for _ in range(2))
    scores = turned(position, query, (12,))[0, :, 0] @ turned(position, key, (12,))[0, :, 0].T  # (12, 12)
    for offset in range(-11, 12):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=2e-6, rtol=0)
    assert scores[0].std() > 0.01  # and it does depend on it


def test_rotary_scores_on_a_grid_depend_on_the_offset_in_rows_and_columns_alone() -> None:
    torch.manual_seed(0)
    position = Positions("rotary", DIM, HEAD_DIM, (4, 5))
    query, key = (torch.randn(HEAD_DIM).expand(1, 20, 1, HEAD_DIM) for _ in range(2))
    scores = turned(position, query, (4, 5))[0, :, 0] @ turned(position, key, (4, 5))[0, :, 0].T
    scores = scores.view(4, 5, 4, 5)
    by_offset: dict[tuple[int, int], list[float]] = {}
    for r in range(4):
        for c in range(5):
            for r2 in range(4):
                for c2 in range(5):
                    by_offset.setdefault((r - r2, c - c2), []).append(scores[r, c, r2, c2].item())
    assert max(max(same) - min(same) for same in by_offset.values()) < 2e-6
    assert len(by_offset) == 7 * 9 and abs(by_offset[1, 0][0] - by_offset[0, 1][0]) > 1e-3


def test_rotary_keeps_lengths_and_leaves_prefix_tokens_and_the_first_place_alone() -> None:
    torch.manual_seed(0)
    heads = torch.randn(2, 1 + 6, HEADS, HEAD_DIM)
    out = turned(Positions("rotary", DIM, HEAD_DIM, (2, 3), prefix=1), heads, (2, 3))
    torch.testing.assert_close(out.norm(dim=-1), heads.norm(dim=-1))
    assert torch.equal(out[:, :2], heads[:, :2]) and not torch.allclose(out[:, 2:], heads[:, 2:])


def test_rotary_turns_the_first_rows_as_it_turns_them_among_all() -> None:
    heads = torch.randn(2, 6, HEADS, HEAD_DIM)
    rotate = Positions("rotary", DIM, HEAD_DIM, (6,)).rotate((6,), heads.device)
    assert rotate is not None and torch.equal(rotate(heads[:, :2]), rotate(heads)[:, :2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rotary_gives_back_the_dtype_it_got(dtype: torch.dtype) -> None:
    heads = torch.randn(1, 6, HEADS, HEAD_DIM, dtype=dtype)
    out = turned(Positions("rotary", DIM, HEAD_DIM, (6,)), heads, (6,))
    assert out.dtype == dtype
    want = turned(Positions("rotary", DIM, HEAD_DIM, (6,)), heads.float(), (6,))
    torch.testing.assert_close(out, want.to(dtype), atol=1e-6, rtol=0)  # angles are not rounded to bfloat16


def attention_over(kind: str, tokens: Tensor) -> Tensor:
    torch.manual_seed(0)
    length = tokens.shape[1]
    position = Positions(kind, DIM, HEAD_DIM, (length,))
    attention = MultiHeadAttention(DIM, HEADS)
    return attention(position.add(tokens), rotate=position.rotate((length,), tokens.device))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_blind_to_order_without_positions_and_only_without(kind: str) -> None:
    torch.manual_seed(1)
    tokens, order = torch.randn(2, 7, DIM), torch.randperm(7)
    alike = torch.allclose(attention_over(kind, tokens[:, order]), attention_over(kind, tokens)[:, order], atol=1e-5)
    assert alike == (kind == "none")


@pytest.mark.parametrize("prefix", [0, 1])
def test_learned_positions_are_taken_as_they_are_at_the_trained_size(prefix: int) -> None:
    position = Positions("learned", DIM, HEAD_DIM, (3, 4), prefix=prefix)
    tokens = torch.randn(2, prefix + 12, DIM)
    assert torch.equal(position.add(tokens, (3, 4)), tokens + position.weight)


def test_learned_patch_positions_are_interpolated_to_another_grid() -> None:
    position = Positions("learned", DIM, HEAD_DIM, (8, 6), prefix=1)
    rows, columns = grid_places(8, 6)
    with torch.no_grad():  # a plane is what any interpolation must keep, away from the border
        position.weight[1:] = (rows + 10 * columns)[:, None]
    added = position.add(torch.zeros(1, 1 + 16 * 12, DIM), (16, 12))
    assert torch.equal(added[0, 0], position.weight[0])  # the class token has no place
    grid = added[0, 1:, 0].view(16, 12)
    fine_rows, fine_columns = grid_places(16, 12)
    want = ((fine_rows + 0.5) / 2 - 0.5 + 10 * ((fine_columns + 0.5) / 2 - 0.5)).view(16, 12)
    torch.testing.assert_close(grid[4:-4, 4:-4], want[4:-4, 4:-4], atol=1e-4, rtol=0)
    added.sum().backward()
    assert position.weight.grad is not None and (position.weight.grad != 0).all()


@pytest.mark.parametrize("kind", ["sinusoidal", "rotary"])
def test_another_grid_is_stretched_onto_the_trained_one(kind: str) -> None:
    """Patch (2, 4) of an 8 x 8 grid lies where (1, 2) of 4 x 4 lies, and has its code."""
    position = Positions(kind, DIM, HEAD_DIM, (4, 4))
    if kind == "sinusoidal":
        coarse, fine = (position.add(torch.zeros(1, side**2, DIM), (side, side))[0] for side in (4, 8))
    else:
        one = torch.ones(1, 1, 1, HEAD_DIM)
        coarse, fine = (turned(position, one.expand(1, s**2, 1, -1), (s, s))[0, :, 0] for s in (4, 8))
    assert torch.equal(coarse.view(4, 4, -1)[1, 2], fine.view(8, 8, -1)[2, 4])


def test_shorter_texts_have_the_first_places() -> None:
    position = Positions("learned", DIM, HEAD_DIM, (10,))
    assert torch.equal(position.add(torch.zeros(1, 4, DIM))[0], position.weight[:4])
    with pytest.raises(ValueError, match="a text of 11 tokens is longer than the context of 10"):
        position.add(torch.zeros(1, 11, DIM))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("absolute", 16, 8, (4,)),
            "position='absolute' is not known; choose one of learned, sinusoidal, rotary, none",
        ),
        (("rotary", 16, 7, (4,)), "position=rotary needs a head_dim that is a multiple of 2, not 7"),
        (("rotary", 16, 6, (4, 4)), "position=rotary needs a head_dim that is a multiple of 4, not 6"),
        (("sinusoidal", 18, 6, (4, 4)), "position=sinusoidal needs a dim that is a multiple of 4, not 18"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Positions(*arguments)
