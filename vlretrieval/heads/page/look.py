"""The examples, to be looked at head by head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from vlretrieval.heads.laboratory import Findings


def look(findings: Sequence[Findings]) -> str:
    """The photo, its words and a holder for the maps of every layer, which the script fills from :func:`data`."""
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
