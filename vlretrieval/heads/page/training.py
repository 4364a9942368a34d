"""Heads while they were trained: figures and roles at several steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.page.charts import curves


def evolution_lines(evolution: Sequence[tuple[int, Findings]]) -> str:
    """Curves of grounding or entropy over optimizer steps, and each head's role at each step."""
    if len(evolution) < 2:
        return ""
    parts = ["<p>The same figures at several steps of the training run, on the same pictures.</p>"]
    last = evolution[-1][1]
    for layer in last.layers.values():
        measure = "grounding" if "grounding" in layer.figures else "entropy"
        lines = {
            f"head {head + 1}": [
                (float(step), found.layers[layer.name].of(measure, head))
                for step, found in evolution
                if layer.name in found.layers and not math.isnan(found.layers[layer.name].of(measure, head))
            ]
            for head in range(layer.heads)
        }
        lines = {name: line for name, line in lines.items() if line}
        if lines:
            parts.append(
                f"<details{' open' if measure == 'grounding' else ''}>"
                f"<summary>{escape(layer.title)}: {measure}</summary>"
                f"<div class=chart>{curves(lines, 'optimizer steps', measure)}</div></details>"
            )
    steps = "".join(f"<th>step {step}</th>" for step, _ in evolution)
    rows = "".join(
        f"<tr><th class=text>{escape(last.title(head))}</th>"
        + "".join(f"<td class=text>{found.roles.get(head, '')}</td>" for _, found in evolution)
        + "</tr>"
        for head in last.heads
    )
    parts.append(
        f"<details><summary>Roles</summary><div class=scroll><table><thead><tr><th class=text>head</th>{steps}</tr>"
        f"</thead><tbody>{rows}</tbody></table></div></details>"
    )
    return "".join(parts)
