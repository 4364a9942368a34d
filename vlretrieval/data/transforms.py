"""From an RGB picture to uint8 (3, S, S). Normalising is the image encoder's own business, once a batch.

Resizing is torch's antialiased one on bytes in channels-last order: three times faster than Pillow's, and equal to it
but for the last bit of some values.
"""

import math
from random import Random
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as nnf
from PIL import Image
from torch import Tensor

ResizeMode = Literal["squash", "crop", "pad"]


def to_tensor(image: Image.Image) -> Tensor:
    """(3, H, W) uint8 of an RGB picture, a view in channels-last order as Pillow stores it."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)  # np.array: a copy that may be written


def resized(pixels: Tensor, height: int, width: int) -> Tensor:
    """``pixels`` (3, H, W) uint8 as (3, height, width), antialiased bicubic."""
    if pixels.shape[1:] == (height, width):
        return pixels
    return nnf.interpolate(pixels[None], size=(height, width), mode="bicubic", antialias=True)[0]


class EvalTransform:
    """Resize to a square, nothing random.

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
        size, pixels = self.image_size, to_tensor(image)
        height, width = pixels.shape[1:]
        if self.mode == "squash":
            return resized(pixels, size, size).contiguous()
        if self.mode == "crop":
            # The roundings of torchvision's Resize and CenterCrop, which CLIP's towers were trained with.
            shorter = min(height, width)
            height, width = (size if side == shorter else int(size * side / shorter) for side in (height, width))
            top, left = (int(round((side - size) / 2)) for side in (height, width))
            return resized(pixels, height, width)[:, top : top + size, left : left + size].contiguous()
        scale = size / max(height, width)
        height, width = max(1, round(height * scale)), max(1, round(width * scale))
        top, left = (size - height) // 2, (size - width) // 2
        canvas = torch.tensor(self.fill, dtype=torch.uint8)[:, None, None].repeat(1, size, size)
        canvas[:, top : top + height, left : left + width] = resized(pixels, height, width)
        return canvas

    def __repr__(self) -> str:
        return f"EvalTransform({self.image_size}, {self.mode!r})"


def eval_transform(image_size: int, mode: ResizeMode = "squash") -> EvalTransform:
    """The transform of evaluation, search and the in-memory cache."""
    return EvalTransform(image_size, mode)


