"""Folders for open_clip and transformers open with those libraries themselves, offline, and embed as the model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import CAPTIONS, save_tiny_checkpoint
from PIL import Image

import vlretrieval
from vlretrieval.data.tokenizers import BpeTokenizer, ClipTokenizer, pad
from vlretrieval.deploy.checkpoint import load_checkpoint
from vlretrieval.deploy.export import export
from vlretrieval.deploy.export_graphs import graphs_of, traced
from vlretrieval.deploy.export_huggingface import OpenedClip, clip_refusal, write_clip_folder
from vlretrieval.deploy.export_open_clip import (
    OpenClipParts,
    OpenedOpenClip,
    preprocess_cfg,
    write_open_clip_folder,
)

open_clip = pytest.importorskip("open_clip")
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]


def tiny_parts(custom_text: bool = False, resize: str = "crop", **changes: Any) -> OpenClipParts:
    """An open_clip model of two layers with random weights; ``vision`` and ``text`` edit its blocks, others the top."""
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8} | changes.pop("vision", {})
    text = {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2} | changes.pop("text", {})
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text} | changes
    torch.manual_seed(0)
    model = (open_clip.CustomTextCLIP if custom_text else open_clip.CLIP)(**config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too must find their places
            parameter.add_(0.02 * torch.randn_like(parameter))
    config |= {"custom_text": True} if custom_text else {}
    return OpenClipParts(config, preprocess_cfg(32, resize, MEAN, STD), model.state_dict())


def reference(parts: OpenClipParts) -> Any:
    config = {name: value for name, value in parts.model_cfg.items() if name != "custom_text"}
    kind = open_clip.CustomTextCLIP if "custom_text" in parts.model_cfg else open_clip.CLIP
    model = kind(**config)
    model.load_state_dict(parts.state_dict)
    return model.eval()


def write(folder: Path, parts: OpenClipParts, precision: str = "fp32") -> None:
    write_open_clip_folder(folder, parts.model_cfg, parts.preprocess_cfg, parts.state_dict, precision)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pixels = torch.randint(0, 256, (3, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    ids, mask = pad(ClipTokenizer(20)(CAPTIONS), 0)
    return pixels, ids, mask


def expected(parts: OpenClipParts) -> tuple[torch.Tensor, torch.Tensor]:
    """What open_clip's own model says of the inputs, before any writing."""
    pixels, ids, _ = inputs()
    model = reference(parts)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    image = model.encode_image((pixels.float() / 255 - mean) / std, normalize=True)
    return image, model.encode_text(F.pad(ids, (0, 20 - ids.shape[1])), normalize=True)


