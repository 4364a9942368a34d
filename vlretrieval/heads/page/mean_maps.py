"""What each layer does on average: the mean map of each head."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from PIL import Image

from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.page.inline import png


def mean_maps(found: Findings) -> str:
    """A picture a head, layer by layer."""
    parts = []
    for layer in found.layers.values():
        pictures = "".join(
            f'<figure><img alt="mean map" width=132 src="{png(_heat(matrix))}">'
            f"<figcaption>head {head + 1}, {found.roles[layer.name, head]}</figcaption></figure>"
            for head, matrix in enumerate(layer.mean_map.numpy())
        )
        shape = layer.mean_map.shape
        parts.append(
            f"<details{' open' if layer.kind in ('text_to_image', 'image_to_text') else ''}><summary>"
            f"{escape(layer.title)} ({shape[1]} queries down, {shape[2]} keys across)</summary>"
            f"<div class=maps>{pictures}</div></details>"
        )
    return (
        "<p>The mean over all pictures of a head's weights, by place of query (down) and key (across), counted from "
        "the first token; dark is much. A clear pattern here is what place alone explains; what depends on content is "
        "blurred.</p>" + "".join(parts)
    )


def _heat(matrix: Any) -> Image.Image:
    """Weights as a small picture, white to dark blue, a pixel a weight."""
    share = np.sqrt(matrix / max(float(matrix.max()), 1e-9))[..., None]
    colour = np.array([255, 255, 255]) * (1 - share) + np.array([16, 52, 120]) * share
    made = Image.fromarray(colour.astype(np.uint8))
    scale = max(1, 132 // max(made.size))
    return made.resize((made.width * scale, made.height * scale), Image.Resampling.NEAREST)
