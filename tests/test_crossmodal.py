"""Cross-modal heads and the matching logit: grouped, kept, pooled early or written out, a pair's logit is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vlretrieval.model.crossmodal import CrossModal, CrossModalHead
from vlretrieval.model.encoded import Encoded, Kept
from vlretrieval.model.retrieval_model import RetrievalModel

TEXT_DIM, IMAGE_DIM, PATCHES, LENGTH = 16, 20, 9, 6

KINDS: dict[str, dict[str, Any]] = {
    "text to image": dict(text_to_image=2, image_to_text=0),
    "image to text": dict(text_to_image=0, image_to_text=2),
    "both": dict(text_to_image=2, image_to_text=4),
    "both, words among themselves": dict(text_to_image=2, image_to_text=2, text_self_heads=4),
    "both, word order": dict(text_to_image=2, image_to_text=2, text_self_heads=2, text_self_position="rotary"),
    "both, MQA": dict(text_to_image=4, image_to_text=4, num_kv_heads=1, qk_norm=True),
    "both, deep": dict(text_to_image=2, image_to_text=2, text_to_image_depth=3, image_to_text_depth=2, head_dim=12),
    "joint": dict(text_to_image=0, image_to_text=0, joint=4),
    "all three": dict(text_to_image=2, image_to_text=2, joint=2, joint_depth=1),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def heads(kind: str = "both", **options: Any) -> CrossModal:
    torch.manual_seed(0)
    module = CrossModal(TEXT_DIM, IMAGE_DIM, **KINDS[kind], **options).double().eval()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):  # a forgotten bias shows
            torch.nn.init.normal_(parameter, std=0.1)
    return module


def pictures(number: int, masked: bool = False) -> Encoded:
    torch.manual_seed(1)
    mask = torch.arange(PATCHES) < torch.randint(3, PATCHES + 1, (number, 1)) if masked else None
    return Encoded(torch.empty(number, 0), torch.randn(number, PATCHES, IMAGE_DIM, dtype=torch.float64), mask)


def texts(number: int) -> Encoded:
    torch.manual_seed(2)
    mask = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (number, 1))
    return Encoded(torch.empty(number, 0), torch.randn(number, LENGTH, TEXT_DIM, dtype=torch.float64), mask)


def match(module: CrossModal, image: Encoded, text: Encoded) -> Tensor:
    return module(module.keep_image(image), text)


def one_by_one(module: CrossModal, image: Encoded, text: Encoded) -> Tensor:
    each = len(text) // len(image)
    rows = [(image.index(torch.tensor([t // each])), text.index(torch.tensor([t]))) for t in range(len(text))]
    return torch.cat([match(module, *pair) for pair in rows])


def assert_same_logits(given: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(given, want, atol=1e-6, rtol=0)  # float64 inside, float32 logits


@each_kind
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded pictures"])
@pytest.mark.parametrize("each", [1, 3])
def test_captions_that_share_a_picture_score_as_one_by_one(each: int, masked: bool, kind: str) -> None:
    module, image, text = heads(kind), pictures(2, masked), texts(2 * each)
    logits = match(module, image, text)
    assert logits.shape == (2 * each,) and logits.dtype == torch.float32
    assert logits.std() > 1e-3  # pairs differ, so the comparison means something
    assert_same_logits(logits, one_by_one(module, image, text))


@each_kind
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded pictures"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_text_that_meets_several_pictures_scores_as_if_it_was_repeated(number: int, masked: bool, kind: str) -> None:
    module, image, text = heads(kind), pictures(3 * number, masked), texts(number)
    logits = match(module, image, text)
    repeated = text.index(torch.arange(number).repeat_interleave(3))
    assert logits.shape == (3 * number,) and logits.std() > 1e-3
    assert_same_logits(logits, one_by_one(module, image, repeated))


@each_kind
def test_kept_pictures_score_as_fresh_ones_in_any_order(kind: str) -> None:
    module, image, text = heads(kind), pictures(4), texts(5)
    rows = torch.tensor([3, 0, 0, 2, 1])
    kept = module.keep_image(image)
    assert len(kept) == 4
    assert_same_logits(module(kept.index(rows), text), match(module, image.index(rows), text))


@each_kind
def test_gradients_do_not_depend_on_grouping(kind: str) -> None:
    module, text = heads(kind), texts(6)
    found = []
    for score in (match, one_by_one):
        image = pictures(2)
        image.tokens.requires_grad_()
        loss = (score(module, image, text) * torch.arange(1, 7)).sum()
        found.append(torch.autograd.grad(loss, [image.tokens, *module.parameters()]))
    for grouped, single in zip(*found, strict=True):
        torch.testing.assert_close(grouped, single, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("self_heads", [0, 2])
@pytest.mark.parametrize("position", ["none", "rotary"])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_last_block_for_the_pooled_token_alone_equals_the_whole_computation(
    depth: int, position: str, self_heads: int
) -> None:
    torch.manual_seed(0)
    head = CrossModalHead(TEXT_DIM, IMAGE_DIM, 2, depth, self_heads=self_heads, self_position=position).double().eval()
    image, text = pictures(5), texts(5)
    x, rotate = text.tokens, head.positions.rotate((LENGTH,), text.tokens.device)
    for block, kept in zip(head.blocks, head.keep(image.tokens), strict=True):
        x = block(x, key_mask=text.mask, rotate=rotate, context=kept)  # all rows, in the last block too
    whole = head.logit(head.norm(x[:, 0])).squeeze(-1).float()
    assert_same_logits(head(text.tokens, text.mask, head.keep(image.tokens)), whole)


@each_kind
def test_padding_of_a_caption_changes_nothing(kind: str) -> None:
    module, image, text = heads(kind), pictures(3), texts(3)
    assert text.mask is not None
    padded = Encoded(
        text.embedding,
        torch.cat([text.tokens, 1e2 * torch.randn(3, 4, TEXT_DIM, dtype=torch.float64)], dim=1),
        torch.cat([text.mask, torch.zeros(3, 4, dtype=torch.bool)], dim=1),
    )
    assert_same_logits(match(module, image, padded), match(module, image, text))


@each_kind
def test_no_mask_means_that_all_tokens_are_real(kind: str) -> None:
    module, image, text = heads(kind), pictures(3), texts(3)
    full = Encoded(text.embedding, text.tokens, torch.ones(3, LENGTH, dtype=torch.bool))
    none = Encoded(text.embedding, text.tokens, None)
    assert_same_logits(match(module, image, none), match(module, image, full))


def test_the_logit_is_the_sum_of_the_kinds() -> None:
    module, image, text = heads("all three"), pictures(3), texts(3)
    kept, parts = module.keep_image(image), []
    assert module.text_to_image is not None and module.image_to_text is not None and module.joint is not None
    parts.append(module.text_to_image(text.tokens, text.mask, kept.text_to_image))
    parts.append(module.image_to_text(image.tokens, None, module.image_to_text.keep(text.tokens), text.mask))
    parts.append(module.joint(image.tokens, None, text.tokens, text.mask))
    assert_same_logits(module(kept, text), parts[0] + parts[1] + parts[2])


def test_patches_are_a_set_to_the_heads_and_words_are_too_unless_their_order_is_given() -> None:
    image, text = pictures(3), texts(3)
    text.mask = None
    patches, words = torch.randperm(PATCHES), torch.tensor([0, *(1 + torch.randperm(LENGTH - 1)).tolist()])  # pooled: 0
    other_image = Encoded(image.embedding, image.tokens[:, patches])
    other_text = Encoded(text.embedding, text.tokens[:, words])
    for kind, ordered in (("both, words among themselves", False), ("both, word order", True)):
        module = heads(kind)
        want = match(module, image, text)
        assert_same_logits(match(module, other_image, text), want)
        assert torch.allclose(match(module, image, other_text), want, atol=1e-6) != ordered


@each_kind
def test_bytes_kept_are_counted(kind: str) -> None:
    kept = heads(kind).keep_image(pictures(4))
    tensors = [kv.key for kv in kept.text_to_image] + [kv.value for kv in kept.text_to_image]
    tensors += [] if kept.tokens is None else [kept.tokens]
    assert kept.nbytes == sum(t.nbytes for t in tensors) > 0


def test_sharing_keys_and_values_keeps_less() -> None:
    options = dict(text_to_image=4, image_to_text=0)
    torch.manual_seed(0)
    full, shared = (CrossModal(TEXT_DIM, IMAGE_DIM, num_kv_heads=kv, **options).double() for kv in (None, 1))
    assert full.keep_image(pictures(4)).nbytes == 4 * shared.keep_image(pictures(4)).nbytes


def test_logits_are_float32_under_autocast_too() -> None:
    """Rounded to bfloat16, logits of a shortlist would tie: 8 bits tell some 40 values between 1 and 1.2 apart."""
    module, image, text = heads("all three").float(), pictures(64), texts(64)
    image.tokens, text.tokens = image.tokens.float(), text.tokens.float()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logits = match(module, image, text)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float()) and len(logits.unique()) > 60


@pytest.mark.parametrize("kind", ["both, word order", "all three"])
def test_recomputing_activations_changes_no_bit(kind: str) -> None:
    found = []
    for checkpointing in (False, True):
        module = heads(kind, activation_checkpointing=checkpointing, dropout=0.1).train()
        torch.manual_seed(3)
        logits = match(module, pictures(2), texts(4))
        found.append([logits, *torch.autograd.grad(logits.sum(), list(module.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_heads_make_a_plain_dual_encoder() -> None:
    nothing = CrossModal(TEXT_DIM, IMAGE_DIM, 0, 0)
    assert not nothing and heads("joint")
    encoder = torch.nn.Module()
    encoder.dim = 8
    model = RetrievalModel(encoder, encoder, nothing, embed_dim=4)
    assert model.crossmodal is None
    with pytest.raises(ValueError, match="plain dual encoder and cannot match"):
        model.match(pictures(1), texts(1))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 texts cannot be shared out evenly to 2 pictures"):
        match(heads(), pictures(2), texts(3))
    with pytest.raises(ValueError, match="depth=0: a cross-modal head needs at least one block"):
        CrossModal(TEXT_DIM, IMAGE_DIM, 2, 0, text_to_image_depth=0)
    with pytest.raises(ValueError, match="pool='last' is not known for cross-modal heads; choose first or mean"):
        CrossModalHead(TEXT_DIM, IMAGE_DIM, 2, 1, pool="last")
    with pytest.raises(ValueError, match="num_heads=3 does not divide dim=16"):
        CrossModal(TEXT_DIM, IMAGE_DIM, 3, 0)


def test_rows_and_runs_of_encoded_and_kept() -> None:
    image = pictures(4, masked=True)
    assert torch.equal(image.index(torch.tensor([2, 0])).tokens, image.tokens[[2, 0]])
    assert torch.equal(image.part(slice(1, 3)).tokens, image.tokens[1:3]) and len(image.part(slice(1, 3))) == 2
    kept = heads("both").keep_image(image).index(torch.tensor([2, 0]))
    assert isinstance(kept, Kept) and len(kept) == 2 and kept.mask is not None and image.mask is not None
    assert torch.equal(kept.mask, image.mask[[2, 0]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["both, word order", "both, MQA", "all three"])
def test_compiles_without_a_graph_break(kind: str) -> None:
    module, image, text = heads(kind).float(), pictures(2), texts(4)
    image.tokens, text.tokens = image.tokens.float(), text.tokens.float()
    compiled = torch.compile(match, fullgraph=True)
    out, want = compiled(module, image, text), match(module, image, text)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    out.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
