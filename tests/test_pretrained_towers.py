"""Pretrained towers, offline: their own embeddings, our contract, saved and reloaded alike, and clear refusals."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from vlretrieval.data.tokenizers import ClipTokenizer, pad
from vlretrieval.deploy.build import build_model, self_contained
from vlretrieval.model.crossmodal import CrossModal
from vlretrieval.model.hugging_face_tower import HuggingFaceTower
from vlretrieval.model.on_top import OnTop
from vlretrieval.model.open_clip_towers import OpenClipImageTower, OpenClipTextTower
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.model.timm_tower import TimmTower
from vlretrieval.training.chunks import recomputed
from vlretrieval.training.length_buckets import encode_text

open_clip = pytest.importorskip("open_clip")

TINY_CLIP = {
    "embed_dim": 24,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
TIMM_CLIP = TINY_CLIP | {
    "quick_gelu": False,
    "vision_cfg": {
        "timm_model_name": "test_vit",
        "timm_model_pretrained": False,
        "timm_pool": "avg",
        "timm_proj": "linear",
        "image_size": 160,
    },
}
TINY_BERT = {
    "model_type": "bert",
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
CAPTIONS = ["a dog runs", "two cats on a red sofa, seen from above", "snow"]


def pixels(size: int, count: int = 3) -> torch.Tensor:
    drawn = np.random.default_rng(1).integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    return torch.from_numpy(drawn)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory) -> Path:
    """A ``local-dir:`` folder of a tiny open_clip model, as open_clip reads it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny_clip")
    arguments = {k: v for k, v in TINY_CLIP.items()}
    theirs = open_clip.CLIP(**copy.deepcopy(arguments))
    torch.save(theirs.state_dict(), folder / "open_clip_pytorch_model.bin")
    preprocess = {
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2, 0.3, 0.25],
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY_CLIP, "preprocess_cfg": preprocess}))
    return folder


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny_bert")
    given = {k: v for k, v in TINY_BERT.items() if k != "model_type"}
    transformers.BertModel(transformers.BertConfig(**given)).save_pretrained(folder)
    return folder


def clip_model(**where) -> RetrievalModel:
    image = OnTop(OpenClipImageTower(image_size=32, **where), dim=16, image_size=32)
    text = OnTop(OpenClipTextTower(**where), dim=16)
    return RetrievalModel(image, text, CrossModal(16, 16, 2, 2), embed_dim=24).eval()


def ids_of(captions=CAPTIONS):
    tokenizer = ClipTokenizer()
    return pad(tokenizer(captions), tokenizer.pad_id)


def test_an_open_clip_folder_gives_open_clips_own_embeddings(clip_folder):
    theirs = open_clip.create_model(f"local-dir:{clip_folder}").eval()
    ours = clip_model(name=f"local-dir:{clip_folder}")
    shown = pixels(32)
    normalised = (shown / 255 - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.25]).view(
        3, 1, 1
    )
    token_ids, token_mask = ids_of()
    with torch.no_grad():
        image, text = ours.encode_image(shown), ours.encode_text(token_ids, token_mask)
        expected = theirs.encode_image(normalised, normalize=True)
        torch.testing.assert_close(image.embedding, expected, atol=1e-5, rtol=0)
        expected = theirs.encode_text(open_clip.get_tokenizer("ViT-B-32")(CAPTIONS), normalize=True)
        torch.testing.assert_close(text.embedding, expected, atol=1e-5, rtol=0)
    assert image.tokens.shape == (3, 1 + 4, 16) and text.tokens.shape[1] == 1 + token_ids.shape[1]


def test_weights_of_a_named_model_load_from_a_file(tmp_path):
    torch.manual_seed(0)
    named = open_clip.create_model("RN50", pretrained=None)  # a name that is not the ViT's, and a convolutional tower
    torch.save(named.state_dict(), tmp_path / "weights.pt")
    ours = OpenClipImageTower("RN50", str(tmp_path / "weights.pt")).eval()
    shown = pixels(224, 1)
    with torch.no_grad():
        given = (shown - ours.mean) / ours.std
        torch.testing.assert_close(ours(shown).pooled, named.eval().encode_image(given), atol=1e-5, rtol=1e-5)
    assert ours(shown).tokens.shape[1] == ours.grid[0] * ours.grid[1] == 49


