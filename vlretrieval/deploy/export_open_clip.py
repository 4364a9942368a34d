"""A folder that open_clip opens by itself (``local-dir:``). It holds open_clip's own architectures and nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from vlretrieval.deploy.export_precision import stored
from vlretrieval.model.encoded import Encoded

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
RESIZE = {"squash": "squash", "crop": "shortest", "pad": "longest"}  # our words for it, and open_clip's


@dataclass(frozen=True)
class OpenClipParts:
    """A model as open_clip describes one.

    Attributes:
        model_cfg: embed_dim, vision_cfg, text_cfg, ... as in open_clip's own JSON files.
        preprocess_cfg: size, mean, std, interpolation, resize_mode.
        state_dict: of open_clip's CLIP or CustomTextCLIP.
    """

    model_cfg: dict[str, Any]
    preprocess_cfg: dict[str, Any]
    state_dict: dict[str, Tensor]


def write_open_clip_folder(
    folder: Path,
    model_cfg: dict[str, Any],
    preprocess_cfg: dict[str, Any],
    state_dict: dict[str, Tensor],
    precision: str = "fp32",
) -> None:
    """open_clip_config.json and open_clip_model.safetensors, after a look whether they go together.

    Raises:
        ValueError: open_clip builds no model of this config, or another one than the weights are of.
    """
    check_fits(model_cfg, state_dict)
    weights = stored(state_dict, precision)
    # the scale is a lone number in float32; metadata as open_clip's own files have it
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = {"model_cfg": model_cfg, "preprocess_cfg": preprocess_cfg}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_fits(model_cfg: dict[str, Any], state_dict: dict[str, Tensor]) -> None:
    """open_clip would leave a surplus or missing weight to chance; here names and shapes must be its own."""
    own = {name: value.shape for name, value in empty_model(model_cfg).state_dict().items()}
    given = {name: value.shape for name, value in state_dict.items()}
    wrong = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
    if wrong:
        raise ValueError(
            f"format=open_clip: the weights are not of the model that open_clip builds of this config: {wrong[0]} is "
            f"{_shape(given, wrong[0])} here and {_shape(own, wrong[0])} there ({len(wrong)} such)"
        )


def _shape(shapes: dict[str, torch.Size], name: str) -> str:
    return str(tuple(shapes[name])) if name in shapes else "missing"


def empty_model(model_cfg: dict[str, Any]) -> nn.Module:
    """open_clip's model of a config, without memory for its weights."""
    import open_clip

    config = {name: value for name, value in model_cfg.items() if name != "custom_text"}
    custom = model_cfg.get("custom_text", False) or "hf_model_name" in model_cfg.get("text_cfg", {})
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    try:
        with torch.device("meta"):
            return kind(**config)
    except (TypeError, AssertionError, KeyError) as error:
        raise ValueError(f"format=open_clip: open_clip builds no model of this config: {error}") from None


def preprocess_cfg(image_size: int, resize: str, mean: list[float], std: list[float]) -> dict[str, Any]:
    """Our preprocessing in open_clip's words. Its own resizing is Pillow's, which differs from torch's in last bits."""
    from open_clip.transform import PreprocessCfg

    fill = 255 if resize == "pad" else 0
    ours = PreprocessCfg(size=image_size, mean=tuple(mean), std=tuple(std), resize_mode=RESIZE[resize], fill_color=fill)
    return asdict(ours)


class OpenedOpenClip(nn.Module):
    """The folder opened by open_clip itself, behind the contract of a dual encoder of ours."""

    crossmodal = None

    def __init__(self, folder: Path):
        super().__init__()
        import open_clip

        # raises where weights are missing, which create_model leaves at random
        self.model, _ = open_clip.create_model_from_pretrained(f"local-dir:{folder}", return_transform=True)
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        text = config["model_cfg"]["text_cfg"]
        self.context_length, self.pad_id = text.get("context_length", 77), text.get("pad_id", 0)
        self.normalise = Normalise(config["preprocess_cfg"]["mean"], config["preprocess_cfg"]["std"])
        self.eval()

    @property
    def logit_scale(self) -> Tensor:
        return self.model.logit_scale.float().exp()

    def encode_image(self, pixels: Tensor) -> Encoded:
        """(B, 3, S, S) uint8 -> embedding (B, E); no tokens come out."""
        return embedded(self.model.encode_image(self.normalise(pixels)))

    def encode_text(self, token_ids: Tensor, token_mask: Tensor) -> Encoded:
        """(B, L) ids -> embedding (B, E). open_clip takes rows as long as the context, and pads by itself."""
        ids = token_ids.masked_fill(~token_mask, self.pad_id)
        return embedded(self.model.encode_text(F.pad(ids, (0, self.context_length - ids.shape[1]), value=self.pad_id)))


class Normalise(nn.Module):
    """uint8 pixels as the towers of other libraries take them."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: list[float], std: list[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, S, S) uint8 -> float32."""
        return (pixels.float() / 255 - self.mean) / self.std


def embedded(features: Tensor) -> Encoded:
    """(B, E) features as unit vectors, without tokens."""
    embedding = F.normalize(features.float(), dim=-1)
    return Encoded(embedding, embedding.new_zeros(len(embedding), 0, 0))
