"""Puts the findings of one model, or of two beside each other, into one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.page.alike import alike
from vlretrieval.heads.page.closing import closing
from vlretrieval.heads.page.data import data
from vlretrieval.heads.page.figures_table import beside, figures_table
from vlretrieval.heads.page.look import look
from vlretrieval.heads.page.mean_maps import mean_maps
from vlretrieval.heads.page.rule import rule
from vlretrieval.heads.page.training import evolution_lines
from vlretrieval.heads.verdict import verdict

HERE = Path(__file__).parent


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
        ("look", "Look at the heads", look(findings)),
        ("table", "Every head in figures", figures_table(first)),
        ("means", "What each layer does on average", mean_maps(first)),
        ("closing", "What closing heads costs", closing(first)),
        ("alike", "How alike the heads of a layer are", alike(first)),
        ("training", "While it was trained", evolution_lines(evolution)),
        ("beside", f"Beside {findings[1].name}" if len(findings) > 1 else "", beside(findings)),
        ("rule", "Rule and terms", rule(first)),
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
        f'<script type="application/json" id="data">{data(findings)}</script>'
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