@pytest.mark.parametrize("custom_text", [False, True])
@torch.no_grad()
def test_the_open_clip_folder_opens_with_open_clip_itself(tmp_path: Path, custom_text: bool) -> None:
    parts = tiny_parts(custom_text)
    write(tmp_path, parts)
    model, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path}")
    weights = model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in parts.state_dict.items())
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path}")
    ids = F.pad(inputs()[1], (0, 20 - inputs()[1].shape[1]))
    assert torch.equal(tokenizer(CAPTIONS), ids), "open_clip and we see the same tokens"
    assert preprocess(Image.new("RGB", (40, 50))).shape == (3, 32, 32)
    opened = OpenedOpenClip(tmp_path)
    for ours, theirs in zip(
        (opened.encode_image(inputs()[0]).embedding, opened.encode_text(*inputs()[1:]).embedding),
        expected(parts),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
@pytest.mark.parametrize("custom_text", [False, True])
@torch.no_grad()
def test_the_huggingface_folder_opens_with_transformers_itself(tmp_path: Path, custom_text: bool, act: str) -> None:
    transformers = pytest.importorskip("transformers")
    parts = tiny_parts(custom_text, **({"quick_gelu": True} if act == "quick_gelu" else {}))
    write_clip_folder(tmp_path, parts, ClipTokenizer(20))
    opened = OpenedClip(tmp_path)
    for ours, theirs in zip(
        (opened.encode_image(inputs()[0]).embedding, opened.encode_text(*inputs()[1:]).embedding),
        expected(parts),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    processor = transformers.CLIPProcessor.from_pretrained(tmp_path, local_files_only=True)
    picture = Image.new("RGB", (40, 50), "red")
    given = processor(text=CAPTIONS, images=[picture], return_tensors="pt", padding=True)
    said = [row[: row.index(49407) + 1] for row in given["input_ids"].tolist()]
    assert said == ClipTokenizer(20)(CAPTIONS)
    assert given["pixel_values"].shape == (1, 3, 32, 32)
    texts, scale = expected(parts)[1], parts.state_dict["logit_scale"].exp()
    found = opened.model(**given)
    torch.testing.assert_close(found.logits_per_text, scale * texts @ found.image_embeds.T, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_half_precision_is_read_back_with_small_differences(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    parts = tiny_parts()
    for precision, most in (("fp16", 2e-3), ("bf16", 2e-2)):
        first, second = tmp_path / f"open_clip_{precision}", tmp_path / f"clip_{precision}"
        first.mkdir(), second.mkdir()
        write(first, parts, precision)
        write_clip_folder(second, parts, ClipTokenizer(20), precision)
        for opened in (OpenedOpenClip(first), OpenedClip(second)):
            apart = (opened.encode_image(inputs()[0]).embedding - expected(parts)[0]).abs().max()
            assert 1e-6 < apart < most


def test_weights_of_another_model_than_the_configs_are_refused(tmp_path: Path) -> None:
    parts = tiny_parts()
    del parts.state_dict["visual.proj"]
    with pytest.raises(ValueError, match=r"visual\.proj is missing here and \(32, 16\) there"):
        write(tmp_path, parts)
    with pytest.raises(ValueError, match="open_clip builds no model of this config.*patch_sise"):
        write_open_clip_folder(tmp_path, parts.model_cfg | {"vision_cfg": {"patch_sise": 8}}, {}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vision": {"no_ln_pre": True}}, "vision_cfg.no_ln_pre=True"),
        ({"vision": {"ls_init_value": 0.1}}, "vision_cfg.ls_init_value=0.1"),
        ({"vision": {"pool_type": "avg"}}, "vision_cfg.pool_type=avg"),
        ({"text": {"no_causal_mask": True}}, "text_cfg.no_causal_mask=True"),
        ({"text": {"pool_type": "last"}}, "text_cfg.pool_type=last"),
        ({"init_logit_bias": -10.0}, "init_logit_bias=-10.0"),
        ({"resize": "pad"}, "cannot pad a picture"),
    ],
    ids=str,
)
def test_what_clip_model_cannot_hold_is_refused_with_the_reason_before_writing(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    parts = tiny_parts(custom_text="text" in changes, **changes)
    assert said in (clip_refusal(parts, ClipTokenizer(20)) or "")
    with pytest.raises(ValueError, match="format=huggingface: "):
        write_clip_folder(tmp_path, parts, ClipTokenizer(20))
    assert list(tmp_path.iterdir()) == []
    assert "another vocabulary" in (clip_refusal(tiny_parts(), BpeTokenizer(300, 20)) or "")


def test_a_model_of_our_own_towers_is_no_open_clip_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds open_clip's own towers, and the image tower is a ImageEncoder"):
        export(tiny_checkpoint, tmp_path / "out", format="open_clip")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_our_own_towers_gets_a_huggingface_folder_with_our_loader(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = export(tiny_checkpoint, tmp_path / "out", format="huggingface")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "vlretrieval" and "auto_map" not in config
    assert "the image tower is a ImageEncoder" in config["not_a_clip_model"]
    assert vlretrieval.load_model(folder).encode_texts(CAPTIONS).shape == (3, 8)


def clip_config(config: dict[str, Any], depth: int = 0) -> None:
    """Makes the config of a tiny checkpoint one whose towers are open_clip's."""
    model, towers = config["model"], "vlretrieval.model.open_clip_towers"
    architecture = tiny_parts().model_cfg
    on_top = {"_target_": "vlretrieval.model.on_top.OnTop", "dim": 16, "depth": depth, "num_heads": 2}
    pixels = {"mean": MEAN, "std": STD, "image_size": 32}
    image = {"_target_": f"{towers}.OpenClipImageTower", "config": architecture} | pixels
    text = {"_target_": f"{towers}.OpenClipTextTower", "config": architecture, "context_length": 20}
    model["embed_dim"] = 16
    model["image_encoder"] = on_top | {"base": image, "image_size": 32}
    model["text_encoder"] = on_top | {"base": text}
    config["data"]["resize"] = "crop"


@pytest.fixture(scope="module")
def clip_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of open_clip towers with cross-modal heads, whose projections are no identity any more."""
    path = tmp_path_factory.mktemp("runs") / "clip" / "checkpoints" / "best.ckpt"
    return save_clip_checkpoint(path)


def save_clip_checkpoint(path: Path, depth: int = 0) -> Path:
    save_tiny_checkpoint(path, lambda config: clip_config(config, depth), tokenizer=ClipTokenizer(20))
    content = torch.load(path, weights_only=True)
    for side in ("image", "text"):
        weight = content["state_dict"][f"model.{side}_projection.weight"]
        weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(side)))
    torch.save(content, path)
    return path


@pytest.mark.parametrize("format", ["open_clip", "huggingface"])
@torch.no_grad()
def test_a_checkpoint_of_open_clip_towers_leaves_as_their_librarys_own_folder(
    clip_checkpoint: Path, tmp_path: Path, format: str
) -> None:
    pytest.importorskip("transformers")
    if format == "open_clip":
        with pytest.raises(ValueError, match="no place for cross-modal heads; set towers_only=true"):
            export(clip_checkpoint, tmp_path / "out", format=format)
    folder = export(clip_checkpoint, tmp_path / "out", format=format, towers_only=True)
    source = load_checkpoint(clip_checkpoint).build()
    opened = {"open_clip": OpenedOpenClip, "huggingface": OpenedClip}[format](folder)
    pixels, ids, mask = inputs()
    close = lambda ours, theirs: torch.testing.assert_close(ours.embedding, theirs.embedding, atol=1e-5, rtol=0)
    close(opened.encode_image(pixels), source.encode_image(pixels))
    close(opened.encode_text(ids, mask), source.encode_text(ids, mask))
    torch.testing.assert_close(opened.logit_scale, source.logit_scale)
    with pytest.raises(ValueError, match="is for another library; open it with (open_clip|transformers)"):
        vlretrieval.load_model(folder)
    assert ("open_clip" if format == "open_clip" else "CLIPModel") in (folder / "README.md").read_text()


def test_attention_on_top_of_a_tower_has_no_place_in_open_clip(tmp_path: Path) -> None:
    checkpoint = save_clip_checkpoint(tmp_path / "run" / "best.ckpt", depth=1)
    with pytest.raises(ValueError, match="no place for the attention on top of the image tower"):
        export(checkpoint, tmp_path / "out", format="open_clip", towers_only=True)
    assert not (tmp_path / "out").exists()


def test_a_program_of_the_text_tower_takes_a_text_as_long_as_the_context(clip_checkpoint: Path) -> None:
    model = load_checkpoint(clip_checkpoint).build().eval()
    graph = next(graph for graph in graphs_of(model, 32) if graph.name == "text")
    program = traced(graph, 20).module()
    for length in (1, 2, 19, 20):
        ids, mask = torch.arange(1, 1 + 2 * length).view(2, length), torch.ones(2, length, dtype=torch.bool)
        with torch.no_grad():
            torch.testing.assert_close(program(ids, mask)[0], model.encode_text(ids, mask).embedding)


@pytest.mark.parametrize("format", ["onnx", pytest.param("torch", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_tiny_open_clip_model_with_heads_round_trips_as_graphs(
    clip_checkpoint: Path, tmp_path: Path, format: str
) -> None:
    pytest.importorskip("onnxruntime")
    folder = export(clip_checkpoint, tmp_path / "out", format=format)
    source, exported = load_checkpoint(clip_checkpoint).build(), vlretrieval.load_model(folder, trust=True).model
    draw = torch.Generator().manual_seed(1)
    for batch in (1, 7, 64):
        pixels = torch.randint(0, 256, (batch, 3, 32, 32), generator=draw, dtype=torch.uint8)
        image = [model.encode_image(pixels) for model in (source, exported)]
        torch.testing.assert_close(image[1].embedding, image[0].embedding, atol=1e-5, rtol=0)
        for length in (5, 20):
            ids = torch.randint(1, 49000, (batch, length), generator=draw)
            mask = torch.arange(length) < torch.randint(2, length + 1, (batch, 1), generator=draw)
            text = [model.encode_text(ids, mask) for model in (source, exported)]
            torch.testing.assert_close(text[1].embedding, text[0].embedding, atol=1e-5, rtol=0)
            logits = [
                model.match_kept(model.keep_image(i), t)
                for model, i, t in zip((source, exported), image, text, strict=True)
            ]
            torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
