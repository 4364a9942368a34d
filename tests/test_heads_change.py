"""Heads closed, removed, shared and gated: what must hold exactly does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_heads import heads_config, heads_model, logits_of, random_pairs, scene_inputs, scene_split
from vlretrieval.data.tokenizers import BpeTokenizer
from vlretrieval.data.transforms import EvalTransform
from vlretrieval.deploy.build import build_model
from vlretrieval.deploy.checkpoint import Checkpoint, load_checkpoint
from vlretrieval.deploy.export import export
from vlretrieval.deploy.loaded import load_folder
from vlretrieval.heads.ablate import Closure, Probe, closed, closing, closures_of, gated, small_gallery
from vlretrieval.heads.convert import mean_of_runs, shared_kv
from vlretrieval.heads.gates import GateSettings, hard_concrete, learn_gates, open_heads
from vlretrieval.heads.laboratory import importance_of
from vlretrieval.heads.layers import heads_of, layers_of
from vlretrieval.heads.pair_loss import pair_loss, true_pairs
from vlretrieval.heads.prune import kept_heads, parameters_of_heads, pruned
from vlretrieval.heads.pruning_curve import gate_gradients, greedy_curve
from vlretrieval.heads.store import save_changed
from vlretrieval.model import costs

IMAGE = "image_encoder.transformer.blocks.0.attention"
TEXT = "text_encoder.transformer.blocks.0.attention"
CROSS = "crossmodal.text_to_image.blocks.0.cross"
LAST = "crossmodal.text_to_image.blocks.1.cross"
BETWEEN = "crossmodal.text_to_image.blocks.0.attention"
BACK = "crossmodal.image_to_text.blocks.0.cross"
SOME = [(IMAGE, 0), (IMAGE, 3), (TEXT, 1), (CROSS, 0), (CROSS, 1), (CROSS, 2), (LAST, 3), (BETWEEN, 2), (BACK, 0)]


def same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...], atol: float = 1e-6) -> bool:
    return all(torch.allclose(a, b, atol=atol, rtol=0) for a, b in zip(first, second, strict=True))


def checkpoint_of(model: Any, config: dict[str, Any]) -> Checkpoint:
    tokenizer = BpeTokenizer(vocab_size=400, context_length=32).fit(["a red circle and a star"])
    heads = {"text": 4, "image": 4, "text_to_image": 4, "image_to_text": 2, "kv": None}
    whole = {"model": config, "heads": heads, "data": {"resize": "squash"}}
    return Checkpoint(Path("x.ckpt"), "0", 7, whole, tokenizer, model.state_dict())


def test_closing_every_head_of_a_block_leaves_the_residual_plus_the_output_bias() -> None:
    model, x = heads_model(), torch.randn(2, 10, 16)
    block = model.image_encoder.transformer.blocks[0]
    with closed(model, [(IMAGE, head) for head in range(4)]), torch.no_grad():
        found = block(x)
        rows = x + block.attention.out.bias
        assert torch.equal(found, rows + block.mlp(block.mlp_norm(rows)))


def test_closing_is_undone_and_gates_multiply() -> None:
    model, pairs = heads_model(), random_pairs()
    before = logits_of(model, pairs)
    with gated(model, {CROSS: torch.tensor([0.5, 1, 1, 1])}):
        half = logits_of(model, pairs)
        with closed(model, [(CROSS, 1)]):
            gates = {layer.name: layer.module.gate for layer in layers_of(model) if layer.module.gate is not None}
            assert gates[CROSS].tolist() == [0.5, 0, 1, 1]
        assert all(torch.equal(a, b) for a, b in zip(half, logits_of(model, pairs), strict=True))
    assert not torch.equal(half[2], before[2])
    assert all(torch.equal(a, b) for a, b in zip(before, logits_of(model, pairs), strict=True))
    assert all(layer.module.gate is None for layer in layers_of(model))


def test_a_head_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="has heads 0 to 3, not 4"):
        closing(heads_model(), [(IMAGE, 4)])
    with pytest.raises(ValueError, match="no attention called 'x'"):
        closing(heads_model(), [("x", 0)])


# ------------------------------------------------------------------------------------------------------------- pruning


def test_the_pruned_model_equals_the_gated_one_and_is_smaller_by_the_counted_parameters() -> None:
    model, pairs = heads_model(), random_pairs()
    with closed(model, SOME):
        gated_logits = logits_of(model, pairs)
    small = pruned(model, closing(model, SOME))
    assert same(gated_logits, logits_of(small, pairs))
    layers = {layer.name: layer.module for layer in layers_of(model)}
    counted = sum(parameters_of_heads(layers[name], 1, 1) for name, _ in SOME)
    count = [sum(p.numel() for p in m.parameters()) for m in (model, small)]
    assert counted == (8 * 4 + 8) * (4 * 16 + 3)  # widths 4 and 8; q, k, v with biases and W_O's columns, over 16
    assert count[0] - count[1] == counted
    assert {layer.name: layer.heads for layer in layers_of(small)}[CROSS] == 1
    assert sum(layer.heads for layer in layers_of(model)) == 30  # the model itself stays


def test_learnt_gates_go_into_the_output_weights() -> None:
    model, pairs = heads_model(), random_pairs()
    gates = {IMAGE: torch.tensor([0.3, 0, 1, 0.8]), CROSS: torch.tensor([0, 0.6, 0, 0])}
    with gated(model, gates):
        wanted = logits_of(model, pairs)
    assert same(wanted, logits_of(pruned(model, gates), pairs))


def test_a_layer_without_an_open_head_keeps_one_that_puts_out_nothing() -> None:
    model, pairs = heads_model(), random_pairs()
    heads = [(TEXT, head) for head in range(4)]
    with closed(model, heads):
        wanted = logits_of(model, pairs)
    small = pruned(model, closing(model, heads))
    layer = {layer.name: layer for layer in layers_of(small)}[TEXT]
    assert layer.heads == 1 and not layer.module.out.weight.any()
    assert same(wanted, logits_of(small, pairs))


@pytest.mark.parametrize("kv", [1, 2])
def test_shared_keys_and_values_are_pruned_by_groups_and_still_equal(kv: int) -> None:
    changed = {f"{part}__num_kv_heads": kv for part in ("image_encoder", "text_encoder", "crossmodal")}
    model, pairs = heads_model(**changed), random_pairs()
    heads = [(IMAGE, 0), (IMAGE, 1), (TEXT, 2), (CROSS, 3), (CROSS, 1), (BACK, 1)]
    with closed(model, heads):
        wanted = logits_of(model, pairs)
    small = pruned(model, closing(model, heads))
    assert same(wanted, logits_of(small, pairs))
    layers = {layer.name: layer.module for layer in layers_of(small)}
    assert layers[IMAGE].num_kv_heads == 1 and layers[IMAGE].num_heads == 2
    assert layers[TEXT].num_heads == (4 if kv == 2 else 3)  # both groups must have equally many


def test_which_heads_stay() -> None:
    assert kept_heads([1, 0, 1, 1], 4) == {0: [0], 2: [2], 3: [3]}
    assert kept_heads([1, 0, 0, 0], 2) == {0: [0]}
    assert kept_heads([1, 0, 1, 1], 2) == {0: [0, 1], 1: [2, 3]}
    assert kept_heads([0, 0], 1) == {0: [0]}


def test_norms_of_queries_and_keys_go_along() -> None:
    changed = {f"{part}__qk_norm": True for part in ("image_encoder", "text_encoder", "crossmodal")}
    model, pairs = heads_model(**changed), random_pairs()
    with closed(model, SOME):
        wanted = logits_of(model, pairs)
    assert same(wanted, logits_of(pruned(model, closing(model, SOME)), pairs))


def test_the_pruned_checkpoint_says_its_counts_opens_and_exports(tmp_path: Path) -> None:
    model, pairs = heads_model(), random_pairs()
    small = pruned(model, closing(model, SOME))
    path = save_changed(tmp_path / "pruned" / "pruned.ckpt", checkpoint_of(model, heads_config()), small, "a test")
    opened = load_checkpoint(path)
    counts = opened.config["model"]
    assert counts["image_encoder"]["num_heads"] == [2, 4] and counts["image_encoder"]["head_dim"] == 4
    assert counts["text_encoder"]["num_heads"] == 3
    assert counts["crossmodal"]["text_to_image"] == [1, 3] and counts["crossmodal"]["image_to_text"] == 1
    assert counts["crossmodal"]["text_self_heads"] == [3, 4]
    assert counts["crossmodal"]["head_dim"] == {"text_to_image": 4, "image_to_text": 8, "text_self": 4}
    assert opened.config["heads"]["image"] == [2, 4] and opened.config["made_by"] == "a test"
    assert same(logits_of(small, pairs), logits_of(opened.build(), pairs), atol=0)
    folder = export(path, tmp_path / "out")
    assert same(logits_of(small, pairs), logits_of(load_folder(folder).model, pairs), atol=0)
    assert costs.parameter_count(counts) == sum(p.numel() for p in small.parameters())


def test_an_unpruned_model_is_described_as_it_was(tmp_path: Path) -> None:
    config = heads_config()
    path = save_changed(tmp_path / "same.ckpt", checkpoint_of(heads_model(), config), heads_model(), "nothing")
    made = load_checkpoint(path).config["model"]
    assert made["image_encoder"]["num_heads"] == 4 and made["image_encoder"]["head_dim"] is None
    assert made["crossmodal"]["head_dim"] is None and made["crossmodal"]["num_kv_heads"] is None


def test_heads_by_block_are_built_and_what_does_not_fit_is_refused() -> None:
    config = heads_config(image_encoder__num_heads=[4, 2], image_encoder__head_dim=4)
    counts = [layer.heads for layer in layers_of(build_model(config)) if layer.kind == "image"]
    assert counts == [4, 2]
    with pytest.raises(ValueError, match=r"num_heads=\[4, 2\] differs from block to block: give the heads' width"):
        build_model(heads_config(image_encoder__num_heads=[4, 2]))
    with pytest.raises(ValueError, match=r"num_heads=\[4\] has 1 numbers for 2 blocks"):
        build_model(heads_config(image_encoder__num_heads=[4], image_encoder__head_dim=4))
    with pytest.raises(ValueError, match="head_dim has no kind 'text'; the kinds are text_to_image"):
        build_model(heads_config(crossmodal__head_dim={"text": 4}))


# ------------------------------------------------------------------------------------------------------------- sharing


def test_pooled_keys_and_values_are_the_means_of_their_heads() -> None:
    rows = torch.arange(12.0).view(6, 2)  # 3 heads of 2 rows
    assert mean_of_runs(rows, 3, 1).tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert torch.equal(mean_of_runs(rows, 3, 3), rows)


def test_sharing_heads_that_are_alike_changes_nothing() -> None:
    """If all heads of a group have the same K and V, their mean is each of them, and MQA equals MHA."""
    model, pairs = heads_model(), random_pairs()
    with torch.no_grad():
        for layer in layers_of(model):
            if layer.kind == "between":
                continue
            merged = layer.module.qkv if layer.module.context_dim is None else layer.module.kv
            first = layer.module.inner if layer.module.context_dim is None else 0
            for tensor in (merged.weight, merged.bias):
                for start in (first, first + layer.module.inner):
                    rows = tensor[start : start + layer.module.inner].unflatten(0, (layer.heads, -1))
                    rows.copy_(rows[:1].clone().expand_as(rows))
    assert same(logits_of(model, pairs), logits_of(shared_kv(model, 1), pairs), atol=1e-5)


@pytest.mark.parametrize("kv", [1, 2])
def test_a_converted_checkpoint_says_so_and_is_what_heads_kv_builds(tmp_path: Path, kv: int) -> None:
    model = heads_model()
    small = shared_kv(model, kv)
    path = save_changed(tmp_path / "gqa.ckpt", checkpoint_of(model, heads_config()), small, "a test")
    opened = load_checkpoint(path)
    changed = {f"{part}__num_kv_heads": kv for part in ("image_encoder", "text_encoder", "crossmodal")}
    trained = build_model(heads_config(**changed))  # what heads.kv builds, and init_from fills
    trained.load_state_dict(opened.build().state_dict(), strict=True)
    if kv == 1:
        assert opened.config["heads"]["kv"] == 1
    assert torch.isfinite(logits_of(trained, random_pairs())[2]).all()


def test_kv_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="kv=3 does not divide the 4 K/V heads of image_encoder.*choose 1, 2, 4"):
        shared_kv(heads_model(), 3)
    with pytest.raises(ValueError, match="kind 'words' is not known"):
        shared_kv(heads_model(), 1, ["words"])


# ------------------------------------------------------------------------------------------------------------ ablation


def probe(model: Any = None, **settings: Any) -> Probe:
    inputs = scene_inputs()
    return Probe(model or heads_model(), inputs.split, inputs.tokenizer, EvalTransform(48), pictures=12, **settings)


def test_a_probe_computes_again_only_what_a_closure_can_change() -> None:
    made = probe()
    made.open()
    images, texts = made._images, made._texts
    for heads in ([(IMAGE, 0)], [(TEXT, 1)], [(CROSS, 0)], SOME):
        quick = made.ranks(heads)
        fresh = probe(made.model).ranks(heads)
        for stage in fresh:
            for a, b in zip(quick[stage], fresh[stage], strict=True):
                assert np.array_equal(a.rank(), b.rank())
    assert made._images is images and made._texts is texts  # what is kept is the open model's


def test_drops_are_paired_and_a_closure_of_nothing_costs_nothing() -> None:
    made = probe(top_k=4)
    drops = made.drops([Closure("nothing", "head", ()), *closures_of(made.model)[:3]], replicates=50)
    assert drops[0].final == (0, 0, 0) and not drops[0].matters
    for drop in drops:
        assert drop.final[1] <= drop.final[0] <= drop.final[2]
        assert drop.final[0] == pytest.approx((drop.t2i[0] + drop.i2t[0]) / 2)
    by_hand = made.recall(made.open()) - made.recall(made.ranks(closures_of(made.model)[1].heads))
    assert drops[2].final[0] == pytest.approx(by_hand)


def test_cross_modal_closures_have_no_first_stage_and_every_scope_is_there() -> None:
    model = heads_model()
    found = closures_of(model)
    scopes = {scope: [c.title for c in found if c.scope == scope] for scope in ("head", "layer", "kind", "direction")}
    assert len(scopes["head"]) == 30 and len(scopes["layer"]) == 8
    assert "all image-to-text heads" in scopes["kind"] and scopes["direction"] == [
        "everything in text-to-image",
        "everything in image-to-text",
    ]
    made = probe(model, top_k=3)
    image, cross = made.drops([Closure("a", "head", ((IMAGE, 0),)), Closure("b", "head", ((CROSS, 0),))], replicates=20)
    assert image.first_stage is not None and cross.first_stage is None


def test_a_small_gallery_keeps_every_truth_among_its_pictures() -> None:
    split = scene_split(40)
    small = small_gallery(split, 10, 2)
    assert len(small.image_ids) == 10 and len(small.captions) == 20
    known = {(split.captions[c], split.image_ids[i]) for c, i in split.positives.tolist()}
    for caption, image in small.positives.tolist():
        assert (small.captions[caption], small.image_ids[image]) in known


@pytest.mark.parametrize("by", ["drops", "gradient", "recall"])
def test_the_curve_goes_from_all_heads_to_the_least_and_never_opens_one_again(by: str) -> None:
    made = probe(top_k=3)
    inputs = scene_inputs()
    drops = made.drops(closures_of(made.model)[:30], replicates=1) if by == "drops" else []
    importance = importance_of(made, by, inputs, drops)
    curve = greedy_curve(made, importance, points=3, least=2)
    assert [point.left for point in curve] == [30, 21, 11, 2]
    for earlier, later in zip(curve, curve[1:], strict=False):
        assert later.closed[: len(earlier.closed)] == earlier.closed
    assert curve[-1].recall == made.recall(made.ranks(curve[-1].closed))
    with pytest.raises(ValueError, match="points=0"):
        greedy_curve(made, importance, points=0)


def test_a_gates_gradient_is_the_slope_of_the_loss_and_a_closed_head_has_none() -> None:
    model, inputs = heads_model(), scene_inputs()
    rows = np.arange(0, 40, 5)
    found = gate_gradients(model, inputs, rows, [(TEXT, 2)])
    assert len(found) == 29 and (TEXT, 2) not in found
    step = 1e-2
    with torch.no_grad():
        losses = []
        for sign in (1, -1):
            gate = torch.ones(4)
            gate[1] += sign * step
            with closed(model, [(TEXT, 2)]), gated(model, {IMAGE: gate}):
                losses.append(float(pair_loss(model, inputs, rows)))
    assert found[IMAGE, 1] == pytest.approx(abs(losses[0] - losses[1]) / (2 * step), rel=0.05, abs=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_true_pairs_of_a_batch() -> None:
    positives = np.array([[0, 0], [1, 0], [2, 1], [2, 2]])
    found = true_pairs(positives, 3, np.array([1, 2]), np.array([0, 1]))
    assert found.tolist() == [[True, False], [False, True]]


# --------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("penalty", ["l0", "l1"])
def test_a_high_price_closes_heads_a_price_of_nothing_none(penalty: str) -> None:
    model, inputs = heads_model(), scene_inputs()
    before = copy.deepcopy(model.state_dict())
    free = learn_gates(model, inputs, GateSettings(penalty, weight=0.0, steps=3, batch_size=6))
    dear = learn_gates(model, inputs, GateSettings(penalty, weight=300.0, steps=25, lr=0.2, batch_size=6))
    assert open_heads(free) == 30 and open_heads(dear) < 15
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert {name: len(gate) for name, gate in dear.items()} == {layer.name: layer.heads for layer in layers_of(model)}
    with gated(model, dear):
        wanted = logits_of(model, random_pairs())
    assert same(wanted, logits_of(pruned(model, dear), random_pairs()), atol=1e-5)


def test_hard_concrete_gates_reach_both_ends() -> None:
    drawn = hard_concrete(torch.zeros(3), torch.tensor([0.001, 0.5, 0.999]))
    assert drawn.tolist() == pytest.approx([0, 0.5, 1], abs=1e-6)
    with pytest.raises(ValueError, match="penalty='l2' is not known"):
        GateSettings("l2")


def test_every_head_is_counted_once() -> None:
    heads = heads_of(layers_of(heads_model()))
    assert len(heads) == len(set(heads)) == 30
