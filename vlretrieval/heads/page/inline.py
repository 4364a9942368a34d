"""Pictures as text inside a page."""

from __future__ import annotations

import base64
import io

from PIL import Image


def png(picture: Image.Image) -> str:
    """A data URL."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def photo(picture: Image.Image) -> str:
    """A data URL, as small as its kind allows."""
    if picture.width <= 96:  # drawn scenes: small, and JPEG would blur them
        return png(picture)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