class TrainTransform:
    """Random resized crop, flip, colour and RandAugment; every draw follows from the key alone.

    Args:
        image_size: side S of the result.
        scale: smallest and largest share of the picture's area that is kept.
        ratio: smallest and largest width / height of the crop.
        flip: chance of a mirror image. Captions that say left or right speak against it, see ``RetrievalData``.
        colour: brightness, contrast and saturation change by up to this factor; 0 leaves them.
        grey: chance of a picture without colour.
        randaugment_ops: operations of torchvision's RandAugment; 0 for none.
        randaugment_magnitude: their strength, 0..30.
    """

    def __init__(
        self,
        image_size: int,
        *,
        scale: tuple[float, float] = (0.5, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.0,
        colour: float = 0.0,
        grey: float = 0.0,
        randaugment_ops: int = 0,
        randaugment_magnitude: int = 9,
    ) -> None:
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"scale={tuple(scale)} must be two shares of the area, 0 < smallest <= largest <= 1")
        if not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"ratio={tuple(ratio)} must be 0 < smallest <= largest")
        for name, value in (("flip", flip), ("colour", colour), ("grey", grey)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} must be from 0 to 1")
        self.image_size = image_size
        self.scale, self.ratio = (scale[0], scale[1]), (ratio[0], ratio[1])
        self.flip, self.colour, self.grey = flip, colour, grey
        self.randaugment_ops, self.randaugment_magnitude = randaugment_ops, randaugment_magnitude

    def crop(self, height: int, width: int, key: int) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the crop, as torchvision's RandomResizedCrop draws it.

        Places are drawn as fractions, so that a picture decoded at a reduced scale is cut at the same place.
        """
        draw = Random(key * 8).random
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area_u, ratio_u, top_u, left_u = draw(), draw(), draw(), draw()
            area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * area_u)
            aspect = math.exp(low + (high - low) * ratio_u)
            cut_w, cut_h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < cut_w <= width and 0 < cut_h <= height:
                return int(top_u * (height - cut_h + 1)), int(left_u * (width - cut_w + 1)), cut_h, cut_w
        # No crop of that shape fits: the largest one in the middle.
        cut_w, cut_h = width, height
        if width / height < self.ratio[0]:
            cut_h = max(1, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            cut_w = max(1, round(height * self.ratio[1]))
        return (height - cut_h) // 2, (width - cut_w) // 2, cut_h, cut_w

    def shorter_side_needed(self, width: int, height: int, key: int) -> int:
        """How small the picture may be decoded so that the crop still has as many pixels as the result."""
        _, _, cut_h, cut_w = self.crop(height, width, key)
        return math.ceil(min(width, height) * self.image_size / min(cut_h, cut_w))

    def __call__(self, pixels: Tensor, key: int, may_flip: bool = True) -> Tensor:
        """(3, H, W) uint8 -> (3, S, S) uint8.

        Args:
            pixels: any size.
            key: 64 random bits.
            may_flip: False where the caption names a side.
        """
        top, left, height, width = self.crop(pixels.shape[1], pixels.shape[2], key)
        cut = pixels[:, top : top + height, left : left + width]
        result = resized(cut, self.image_size, self.image_size)
        flip_u, grey_u, *colour_u = _uniform(key, 5, stream=1)
        if may_flip and flip_u < self.flip:
            result = result.flip(-1)
        if self.colour:
            result = self._coloured(result, colour_u)
        if grey_u < self.grey:
            from torchvision.transforms.v2 import functional as v2f

            result = v2f.rgb_to_grayscale(result, num_output_channels=3)
        if self.randaugment_ops:
            result = self._rand_augmented(result, key)
        return result.contiguous()

    def _coloured(self, pixels: Tensor, draws: list[float]) -> Tensor:
        from torchvision.transforms.v2 import functional as v2f

        change = (v2f.adjust_brightness, v2f.adjust_contrast, v2f.adjust_saturation)
        for adjust, draw in zip(change, draws, strict=True):
            pixels = adjust(pixels, 1 + self.colour * (2 * draw - 1))
        return pixels

    def _rand_augmented(self, pixels: Tensor, key: int) -> Tensor:
        from torchvision.transforms import v2

        # RandAugment draws from torch's global generator: seeded here, put back after.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key & (2**63 - 1))
            return v2.RandAugment(self.randaugment_ops, self.randaugment_magnitude)(pixels)


class CropTransform:
    """A random square cut out of a stored picture, without resizing, perhaps mirrored: the cheapest augmentation.

    Args:
        image_size: side S of the result; pictures must be stored with a longer one.
        flip: chance of a mirror image.
    """

    def __init__(self, image_size: int, *, flip: float = 0.0) -> None:
        if not 0 <= flip <= 1:
            raise ValueError(f"flip={flip} must be from 0 to 1")
        self.image_size, self.flip = image_size, flip

    def __call__(self, pixels: Tensor, key: int, may_flip: bool = True) -> Tensor:
        """(3, H, W) uint8 -> (3, S, S) uint8; all chance is in the key."""
        size, (height, width) = self.image_size, pixels.shape[1:]
        if min(height, width) < size:
            raise ValueError(f"a picture of {width} x {height} is too small to cut {size} x {size} out of it")
        top_u, left_u, flip_u = _uniform(key, 3, stream=2)
        top, left = int(top_u * (height - size + 1)), int(left_u * (width - size + 1))
        cut = pixels[:, top : top + size, left : left + size]
        return cut.flip(-1) if may_flip and flip_u < self.flip else cut


def _uniform(key: int, count: int, stream: int) -> list[float]:
    """``count`` numbers in [0, 1) that follow from the key and the stream alone."""
    draw = Random(key * 8 + stream).random  # a tenth of the cost of a NumPy generator, for a handful of numbers
    return [draw() for _ in range(count)]
