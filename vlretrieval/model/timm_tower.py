"""Image towers of timm behind the encoders' contract: a ViT's tokens, or a convolutional map taken as patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlretrieval.model.encoders import Hidden

HUB = "hub"


class TimmTower(nn.Module):
    """A timm model without its classifier.

    Args:
        name: timm's, e.g. ``vit_base_patch16_224.augreg_in21k`` or ``tf_efficientnet_lite0``.
        pretrained: a file of weights under timm's names; "hub": timm's own, downloaded or from its cache; None: random.
        image_size: side of the square pictures in pixels.
        mean, std: per channel of pixels scaled to 0 .. 1; None: what the model was trained with.
        drop_rate, drop_path_rate: timm's, in training.

    Raises:
        ValueError: an unknown name, missing or unfitting weights, a size that the model does not take.

    Attributes:
        dim, token_dim: widths of pooled and of tokens; ``grid``: rows and columns of the tokens.
    """

    aligned = False
    model: Any
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        name: str,
        pretrained: str | None = None,
        image_size: int = 224,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        try:
            import timm
        except ImportError:
            raise ValueError(f"name={name} is a tower of timm, which is not installed: pip install timm") from None
        if not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")) and not timm.is_model(name):
            near = timm.list_models(f"*{name.split('.')[0][:12]}*")[:4]
            raise ValueError(f"name={name!r} is no model of timm{': there are ' + ', '.join(near) if near else ''}")
        arguments: dict[str, Any] = {"num_classes": 0, "drop_rate": drop_rate}
        if drop_path_rate:
            arguments["drop_path_rate"] = drop_path_rate
        if pretrained not in (None, HUB):
            if not Path(str(pretrained)).is_file():
                raise ValueError(f"pretrained={pretrained}: no such file; give weights under timm's names, or {HUB!r}")
            arguments["pretrained_cfg_overlay"] = {"file": str(pretrained), "hf_hub_id": None}
        try:
            self.model = timm.create_model(name, pretrained=pretrained is not None, **arguments)
        except Exception as error:  # timm, torch and the hub each have their own
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"name={name}, pretrained={pretrained}: timm cannot build it: {reason}") from None
        if "pretrained_cfg_overlay" in arguments:
            _none_missing(self.model, str(pretrained))
        trained = self.model.pretrained_cfg
        self.name, self.image_size = name, image_size
        self._mean, self._std = tuple(mean or trained["mean"]), tuple(std or trained["std"])
        self.register_buffer("mean", torch.tensor(self._mean).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(self._std).view(3, 1, 1) * 255, persistent=False)
        self._memory = torch.contiguous_format
        self.maps_last = _is_channels_last(self.model)
        self.prefix = int(getattr(self.model, "num_prefix_tokens", 0))
        try:
            with torch.no_grad():
                shown = self.eval()(torch.zeros(1, 3, image_size, image_size))
        except (AssertionError, RuntimeError) as error:
            own = trained["input_size"][-1]
            raise ValueError(
                f"image_size={image_size}: {name} does not take it ({error}); it was trained at {own}"
            ) from None
        self.train()
        if any(isinstance(module, nn.Conv2d) and module.groups > 1 for module in self.modules()):
            # depthwise convolutions: 1.5 times faster on a CPU with channels last (EfficientNet-Lite2, measured)
            self.model.to(memory_format=torch.channels_last)
            self._memory = torch.channels_last
        self.dim, self.token_dim = shown.pooled.shape[1], shown.tokens.shape[2]
        side = math.isqrt(shown.tokens.shape[1])
        self.grid = (side, shown.tokens.shape[1] // side)

    def forward(self, pixels: Tensor) -> Hidden:
        """(B, 3, S, S) uint8 pixels, or float ones taken as normalised -> :class:`Hidden`, tokens in reading order."""
        if not pixels.is_floating_point():
            pixels = (pixels.to(self.mean.dtype) - self.mean) / self.std
        features = self.model.forward_features(pixels.contiguous(memory_format=self._memory))
        pooled = self.model.forward_head(features, pre_logits=True)
        if features.ndim == 4:
            tokens = features.flatten(1, 2) if self.maps_last else features.flatten(2).transpose(1, 2)
        else:
            tokens = features[:, self.prefix :]
        return Hidden(pooled.flatten(1), tokens, None)

    def layer_numbers(self) -> dict[str, int]:
        """Parameter name -> its stage or block as timm groups them, 0 the stem; the final norm is of the last one's."""
        from timm.models import group_parameters

        groups = group_parameters(self.model, self.model.group_matcher(coarse=True), reverse=True)
        return {f"model.{name}": number for name, number in groups.items()}

    def stored(self) -> dict[str, Any]:
        """The arguments that build this tower without its files; a checkpoint brings the weights."""
        return {"pretrained": None, "mean": list(self._mean), "std": list(self._std)}


def _none_missing(model: nn.Module, path: str) -> None:
    # without a classifier timm loads leniently, and what a file lacks would keep its random start in silence
    from timm.models import load_state_dict

    own, there = set(model.state_dict()), set(load_state_dict(path, weights_only=True))
    missing = sorted(own - there)
    if missing and own & there:  # with no name in common, timm has translated the names of another project
        raise ValueError(f"pretrained={path} is missing {len(missing)} of {len(own)} weights ({missing[0]}, ...)")


def _is_channels_last(model: nn.Module) -> bool:
    # Swin and its like hand (B, H, W, C) on; their output_fmt says so
    return str(getattr(model, "output_fmt", "NCHW")).endswith("NHWC")
