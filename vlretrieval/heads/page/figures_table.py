"""Every head in figures, a row a head; two models head by head."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape

from vlretrieval.heads.figures import LayerStatistics
from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.roles import resting
from vlretrieval.heads.verdict import lift

COLUMNS = [
    ("grounding", "grounding (x chance)"),
    ("pointing", "pointing"),
    ("entropy", "entropy"),
    ("position", "explained by place"),
    ("resting", "on first, last, stops"),
    ("column", "on one key"),
    ("neighbours", "on neighbours"),
    ("distance", "distance"),
]


def figures_table(found: Findings) -> str:
    """A sortable row a head: role, what closing it costs, every figure, the words it answers to."""
    drops = bool(found.drops)
    costs = [f"closing costs, points of R@{found.plan.ablation.k}"] if drops else []
    names = ["head", "role", *costs, *(title for _, title in COLUMNS)]
    heads = "".join(
        f'<th scope="col"{" class=text" if number < 2 else ""}><button>{escape(name)}</button></th>'
        for number, name in enumerate(names)
    )
    rows = []
    for name, head in found.heads:
        layer = found.layers[name]
        cells = [f'<th scope="row" class=text>{escape(layer.title)}, head {head + 1}</th>']
        role = found.roles[name, head]
        cells.append(f'<td class=text><span class="role {role}">{role}</span></td>')
        if drops:
            drop = found.drop_of((name, head))
            cells.append(
                '<td data-value=""></td>'
                if drop is None
                else f'<td data-value="{drop.final[0]:.4f}">{drop.final[0]:.1f} '
                f"[{drop.final[1]:.1f}, {drop.final[2]:.1f}]</td>"
            )
        cells += [_measured(layer, head, measure) for measure, _ in COLUMNS]
        words = layer.words[head] if layer.words else []
        cells.append(f"<td class=words>{escape(', '.join(word for word, _ in words))}</td>")
        data = escape(json.dumps([0, name, head]), quote=True)
        rows.append(f"<tr tabindex=0 data-head='{data}'>{''.join(cells)}</tr>")
    return (
        "<p>A heading sorts by its column. Point at a row, or walk with the arrow keys, to see the head's map of the "
        "example chosen above. An empty cell was not measured: heads across modalities have no distance, and things "
        "must have known places for grounding.</p>"
        '<div class=bench><div class=scroll style="max-height:70vh;overflow:auto"><table id="table"><thead><tr>'
        f'{heads}<th scope="col" class=text><button>answers to</button></th></tr></thead><tbody>{"".join(rows)}</tbody>'
        '</table></div><aside class=side id="preview" aria-live="polite"></aside></div>'
    )


def beside(findings: Sequence[Findings]) -> str:
    """The heads of two models, row by row; nothing for one model."""
    if len(findings) < 2:
        return ""
    one, other = findings[:2]
    rows = []
    for head in dict.fromkeys([*one.heads, *other.heads]):
        cells = [f"<th class=text>{escape((one if head in one.roles else other).title(head))}</th>"]
        for found in (one, other):
            if head not in found.roles:
                cells.append("<td></td>" * 4)
                continue
            layer, drop = found.layers[head[0]], found.drop_of(head)
            cells += [
                f'<td class=text><span class="role {found.roles[head]}">{found.roles[head]}</span></td>',
                _measured(layer, head[1], "entropy"),
                _measured(layer, head[1], "grounding"),
                f"<td>{'' if drop is None else interval_text(drop.final)}</td>",
            ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    recall = ""
    if one.drops and other.drops:
        recall = f" Recall with all heads open: {one.recall:.1f} % and {other.recall:.1f} %."
    group = "<th class=text>role</th><th>entropy</th><th>grounding</th><th>closing costs</th>"
    names = "".join(f'<th class=text colspan=4 scope="colgroup">{escape(found.name)}</th>' for found in (one, other))
    return (
        f"<p>Head by head; the maps of both stand beside each other above.{recall}</p>"
        f"<div class=scroll><table><thead><tr><td></td>{names}</tr>"
        f"<tr><th class=text>head</th>{group * 2}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _measured(layer: LayerStatistics, head: int, measure: str) -> str:
    value = resting(layer, head) if measure == "resting" else layer.of(measure, head)
    if measure == "resting" and not any(name in layer.figures for name in ("first", "last", "separators")):
        value = math.nan
    if math.isnan(value):
        return '<td data-value=""></td>'
    text = f"{value:.2f}"
    if measure == "grounding":
        text += f" ({lift(layer, head):.1f} x)" + ("*" if layer.scope == "caption" else "")
    return f'<td data-value="{value:.5f}">{text}</td>'


def interval_text(drop: tuple[float, float, float] | None) -> str:
    """ "1.2 [0.3, 2.1]"; nothing where nothing was measured."""
    return "" if drop is None else f"{drop[0]:.1f} [{drop[1]:.1f}, {drop[2]:.1f}]"
