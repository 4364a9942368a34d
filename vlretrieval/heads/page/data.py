"""What the page's script reads: layers, roles, and the maps of every head on the examples."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from vlretrieval.heads.examples import SEEN_SIDE, Example, HeadMaps
from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.page.inline import photo


def data(findings: Sequence[Findings]) -> str:
    """JSON of the layers' titles and roles and of the examples' maps, safe inside a script element."""
    models = [
        {
            "name": found.name,
            "layers": {
                layer.name: {
                    "title": layer.title,
                    "roles": [found.roles[layer.name, head] for head in range(layer.heads)],
                }
                for layer in found.layers.values()
            },
        }
        for found in findings
    ]
    examples = [_example(number, findings) for number in range(len(findings[0].examples))]
    # "<" would end the script element if a caption said so
    return json.dumps({"models": models, "examples": examples}, ensure_ascii=False).replace("<", "\\u003c")


def _example(number: int, findings: Sequence[Findings]) -> dict[str, Any]:
    example: Example = findings[0].examples[number]
    picture = example.picture
    if max(picture.size) > SEEN_SIDE:
        picture = picture.resize((SEEN_SIDE, SEEN_SIDE))
    return {
        "id": example.image_id,
        "picture": photo(picture),
        "words": example.words,
        "word": example.telling_word,
        "side": example.side,
        "named": [[words, [[round(v, 4) for v in box] for box in boxes]] for words, boxes in example.named],
        "maps": [
            {name: _packed(maps) for name, maps in found.examples[number].layers.items()}
            if number < len(found.examples) and found.examples[number].words == example.words
            else {}
            for found in findings
        ],
    }


def _packed(maps: HeadMaps) -> dict[str, Any]:
    """Bytes of each row's largest weight, which stands beside."""
    largest = maps.maps.max(-1)
    scaled = np.round(255 * maps.maps / np.maximum(largest, 1e-12)[..., None]).astype(np.uint8)
    return {
        "rows": maps.rows,
        "columns": maps.columns,
        "shape": list(maps.maps.shape),
        "largest": [float(f"{value:.4g}") for value in largest.reshape(-1)],
        "data": base64.b64encode(scaled.tobytes()).decode(),
    }
