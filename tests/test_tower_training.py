"""Pretrained towers in training: what mode their parts are in, whose statistics count, at which rate they learn."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from vlretrieval import losses
from vlretrieval.evaluation.encode import evaluating
from vlretrieval.model.hugging_face_tower import HuggingFaceTower
from vlretrieval.model.on_top import OnTop
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.model.timm_tower import TimmTower
from vlretrieval.training.chunks import recomputed
from vlretrieval.training.layers import layers_above
from vlretrieval.training.momentum import Momentum, MomentumEncoder
from vlretrieval.training.objective import Objective
from vlretrieval.training.optimization import parameter_groups
from vlretrieval.training.task import RetrievalTask
from vlretrieval.training.watch.sanity import without_gradient

timm = pytest.importorskip("timm")
BERT = {
    "model_type": "bert",
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}


def model(image: str = "test_efficientnet", depth: int = 1) -> RetrievalModel:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = 160 if image == "test_vit" else 64
    return RetrievalModel(
        OnTop(TimmTower(image, None, size), dim=16, depth=depth, num_heads=2, image_size=size),
        OnTop(HuggingFaceTower(config=BERT, vocab_size=60, context_length=32), dim=16, depth=depth, num_heads=2),
        embed_dim=8,
    )


def test_looking_at_a_model_leaves_every_part_in_the_mode_it_was_in() -> None:
    task = RetrievalTask(model(), Objective(losses.info_nce), None, freeze=["image_encoder.base"]).train()
    before = {name: module.training for name, module in task.named_modules()}
    assert len(set(before.values())) == 2
    with evaluating(task.model):
        assert not any(module.training for module in task.model.modules())
    assert {name: module.training for name, module in task.named_modules()} == before


def test_a_run_starts_with_every_part_training_but_the_frozen_ones() -> None:
    task = RetrievalTask(model().eval(), Objective(losses.info_nce), None, freeze=["image_encoder.base"])
    task.on_fit_start()
    assert task.model.text_encoder.base.model.training and not task.model.image_encoder.base.model.training


def test_a_momentum_teacher_follows_the_statistics_of_batch_norms_too() -> None:
    own = model(depth=0)
    teacher = MomentumEncoder(own, Momentum(decay=0.75, queue=4))
    norms = [
        (a, b) for a, b in zip(own.modules(), teacher.twin.modules(), strict=True) if isinstance(a, nn.BatchNorm2d)
    ]
    assert norms
    start = norms[0][1].running_mean.clone()
    for norm, _ in norms:
        norm.running_mean += 4.0
        norm.num_batches_tracked += 3
    teacher.update(own)
    torch.testing.assert_close(norms[0][1].running_mean, start + 1.0)
    assert all(int(twin.num_batches_tracked) == 3 for _, twin in norms)


def rates_and_decays(of: RetrievalModel) -> tuple[dict[str, float], set[str]]:
    groups = parameter_groups(of, lr=1.0, weight_decay=0.1, layer_decay={"image_encoder": 0.5, "text_encoder": 0.5})
    names = {id(p): name for name, p in of.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    return rates, {names[id(p)] for group in groups for p in group["params"] if group["weight_decay"]}


@pytest.mark.parametrize("image", ["test_efficientnet", "test_vit"])
def test_layer_decay_counts_down_through_the_tower_and_spares_what_is_new(image: str) -> None:
    rates, _ = rates_and_decays(model(image))
    new = {rate for name, rate in rates.items() if ".base." not in name}
    assert new == {1.0}
    text = "text_encoder.base.model."
    assert rates[text + "encoder.layer.1.output.dense.weight"] == 1.0
    assert rates[text + "encoder.layer.0.output.dense.weight"] == 0.5
    assert rates[text + "embeddings.word_embeddings.weight"] == 0.25
    tower = {name.removeprefix("image_encoder.base.model."): rate for name, rate in rates.items() if "image" in name}
    last = max(int(name.split(".")[1]) for name in tower if name.startswith("blocks."))
    for name, rate in tower.items():
        if name.startswith("blocks."):
            assert rate == 0.5 ** (last - int(name.split(".")[1])), name
    for top in ("norm.weight",) if image == "test_vit" else ("bn2.weight", "conv_head.weight"):
        assert tower[top] == 1.0
    for bottom in ("patch_embed.proj.weight", "pos_embed") if image == "test_vit" else ("conv_stem.weight",):
        assert tower[bottom] == 0.5 ** (last + 1)


@pytest.mark.parametrize("name, stages", [("resnet18", "layer"), ("convnext_atto", "stages.")])
def test_stages_of_other_towers_are_timm_s_own(name: str, stages: str) -> None:
    """Blocks are numbered anew in each of their stages, which a pattern over names took for the depth."""
    with torch.device("meta"):
        tower = nn.ModuleDict({"image_encoder": nn.ModuleDict({"base": nn.Module()})})
        tower["image_encoder"]["base"].model = timm.create_model(name, num_classes=0)
    tower["image_encoder"]["base"].layer_numbers = lambda: TimmTower.layer_numbers(tower["image_encoder"]["base"])
    above = layers_above(tower, "image_encoder")
    of_stage: dict[str, set[int]] = {}
    for parameter, layers in above.items():
        found = re.search(rf"base\.model\.{re.escape(stages)}(\d)\.", parameter)
        of_stage.setdefault(found[1] if found else "", set()).add(layers)
    depths = [sorted(of_stage[stage]) for stage in sorted(of_stage) if stage]
    top = depths[-1][0]
    assert depths == [[top + 3], [top + 2], [top + 1], [top]]
    stem = "stem.0.weight" if name == "convnext_atto" else "conv1.weight"
    assert above[f"image_encoder.base.model.{stem}"] == top + 4


def test_what_is_looked_up_in_a_tower_is_not_decayed() -> None:
    _, decayed = rates_and_decays(model("test_vit"))
    text, image = "text_encoder.base.model.", "image_encoder.base.model."
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        assert f"{text}embeddings.{name}.weight" not in decayed
    assert image + "pos_embed" not in decayed and image + "cls_token" not in decayed
    assert (
        text + "encoder.layer.0.attention.self.query.weight" in decayed and image + "patch_embed.proj.weight" in decayed
    )


def test_an_adapter_whose_second_matrix_is_nought_is_no_dead_part() -> None:
    adapters = nn.ModuleDict({name: nn.ModuleDict({"w": nn.Linear(2, 2, bias=False)}) for name in ("lora_A", "lora_B")})
    torch.nn.init.zeros_(adapters["lora_B"]["w"].weight)
    (adapters["lora_B"]["w"](adapters["lora_A"]["w"](torch.ones(1, 2)))).sum().backward()
    assert not without_gradient(adapters)
    adapters.zero_grad()
    assert without_gradient(adapters)


def test_a_chunk_s_statistics_are_counted_once_though_it_is_computed_twice() -> None:
    pixels = torch.randint(0, 256, (6, 3, 64, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    plain, cached = model(depth=0).train(), model(depth=0).train()
    for run in (slice(0, 3), slice(3, 6)):
        plain.encode_image(pixels[run])
    recomputed(cached.encode_image, 3, pixels, model=cached).embedding.square().sum().backward()
    assert any("running_mean" in name for name, _ in plain.named_buffers())
    for (name, expected), (_, got) in zip(plain.named_buffers(), cached.named_buffers(), strict=True):
        torch.testing.assert_close(got, expected, msg=name)
    assert {m.momentum for m in cached.modules() if isinstance(m, nn.BatchNorm2d)} == {0.1}
