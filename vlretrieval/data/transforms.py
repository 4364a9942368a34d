"""From an RGB picture to uint8 (3, S, S). Normalising is the image encoder's own business, once a batch."""

from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

ResizeMode = Literal["squash", "crop", "pad"]


def to_tensor(image: Image.Image) -> Tensor:
    """(3, H, W) uint8 of an RGB picture."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()  # np.array: a copy that may be written


class EvalTransform:
    """Resize to a square, antialiased bicubic, nothing random.

    Args:
        image_size: side S of the result.
        mode: "squash" changes the aspect ratio and keeps every pixel; "crop" scales the shorter side to S and keeps the
            centre (CLIP's way); "pad" scales the longer side to S and fills the rest with ``fill``.
        fill: colour around a padded picture.
    """

    def __init__(
        self, image_size: int, mode: ResizeMode = "squash", fill: tuple[int, int, int] = (255, 255, 255)
    ) -> None:
        if mode not in ("squash", "crop", "pad"):
            raise ValueError(f"resize={mode!r} is not known; choose squash, crop or pad")
        if image_size < 1:
            raise ValueError(f"image_size={image_size} must be at least 1")
        self.image_size = image_size
        self.mode = mode
        self.fill = fill

    def __call__(self, image: Image.Image) -> Tensor:
        return to_tensor(self.resize(image))

    def resize(self, image: Image.Image) -> Image.Image:
        """The picture as a square of side ``image_size``."""
        size, (width, height) = self.image_size, image.size
        if (width, height) == (size, size):
            return image
        if self.mode == "squash":
            return image.resize((size, size), Image.Resampling.BICUBIC)
        if self.mode == "crop":
            # The box is cut while resampling, in fractions of a pixel: no second picture is made.
            side = min(width, height)
            left, top = (width - side) / 2, (height - side) / 2
            return image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
        scale = size / max(width, height)
        small = (max(1, round(width * scale)), max(1, round(height * scale)))
        canvas = Image.new("RGB", (size, size), self.fill)
        canvas.paste(image.resize(small, Image.Resampling.BICUBIC), ((size - small[0]) // 2, (size - small[1]) // 2))
        return canvas

    def __repr__(self) -> str:
        return f"EvalTransform({self.image_size}, {self.mode!r})"


def eval_transform(image_size: int, mode: ResizeMode = "squash") -> EvalTransform:
    """The transform of evaluation, search and the in-memory cache."""
    return EvalTransform(image_size, mode)
