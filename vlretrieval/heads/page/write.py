"""Puts the findings of one model, or of two beside each other, into one HTML page."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlretrieval.heads.diversity import Diversity
from vlretrieval.heads.examples import SEEN_SIDE, Example, HeadMaps
from vlretrieval.heads.figures import LayerStatistics
from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.page.charts import Bar, bars, curves
from vlretrieval.heads.roles import ROLES, resting
from vlretrieval.heads.verdict import NEAR, lift, verdict

HERE = Path(__file__).parent

MEANINGS = {
    "role": "by the rule at the end of this page",
    "entropy": "of a query's weights as a share of the highest there is: 0 one key, 1 all keys alike",
    "distance": "how far away a query looks, in tokens or patch sides",
    "neighbours": "share of the weight on keys at most one token (or one patch, diagonals too) away, itself among them",
    "resting": "share of the weight on the first, the last and separating tokens (for pictures: the class token)",
    "column": "share of all queries' weight on the one key that gets most",
    "position": "how far the maps are explained by place alone: 0 by content only, 1 by place only",
    "grounding": "share of the weight on the patches of the thing that a word names (or, for image-to-text heads, on "
    "the words that name what a patch shows); in brackets as a multiple of chance, an even spread",
    "pointing": "how often the patch (or word) with the most weight is one of these",
    "drop": "points of recall that closing this head alone loses, with the 95 % interval of the difference on the same "
    "queries; the pictures of the gallery are drawn",
    "words": "text-to-image: words that look most narrowly; other heads: words looked at most",
}
ORDERS = {
    "drops": "what recall loses without each alone",
    "recall": "what recall loses without each, asked anew at each point",
    "gradient": "the gradient of their gates, asked anew at each point",
}
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


def write_report(
    path: str | Path,
    findings: Sequence[Findings],
    *,
    evolution: Sequence[tuple[int, Findings]] = (),
    title: str = "Attention heads",
) -> Path:
    """Write ``report.html``, whole or not at all; it asks for nothing beyond itself.

    Args:
        findings: of one model; of a second one, to compare.
        evolution: (step, findings) of checkpoints of one run.
    """
    first = findings[0]
    sections = [
        ("summary", "What was found", _summary(findings)),
        ("look", "Look at the heads", _look(findings)),
        ("table", "Every head in figures", _table(first)),
        ("means", "What each layer does on average", _mean_maps(first)),
        ("closing", "What closing heads costs", _closing(first)),
        ("alike", "How alike the heads of a layer are", _alike(first)),
        ("training", "While it was trained", _evolution(evolution)),
        ("beside", f"Beside {findings[1].name}" if len(findings) > 1 else "", _beside(findings)),
        ("rule", "Rule and terms", _rule(first)),
    ]
    sections = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{name}-section">{escape(head)}</a>' for name, head, _ in sections)
    body = "".join(
        f'<section id="{name}-section"><h2>{escape(head)}</h2>{content}</section>' for name, head, content in sections
    )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: {escape(first.name)}</title><style>{_asset('report.css')}</style></head><body>"
        '<a class="skip" href="#table-section">Go to the table</a>'
        f"<header><h1>{escape(title)}: {escape(first.name)}</h1>"
        f"<p class=soft>{escape(_about(first))}</p><nav>{links}</nav></header><main>{body}</main>"
        f'<script type="application/json" id="data">{_data(findings)}</script>'
        f"<script>{_asset('report.js')}</script></body></html>\n"
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    return partial.replace(path)


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _about(found: Findings) -> str:
    how = found.plan.ablation
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in found.seconds.items())
    parts = [
        f"{found.parameters:,} parameters.",
        f"Figures: {min(found.plan.pictures, found.split['images'])} pictures of the {found.split['name']} split with "
        "a caption each.",
    ]
    if found.drops:
        parts.append(
            f"Closures: {how.pictures} pictures with {how.captions} captions each, re-ranked to depth {how.top_k}."
        )
    return " ".join([*parts, f"Taken: {seconds}."])


# ------------------------------------------------------------------------------------------------------------- sections


def _summary(findings: Sequence[Findings]) -> str:
    parts = []
    for found in findings:
        head = f"<h3>{escape(found.name)}</h3>" if len(findings) > 1 else ""
        lines = "".join(
            f"<li{' class=warning' if line.startswith('Near copies') else ''}>{escape(line)}</li>"
            for line in verdict(found)
        )
        parts.append(f"{head}<ul>{lines}</ul>")
    return "".join(parts)


def _look(findings: Sequence[Findings]) -> str:
    examples = findings[0].examples
    if not examples:
        return ""
    choices = "".join(f"<button>example {number + 1}</button>" for number in range(len(examples)))
    holders = []
    for layer in findings[0].layers.values():
        for model, found in enumerate(findings):
            if layer.name not in found.layers:
                continue
            beside = f" ({escape(found.name)})" if len(findings) > 1 else ""
            holders.append(
                f"<h3>{escape(layer.title)}{beside} <span class=soft>: <span data-who></span></span></h3>"
                f"<div class=maps data-maps='{escape(json.dumps([model, layer.name]), quote=True)}'></div>"
            )
    order = sorted(range(len(holders)), key=lambda at: "-to-" not in holders[at])  # cross-modal heads first
    return (
        "<p>Choose a word: every head shows what it does with it. Bright is where the weight is (the brightest patch "
        "of each map is its largest weight); a yellow frame is the thing that the word names. Choose a patch of the "
        "picture (click, or focus it and use the arrow keys; Escape lets go) to see what it looks at.</p>"
        f'<div class=chips id="examples">{choices}</div>'
        '<div class=look><div><canvas id="photo" width="250" height="250" tabindex="0" role="img" '
        'aria-label="the picture; arrow keys choose a patch"></canvas><p class=soft id="identity"></p>'
        '<div class=chips id="words"></div></div>'
        f"<div>{''.join(holders[at] for at in order)}</div></div>"
    )


def _table(found: Findings) -> str:
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


def _mean_maps(found: Findings) -> str:
    parts = []
    for layer in found.layers.values():
        pictures = "".join(
            f'<figure><img alt="mean map" width=132 src="{_png(_heat(matrix))}">'
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


def _closing(found: Findings) -> str:
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
        f"<tr><th class=text>{escape(d.closure.title)}</th><td>{_cell(d.first_stage)}</td><td>{_cell(d.final)}</td>"
        f"<td>{_cell(d.t2i)}</td><td>{_cell(d.i2t)}</td></tr>"
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


def _cell(drop: tuple[float, float, float] | None) -> str:
    return "" if drop is None else f"{drop[0]:.1f} [{drop[1]:.1f}, {drop[2]:.1f}]"


def _alike(found: Findings) -> str:
    if not found.alike:
        return ""
    parts = [
        "<p>Maps: Jensen-Shannon divergence in bits, 0 the same map, 1 nothing in common. Outputs: CKA, 1 the same up "
        "to a turn and a scale. Weights: cosine of what the weights do, 1 the same, 0 unrelated.</p>"
    ]
    for layer in found.alike.values():
        parts.append(f"<h3>{escape(layer.title)}</h3><div class=trio>{_matrices(layer)}</div>")
    return "".join(parts)


def _matrices(layer: Diversity) -> str:
    made = []
    for name, matrix in (
        ("maps, bits apart", layer.maps),
        ("outputs, CKA", layer.outputs),
        ("weights, cosine", layer.weights),
    ):
        top = "".join(f'<th scope="col">{number + 1}</th>' for number in range(len(matrix)))
        rows = "".join(
            f'<tr><th scope="row">{number + 1}</th>'
            + "".join(
                f'<td style="background:rgba(var(--heat),{0.55 * min(1.0, max(0.0, value)):.2f})">{value:.2f}</td>'
                for value in row
            )
            + "</tr>"
            for number, row in enumerate(matrix.tolist())
        )
        made.append(
            f"<div class=scroll><table class=matrix><caption>{name}</caption><thead><tr><td></td>{top}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
    return "".join(made)


def _evolution(evolution: Sequence[tuple[int, Findings]]) -> str:
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


def _beside(findings: Sequence[Findings]) -> str:
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
                f"<td>{'' if drop is None else _cell(drop.final)}</td>",
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


def _rule(found: Findings) -> str:
    roles = "".join(
        f"<tr><th class=text><span class='role {role}'>{role}</span></th><td class=words>{escape(ROLES[role])}</td>"
        f"<td class=words>{escape(condition)}</td></tr>"
        for role, condition in found.plan.rule.lines()
    )
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in MEANINGS.items())
    return (
        "<p>The first line that holds names a head. Thresholds are settings (rule.sink=0.6).</p>"
        "<div class=scroll><table><thead><tr><th class=text>role</th><th class=text>it</th>"
        "<th class=text>if</th></tr></thead>"
        f"<tbody>{roles}</tbody></table></div><p class=soft>* one query, the start token, speaks for the whole "
        "caption: grounding on all things that it names together.</p>"
        f"<dl>{terms}</dl>"
    )


# ----------------------------------------------------------------------------------------------------------------- data


def _data(findings: Sequence[Findings]) -> str:
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
        "picture": _picture(picture),
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


def _heat(matrix: Any) -> Image.Image:
    """Weights as a small picture, white to dark blue, a pixel a weight."""
    share = np.sqrt(matrix / max(float(matrix.max()), 1e-9))[..., None]
    colour = np.array([255, 255, 255]) * (1 - share) + np.array([16, 52, 120]) * share
    made = Image.fromarray(colour.astype(np.uint8))
    scale = max(1, 132 // max(made.size))
    return made.resize((made.width * scale, made.height * scale), Image.Resampling.NEAREST)


def _png(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _picture(picture: Image.Image) -> str:
    if picture.width <= 96:  # drawn scenes: small, and JPEG would blur them
        return _png(picture)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
