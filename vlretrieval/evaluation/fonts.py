"""A font that has the letters of a text, or the word that there is none: letters are never drawn as empty boxes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

FOLDERS = {
    "darwin": ["/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts"],
    "win32": ["C:/Windows/Fonts"],
}.get(sys.platform, ["/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts"])
# Plain fonts first, then those with most scripts, by what their file names have in them.
LIKELY = ("DejaVuSans.", "NotoSansCJK", "NotoSansSC", "SourceHanSans", "wqy-", "PingFang", "msyh", "simsun", "Unifont")
TRIED = 400  # font files at most
NOWHERE = "\U0010fffe"  # a noncharacter: every font draws its sign for a missing letter


def font_for(text: str, size: int, file: str | None = None) -> Font | None:
    """The first font that has all letters of ``text``; None if there is none.

    Args:
        size: in pixels.
        file: of the only font to be tried; None: Pillow's own, then the system's.

    Raises:
        ValueError: ``file`` is no font.
    """
    letters = "".join(sorted(set(text) - set(" \t\n")))
    if file is not None:
        try:
            font: Font = ImageFont.truetype(file, size)
        except OSError:
            raise ValueError(f"pictures.font={file} cannot be read as a font; give a .ttf, .otf or .ttc") from None
        return font if has_letters(font, letters) else None
    own = ImageFont.load_default(size)
    if has_letters(own, letters):
        return own
    found = system_font_with(letters)
    return None if found is None else ImageFont.truetype(found, size)


def has_letters(font: Font, letters: str) -> bool:
    """Whether a font draws each of ``letters`` otherwise than one that it does not have."""
    if not isinstance(font, ImageFont.FreeTypeFont):  # Pillow without freetype: Latin-1 alone
        return all(ord(letter) < 256 for letter in letters)
    missing = bytes(font.getmask(NOWHERE))
    return all(bytes(font.getmask(letter)) != missing for letter in letters)


@cache
def system_font_with(letters: str) -> str | None:
    """The file of a font of the system that has ``letters``."""
    for number, file in enumerate(system_fonts()):
        if number >= TRIED:
            break
        try:
            if has_letters(ImageFont.truetype(file, 12), letters):
                return file
        except (OSError, ValueError):
            continue
    return None


@cache
def system_fonts() -> tuple[str, ...]:
    """Font files, the likely ones first."""

    def likelihood(file: str) -> tuple[int, str]:
        name = Path(file).name
        return next((place for place, part in enumerate(LIKELY) if part in name), len(LIKELY)), file

    return tuple(sorted(_walk(), key=likelihood))


def _walk() -> Iterator[str]:
    for folder in FOLDERS:
        for root, _, names in os.walk(Path(folder).expanduser()):
            yield from (str(Path(root) / name) for name in names if name.lower().endswith((".ttf", ".otf", ".ttc")))
