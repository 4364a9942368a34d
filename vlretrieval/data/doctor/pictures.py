"""A first look at a picture: how it is stored, whether it opens, and a small grey print of it to know it again by."""

import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vlretrieval.data.images import BadImage, open_raw

PRINT_SIDE = 24
TINY_SIDE = 32  # pixels
EXTREME_ASPECT = 4.0


@dataclass(frozen=True, slots=True)
class Look:
    """What one picture showed.

    Attributes:
        fault: why it cannot be opened; None when it can.
        kinds: how it is stored, in the words of the report ("turned by EXIF", "transparent", ...).
        size: width and height, upright.
        digest: of the decoded pixels: equal pictures in different files are equal.
        print: (24, 24) uint8 grey.
    """

    fault: str | None
    kinds: tuple[str, ...] = ()
    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    print: np.ndarray | None = None


def look_at(picture: Image.Image, stored: str | Path | bytes | None) -> Look:
    """Look at an opened picture and, where there is one, at its file."""
    width, height = picture.size
    kinds = stored_kinds(stored) if stored is not None else []
    if min(width, height) < TINY_SIDE:
        kinds.append(f"smaller than {TINY_SIDE} pixels")
    if max(width, height) > EXTREME_ASPECT * min(width, height):
        kinds.append(f"longer than {EXTREME_ASPECT:g} to 1")
    digest = hashlib.blake2b(f"{width} {height} ".encode() + picture.tobytes(), digest_size=16).digest()
    small = picture.convert("L").resize((PRINT_SIDE, PRINT_SIDE), Image.Resampling.BOX)
    return Look(None, tuple(kinds), (width, height), digest, np.asarray(small))


def stored_kinds(stored: str | Path | bytes) -> list[str]:
    """How a picture is stored, as far as a loader could get it wrong; read from the header alone."""
    with open_raw(stored) as image:
        kinds = []
        if image.getexif().get(0x0112, 1) in range(2, 9):
            kinds.append("turned or mirrored by EXIF")
        if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            kinds.append("transparent")
        if image.mode in ("CMYK", "YCCK"):
            kinds.append("CMYK")
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            kinds.append("more than 8 bits")
        if image.mode in ("L", "1"):
            kinds.append("grey")
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            kinds.append("several frames")
    return kinds


def unreadable(bad: BadImage) -> Look:
    """The look of a picture that cannot be opened."""
    return Look(bad.reason)


def thumbnail(picture: Image.Image, side: int = 112) -> bytes:
    """A small JPEG for the report."""
    small = picture.copy()
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=70)
    return buffer.getvalue()


def prints_of(looks: Iterable[Look]) -> np.ndarray:
    """(N, 24, 24) uint8; zeros where a picture cannot be opened."""
    nothing = np.zeros((PRINT_SIDE, PRINT_SIDE), dtype=np.uint8)
    return np.stack([nothing if look.print is None else look.print for look in looks])
