"""The rule that names heads, and what the terms mean."""

from __future__ import annotations

from html import escape

from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.roles import ROLES

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


def rule(found: Findings) -> str:
    """The conditions of every role with their thresholds, and a list of terms."""
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
