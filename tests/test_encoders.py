"""The two encoders: what padding, order, size and dtype may and may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlretrieval.model.encoders import ImageEncoder, TextEncoder

VOCAB, CONTEXT, DIM = 50, 12, 16


def text_encoder(**options: Any) -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(VOCAB, CONTEXT, DIM, 2, 4, **options).double().eval()


def image_encoder(**options: Any) -> ImageEncoder:
    torch.manual_seed(0)
    return ImageEncoder(32, 8, DIM, 2, 4, **options).double().eval()


def ids(batch: int = 3, length: int = 7) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, VOCAB, (batch, length))


POSITIONS = ["learned", "sinusoidal", "rotary", "none"]
POOLS = [dict(pool="first"), dict(pool="mean"), dict(pool="last"), dict(pool="last", causal=True)]


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("position", POSITIONS)
def test_the_embedding_of_a_text_does_not_depend_on_its_padding(position: str, pool: dict[str, Any]) -> None:
    encoder, tokens = text_encoder(position=position, num_kv_heads=2, **pool), ids(length=5)
    mask = torch.arange(5) < torch.tensor([[5], [3], [1]])
    short = encoder(tokens, mask)
    padding = torch.randint(0, VOCAB, (3, 4))
    padded = encoder(torch.cat([tokens, padding], 1), torch.cat([mask, torch.zeros(3, 4, dtype=torch.bool)], 1))
    torch.testing.assert_close(padded.pooled, short.pooled, atol=1e-13, rtol=0)
    for row, length in enumerate((5, 3, 1)):
        alone = encoder(tokens[row : row + 1, :length])
        torch.testing.assert_close(alone.pooled[0], short.pooled[row], atol=1e-13, rtol=0)


@pytest.mark.parametrize("position", POSITIONS)
def test_word_order_matters_with_positions_and_only_with(position: str) -> None:
    encoder, tokens = text_encoder(position=position, pool="mean"), ids()
    alike = torch.allclose(encoder(tokens.flip(1)).pooled, encoder(tokens).pooled, atol=1e-12)
    assert alike == (position == "none")


@pytest.mark.parametrize("position", POSITIONS)
def test_patch_order_matters_with_positions_and_only_with(position: str) -> None:
    encoder, pixels = image_encoder(position=position, pool="mean"), torch.randn(2, 3, 32, 32).double()
    swapped = torch.cat([pixels[..., 16:, :], pixels[..., :16, :]], dim=-2)  # rows of patches change places
    alike = torch.allclose(encoder(swapped).pooled, encoder(pixels).pooled, atol=1e-12)
    assert alike == (position == "none")


@pytest.mark.parametrize("pool", ["first", "mean"])
@pytest.mark.parametrize("position", POSITIONS)
def test_pictures_of_other_sizes_are_taken(position: str, pool: str) -> None:
    encoder = image_encoder(position=position, pool=pool)
    hidden = encoder(torch.randn(2, 3, 48, 24).double())
    assert hidden.tokens.shape == (2, 6 * 3 + (pool == "first"), DIM) and hidden.pooled.shape == (2, DIM)
    assert hidden.mask is None


def test_patches_are_a_strided_convolution() -> None:
    encoder, pixels = image_encoder(position="none", pool="mean"), torch.randn(2, 3, 32, 16).double()
    kernel = encoder.patches.weight.view(DIM, 3, 8, 8)
    grid = torch.nn.functional.conv2d(pixels, kernel, encoder.patches.bias, stride=8)
    torch.testing.assert_close(encoder.transformer(grid.flatten(2).mT), encoder(pixels).tokens)


def test_uint8_pixels_are_normalised_and_float_pixels_are_taken_as_they_are() -> None:
    encoder = image_encoder(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = (
        torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1).double(),
        torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1).double(),
    )
    torch.testing.assert_close(encoder(pixels).pooled, encoder((pixels / 255 - mean) / std).pooled, atol=1e-6, rtol=0)


def test_items_of_a_batch_do_not_mix() -> None:
    encoder, pixels = image_encoder(), torch.randn(3, 3, 32, 32).double()
    torch.testing.assert_close(encoder(pixels[1:2]).pooled[0], encoder(pixels).pooled[1], atol=1e-13, rtol=0)


def test_patch_dropout_leaves_the_share_out_in_training_only() -> None:
    encoder, pixels = image_encoder(patch_dropout=0.5), torch.randn(2, 3, 32, 32).double()
    assert encoder.train()(pixels).tokens.shape[1] == 1 + 8
    assert encoder.eval()(pixels).tokens.shape[1] == 1 + 16
    torch.testing.assert_close(encoder.eval()(pixels).pooled, image_encoder()(pixels).pooled)


def test_patch_dropout_keeps_whole_patches_in_reading_order() -> None:
    encoder = image_encoder(patch_dropout=0.5)
    x = torch.arange(17.0).view(1, 17, 1).expand(4, 17, DIM)
    kept = encoder._drop_patches(x)[..., 0]
    assert (kept[:, 0] == 0).all() and (kept.diff(dim=1) > 0).all() and kept.shape == (4, 9)
    assert len({tuple(row) for row in kept.tolist()}) > 1


@pytest.mark.parametrize("build", [text_encoder, image_encoder])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputing_activations_changes_no_bit(build: Any, dropout: float) -> None:
    given = ids() if build is text_encoder else torch.randn(2, 3, 32, 32).double()
    found = []
    for checkpointing in (False, True):
        encoder = build(activation_checkpointing=checkpointing, dropout=dropout).train()
        torch.manual_seed(3)
        out = encoder(given).pooled
        out.square().sum().backward()
        found.append([out, *(p.grad for p in encoder.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 20
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: text_encoder(causal=True), "causal=true with pool=first: the first token sees nothing"),
        (lambda: text_encoder()(ids(length=13)), "a text of 13 tokens is longer than context_length=12"),
        (lambda: ImageEncoder(30, 8, DIM, 1, 4), "patch_size=8 does not divide image_size=30"),
        (lambda: image_encoder(pool="last"), "pool='last' is not known for pictures"),
        (lambda: image_encoder(patch_dropout=1.0), "patch_dropout=1.0 is not a share below 1"),
        (lambda: image_encoder(patch_dropout=0.5, position="rotary"), "patch_dropout=0.5 and position=rotary"),
        (lambda: image_encoder()(torch.randn(1, 3, 30, 32).double()), "is no whole number of 8 px patches"),
    ],
)
def test_what_does_not_fit_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        build()


@pytest.mark.slow
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("build", [text_encoder, image_encoder])
def test_compiles_without_a_graph_break(build: Any, position: str) -> None:
    encoder = build(position=position, num_kv_heads=2).float()
    given = (ids(), torch.ones(3, 7, dtype=torch.bool)) if build is text_encoder else (torch.randn(2, 3, 32, 32),)
    out, want = torch.compile(encoder, fullgraph=True)(*given), encoder(*given)
    torch.testing.assert_close(out.pooled, want.pooled, atol=1e-5, rtol=1e-5)
    out.pooled.sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())
