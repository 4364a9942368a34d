"""What closing heads costs: bars, by stage and direction, the pruning curve."""

from __future__ import annotations

from html import escape

from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.page.charts import Bar, bars, curves
from vlretrieval.heads.page.figures_table import interval_text
from vlretrieval.heads.verdict import NEAR

ORDERS = {
    "drops": "what recall loses without each alone",
    "recall": "what recall loses without each, asked anew at each point",
    "gradient": "the gradient of their gates, asked anew at each point",
}


def closing(found: Findings) -> str:
    """Bars of what each closure loses, by kind, layer and head; the curve of heads left."""
    if not found.drops:
        return ""
    k = found.plan.ablation.k
    unit = f"points of R@{k} lost (mean of both directions, last stage)"
    wide = [Bar(d.closure.title, *d.final) for d in found.drops if d.closure.scope in ("kind", "direction")]
    layers = [Bar(d.closure.title, *d.final) for d in found.drops if d.closure.scope == "layer"]
    heads = sorted((d for d in found.drops if d.closure.scope == "head"), key=lambda d: -d.final[0])
    shown = [Bar(d.closure.title, *d.final) for d in heads[:20]]
    first = [d for d in found.drops if d.first_stage is not None and d.closure.scope in ("kind", "layer")]
    stage = "".join(
        f"<tr><th class=text>{escape(d.closure.title)}</th><td>{interval_text(d.first_stage)}</td>"
        f"<td>{interval_text(d.final)}</td><td>{interval_text(d.t2i)}</td><td>{interval_text(d.i2t)}</td></tr>"
        for d in first
    )
    parts = [
        f"<p>Recall with all heads open: R@{k} {found.recall:.1f} %. Closed heads put out exactly nothing. Bars are "
        f"{escape(unit)}, whiskers 95 % intervals; grey where the interval holds 0.</p>",
        f"<h3>A kind of heads, a direction</h3><div class=chart>{bars(wide, unit)}</div>",
        f"<h3>A layer</h3><div class=chart>{bars(layers, unit)}</div>",
        f"<h3>One head{f': the {len(shown)} that cost most of {len(heads)}' if len(heads) > len(shown) else ''}</h3>"
        f"<div class=chart>{bars(shown, unit)}</div>",
    ]
    if stage:
        parts.append(
            "<details><summary>By stage and direction, for closures in the encoders</summary><div class=scroll><table>"
            "<thead><tr><th class=text>closed</th><th>first stage</th><th>last stage</th><th>text to image</th>"
            f"<th>image to text</th></tr></thead><tbody>{stage}</tbody></table></div></details>"
        )
    if len(found.curve) > 1:
        line = [(float(point.left), point.recall) for point in found.curve]
        parts.append(
            "<h3>Recall against heads left</h3><p>Heads are closed one after another, the least needed first (by "
            f"{ORDERS[found.plan.ablation.by]}). The order is chosen on the same gallery: measure a pruned model on "
            f"another split. Within {NEAR:g} point of all heads open counts as level.</p>"
            f"<div class=chart>{curves({'': line}, 'heads left', f'R@{k}, %')}</div>"
        )
    return "".join(parts)
