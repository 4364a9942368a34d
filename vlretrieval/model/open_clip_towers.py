"""The two towers of an open_clip model behind the encoders' contract; the one model file that imports open_clip."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlretrieval.model.encoders import Hidden
from vlretrieval.model.transformer import pool_tokens


class OpenClipImageTower(nn.Module):
    """The image half of an open_clip model. Its pooled output is open_clip's image embedding, before it is normalised.

    Args:
        name: a model of open_clip ("ViT-B-32"), a folder as "local-dir:DIR", or "hf-hub:OWNER/MODEL".
        pretrained: of a named model: a tag ("laion2b_s34b_b79k") or a file of weights; None: random weights, unless the
            name is a folder or hub id, which bring theirs.
        config: the architecture (open_clip's ``model_cfg``) in place of a name.
        quick_gelu: None: what the weights were trained with; a bool must agree with it.
        image_size: side of the square pictures in pixels; must be the model's.
        mean, std: per channel of pixels scaled to 0 .. 1; None: what the weights were trained with.

    Raises:
        ValueError: an unknown model, missing weights, another activation or size than the weights were trained with.

    Attributes:
        dim, token_dim: widths of pooled and of tokens; ``grid``: rows and columns of the tokens.
    """

    aligned = True
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        name: str | None = None,
        pretrained: str | None = None,
        *,
        config: dict[str, Any] | None = None,
        quick_gelu: bool | None = None,
        image_size: int = 224,
        mean: list[float] | None = None,
        std: list[float] | None = None,
    ):
        super().__init__()
        whole, self.config = _build(name, pretrained, config, quick_gelu)
        self.visual = whole.visual
        own = self.visual.image_size
        own = own[0] if isinstance(own, tuple | list) else own
        if image_size != own:
            raise ValueError(f"image_size={image_size}, but {name or 'this model'} takes {own}; set it to that")
        self.image_size = image_size
        trained = getattr(self.visual, "preprocess_cfg", {})
        self._mean = list(mean or trained.get("mean") or _clip_constants()[0])
        self._std = list(std or trained.get("std") or _clip_constants()[1])
        self.register_buffer("mean", torch.tensor(self._mean).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(self._std).view(3, 1, 1) * 255, persistent=False)
        self._tokens_last = type(self.visual).__name__ == "VisionTransformer"
        training = self.training
        with torch.no_grad():
            shown = self.eval()(torch.zeros(1, 3, image_size, image_size))
        self.train(training)
        self.dim, self.token_dim = shown.pooled.shape[1], shown.tokens.shape[2]
        side = math.isqrt(shown.tokens.shape[1])
        self.grid = (side, shown.tokens.shape[1] // side)

    def forward(self, pixels: Tensor) -> Hidden:
        """(B, 3, S, S) uint8 pixels, or float ones taken as normalised -> :class:`Hidden`, tokens of the last block."""
        if not pixels.is_floating_point():
            pixels = (pixels.to(self.mean.dtype) - self.mean) / self.std
        found = self.visual.forward_intermediates(
            pixels,
            indices=1,
            normalize_intermediates=self._tokens_last,
            output_fmt="NLC" if self._tokens_last else "NCHW",
        )
        tokens = found["image_intermediates"][-1]
        if tokens.ndim == 4:
            tokens = tokens.flatten(2).transpose(1, 2)
        return Hidden(found["image_features"], tokens, None)

    def stored(self) -> dict[str, Any]:
        """The arguments that build this tower without its files; a checkpoint brings the weights."""
        return {**_architecture(self.config), "mean": self._mean, "std": self._std}


class OpenClipTextTower(nn.Module):
    """The text half of an open_clip model. Its pooled output is open_clip's text embedding, before it is normalised.

    Args:
        name, pretrained, config, quick_gelu: as :class:`OpenClipImageTower`.
        vocab_size: of the tokenizer, which must be the model's.
        context_length: longest text in tokens, at most the model's. Shorter texts cost less and come out the same.

    Attributes:
        dim, token_dim: widths of pooled and of tokens.
    """

    aligned = True

    def __init__(
        self,
        name: str | None = None,
        pretrained: str | None = None,
        *,
        config: dict[str, Any] | None = None,
        quick_gelu: bool | None = None,
        vocab_size: int = 49408,
        context_length: int = 77,
    ):
        super().__init__()
        whole, self.config = _build(name, pretrained, config, quick_gelu)
        text = whole.text
        called = name or "this model"
        if type(text).__name__ != "TextTransformer" or text.cls_emb is not None or text.attn_mask is None:
            raise ValueError(
                f"{called}: its text tower is not CLIP's causal one (CoCa's and SigLIP's are not); take "
                "its image tower beside another text tower, such as model/text_encoder=huggingface"
            )
        if text.pool_type not in ("argmax", "eos", "last"):
            raise ValueError(f"{called}: its text tower pools by {text.pool_type!r}, which is not known here")
        if vocab_size != text.vocab_size:
            raise ValueError(f"vocab_size={vocab_size}, but {called} has {text.vocab_size} words; take its tokenizer")
        if context_length > text.context_length:
            raise ValueError(
                f"context_length={context_length}, but {called} takes {text.context_length} tokens at most"
            )
        self.text = text
        self.context_length, self.vocab_size = context_length, vocab_size
        projection = text.text_projection
        self.token_dim = int(text.ln_final.weight.shape[0])
        self.dim = self.token_dim if projection is None else int(text.output_dim)

    def forward(self, token_ids: Tensor, token_mask: Tensor | None = None) -> Hidden:
        """(B, L) ids and (B, L) bool, True on real tokens -> :class:`Hidden`, pooled at the end token.

        Each token sees those before it alone, so what stands behind the end token changes nothing.
        """
        text, length = self.text, token_ids.shape[1]
        x = text.token_embedding(token_ids) + text.positional_embedding[:length]
        # not text.attn_mask[:length, :length], which is contiguous at full length alone: torch.export would refuse that
        later = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        x = text.transformer(x, attn_mask=later)
        tokens = text.ln_final(x)
        pooled = pool_tokens(tokens, token_mask, "last")
        if isinstance(text.text_projection, nn.Linear):
            pooled = text.text_projection(pooled)
        elif text.text_projection is not None:
            pooled = pooled @ text.text_projection
        return Hidden(pooled, tokens, token_mask)

    def stored(self) -> dict[str, Any]:
        """The arguments that build this tower without its files; a checkpoint brings the weights."""
        return _architecture(self.config)


def _architecture(config: dict[str, Any]) -> dict[str, Any]:
    return {"name": None, "pretrained": None, "config": config, "quick_gelu": None}


def _build(
    name: str | None, pretrained: str | None, config: dict[str, Any] | None, quick_gelu: bool | None
) -> tuple[Any, dict[str, Any]]:
    """The whole model, its text tower apart, and its architecture as plain data."""
    import open_clip

    if (name is None) == (config is None):
        raise ValueError("give name (a model of open_clip, local-dir:FOLDER, hf-hub:ID), or config, its architecture")
    if config is not None:
        if pretrained is not None:
            raise ValueError(f"pretrained={pretrained} goes with a name, not with a config")
        return _from_config(open_clip, copy.deepcopy(config), quick_gelu)
    assert name is not None
    brings_weights = ":" in name
    if brings_weights and pretrained is not None:
        raise ValueError(f"pretrained={pretrained} has no effect: {name} brings its weights; leave it out")
    if not brings_weights and name not in open_clip.list_models():
        import difflib

        near = difflib.get_close_matches(name, open_clip.list_models(), n=3)
        raise ValueError(f"name={name!r} is no model of open_clip{'; did you mean ' + ', '.join(near) if near else ''}")
    file = pretrained is not None and ("/" in pretrained or Path(pretrained).suffix in (".pt", ".bin", ".safetensors"))
    if file and not Path(str(pretrained)).is_file():
        raise ValueError(f"pretrained={pretrained}: no such file")
    wanted = _quick_gelu(open_clip, name, None if file else pretrained, quick_gelu)
    try:
        whole = open_clip.create_model(
            name,
            pretrained=pretrained,
            require_pretrained=brings_weights or pretrained is not None,
            force_custom_text=True,
            force_quick_gelu=wanted,
        )
    except Exception as error:  # open_clip, the hub and torch each have their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"name={name}, pretrained={pretrained}: open_clip cannot load it: {reason}") from None
    found = open_clip.get_model_config(name) if not brings_weights else _config_of(open_clip, name)
    assert found is not None
    found = {k: v for k, v in copy.deepcopy(found).items() if k != "custom_text"}
    if wanted:
        found["quick_gelu"] = True
    return whole, found


def _quick_gelu(open_clip: Any, name: str, tag: str | None, asked: bool | None) -> bool:
    """Whether to force QuickGELU; refused where it is not what the weights were trained with."""
    if ":" in name:
        trained = bool(_config_of(open_clip, name).get("quick_gelu", False))
    elif tag is not None:
        known = open_clip.get_pretrained_cfg(name, tag)
        if not known:
            tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none"
            raise ValueError(f"pretrained={tag!r} is no tag of {name} and no file; its tags are {tags}")
        trained = bool(known.get("quick_gelu", False))
    else:
        trained = bool((open_clip.get_model_config(name) or {}).get("quick_gelu", False)) if asked is None else asked
    if asked is not None and asked != trained:
        raise ValueError(
            f"quick_gelu={asked}, but the weights were trained with quick_gelu={trained}: the same weights with "
            "the other activation give other embeddings; leave it out"
        )
    named = bool((open_clip.get_model_config(name) or {}).get("quick_gelu", False)) if ":" not in name else trained
    if named and not trained:
        raise ValueError(
            f"{name} has quick_gelu=True, but the weights {tag!r} were trained without; "
            f"take {name.removesuffix('-quickgelu')}"
        )
    return trained


def _config_of(open_clip: Any, name: str) -> dict[str, Any]:
    """The ``model_cfg`` of a folder or hub id."""
    scheme, _, place = name.partition(":")
    if scheme == "local-dir":
        import json

        path = Path(place) / "open_clip_config.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))["model_cfg"])
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file; local-dir: takes a folder of open_clip's") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no open_clip config: {type(error).__name__}: {error}") from None
    if scheme != "hf-hub":
        raise ValueError(f"name={name}: {scheme}: is not known; there are local-dir: and hf-hub:")
    from open_clip.factory import _get_hf_config

    try:
        return dict(_get_hf_config(place)["model_cfg"])
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"name={name}: its config cannot be fetched: {reason}") from None


def _from_config(open_clip: Any, config: dict[str, Any], quick_gelu: bool | None) -> tuple[Any, dict[str, Any]]:
    if quick_gelu is not None:
        config["quick_gelu"] = quick_gelu
    if config.get("text_cfg", {}).get("hf_model_name"):
        raise ValueError("config.text_cfg.hf_model_name: take model/text_encoder=huggingface for a Hugging Face tower")
    vision = dict(config.get("vision_cfg") or {})
    vision.pop("timm_model_pretrained", None)
    if "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False
    arguments = {k: v for k, v in config.items() if k not in ("custom_text", "vision_cfg", "text_cfg")}
    try:
        whole = open_clip.CustomTextCLIP(vision_cfg=vision, text_cfg=dict(config["text_cfg"]), **arguments)
    except (TypeError, KeyError, ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"config is no architecture of open_clip: {type(error).__name__}: {error}") from None
    return whole, config


def _clip_constants() -> tuple[tuple[float, ...], tuple[float, ...]]:
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    return OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
