"""Pictures of every kind that broke a loader, made on the spot. ``GOOD`` have a known look, ``BAD`` must be refused."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, features

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def quarters(width: int = 48, height: int = 32) -> Image.Image:
    """Red top left, green top right, blue bottom left, white bottom right: any turn or flip shows."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[: height // 2, width // 2 :] = GREEN
    pixels[height // 2 :, : width // 2] = BLUE
    pixels[height // 2 :, width // 2 :] = WHITE
    return Image.fromarray(pixels)


# What a camera held that way has stored, for the picture above to be the upright one.
_STORED = {
    1: lambda im: im,
    2: lambda im: im.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    3: lambda im: im.transpose(Image.Transpose.ROTATE_180),
    4: lambda im: im.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
    5: lambda im: im.transpose(Image.Transpose.TRANSPOSE),
    6: lambda im: im.transpose(Image.Transpose.ROTATE_90),
    7: lambda im: im.transpose(Image.Transpose.TRANSVERSE),
    8: lambda im: im.transpose(Image.Transpose.ROTATE_270),
}


def with_orientation(orientation: int, format: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(_STORED[orientation](quarters()), format, exif=exif, quality=95)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def half_clear(mode: str) -> Image.Image:
    """Left half opaque (red, or black for grey), right half fully transparent with a hidden green (or white)."""
    pixels = np.zeros((8, 8, 4), dtype=np.uint8)
    pixels[:, :4] = (*RED, 255)
    pixels[:, 4:] = (*GREEN, 0)
    if mode == "RGBA":
        return Image.fromarray(pixels)
    grey = np.zeros((8, 8, 2), dtype=np.uint8)
    grey[:, :4] = (0, 255)
    grey[:, 4:] = (255, 0)
    return Image.fromarray(grey, "LA")


def palette_with_transparency() -> bytes:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([*RED, *GREEN, *BLUE])
    image.paste(1, (4, 0, 8, 8))
    return encoded(image, "PNG", transparency=1)


def grey16(values: np.ndarray) -> bytes:
    return encoded(Image.fromarray(values.astype(np.uint16)), "PNG")


def animated(format: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN, BLUE)]
    options = {"lossless": True} if format == "WEBP" else {}
    return encoded(frames[0], format, save_all=True, append_images=frames[1:], duration=50, **options)


def png_header(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of the size said, with no pixels behind it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*c) for c in chunks) + chunk(b"IEND", b"")


def real_bomb(width: int, height: int) -> bytes:
    """A valid 1-bit PNG of many pixels in few bytes."""
    return encoded(Image.new("1", (width, height)), "PNG", optimize=False)


_JPEG = encoded(quarters(256, 256), "JPEG")
_PNG = encoded(Image.effect_noise((64, 64), 80).convert("RGB"), "PNG")
_WEBP = encoded(Image.effect_noise((64, 64), 80).convert("RGB"), "WEBP")

BAD: dict[str, bytes] = {
    "empty": b"",
    "one_byte": b"\xff",
    "zero_bytes": bytes(4096),
    "random_bytes": np.random.default_rng(0).bytes(4096),
    "html": b"<!doctype html><html><body>404 Not Found</body></html>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>',
    "pdf": b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n",
    "text": "a dog \u00fc".encode(),
    "jpeg_header_only": _JPEG[:20],
    "jpeg_truncated": _JPEG[: len(_JPEG) // 2],
    "jpeg_without_its_end": _JPEG[:-200],
    "png_header_only": _PNG[:33],
    "png_truncated": _PNG[: len(_PNG) // 2],
    "png_broken_data": _PNG[:200] + bytes(100) + _PNG[300:],
    "webp_truncated": _WEBP[: len(_WEBP) // 2],
    "gif_empty": b"GIF89a",
    "gif_without_frames": b"GIF89a\x08\x00\x08\x00\x00\x00\x00;",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n",
    "zero_width": png_header(0, 8),
    "bomb_header_only": png_header(60000, 60000),
    "bomb_text_chunk": png_header(8, 8, (b"zTXt", b"x\0\0" + zlib.compress(bytes(80_000_000)))),
    "heic": b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(64),
}

GOOD: dict[str, bytes] = {
    **{f"exif_{orientation}": with_orientation(orientation) for orientation in range(1, 9)},
    "png_exif_6": with_orientation(6, "PNG"),
    "rgba": encoded(half_clear("RGBA"), "PNG"),
    "la": encoded(half_clear("LA"), "PNG"),
    "palette_transparency": palette_with_transparency(),
    "rgb_transparency": encoded(Image.new("RGB", (8, 8), GREEN), "PNG", transparency=GREEN),
    "rgba_webp": encoded(half_clear("RGBA"), "WEBP", lossless=True, exact=True),
    "cmyk": encoded(Image.new("RGB", (8, 8), RED).convert("CMYK"), "JPEG", quality=95),
    "cmyk_tiff": encoded(Image.new("RGB", (8, 8), RED).convert("CMYK"), "TIFF"),
    "grey": encoded(Image.new("L", (8, 8), 128), "JPEG"),
    "one_bit": encoded(Image.new("1", (8, 8), 1), "PNG"),
    "grey16": grey16(np.linspace(0, 65535, 64).reshape(8, 8)),
    "grey16_tiff": encoded(Image.fromarray(np.full((8, 8), 32768, dtype=np.uint16)), "TIFF"),
    "float_tiff": encoded(Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)), "TIFF"),
    "gif_animated": animated("GIF"),
    "webp_animated": animated("WEBP"),
    "png_animated": animated("PNG"),
    "bmp": encoded(quarters(), "BMP"),
    "tiny": encoded(Image.new("RGB", (1, 1), RED), "PNG"),
    "extreme": encoded(Image.new("RGB", (1, 20000), RED), "PNG"),
    **({"avif": encoded(quarters(), "AVIF", quality=95)} if features.check("avif") else {}),
}


def odd_files(folder: Path) -> dict[str, Path]:
    """What stands at an image's path and is no picture: each must be refused without waiting."""
    os.mkfifo(folder / "fifo.jpg")
    (folder / "folder.jpg").mkdir()
    (folder / "loop.jpg").symlink_to(folder / "loop.jpg")
    (folder / "dangling.jpg").symlink_to(folder / "nowhere.jpg")
    (folder / "device.jpg").symlink_to("/dev/zero")
    return {
        **{name: folder / f"{name}.jpg" for name in ("fifo", "folder", "loop", "dangling", "device")},
        "missing": folder / "missing.jpg",
        "nul": Path("a\0b.jpg"),
        "long_name": folder / ("x" * 300),
    }
