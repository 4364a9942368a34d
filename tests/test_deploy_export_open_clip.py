"""Folders for open_clip and transformers open with those libraries themselves, offline, and embed as the model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import CAPTIONS
from PIL import Image

from vlretrieval.data.tokenizers import BpeTokenizer, ClipTokenizer, pad
from vlretrieval.deploy.export import export
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
    with pytest.raises(ValueError, match="holds open_clip's own towers, and the image encoder is a ImageEncoder"):
        export(tiny_checkpoint, tmp_path / "out", format="open_clip")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_our_own_towers_gets_a_huggingface_folder_with_our_loader(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    import vlretrieval

    folder = export(tiny_checkpoint, tmp_path / "out", format="huggingface")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "vlretrieval" and "auto_map" not in config
    assert vlretrieval.load_model(folder).encode_texts(CAPTIONS).shape == (3, 8)
