"""Every YAML under conf/ composes, passes the checks of the commands, and builds what it describes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from vlretrieval.commands.check import check_config, missing_keys
from vlretrieval.commands.launch import conf_dir

CONF = conf_dir()
FILES = sorted(CONF.rglob("*.yaml"))
PRIMARY = [path.stem for path in FILES if path.parent == CONF and path.stem != "hydra_settings"]
# Objects whose building reads files, wants a device or starts a library: composed and checked, not built.
NOT_BUILT = {"data", "trainer", "logger", "tokenizer"}


SAMPLES = {"openclip.name": "ViT-B-32", "model.image_encoder.base.name": "test_efficientnet"}
BERT = dict(model_type="bert", vocab_size=400_000, hidden_size=32, num_hidden_layers=6, num_attention_heads=2)
CLIP = dict(
    embed_dim=512,
    vision_cfg=dict(image_size=224, layers=1, width=64, patch_size=32),
    text_cfg=dict(context_length=77, vocab_size=49408, width=64, heads=1, layers=1),
)
RANDOM: dict[str, dict[str, Any]] = {
    "TimmTower": {"pretrained": None},
    "HuggingFaceTower": {"pretrained": None, "config": BERT},
    "OpenClipImageTower": {"name": None, "pretrained": None, "config": CLIP},
    "OpenClipTextTower": {"name": None, "pretrained": None, "config": CLIP},
}


def at_random(cfg: DictConfig) -> DictConfig:
    """Pretrained towers start from random weights: no file of theirs is here, and no hub is asked."""
    cfg = cfg.copy()
    for encoder in ("image_encoder", "text_encoder"):
        kind = str(OmegaConf.select(cfg, f"model.{encoder}.base._target_")).rpartition(".")[2]
        if kind == "HuggingFaceTower":
            pytest.importorskip("transformers")
        for key, value in RANDOM.get(kind, {}).items():
            OmegaConf.update(cfg, f"model.{encoder}.base.{key}", value)
    if RANDOM["OpenClipTextTower"]["config"] == OmegaConf.select(cfg, "model.text_encoder.base.config"):
        cfg.tokenizer.vocab_size, cfg.tokenizer.context_length = 49408, 77
    return cfg


def name_of(path: Path) -> str:
    return path.relative_to(CONF).as_posix()


def choice(path: Path) -> str:
    """``conf/model/text_encoder/small.yaml`` -> "model/text_encoder=small"."""
    return f"{path.parent.relative_to(CONF).as_posix()}={path.stem}"


@contextmanager
def composing() -> Iterator[None]:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@cache
def compose(command: str, overrides: tuple[str, ...]) -> DictConfig:
    with composing():
        return hydra.compose(command, overrides=list(overrides))


def training_config(*overrides: str) -> DictConfig:
    """conf/train.yaml with some choices, and "x" for what only a user can know (paths, names)."""
    missing = missing_keys(OmegaConf.to_container(compose("train", overrides), resolve=False))
    given = {key: 1000 if key.endswith("_size") else SAMPLES.get(key, "x") for key in missing}
    return compose("train", (*overrides, *(f"{key}={value}" for key, value in given.items())))


GROUP_FILES = [path for path in FILES if path.parent != CONF and path.stem != "base"] + [
    path for path in FILES if path.parent.parent == CONF and path.stem == "base" and path.parent.name == "model"
]


@pytest.mark.parametrize("path", GROUP_FILES, ids=name_of)
def test_every_choice_composes_passes_the_checks_and_builds(path: Path) -> None:
    cfg = training_config(choice(path))
    check_config(cfg, compose("train", (choice(path),)))
    cfg = at_random(cfg)
    with torch.device("meta"):  # shapes only
        for block in ("model", "loss", "optimizer", "scheduler"):
            if block not in NOT_BUILT:
                hydra.utils.instantiate(cfg[block])


@pytest.mark.parametrize("command", PRIMARY)
def test_every_command_composes(command: str) -> None:
    cfg = compose(command, ())
    assert len(cfg) >= 2


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_opens_with_what_it_is(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("# @package")]
    assert re.match(r"# \S", lines[0]), "the first line says what the choice is"


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=name_of)
def test_every_experiment_names_its_command(path: Path) -> None:
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(f"vlretrieval-train experiment={path.stem}" in line for line in head)


HEADS_KEYS = {
    "heads.text": "text_encoder.transformer",
    "heads.image": "image_encoder.transformer",
    "heads.text_to_image": "crossmodal.text_to_image",
    "heads.image_to_text": "crossmodal.image_to_text",
}


def build(*overrides: str) -> Any:
    with torch.device("meta"):
        return hydra.utils.instantiate(training_config(*overrides).model)


@pytest.mark.parametrize("key", HEADS_KEYS)
def test_each_number_of_the_heads_block_reaches_its_own_attention_and_no_other(key: str) -> None:
    base, changed = build(), build(f"{key}=8")
    for other, place in HEADS_KEYS.items():
        before, after = (attention_heads(model.get_submodule(place), place) for model in (base, changed))
        if other == key:
            assert set(after) == {8}
        elif key != "heads.text":  # text heads are those between words in the cross-modal blocks too
            assert before == after


def attention_heads(module: torch.nn.Module, place: str) -> list[int]:
    """Query heads of the attention that a number of the heads block is about."""
    kind = ".cross" if place.startswith("crossmodal") else ""
    return [m.num_heads for name, m in module.named_modules() if hasattr(m, "num_heads") and name.endswith(kind)]


def attention_weights(module: torch.nn.Module | None) -> int:
    """Entries of all W_Q, W_K, W_V and W_O below a module, biases left out."""
    layers = [m for m in module.modules() if hasattr(m, "num_heads")] if module is not None else []
    return sum(p.numel() for layer in layers for name, p in layer.named_parameters() if name.endswith("weight"))


@pytest.mark.parametrize("text", [1, 2, 8])
@pytest.mark.parametrize("image", [4, 8])
@pytest.mark.parametrize("text_to_image", [0, 2, 8])
@pytest.mark.parametrize("kv", [None, 1, 2])
def test_the_heads_block_changes_the_parameter_counts_as_the_formula_says(
    text: int, image: int, text_to_image: int, kv: int | None
) -> None:
    """head_dim = dim / heads: 4 dim^2 weights a layer in MHA at any count; 2 dim^2 (1 + kv / heads) with kv shared."""
    if kv is not None and any(heads % kv for heads in (text, image)):
        with pytest.raises(Exception, match="num_kv_heads"):
            build(f"heads.text={text}", f"heads.image={image}", f"heads.kv={kv}")
        return
    words = [f"heads.text={text}", f"heads.image={image}", f"heads.text_to_image={text_to_image}"]
    overrides = [*words, f"heads.kv={'null' if kv is None else kv}"]
    cfg, model = training_config(*overrides).model, build(*overrides)

    def layer(dim: int, heads: int, shared: int | None) -> float:
        return 2 * dim**2 * (1 + (shared or heads) / heads)

    for encoder, heads in ((cfg.text_encoder, text), (cfg.image_encoder, image)):
        built = model.text_encoder if encoder is cfg.text_encoder else model.image_encoder
        assert attention_weights(built) == encoder.depth * layer(encoder.dim, heads, kv)
    crossed = model.crossmodal.text_to_image
    if text_to_image == 0:
        assert crossed is None
    else:
        dim, shared = cfg.text_encoder.dim, cfg.crossmodal.num_kv_heads
        between = layer(dim, text, None) if cfg.crossmodal.text_self_heads else 0
        expected = cfg.crossmodal.text_to_image_depth * (layer(dim, text_to_image, shared) + between)
        assert attention_weights(crossed) == expected


def test_no_cross_modal_heads_leave_a_plain_dual_encoder() -> None:
    assert build("heads.text_to_image=0", "heads.image_to_text=0").crossmodal is None
    assert build("heads=dual").crossmodal is None
    assert build("heads.text_to_image=0").crossmodal is not None


def test_every_interpolation_of_the_model_runs_one_way() -> None:
    """tokenizer -> model -> data: no model key reads from data, no tokenizer key from the model."""
    cfg = OmegaConf.to_container(training_config(), resolve=False)
    assert isinstance(cfg, dict)
    text = {block: OmegaConf.to_yaml(OmegaConf.create(cfg[block])) for block in ("tokenizer", "model", "heads")}
    assert "${" not in text["heads"]
    assert not re.search(r"\$\{(model|data|loss)", text["tokenizer"])
    assert not re.search(r"\$\{(data|loss|optimizer|trainer)", text["model"])


def test_the_walk_found_the_files() -> None:
    assert len(FILES) >= 25 and {"train", "evaluate", "export", "search"} <= set(PRIMARY)
