"""An examination's findings as plain data, for heads.json."""

from __future__ import annotations

import math
from typing import Any

from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.verdict import verdict


def plain(found: Findings) -> dict[str, Any]:
    """The findings as plain data, for heads.json."""
    heads = []
    for name, head in found.heads:
        layer, drop = found.layers[name], found.drop_of((name, head))
        figures = {
            measure: {
                "value": _number(layer.of(measure, head)),
                "interval": [_number(b) for b in layer.interval(measure, head)],
            }
            for measure in layer.figures
        }
        heads.append(
            {
                "layer": name,
                "kind": layer.kind,
                "head": head + 1,
                "role": found.roles[name, head],
                "figures": figures,
                "words": [word for word, _ in layer.words[head]] if layer.words else [],
                "drop": None if drop is None else list(drop.final),
            }
        )
    return {
        "model": found.name,
        "parameters": found.parameters,
        "split": found.split,
        "rule": dict(found.plan.rule.lines()),
        "recall": _number(found.recall),
        "heads": heads,
        "chance": {name: {k: _number(v) for k, v in layer.chance.items()} for name, layer in found.layers.items()},
        "closures": [
            {
                "closure": drop.closure.title,
                "scope": drop.closure.scope,
                "final": list(drop.final),
                "first_stage": None if drop.first_stage is None else list(drop.first_stage),
                "t2i": list(drop.t2i),
                "i2t": list(drop.i2t),
            }
            for drop in found.drops
        ],
        "likeness": {
            name: {
                "maps_bits": d.maps.tolist(),
                "outputs_cka": d.outputs.tolist(),
                "weights_cosine": d.weights.tolist(),
            }
            for name, d in found.alike.items()
        },
        "warnings": found.warnings,
        "curve": [
            {"left": point.left, "recall": point.recall, "closed": [[name, head + 1] for name, head in point.closed]}
            for point in found.curve
        ],
        "verdict": verdict(found),
        "seconds": found.seconds,
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 6)