@pytest.mark.parametrize("config", [TINY_CLIP, TIMM_CLIP], ids=["vit", "timm trunk"])
def test_an_architecture_builds_with_random_weights_and_reloads_alike(config):
    size = config["vision_cfg"]["image_size"]
    torch.manual_seed(0)
    image = OnTop(OpenClipImageTower(config=config, image_size=size), dim=16, depth=1, num_heads=2, image_size=size)
    text = OnTop(OpenClipTextTower(config=config), dim=16, depth=1, num_heads=2)
    model = RetrievalModel(image, text, CrossModal(16, 16, 2, 2), embed_dim=24)
    assert_reloads(model, described(config, size), size, *ids_of())


def described(config, size):
    top = {"dim": 16, "depth": 1, "num_heads": 2}
    towers = "vlretrieval.model.open_clip_towers"
    return {
        "_target_": "vlretrieval.model.retrieval_model.RetrievalModel",
        "embed_dim": 24,
        "image_encoder": {
            "_target_": "vlretrieval.model.on_top.OnTop", "image_size": size, **top,
            "base": {"_target_": f"{towers}.OpenClipImageTower", "config": config, "image_size": size},
        },
        "text_encoder": {
            "_target_": "vlretrieval.model.on_top.OnTop", **top,
            "base": {"_target_": f"{towers}.OpenClipTextTower", "config": config},
        },
        "crossmodal": {
            "_target_": "vlretrieval.model.crossmodal.CrossModal",
            "text_dim": 16, "image_dim": 16, "text_to_image": 2, "image_to_text": 2,
        },
    }  # fmt: skip


def assert_reloads(model: nn.Module, config: dict, size: int, token_ids, token_mask) -> None:
    """Through plain JSON, without the files: as a checkpoint does it."""
    told = json.loads(json.dumps(self_contained(config, model)))
    again = build_model(told)
    again.load_state_dict(model.state_dict(), strict=True)
    model.eval(), again.eval()
    with torch.no_grad():
        for one, other in zip(
            (model.encode_image(pixels(size)), model.encode_text(token_ids, token_mask)),
            (again.encode_image(pixels(size)), again.encode_text(token_ids, token_mask)),
            strict=True,
        ):
            assert torch.equal(one.embedding, other.embedding) and torch.equal(one.tokens, other.tokens)


def test_timm_and_hugging_face_in_one_model_reload_without_their_files(bert_folder):
    torch.manual_seed(0)
    image_tower = TimmTower("test_efficientnet", None, 64)
    assert image_tower.token_dim == image_tower.model.num_features and image_tower.grid[0] == image_tower.grid[1]
    image = OnTop(image_tower, dim=16, depth=1, num_heads=2, position="learned", image_size=64)
    text = OnTop(HuggingFaceTower(str(bert_folder), vocab_size=60, context_length=20), dim=16, depth=1, num_heads=2)
    model = RetrievalModel(image, text, CrossModal(16, 16, 2, 2), embed_dim=24)
    config = described(TINY_CLIP, 64)
    config["image_encoder"] |= {
        "position": "learned",
        "base": {"_target_": "vlretrieval.model.timm_tower.TimmTower", "name": "test_efficientnet", "image_size": 64},
    }
    config["text_encoder"]["base"] = {
        "_target_": "vlretrieval.model.hugging_face_tower.HuggingFaceTower",
        "pretrained": str(bert_folder), "vocab_size": 60, "context_length": 20,
    }  # fmt: skip
    token_ids, token_mask = pad([[1, 5, 6, 2], [1, 7, 2]], 0)
    assert_reloads(model, config, 64, token_ids, token_mask)


