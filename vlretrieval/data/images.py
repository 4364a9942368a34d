"""Open a picture rightly: upright, without alpha, 8 bit RGB, within limits. One function for every path of the project.

What goes wrong elsewhere, and is right here: EXIF orientation is applied; transparency is composited on a stated
colour and not dropped (which shows the hidden colour below it); 16-bit grey is scaled and not clipped to white; CMYK is
converted; of an animation the first frame is taken; a truncated file is an error and not half a grey picture; a bomb is
refused by its header before a pixel is decoded; and what is no regular file is never opened, since a FIFO would wait
for ever.
"""

import io
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

# 8192 x 8192. Decoded to RGB that is 200 MB; Pillow alone only warns up to twice its own limit of 89 million.
MAX_PIXELS = 64 * 1024 * 1024
WHITE = (255, 255, 255)

# Named, because some of Pillow's other formats start programs (EPS: ghostscript) or hold no photo. JPEG includes MPO,
# the two-picture JPEG of some phones.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".mpo", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2",
    ".heic", ".heif",
)  # fmt: skip
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")


class BadImage(ValueError):
    """A picture that cannot be used; ``name`` is the file, ``reason`` says why in a few words."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple:  # a loader worker sends its exceptions by pickle
        return (BadImage, (self.name, self.reason))


def open_image(
    source: str | Path | bytes | BinaryIO,
    *,
    background: tuple[int, int, int] = WHITE,
    max_pixels: int = MAX_PIXELS,
    at_least: int | Callable[[int, int], int] | None = None,
    name: str | None = None,
) -> Image.Image:
    """The picture as 8-bit RGB, upright.

    Args:
        source: a path, the file's bytes, or an open binary file.
        background: the colour under transparent parts.
        max_pixels: width x height allowed; more is refused by the header alone, before anything is decoded.
        at_least: the shorter side need not be longer than this (or than what a function of the upright width and height
            says): a JPEG may then be decoded at 1/2, 1/4 or 1/8 scale, which is cheaper. None: full size.
        name: what to call the picture in errors; the path by default.

    Raises:
        BadImage: naming the file and the reason: missing, no regular file, empty, not an image, truncated, too large.
    """
    called = name or (str(source) if isinstance(source, (str, Path)) else "picture in memory")
    if isinstance(source, (str, Path)):
        _check_file(str(source), called)
    elif isinstance(source, bytes):
        if not source:
            raise BadImage(called, "empty, 0 bytes")
        source = io.BytesIO(source)
    try:
        with Image.open(source, formats=_formats()) as image:
            return _decode(image, background, max_pixels, at_least, called)
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # the warning, where it is made an error
        raise BadImage(called, f"more pixels than max_pixels={max_pixels} allows") from None
    except UnidentifiedImageError:
        raise BadImage(called, _why_unidentified(source)) from None
    except MemoryError:
        raise BadImage(called, "does not fit into memory") from None
    except Exception as error:
        # Pillow's decoders raise OSError, SyntaxError, struct.error, ValueError, ... and most name no file.
        raise BadImage(called, f"broken: {_one_line(error)}") from error


def open_raw(source: str | Path | bytes) -> Image.Image:
    """The picture as it is stored, its header read and nothing decoded; for looking at, not for a model."""
    if isinstance(source, bytes):
        return Image.open(io.BytesIO(source), formats=_formats())
    _check_file(str(source), str(source))
    return Image.open(source, formats=_formats())


def _decode(
    image: Image.Image,
    background: tuple[int, int, int],
    max_pixels: int,
    at_least: int | Callable[[int, int], int] | None,
    called: str,
) -> Image.Image:
    width, height = image.size
    if width * height > max_pixels:
        raise BadImage(called, f"{width} x {height} pixels are more than max_pixels={max_pixels} allows")
    if at_least is not None and image.format in ("JPEG", "MPO"):
        if callable(at_least):
            at_least = at_least(height, width) if _orientation(image) >= 5 else at_least(width, height)
        image.draft(None, _draft_size(width, height, at_least))
    image.load()
    return to_rgb(_upright(image), background)


def _draft_size(width: int, height: int, at_least: int) -> tuple[int, int]:
    # draft() picks the smallest of 1, 1/2, 1/4, 1/8 whose sides both reach the size asked for.
    shorter = min(width, height)
    if shorter <= at_least:
        return width, height
    return max(1, width * at_least // shorter), max(1, height * at_least // shorter)


def _orientation(image: Image.Image) -> int:
    """1 to 8; 5 and more swap width and height."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:  # EXIF too broken to read says nothing about the orientation; the pixels are good
        return 1
    return orientation if orientation in range(1, 9) else 1


def _upright(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image) if _orientation(image) > 1 else image


def to_rgb(image: Image.Image, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """``image`` of any Pillow mode as RGB: transparency composited on ``background``, deep grey scaled to 8 bits."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return _deep_grey(image, background)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        # La and RGBa are premultiplied: Pillow converts them only by way of LA and RGBA.
        image = image.convert({"La": "LA", "RGBa": "RGBA"}.get(image.mode, "RGBA")).convert("RGBA")
        canvas = Image.new("RGBA", image.size, (*background, 255))
        return Image.alpha_composite(canvas, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _deep_grey(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """16-bit grey: 65535 is white. 32-bit and float grey have no agreed white: the picture's own largest value is."""
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("grey values that are not finite")
    white = 65535.0
    if image.mode == "F":
        white = max(1.0, float(values.max(initial=0)))
    elif image.mode == "I" and values.max(initial=0) > white:
        white = float(values.max())
    grey = np.clip(np.round(values / white * 255), 0, 255).astype(np.uint8)
    rgb = np.repeat(grey[..., None], 3, axis=2)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        rgb[values == clear] = background
    return Image.fromarray(rgb)


def _check_file(path: str, called: str) -> None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise BadImage(called, "no such file") from None
    except OSError as error:  # loops of links, names too long, no permission
        raise BadImage(called, error.strerror or "cannot be read") from None
    except ValueError as error:  # a NUL in the name
        raise BadImage(repr(called), str(error)) from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"
        raise BadImage(called, f"{kind}, not a regular file")
    if found.st_size == 0:
        raise BadImage(called, "empty, 0 bytes")


def _why_unidentified(source: str | Path | BinaryIO) -> str:
    try:
        if isinstance(source, (str, Path)):
            with open(source, "rb") as file:
                head = file.read(12)
        else:
            source.seek(0)
            head = source.read(12)
    except (OSError, ValueError):
        head = b""
    if head[4:8] == b"ftyp" and head[8:12] in _HEIC_BRANDS:
        return "HEIC, which this Pillow cannot read: pip install pillow-heif, or convert it to JPEG"
    return "not an image of a known kind"


@cache
def _formats() -> tuple[str, ...]:
    """Those of FORMATS that the installed Pillow opens, and HEIF where pillow-heif is installed."""
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return tuple(known)
    register_heif_opener()
    return (*known, "HEIF")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:200] if text else type(error).__name__
