"""Costs computed from a config equal those of the module it builds: for every config there is, and for every option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vlretrieval.commands import dry_run
from vlretrieval.commands.check import missing_keys
from vlretrieval.commands.launch import conf_dir
from vlretrieval.deploy.build import build_model
from vlretrieval.model import costs
from vlretrieval.model.attention import MultiHeadAttention
from vlretrieval.model.hints import head_width_hints
from vlretrieval.model.measured_costs import measured_costs

CONF = conf_dir()
# models of towers whose costs their config does not tell: measured, see the last test
TOWERS = {"timm", "huggingface", "openclip", "pretrained"}


def tells_its_costs(path: Path) -> bool:
    """Whether a choice, or the choice it builds on, holds no pretrained tower."""
    defaults = (yaml.safe_load(path.read_text()) or {}).get("defaults", []) if path.parent.name == "experiment" else []
    chosen = {str(value) for entry in defaults if isinstance(entry, dict) for value in entry.values()}
    built_on = [path.with_name(f"{entry}.yaml") for entry in defaults if isinstance(entry, str) and entry != "_self_"]
    return not {path.stem, *chosen} & TOWERS and all(map(tells_its_costs, built_on))


CHOICES = [
    f"{path.parent.relative_to(CONF).as_posix()}={path.stem}"
    for room in ("model", "heads", "experiment")
    for path in sorted((CONF / room).rglob("*.yaml"))
    if tells_its_costs(path)
]


def compose(*overrides: str) -> Any:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("train", overrides=list(overrides))
        missing = missing_keys(OmegaConf.to_container(cfg, resolve=False))
        return hydra.compose("train", overrides=[*overrides, *(f"{key}=x" for key in missing)])


def plain(**options: Any) -> dict[str, Any]:
    """The model block of a small config; options as ``image_encoder__depth=2``."""
    model: dict[str, Any] = {
        "_target_": "vlretrieval.model.retrieval_model.RetrievalModel",
        "embed_dim": 32,
        "image_encoder": {
            "_target_": "vlretrieval.model.encoders.ImageEncoder",
            **dict(image_size=64, patch_size=8, dim=64, depth=3, num_heads=4),
        },
        "text_encoder": {
            "_target_": "vlretrieval.model.encoders.TextEncoder",
            **dict(vocab_size=100, context_length=40, dim=48, depth=2, num_heads=4),
        },
        "crossmodal": {
            "_target_": "vlretrieval.model.crossmodal.CrossModal",
            **dict(text_dim=48, image_dim=64, text_to_image=2, image_to_text=2),
        },
    }
    for name, value in options.items():
        block, _, key = name.rpartition("__")
        (model[block] if block else model)[key] = value
    return model


def everywhere(**options: Any) -> dict[str, Any]:
    """The same options in both encoders and in the cross-modal heads."""
    blocks = ("image_encoder", "text_encoder", "crossmodal")
    return {f"{block}__{key}": value for block in blocks for key, value in options.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "plain dual encoder": dict(crossmodal=None),
    "no heads of one kind": dict(crossmodal__text_to_image=0),
    "mean pools": dict(image_encoder__pool="mean", text_encoder__pool="mean"),
    "causal, last pool": dict(text_encoder__causal=True, text_encoder__pool="last"),
    "MQA": everywhere(num_kv_heads=1),
    "wide heads": everywhere(head_dim=20),
    "QK-norm": everywhere(qk_norm=True),
    "rotary": dict(
        image_encoder__position="rotary",
        text_encoder__position="rotary",
        crossmodal__text_self_heads=4,
        crossmodal__text_self_position="rotary",
    ),
    "no positions": dict(image_encoder__position="none", text_encoder__position="sinusoidal"),
    "words among themselves": dict(crossmodal__text_self_heads=4, crossmodal__text_to_image_depth=3),
    "one block a head": dict(crossmodal__text_to_image_depth=1, crossmodal__image_to_text_depth=1),
    "joint too": dict(crossmodal__joint=4),
    "joint alone": dict(crossmodal__joint=4, crossmodal__text_to_image=0, crossmodal__image_to_text=0),
    "dropout": everywhere(dropout=0.1) | dict(crossmodal__text_self_heads=4),
    "patch dropout": dict(image_encoder__patch_dropout=0.5),
    "checkpointing": everywhere(activation_checkpointing=True),
    "narrow MLP, logit bias": everywhere(mlp_ratio=1.5) | dict(init_logit_bias=-10.0),
}


def parts_of(model: nn.Module) -> dict[str, list[nn.Module | nn.Parameter]]:
    parts: dict[str, list[Any]] = {
        "text encoder": [model.text_encoder],
        "image encoder": [model.image_encoder],
        "projections": [model.text_projection, model.image_projection, model.log_logit_scale],
    }
    if model.logit_bias is not None:
        parts["projections"].append(model.logit_bias)
    for kind in ("text_to_image", "image_to_text", "joint"):
        if model.crossmodal is not None and getattr(model.crossmodal, kind) is not None:
            parts[kind.replace("_", "-") + " heads"] = [getattr(model.crossmodal, kind)]
    return parts


def parameters(modules: list[nn.Module | nn.Parameter]) -> int:
    return sum(m.numel() if isinstance(m, nn.Parameter) else sum(p.numel() for p in m.parameters()) for m in modules)


def inputs(config: dict[str, Any], length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    side = config["image_encoder"]["image_size"]
    ids = torch.zeros(batch, length, dtype=torch.long)
    return torch.zeros(batch, 3, side, side), ids, torch.ones(batch, length, dtype=torch.bool)


def counted_flops(model: nn.Module, config: dict[str, Any], length: int) -> dict[str, int]:
    """What torch counts in one forward pass of every part. On the meta device, where attention is products too."""
    with torch.device("meta"), torch.no_grad():
        pixels, ids, mask = inputs(config, length)
        model.eval()
        counts = {}
        with FlopCounterMode(display=False) as counter:
            pooled, _, _ = model.text_encoder(ids, mask)
        counts["text encoder"] = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            pooled_image, _, _ = model.image_encoder(pixels)
        counts["image encoder"] = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            model.text_projection(pooled), model.image_projection(pooled_image)
        counts["projections"] = counter.get_total_flops()
        if model.crossmodal is None:
            return counts
        image, text = model.encode_image(pixels), model.encode_text(ids, mask)
        for kind in ("text_to_image", "image_to_text", "joint"):
            if (head := getattr(model.crossmodal, kind)) is None:
                continue
            with FlopCounterMode(display=False) as counter:
                if kind == "text_to_image":
                    head(text.tokens, text.mask, head.keep(image.tokens))
                elif kind == "image_to_text":
                    head(image.tokens, None, head.keep(text.tokens), text.mask)
                else:
                    head(image.tokens, None, text.tokens, text.mask)
            counts[kind.replace("_", "-") + " heads"] = counter.get_total_flops()
    return counts


def assert_costs_are_those_of_the_module(config: dict[str, Any], length: int) -> None:
    with torch.device("meta"):
        model = build_model(config)
        stated = costs.costs(config, length)
        assert {name: part.parameters for name, part in stated.items()} == {
            name: parameters(modules) for name, modules in parts_of(model).items()
        }
        counted = counted_flops(model, config, length)
        assert {name: part.flops for name, part in stated.items()} == counted
        assert costs.parameter_count(config) == sum(p.numel() for p in model.parameters())
        assert costs.flops(config, length) == sum(counted.values())
        if model.crossmodal is None:
            assert costs.kv_bytes(config) == 0
            return
        with torch.no_grad():
            image = model.encode_image(inputs(config, length, batch=3)[0])
            kept = model.keep_image(image)
            assert 3 * costs.kv_bytes(config) == kept.nbytes
            # keeping saves exactly the products with the picture that match_kept does not make
            text = model.encode_text(*inputs(config, length)[1:])
            kept = model.keep_image(model.encode_image(inputs(config, length)[0]))
            with FlopCounterMode(display=False) as counter:
                model.match_kept(kept, text)
        heads = [part for name, part in stated.items() if name.endswith("heads")]
        assert sum(part.flops - part.flops_saved for part in heads) == counter.get_total_flops()


@pytest.mark.parametrize("choice", CHOICES)
def test_costs_of_every_config_equal_those_of_the_model_it_builds(choice: str) -> None:
    cfg = compose(choice)
    model = OmegaConf.to_container(cfg.model, resolve=True)
    assert isinstance(model, dict)
    assert_costs_are_those_of_the_module(model, cfg.tokenizer.context_length)


@pytest.mark.parametrize("name", OPTIONS)
def test_costs_of_every_option_equal_those_of_the_module(name: str) -> None:
    assert_costs_are_those_of_the_module(plain(**OPTIONS[name]), 13)


@pytest.mark.parametrize("name", OPTIONS)
def test_activation_bytes_are_what_autograd_keeps(name: str) -> None:
    """To 1 %: a few numbers a batch (tables of angles, indices) are not counted."""
    config, length, batch = plain(**OPTIONS[name]), 24, 4
    model = build_model(config).train()
    kept: dict[int, torch.UntypedStorage] = {}
    given = inputs(config, length, batch)
    ours = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *given)}

    def remember(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in ours:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        image, text = model.encode_image(given[0]), model.encode_text(*given[1:])
        logits = model.match(image, text) if model.crossmodal is not None else None
    del logits
    measured = sum(storage.nbytes() for storage in kept.values()) / batch
    assert costs.activation_bytes(config, length) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("context_dim", [None, 40])
def test_an_attention_layer_has_the_parameters_of_the_formula(context_dim: int | None, kv_heads: int) -> None:
    options = dict(num_kv_heads=kv_heads, head_dim=10, context_dim=context_dim, qk_norm=True)
    module = MultiHeadAttention(32, 4, **options)
    assert costs.attention(32, 4, 5, 5, **options).parameters == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("heads", [1, 2, 8, 32])
def test_a_layer_costs_4_dim_squared_weights_and_the_same_flops_whatever_its_heads(heads: int) -> None:
    cost = costs.attention(4096, heads, 10, 10, bias=False)
    assert cost.parameters == 4 * 4096**2 == 67_108_864
    assert cost.flops == costs.attention(4096, 1, 10, 10, bias=False).flops


def test_sharing_keys_and_values_shrinks_what_is_kept_by_as_much() -> None:
    kept = {
        kv: costs.kv_bytes(plain(crossmodal__text_to_image=8, crossmodal__image_to_text=0, crossmodal__num_kv_heads=kv))
        for kv in (None, 2, 1)
    }
    assert kept[None] == 4 * kept[2] == 8 * kept[1]
    assert costs.kv_bytes(plain(), bytes_each=2) * 2 == costs.kv_bytes(plain())


def test_dry_run_shows_the_table_and_builds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = compose("experiment=quickstart")
    rows = dry_run.show(cfg)
    shown = capsys.readouterr().out
    assert list(rows)[-1] == "total"
    for column in ("parameters", "flops_per_pair", "activation_bytes_per_pair", "kept_bytes_per_picture"):
        assert rows["total"][column] == sum(row[column] for part, row in rows.items() if part != "total") > 0
    for row in rows.values():
        assert f"{row['parameters']:,}" in shown
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines() if not line.startswith("hint"))


def test_unknown_parts_are_named() -> None:
    config = plain(text_encoder__context_length=40)
    config["text_encoder"]["_target_"] = "open_clip.create_model"
    with pytest.raises(ValueError, match=r"model.text_encoder._target_=open_clip.create_model: costs are known"):
        costs.costs(config)


def test_a_hint_names_heads_far_from_the_usual_width_and_only_those() -> None:
    usual = plain(
        image_encoder__dim=768,
        image_encoder__num_heads=12,
        text_encoder__dim=512,
        text_encoder__num_heads=8,
        crossmodal__text_dim=512,
        crossmodal__image_dim=768,
        crossmodal__head_dim=32,
    )
    unusual = usual | {"image_encoder": usual["image_encoder"] | {"num_heads": 4}}
    with torch.device("meta"):
        assert head_width_hints(build_model(usual)) == []
        hints = head_width_hints(build_model(unusual))
    assert hints == [
        "image_encoder.transformer.attention: 4 heads are 192 wide at dim=768; the usual width is 64, with 12 heads"
    ]


def test_the_walk_found_the_configs() -> None:
    assert len(CHOICES) >= 12 and Path(CONF / "model").is_dir()


def test_a_model_tried_costs_what_its_config_says() -> None:
    config, length = plain(), 24
    found = measured_costs(build_model(config), config["image_encoder"]["image_size"], length)
    said = costs.costs(config, length)
    heads = sum((cost for name, cost in said.items() if name.endswith("heads")), costs.Cost())
    for name, cost in {
        **{n: c for n, c in said.items() if not n.endswith("heads")},
        "cross-modal heads": heads,
    }.items():
        one = found[name]
        assert (one.parameters, one.kept) == (cost.parameters, cost.kept), name
        assert one.flops == pytest.approx(cost.flops, rel=0.01), name
    measured, stated = (sum(cost.activations for cost in parts.values()) for parts in (found, said))
    assert measured == pytest.approx(stated, rel=0.05)
