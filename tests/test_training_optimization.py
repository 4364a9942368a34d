"""Parameter groups and schedules."""

import math

import hydra
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import config, tiny_model
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


def test_the_cross_modal_heads_and_the_scale_have_rates_of_their_own():
    model = tiny_model(joint=2)
    optimizer = adamw(model, lr=1.0, rates={"crossmodal": 3.0, "log_logit_scale": 0.25})
    rate = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        factor = 3.0 if name.startswith("crossmodal.") else 0.25 if name == "log_logit_scale" else 1.0
        assert rate[id(parameter)] == factor, name
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert id(model.crossmodal.joint.type_embedding) not in decayed
    assert id(model.crossmodal.joint.from_text.weight) in decayed


def test_a_scalar_shares_its_group_with_scalars_alone():
    """They are not sharded, and a fused step takes no mixture."""
    for group in adamw(tiny_model(init_logit_bias=-10.0), lr=1.0).param_groups:
        assert len({p.ndim == 0 for p in group["params"]}) == 1


def test_the_optimizer_of_the_config_is_fused_and_takes_rates_and_layer_decay(tmp_path):
    plain = config(tmp_path).optimizer
    asked = config(
        tmp_path, "optimizer.rates={text_encoder:0.5}", "optimizer.layer_decay={image_encoder:0.1}", "optimizer.lr=2.0"
    ).optimizer
    model = tiny_model()
    assert hydra.utils.instantiate(plain)(model).defaults["fused"] is True
    groups = hydra.utils.instantiate(asked)(model).param_groups
    rate = {id(p): g["lr"] for g in groups for p in g["params"]}
    assert rate[id(model.text_encoder.embedding.weight)] == 1.0
    assert rate[id(model.image_encoder.patches.weight)] == pytest.approx(0.2)


def test_a_fused_step_is_the_plain_one_s():
    models = [tiny_model(), tiny_model()]
    optimizers = [adamw(model, lr=0.01, rates={"crossmodal": 2.0}) for model in models]
    for group in optimizers[1].param_groups:
        group["fused"] = group["foreach"] = False
    for model, optimizer in zip(models, optimizers, strict=True):
        for seed in range(3):
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape)
            optimizer.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_prefix_that_names_nothing_is_refused(model):
    with pytest.raises(ValueError, match="rates.vision: no parameter starts with 'vision'; there are image_encoder"):
        parameter_groups(model, lr=1.0, weight_decay=0.1, rates={"vision": 2.0})


def test_a_rate_of_a_frozen_part_is_told_and_has_no_effect(model, caplog):
    model.image_encoder.requires_grad_(False)
    with caplog.at_level("INFO"):
        groups = parameter_groups(model, lr=1.0, weight_decay=0.1, rates={"image_encoder": 0.5})
    assert "optimizer.rates.image_encoder has no effect: all of image_encoder is frozen" in caplog.text
    assert {group["lr"] for group in groups} == {1.0}


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


def rates_of(schedule, steps, **settings):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, steps, **settings)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 0.1, 10])
def test_schedules_equal_their_formulas(warmup):
    rise = 10 if warmup else 1
    after = [(step - rise) / (100 - rise) for step in range(rise, 100)]
    up = [(step + 1) / rise for step in range(rise)]
    cosine = up + [0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2 for done in after]
    assert rates_of(warmup_cosine, 100, warmup=warmup, floor=0.1) == pytest.approx(cosine)
    assert rates_of(warmup_linear, 100, warmup=warmup) == pytest.approx(up + [1 - done for done in after])
    constant = up + [1.0] * (75 - rise) + [(100 - step) / 25 for step in range(75, 100)]
    assert rates_of(warmup_constant, 100, warmup=warmup, cooldown=0.25) == pytest.approx(constant)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.floats(0, 0.99), st.floats(0, 1))
def test_a_schedule_of_any_length_stays_within_its_rate(steps, warmup, cooldown):
    for schedule, more in ((warmup_cosine, {}), (warmup_linear, {}), (warmup_constant, dict(cooldown=cooldown))):
        rates = rates_of(schedule, steps, warmup=warmup, **more)
        assert all(0 < rate <= 1 for rate in rates), schedule  # the last step still moves


def test_a_warmup_longer_than_the_run_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="warmup=50 is 50 steps, but the run has 20"):
        warmup_cosine(optimizer, 20, warmup=50)
