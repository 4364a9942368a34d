"""Each sign of a broken run: found in a model that is broken so, and not in a healthy one."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_training import tiny_batch, tiny_model
from torch.nn import functional as F

from vlretrieval import losses
from vlretrieval.model.attention import MultiHeadAttention
from vlretrieval.training.objective import Objective
from vlretrieval.training.task import RetrievalTask
from vlretrieval.training.watch import sanity


def backward(model, **objective):
    """A step's gradients on a fresh batch."""
    task = RetrievalTask(model, Objective(losses.info_nce, **objective), lambda m: None)
    loss, _ = task.objective(model, task.encode(tiny_batch()))
    loss.backward()


def test_a_line_says_ok_or_what_to_do():
    assert str(sanity.Finding("scale 14")) == "ok       scale 14"
    assert str(sanity.Finding("scale 100", "lower it")) == "WARNING  scale 100: lower it"


@pytest.mark.parametrize("last, good", [(0.1, True), (2.7, True), (2.9, False), (4.2, False), (math.nan, False)])
def test_a_loss_that_does_not_fall_on_one_batch_is_told(last, good):
    found = sanity.overfitting(4.0, last, 40)
    assert found.good is good and "4 -> " in found.seen


def test_a_loss_at_chance_is_that_of_a_collapsed_model_and_of_no_trained_one():
    g = torch.Generator().manual_seed(0)
    same = F.normalize(torch.randn(1, 8, generator=g), dim=-1).expand(16, 8)
    apart = torch.eye(16)
    for embedding, good in ((same, False), (apart, True)):
        loss = float(losses.info_nce(embedding, embedding, torch.tensor(10.0)))
        assert sanity.chance(loss, 16).good is good
    assert sanity.chance(0.0, 1).good, "a batch of one has nothing to tell apart"


def test_collapsed_and_dead_embeddings_are_found():
    g = torch.Generator().manual_seed(0)
    healthy = F.normalize(torch.randn(32, 16, generator=g), dim=-1)
    point = F.normalize(torch.ones(1, 16) + 1e-3 * torch.randn(32, 16, generator=g), dim=-1)
    assert sanity.collapse(healthy, "image").good
    assert "one point" in sanity.collapse(point, "image").to_do
    dead = healthy.clone()
    dead[3:5] = 0
    assert "2 of 32 text" in sanity.collapse(dead, "text").seen and not sanity.collapse(dead, "text").good
    assert sanity.collapse(healthy[:1], "image").good


def test_the_mean_cosine_is_that_of_all_pairs():
    g = torch.Generator().manual_seed(0)
    rows = F.normalize(torch.randn(7, 5, generator=g) + 1, dim=-1)
    pairs = [float(rows[i] @ rows[j]) for i in range(7) for j in range(7) if i != j]
    assert sanity.mean_cosine(rows) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)


def copy_head(layer: MultiHeadAttention, source: int, target: int, parts: str) -> None:
    """Makes one head's projections those of another (MHA)."""
    width = layer.head_dim
    rows = {"q": 0, "k": layer.inner, "v": layer.inner + layer.inner_kv}
    with torch.no_grad():
        for part in parts:
            weight = layer.qkv.weight[rows[part] : rows[part] + layer.inner]
            weight[target * width : (target + 1) * width] = weight[source * width : (source + 1) * width]


def test_a_head_that_is_a_copy_is_found_by_its_projections_and_by_its_output():
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4)
    assert sanity.copied_heads(layer).good
    copy_head(layer, 1, 3, "qk")
    assert sanity.copied_heads(layer).good, "the same map over other values is another head"
    copy_head(layer, 1, 3, "v")
    found = sanity.copied_heads(layer)
    assert not found.good and "heads 2 and 4" in found.seen
    with sanity.head_outputs(layer) as outputs:
        layer(torch.randn(2, 5, 16))
    cosine, i, j = sanity.most_alike(outputs[""])
    assert (i, j) == (1, 3) and cosine == pytest.approx(1)
    assert not list(layer.out._forward_pre_hooks), "the hooks are taken off"


def test_heads_with_shared_keys_and_values_are_told_apart_by_their_queries():
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4, num_kv_heads=1, context_dim=8)
    assert sanity.copied_heads(layer).good
    with torch.no_grad():
        layer.q.weight[4:8] = layer.q.weight[:4]
    assert "heads 1 and 2" in sanity.copied_heads(layer).seen and not sanity.copied_heads(layer).good


def test_a_healthy_model_has_no_copies_and_gradients_everywhere():
    model = tiny_model()
    backward(model, ranking_weight=1.0)
    assert sanity.copied_heads(model).good
    assert sanity.without_gradient(model) == []
    assert sanity.gradients(model).good


def test_a_part_that_no_gradient_reaches_is_named():
    model = tiny_model()
    backward(model, matching_weight=0.0)
    assert sanity.without_gradient(model) == ["crossmodal"]
    assert "no gradient reaches crossmodal" in sanity.gradients(model).seen
    assert sanity.gradients(model, ignored=("crossmodal",)).good

    cut = tiny_model()
    plain = cut.text_encoder.forward
    cut.text_encoder.forward = lambda *a: tuple(x if x is None else x.detach() for x in plain(*a))
    backward(cut)
    assert sanity.without_gradient(cut) == ["text_encoder"]


def test_a_frozen_part_is_not_missed():
    model = tiny_model()
    model.text_encoder.requires_grad_(False)
    backward(model)
    assert sanity.gradients(model).good


@pytest.mark.parametrize("scale, good", [(1.0, False), (1.5, True), (14.3, True), (98.0, True), (99.9, False)])
def test_the_logit_scale_at_either_rail_is_told(scale, good):
    assert sanity.rail(scale).good is good


@pytest.mark.parametrize("waited, good", [(0.0, True), (0.2, True), (0.6, False)])
def test_steps_that_wait_for_their_batches_are_told(waited, good):
    found = sanity.loader_bound(waited, 1.0)
    assert found.good is good and f"{100 * waited:.0f} %" in found.seen


def test_distinct_rows_are_the_first_of_each_id():
    ids = torch.tensor([7, 3, 7, 9, 3])
    assert sanity.distinct(ids).tolist() == [0, 1, 3]
