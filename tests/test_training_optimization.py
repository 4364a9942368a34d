"""Parameter groups and schedules."""

import pytest
import torch
from torch import nn

from vlretrieval.model.encoders import ImageEncoder, TextEncoder
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.optimization import adamw, parameter_groups, warmup_constant, warmup_cosine, warmup_linear


@pytest.fixture(scope="module")
def model():
    return RetrievalModel(ImageEncoder(16, 8, 16, 3, 2), TextEncoder(30, 8, 16, 2, 2), embed_dim=8)


def test_norms_biases_positions_and_the_scale_are_not_decayed(model):
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {
        names[id(p)]
        for g in parameter_groups(model, lr=1.0, weight_decay=0.1)
        if g["weight_decay"]
        for p in g["params"]
    }
    assert "image_encoder.patches.weight" in decayed and "text_projection.weight" in decayed
    assert not any("norm" in n or n.endswith("bias") or "positions" in n or "scale" in n for n in decayed)
    assert "text_encoder.embedding.weight" not in decayed


def test_every_trainable_parameter_is_in_exactly_one_group(model):
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1, rates={"text": 2.0}, layer_decay={"image_encoder": 0.5})
    ids = [id(p) for g in groups for p in g["params"]]
    assert len(ids) == len(set(ids)) == sum(1 for _ in model.parameters())


def test_rates_and_layer_decay_set_each_part_s_rate(model):
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1, rates={"text": 2.0}, layer_decay={"image_encoder": 0.5})
    rate = {id(p): g["lr"] for g in groups for p in g["params"]}
    named = dict(model.named_parameters())
    assert rate[id(named["text_encoder.embedding.weight"])] == 2.0
    assert rate[id(named["image_encoder.transformer.blocks.2.mlp.0.weight"])] == 1.0
    assert rate[id(named["image_encoder.transformer.blocks.0.mlp.0.weight"])] == 0.25
    assert rate[id(named["image_encoder.patches.weight"])] == 0.125
    assert rate[id(named["image_encoder.transformer.norm.weight"])] == 1.0


def test_a_prefix_that_names_nothing_is_refused(model):
    with pytest.raises(ValueError, match="no trainable parameter starts with 'vision'; there are image_encoder"):
        parameter_groups(model, lr=1.0, weight_decay=0.1, rates={"vision": 2.0})


def test_a_frozen_model_is_refused():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="every one is frozen"):
        adamw(frozen, lr=1.0)


@pytest.mark.parametrize("schedule", [warmup_cosine, warmup_linear, warmup_constant])
def test_schedules_rise_hold_or_fall_and_end_at_nothing(schedule):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, 100, warmup=10)
    rates = []
    for _ in range(101):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == sorted(rates[:10]) and max(rates) == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.0, abs=1e-3)


def test_a_warmup_longer_than_the_run_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="warmup=50 is 50 steps, but the run has 20"):
        warmup_cosine(optimizer, 20, warmup=50)