def test_padding_changes_nothing_of_any_text_tower(bert_folder):
    clip, bert = OpenClipTextTower(config=TINY_CLIP), HuggingFaceTower(str(bert_folder), vocab_size=60)
    for tower, last in ((clip, 49407), (bert, 2)):
        tower.eval()
        short = torch.tensor([[1, 5, 6, last]])
        long = torch.tensor([[1, 5, 6, last, 0, 0, 0]])
        with torch.no_grad():
            one = tower(short, torch.ones(1, 4, dtype=torch.bool))
            other = tower(long, torch.tensor([[True] * 4 + [False] * 3]))
        torch.testing.assert_close(one.pooled, other.pooled, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(one.tokens, other.tokens[:, :4], atol=1e-6, rtol=1e-5)


def test_hugging_faces_own_hidden_states_come_out(bert_folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModel.from_pretrained(bert_folder).eval()
    ours = HuggingFaceTower(str(bert_folder), vocab_size=60).eval()
    token_ids, token_mask = pad([[1, 5, 6, 2], [1, 7, 2]], 0)
    with torch.no_grad():
        tokens = theirs(input_ids=token_ids, attention_mask=token_mask.long()).last_hidden_state
        hidden = ours(token_ids, token_mask)
    torch.testing.assert_close(hidden.tokens, tokens)
    mean = tokens[1, :3].mean(0)
    torch.testing.assert_close(hidden.pooled[1], mean)


def test_a_fresh_top_starts_from_what_the_tower_says(bert_folder):
    tower = TimmTower("test_efficientnet", None, 64).eval()
    plain, topped = (OnTop(tower, dim=16, depth=d, num_heads=2, image_size=64).eval() for d in (0, 2))
    with torch.no_grad():
        expected = nn.functional.layer_norm(tower(pixels(64)).pooled, (tower.dim,))
        for encoder in (plain, topped):
            torch.testing.assert_close(encoder(pixels(64)).pooled, expected, atol=0.01, rtol=0)
    assert topped.added is not None and plain.added is None


def test_without_blocks_and_cross_modal_heads_tokens_are_neither_computed_nor_trained(bert_folder):
    image = OnTop(TimmTower("test_efficientnet", None, 64), dim=16, image_size=64)
    text = OnTop(HuggingFaceTower(str(bert_folder), vocab_size=60), dim=16)
    token_ids, token_mask = pad([[1, 5, 6, 8, 7, 2], [1, 7, 2], [1, 8, 5, 6, 2]], 0)
    with torch.no_grad():
        image.eval(), text.eval()
        expected = image(pixels(64)).pooled, text(token_ids, token_mask).pooled
    assert image(pixels(64)).tokens.shape[1] == 1 + 4
    model = RetrievalModel(image, text, embed_dim=8)
    pictures, captions = model.encode_image(pixels(64)), model.encode_text(token_ids, token_mask)
    assert pictures.tokens.shape[1] == captions.tokens.shape[1] == captions.mask.shape[1] == 0
    chunked = recomputed(lambda *rows: encode_text(model, *rows, buckets=2), 2, token_ids, token_mask, model=model)
    torch.testing.assert_close(chunked.embedding, captions.embedding)
    assert torch.equal(image(pixels(64)).pooled, expected[0]) and torch.equal(
        text(token_ids, token_mask).pooled, expected[1]
    )
    (model.logit_scale * model.similarity(pictures, captions)[0]).sum().backward()
    trained = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not name.startswith(("image_encoder.base", "text_encoder.base"))
    ]
    assert trained and all(model.get_parameter(name).grad is not None for name in trained)


def test_stored_output_of_the_tower_goes_the_same_way(bert_folder):
    model = RetrievalModel(
        OnTop(TimmTower("test_efficientnet", None, 64), dim=16, depth=1, num_heads=2, image_size=64),
        OnTop(HuggingFaceTower(str(bert_folder), vocab_size=60), dim=16, depth=1, num_heads=2),
        embed_dim=8,
    ).eval()
    token_ids, token_mask = pad([[1, 5, 6, 2], [1, 7, 2]], 0)
    with torch.no_grad():
        image = model.image_from(*model.image_encoder.base(pixels(64)))
        text = model.text_from(*model.text_encoder.base(token_ids, token_mask))
        assert torch.equal(image.embedding, model.encode_image(pixels(64)).embedding)
        assert torch.equal(text.tokens, model.encode_text(token_ids, token_mask).tokens)


def test_timm_weights_from_a_file_and_none_missing(tmp_path):
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(3)
    theirs = timm.create_model("test_efficientnet", pretrained=False)
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    ours = TimmTower("test_efficientnet", str(tmp_path / "weights.safetensors"), 64).eval()
    with torch.no_grad():
        shown = (pixels(64) - ours.mean) / ours.std
        expected = theirs.eval().forward_head(theirs.forward_features(shown), pre_logits=True)
        torch.testing.assert_close(ours(pixels(64)).pooled, expected)
    some = dict(list(theirs.state_dict().items())[2:])
    save_file(some, tmp_path / "lacking.safetensors")
    with pytest.raises(ValueError, match=r"(?i)missing"):
        TimmTower("test_efficientnet", str(tmp_path / "lacking.safetensors"), 64)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f, b: TimmTower("vit_smal", None), "is no model of timm"),
        (lambda f, b: TimmTower("test_vit", "/nowhere/w.pt", 160), "no such file"),
        (lambda f, b: TimmTower("test_vit", None, 100), "trained at 160"),
        (lambda f, b: OpenClipImageTower("ViT-B-33"), "did you mean"),
        (lambda f, b: OpenClipImageTower("ViT-B-32", "nonsense"), "its tags are"),
        (lambda f, b: OpenClipImageTower("ViT-B-32", "laion2b_s34b_b79k", quick_gelu=True), "quick_gelu=False"),
        (lambda f, b: OpenClipImageTower(f"local-dir:{f}", "openai"), "brings its weights"),
        (lambda f, b: OpenClipImageTower(f"local-dir:{f}", image_size=64), "takes 32"),
        (lambda f, b: OpenClipImageTower(f"local-dir:{f}", image_size=32, quick_gelu=False), "quick_gelu=True"),
        (lambda f, b: OpenClipImageTower("local-dir:/nowhere"), "no such file"),
        (lambda f, b: OpenClipTextTower(config=TINY_CLIP, context_length=90), "77 tokens at most"),
        (lambda f, b: OpenClipTextTower(config=TINY_CLIP, vocab_size=500), "has 49408 words"),
        (lambda f, b: OpenClipTextTower("ViT-B-16-SigLIP", context_length=64), "not CLIP's causal one"),
        (lambda f, b: HuggingFaceTower("/nowhere", vocab_size=60), "cannot read it"),
        (lambda f, b: HuggingFaceTower(str(b), vocab_size=61), "has 60 words"),
        (lambda f, b: HuggingFaceTower(str(b), vocab_size=60, context_length=65), "64 tokens at most"),
        (lambda f, b: HuggingFaceTower(vocab_size=60), "give pretrained"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(make, said, clip_folder, bert_folder):
    with pytest.raises(ValueError, match=said) as caught:
        make(clip_folder, bert_folder)
    assert "\n" not in str(caught.value)


def test_missing_weights_never_pass_for_random_ones(clip_folder, bert_folder, tmp_path):
    (tmp_path / "open_clip_config.json").write_text((clip_folder / "open_clip_config.json").read_text())
    with pytest.raises(ValueError, match="open_clip cannot load it"):
        OpenClipImageTower(f"local-dir:{tmp_path}", image_size=32)
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((bert_folder / "config.json").read_text())
    some = {k: v for k, v in load_file(bert_folder / "model.safetensors").items() if "layer.1" not in k}
    save_file(some, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks \d+ weights"):
        HuggingFaceTower(str(tmp_path), vocab_size=60)


def test_towers_that_share_a_space_keep_its_width(clip_folder):
    image = OpenClipImageTower(f"local-dir:{clip_folder}", image_size=32)
    with pytest.raises(ValueError, match="share a space of 24"):
        RetrievalModel(image, OpenClipTextTower(f"local-dir:{clip_folder}"), embed_dim=16)


def test_adapters_alone_are_trained_and_change_nothing_at_first(bert_folder):
    pytest.importorskip("peft")

    def made(lora):
        torch.manual_seed(0)
        return OnTop(HuggingFaceTower(str(bert_folder), vocab_size=60), dim=16, num_heads=2, lora=lora)

    plain, adapted = made(None).eval(), made({"rank": 2, "targets": ["query", "value"]}).eval()
    token_ids, token_mask = pad([[1, 5, 6, 2], [1, 7, 2]], 0)
    with torch.no_grad():
        torch.testing.assert_close(plain(token_ids, token_mask).pooled, adapted(token_ids, token_mask).pooled)
    trained = {name for name, parameter in adapted.base.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    with pytest.raises(ValueError, match="no linear layer is named 'quary'; there are"):
        made({"rank": 2, "targets": ["quary"]})
