"""A folder that transformers opens by itself as a CLIPModel, for models whose architecture is CLIP's."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vlretrieval.data.tokenizers import ClipTokenizer, Tokenizer
from vlretrieval.deploy.export_open_clip import Normalise, OpenClipParts, embedded
from vlretrieval.deploy.export_precision import HALF, stored
from vlretrieval.model.encoded import Encoded

# Settings of open_clip's towers that CLIPModel has a place for; every other must be at its default.
VISION = {"layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size", "patch_dropout", "output_tokens"}
TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "eos_id", "pad_id", "output_tokens"}
TOP = {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "custom_text", "init_logit_scale"}
START, END = "<|startoftext|>", "<|endoftext|>"

PLACE = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
MERGED = "attn.in_proj_"
BLOCK = {  # of a residual block: open_clip's name -> CLIPModel's
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def clip_refusal(parts: OpenClipParts, tokenizer: Tokenizer) -> str | None:
    """Why CLIPModel cannot hold this model, or None."""
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    if not isinstance(tokenizer, ClipTokenizer):
        return f"CLIPTokenizer has another vocabulary than this model's {type(tokenizer).__name__}"

    config = parts.model_cfg
    beyond = sorted(name for name in config.keys() - TOP if config[name] is not None)
    if beyond:
        return f"CLIPModel has no place for {beyond[0]}={config[beyond[0]]}"
    for block, held, kind in (("vision_cfg", VISION, CLIPVisionCfg), ("text_cfg", TEXT, CLIPTextCfg)):
        defaults = {field.name: field.default for field in fields(kind)}
        for name, value in config[block].items():
            if name not in held and value != defaults[name]:
                return f"CLIPModel has no place for {block}.{name}={value}"
    vision = config["vision_cfg"]
    if not isinstance(vision.get("layers", 12), int):
        return "CLIPModel has a vision transformer, and this image tower is a ResNet"
    if not isinstance(vision.get("image_size", 224), int):
        return f"CLIPModel takes square pictures, not {vision['image_size']}"
    if parts.preprocess_cfg["resize_mode"] == "longest":
        return "CLIPImageProcessor cannot pad a picture to a square; export a model with data.resize=crop or squash"
    return None


def clip_config(parts: OpenClipParts, precision: str) -> dict[str, Any]:
    """config.json of a CLIPModel."""
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    config, act = parts.model_cfg, "quick_gelu" if parts.model_cfg.get("quick_gelu") else "gelu"
    vision, text = CLIPVisionCfg(**config["vision_cfg"]), CLIPTextCfg(**config["text_cfg"])
    shared = {"hidden_act": act, "layer_norm_eps": 1e-5, "projection_dim": config["embed_dim"]}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config["embed_dim"],
        "logit_scale_init_value": 2.6592,
        "dtype": str(HALF.get(precision, torch.float32)).removeprefix("torch."),
        "vision_config": shared
        | {
            "model_type": "clip_vision_model",
            "hidden_size": vision.width,
            "intermediate_size": int(vision.width * vision.mlp_ratio),
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.width // vision.head_width,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
        },
        "text_config": shared
        | {
            "model_type": "clip_text_model",
            "hidden_size": text.width,
            "intermediate_size": int(text.width * text.mlp_ratio),
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "max_position_embeddings": text.context_length,
            "vocab_size": text.vocab_size,
            "bos_token_id": ClipTokenizer.start_id,
            "eos_token_id": ClipTokenizer.end_id,
            "pad_token_id": ClipTokenizer.end_id,
        },
    }


def clip_weights(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's weights under CLIPModel's names: merged projections apart, matrices of the joint space turned."""
    result = {}
    for name, value in state_dict.items():
        name = name.removeprefix("text.")  # CustomTextCLIP keeps its text tower in a module of its own
        place = PLACE.fullmatch(name)
        if place is None:
            new, turned = OTHER[name]
            result[new] = value.T if turned else value
            continue
        tower, layer, part = place.groups()
        stem = f"{'vision' if tower else 'text'}_model.encoder.layers.{layer}"
        if part.startswith(MERGED):
            for third, rows in zip("qkv", value.chunk(3), strict=True):
                result[f"{stem}.self_attn.{third}_proj.{part.removeprefix(MERGED)}"] = rows
        else:
            module, _, kind = part.rpartition(".")
            result[f"{stem}.{BLOCK[module]}.{kind}"] = value
    return result


