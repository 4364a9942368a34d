"""The doctor's report as one HTML file that needs nothing beside it."""

import base64
from html import escape

from vlretrieval.data.doctor.examine import Finding, Report

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2rem 1rem .2rem 0; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
section { border-top: 1px solid #ddd; margin-top: 1.5rem; } h2 { font-size: 1.1rem; }
.fault h2::before { content: "\\25cf  "; color: #b00020; } .note h2::before { content: "\\25cb  "; color: #777; }
figure { margin: .4rem 0; display: flex; gap: .5rem; align-items: center; } figcaption { overflow-wrap: anywhere; }
img { max-width: 112px; max-height: 112px; border: 1px solid #ddd; }
.more { color: #777; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } section { border-color: #444; } }
"""


def page(report: Report, title: str) -> str:
    """The report as HTML."""
    rows = "".join(
        f'<tr><td>{escape(name)}<td class="n">{pictures:,}<td class="n">{captions:,}</tr>'
        for name, (pictures, captions) in report.sizes.items()
    )
    sections = "".join(_section(finding, report.thumbnails) for finding in report.findings)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(verdict(report))}</p>"
        f"<table><tr><th>split<th>pictures<th>captions</tr>{rows}</table>{sections}</html>\n"
    )


def verdict(report: Report) -> str:
    """One sentence."""
    pictures = sum(size[0] for size in report.sizes.values())
    captions = sum(size[1] for size in report.sizes.values())
    faults, notes = report.faults, len(report.findings) - report.faults
    kinds = (
        f"{faults or 'no'} kind{'s' * (faults != 1)} of fault, {notes or 'no'} kind{'s' * (notes != 1)} worth knowing"
    )
    return f"{pictures:,} pictures and {captions:,} captions: {kinds}; {len(report.fixes)} entries for a fix list."


def _section(finding: Finding, thumbnails: dict[int, bytes]) -> str:
    figures = "".join(_figure(line, indices, thumbnails) for line, indices in finding.examples)
    rest = finding.count - len(finding.examples)
    more = f'<p class="more">and {rest:,} more' if rest > 0 else ""
    head = f"<h2>{escape(finding.title)}: {finding.count:,}</h2>"
    return f'<section class="{finding.weight}">{head}{figures}{more}</section>'


def _figure(line: str, indices: tuple[int, ...], thumbnails: dict[int, bytes]) -> str:
    images = "".join(
        f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(thumbnails[index]).decode()}">'
        for index in indices
        if index in thumbnails
    )
    return f"<figure>{images}<figcaption>{escape(line)}</figcaption></figure>"


def summary(report: Report, examples: int = 2) -> str:
    """The report for a terminal."""
    lines = [verdict(report), ""]
    lines += [f"  {name:<12}{p:>9,} pictures {c:>10,} captions" for name, (p, c) in report.sizes.items()]
    for finding in report.findings:
        mark = "FAULT" if finding.weight == "fault" else "note "
        lines += ["", f"{mark}  {finding.title}: {finding.count:,}"]
        lines += [f"         {line}" for line, _ in finding.examples[:examples]]
    return "\n".join(lines)
