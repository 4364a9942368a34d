"""Recording from outside: the maps are those that the model uses, and the model is bit by bit what it was."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_heads import heads_model, logits_of, random_pairs
from vlretrieval.heads.layers import layers_of
from vlretrieval.heads.record import observing, observing_outputs, record_attention


def test_every_layer_is_known_by_name_and_kind() -> None:
    found = {layer.name: (layer.kind, layer.heads, layer.title) for layer in layers_of(heads_model())}
    assert found["image_encoder.transformer.blocks.1.attention"] == ("image", 4, "image, layer 2")
    assert found["text_encoder.transformer.blocks.0.attention"] == ("text", 4, "text, layer 1")
    assert found["crossmodal.text_to_image.blocks.0.cross"] == ("text_to_image", 4, "text-to-image, layer 1")
    assert found["crossmodal.text_to_image.blocks.1.attention"][0] == "between"
    assert found["crossmodal.image_to_text.blocks.0.cross"][:2] == ("image_to_text", 2)
    assert len(found) == 8


def test_maps_are_kept_by_module_name_and_every_real_row_sums_to_1() -> None:
    model, pairs = heads_model(), random_pairs()
    with record_attention(model) as maps:
        logits_of(model, pairs)
    assert set(maps) == {layer.name for layer in layers_of(model)}
    assert maps["image_encoder.transformer.blocks.0.attention"].shape == (3, 4, 10, 10)
    assert maps["crossmodal.text_to_image.blocks.0.cross"].shape == (3, 4, 9, 10)
    assert maps["crossmodal.text_to_image.blocks.1.cross"].shape == (3, 4, 1, 10)  # the start token alone
    assert maps["crossmodal.image_to_text.blocks.0.cross"].shape == (3, 2, 10, 9)
    for weights in maps.values():
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    assert (maps["text_encoder.transformer.blocks.0.attention"][2, :, :, 7:] == 0).all()  # padding


def test_looking_changes_nothing_and_leaves_nothing_behind() -> None:
    model, pairs = heads_model(), random_pairs()
    before = logits_of(model, pairs)
    plain = [vars(layer.module).copy() for layer in layers_of(model)]
    hooks = [len(layer.module.out._forward_pre_hooks) for layer in layers_of(model)]
    with record_attention(model), observing_outputs(model, lambda layer, outputs: None):
        during = logits_of(model, pairs)
    after = logits_of(model, pairs)
    for one, two, three in zip(before, during, after, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    assert all(layer.module.observer is None for layer in layers_of(model))
    assert [vars(layer.module) for layer in layers_of(model)] == plain
    assert [len(layer.module.out._forward_pre_hooks) for layer in layers_of(model)] == hooks


def test_an_earlier_observer_still_sees_and_stays() -> None:
    model, pairs = heads_model(), random_pairs()
    layer = layers_of(model)[0].module
    seen: list[torch.Tensor] = []
    layer.observer = seen.append
    with record_attention(model, "image_encoder") as maps:
        logits_of(model, pairs)
    assert len(seen) == 1 and torch.equal(seen[0], maps["image_encoder.transformer.blocks.0.attention"])
    assert len(maps) == 2 and layer.observer is not None


def test_an_error_inside_takes_the_observers_off_too() -> None:
    model = heads_model()
    with pytest.raises(RuntimeError, match="stop"), record_attention(model):
        raise RuntimeError("stop")
    assert all(layer.module.observer is None for layer in layers_of(model))


def test_outputs_are_what_the_weights_make_of_the_values() -> None:
    """Of the first image layer: weights @ values, head by head, before W_O."""
    model, (pixels, *_) = heads_model(), random_pairs()
    block = model.image_encoder.transformer.blocks[0]
    inside: dict[str, torch.Tensor] = {}
    block.attention_norm.register_forward_hook(lambda module, given, out: inside.__setitem__("x", out))
    with (
        record_attention(model, "image_encoder.transformer.blocks.0") as maps,
        observing_outputs(model, lambda layer, out: inside.__setitem__(layer.name, out), "image_encoder"),
        torch.no_grad(),
    ):
        model.encode_image(pixels)
    value = block.attention.qkv(inside["x"])[..., 32:].unflatten(-1, (4, 4)).transpose(1, 2)  # (B, H, L, D)
    name = "image_encoder.transformer.blocks.0.attention"
    assert torch.allclose((maps[name] @ value).transpose(1, 2), inside[name], atol=1e-5)


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="no attention called 'fusion'; there are image_encoder.transformer"):
        with observing(heads_model(), lambda layer, weights: None, "fusion"):
            pass
    with pytest.raises(ValueError, match="no heads to look at"):
        layers_of(torch.nn.Linear(2, 2))