OTHER = {  # open_clip's name -> CLIPModel's, and whether the matrix is turned
    "visual.class_embedding": ("vision_model.embeddings.class_embedding", False),
    "visual.positional_embedding": ("vision_model.embeddings.position_embedding.weight", False),
    "visual.conv1.weight": ("vision_model.embeddings.patch_embedding.weight", False),
    "visual.ln_pre.weight": ("vision_model.pre_layrnorm.weight", False),  # spelt so there
    "visual.ln_pre.bias": ("vision_model.pre_layrnorm.bias", False),
    "visual.ln_post.weight": ("vision_model.post_layernorm.weight", False),
    "visual.ln_post.bias": ("vision_model.post_layernorm.bias", False),
    "visual.proj": ("visual_projection.weight", True),
    "token_embedding.weight": ("text_model.embeddings.token_embedding.weight", False),
    "positional_embedding": ("text_model.embeddings.position_embedding.weight", False),
    "ln_final.weight": ("text_model.final_layer_norm.weight", False),
    "ln_final.bias": ("text_model.final_layer_norm.bias", False),
    "text_projection": ("text_projection.weight", True),
    "logit_scale": ("logit_scale", False),
}


def write_clip_folder(folder: Path, parts: OpenClipParts, tokenizer: Tokenizer, precision: str = "fp32") -> None:
    """config.json, model.safetensors, the tokenizer's and the image processor's files.

    Raises:
        ValueError: what :func:`clip_refusal` tells.
    """
    reason = clip_refusal(parts, tokenizer)
    if reason is not None:
        raise ValueError(f"format=huggingface: {reason}")
    _write(folder / "config.json", clip_config(parts, precision))
    weights = stored(clip_weights(parts.state_dict), precision)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "preprocessor_config.json", image_processor(parts.preprocess_cfg))
    write_clip_tokenizer(folder, tokenizer.context_length)


def image_processor(preprocess_cfg: dict[str, Any]) -> dict[str, Any]:
    """preprocessor_config.json."""
    size, squash = preprocess_cfg["size"], preprocess_cfg["resize_mode"] == "squash"
    square = {"height": size, "width": size}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": square if squash else {"shortest_edge": size},
        "resample": 3,  # bicubic
        "do_center_crop": not squash,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess_cfg["mean"]),
        "image_std": list(preprocess_cfg["std"]),
        "do_convert_rgb": True,
    }


def write_clip_tokenizer(folder: Path, context_length: int) -> None:
    """CLIP's vocabulary out of open_clip's wheel, in the files that CLIPTokenizer reads."""
    from open_clip.tokenizer import SimpleTokenizer, default_bpe

    engine = SimpleTokenizer()
    vocab = {token: number for token, number in engine.encoder.items() if number < ClipTokenizer.start_id}
    vocab |= {START: ClipTokenizer.start_id, END: ClipTokenizer.end_id}
    with gzip.open(default_bpe()) as file:
        merges = file.read().decode("utf-8").split("\n")[1 : ClipTokenizer.vocab_size - 256 - 2 - 256 + 1]
    _write(folder / "vocab.json", vocab)
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "CLIPTokenizer",
            "model_max_length": context_length,
            "bos_token": START,
            "eos_token": END,
            "unk_token": END,
            "pad_token": END,
        },
    )


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class OpenedClip(nn.Module):
    """The folder opened by transformers itself, without network, behind the contract of a dual encoder of ours."""

    crossmodal = None

    def __init__(self, folder: Path):
        super().__init__()
        from transformers import CLIPModel

        opened: Any = CLIPModel.from_pretrained(  # a pair, whatever its annotation says
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
        self.model: Any = opened[0]
        loading = opened[1]
        wrong = sorted(map(str, [*loading["missing_keys"], *loading["unexpected_keys"], *loading["mismatched_keys"]]))
        if wrong:
            raise ValueError(f"{folder}: transformers finds other weights than CLIPModel's: {wrong[0]}")
        said = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        self.normalise = Normalise(said["image_mean"], said["image_std"])
        self.eval()

    @property
    def logit_scale(self) -> Tensor:
        return self.model.logit_scale.float().exp()

    def encode_image(self, pixels: Tensor) -> Encoded:
        """(B, 3, S, S) uint8 -> embedding (B, E); no tokens come out."""
        found = self.model.get_image_features(pixel_values=self.normalise(pixels))
        return embedded(_features(found))

    def encode_text(self, token_ids: Tensor, token_mask: Tensor) -> Encoded:
        """(B, L) ids, (B, L) mask -> embedding (B, E)."""
        found = self.model.get_text_features(input_ids=token_ids, attention_mask=token_mask.long())
        return embedded(_features(found))


def _features(found: Any) -> Tensor:
    # transformers 5 gives an object, earlier versions the tensor
    return found if isinstance(found, Tensor) else found.pooler_output
