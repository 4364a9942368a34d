"""metrics.json as tables on a terminal. Knows no model and computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STAGES = {"first_stage": "first stage", "reranked": "re-ranked"}
WAYS = {"t2i": "text to image", "i2t": "image to text"}


def with_interval(value: float, low_high: list[float] | None, sign: str = "") -> str:
    """A cell: the value, and below it its interval."""
    return f"{value:{sign}.1f}" + (f"\n[{low_high[0]:{sign}.1f}, {low_high[1]:{sign}.1f}]" if low_high else "")


def recall_rows(figures: dict[str, Any], ks: list[int]) -> list[list[str]]:
    """One row a stage and direction: R@k with intervals, median and mean rank, rsum."""
    rows = []
    for stage, stage_name in STAGES.items():
        if stage not in figures:
            continue
        for way, way_name in WAYS.items():
            found = figures[stage][way]
            cells = [f"{stage_name}\n{way_name}"]
            cells += [with_interval(found[f"R@{k}"], found.get("interval", {}).get(f"R@{k}")) for k in ks]
            cells += [f"{found['median_rank']:g}\n{found['mean_rank']:.1f}"]
            cells.append(f"{figures[stage]['rsum']:.1f}" if way == "i2t" else "")
            rows.append(cells)
    return rows


def notes(figures: dict[str, Any]) -> list[str]:
    """What a reader must know beside the numbers: one sentence a line."""
    protocol = figures["protocol"]
    split = protocol["split"]
    lines = [
        f"{split['name']}: {split['images']} images, {split['captions']} captions, split hash {split['hash']}; "
        f"positives: {protocol['positives']}; ties count {protocol['ties']}."
    ]
    if "split_is" in protocol:
        lines.append(f"protocol {protocol['name']}: the split is {protocol['split_is']}.")
    if protocol["images_without_captions"]:
        lines.append(f"{protocol['images_without_captions']} images without captions are left out of image to text.")
    for way, beyond in protocol["k_beyond_gallery"].items():
        if beyond:
            lines.append(f"{WAYS[way]}: k = {', '.join(map(str, beyond))} lies beyond the gallery and takes all of it.")
    for stage, stage_name in STAGES.items():
        for way, way_name in WAYS.items():
            if stage in figures and figures[stage][way]["tied_share"]:
                found = figures[stage][way]
                bounds = " / ".join(f"{value:.1f}" for value in found["ties"][f"R@{protocol['ks'][0]}"])
                lines.append(
                    f"{stage_name}, {way_name}: {found['tied_share']:.2f} % of the queries are tied with a wrong "
                    f"candidate; R@{protocol['ks'][0]} with ties against / at random / for the model: {bounds}."
                )
    reranking = protocol["rerank"]
    if "top_k" in reranking:
        for way, used in reranking["top_k"].items():
            clamped = " (the whole gallery)" if used < reranking["asked_top_k"] else ""
            lines.append(f"{WAYS[way]}: the first {used}{clamped} are re-ranked by {reranking['score'].split(';')[0]}.")
    elif reranking["asked_top_k"]:
        lines.append(f"not re-ranked: {reranking['done'].removeprefix('no: ')}.")
    if protocol.get("captions_truncated"):
        lines.append(f"{protocol['captions_truncated']} captions are longer than the context and were cut.")
    if "by_image_id" in figures:
        for stage, found in figures["by_image_id"].items():
            lines.append(
                f"{STAGES[stage]}, own pairs alone counted as true: R@1 text to image {found['t2i']['R@1']:.1f}, "
                f"image to text {found['i2t']['R@1']:.1f}, rsum {found['rsum']:.1f}."
                if "R@1" in found["t2i"]
                else f"{STAGES[stage]}, own pairs alone counted as true: rsum {found['rsum']:.1f}."
            )
    return lines


def negative_rows(negatives: dict[str, Any]) -> list[list[str]]:
    """One row a kind: pairs, accuracy by cosine and by matching logit, and the difference of the two."""
    rows = []
    for kind, found in negatives.items():
        cells = [kind, str(found["pairs"])]
        for name, value in (("cosine", "accuracy"), ("match", "accuracy"), ("difference", "points")):
            sign = "+" if name == "difference" else ""
            there = name in found
            cells.append(with_interval(found[name][value], found[name].get("interval"), sign) if there else "")
        rows.append(cells)
    return rows


def print_figures(figures: dict[str, Any]) -> None:
    """Everything a run of ``vlretrieval-evaluate`` says; the tables fit 80 columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    ks = figures["protocol"]["ks"]

    def show(title: str, heads: list[str], rows: list[list[str]], words: int) -> None:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for place, head in enumerate(heads):
            table.add_column(head, justify="left" if place < words else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)

    heads = ["", *[f"R@{k}, %" for k in ks], "median\nmean", "rsum"]
    interval = " with 95 % intervals" if figures["protocol"]["intervals"]["replicates"] else ""
    folds = figures["protocol"]["name"].partition(", ")[2]
    show(f"Recall{interval}{', ' + folds if folds else ''}", heads, recall_rows(figures, ks), 1)
    if "hard_negatives" in figures:
        heads = ["kind of fault", "pairs", "cosine, %", "cross-modal, %", "difference, points"]
        show("Hard negatives: true caption above the false one", heads, negative_rows(figures["hard_negatives"]), 1)
    for line in notes(figures):
        console.print(line, highlight=False)
    if "eccv_caption" in figures:
        for name, ways in figures["eccv_caption"].items():
            for way, found in ways.items():
                shown = ", ".join(f"{key} {value:.1f}" for key, value in found.items() if isinstance(value, float))
                console.print(f"{name}, {WAYS[way]} ({found['queries']} queries): {shown}.", highlight=False)
    for score, found in figures.get("winoground", {}).items():
        whole = found["all"]
        shown = ", ".join(f"{name} {whole[name]:.1f}" for name in ("text", "image", "group"))
        console.print(
            f"Winoground by {score} ({whole['examples']} examples; chance 25, 25, 16.7): {shown}.", highlight=False
        )
    for line in further_lines(figures["further"]) if "further" in figures else []:
        console.print(line, highlight=False)


def further_lines(further: dict[str, Any]) -> list[str]:
    """The figures beside the table, one sentence a line."""
    lines = []
    for way, way_name in WAYS.items():
        found, hubs = further["every_positive"][way], further["hubs"]
        lines.append(
            f"{way_name}, every positive ({found['positives_a_query']:.1f} a query): mAP@R {found['mAP@R']:.1f}, "
            f"R-precision {found['R-precision']:.1f}, mAP {found['mAP']:.1f}, nDCG {found['nDCG']:.3f}."
        )
        at_once = ", ".join(f"{k} {v:.1f}" for k, v in hubs["corrected"][way].items() if k != "interval")
        lines.append(
            f"{way_name}, hubs: {hubs[way]['never']:.0f} % of the candidates are in no list of {hubs[way]['k']}, the "
            f"largest is in {hubs[way]['most']} (skewness {hubs[way]['skewness']:.1f}); corrected (CSLS): {at_once}."
        )
    for name in ("text_to_text", "image_to_image"):
        if name in further:
            recalls = ", ".join(f"{k} {v:.1f}" for k, v in further[name].items() if k.startswith("R@"))
            lines.append(f"{name.replace('_', ' ')} ({further[name]['queries']} queries): {recalls}.")
    return lines


def print_ranking(figures: dict[str, Any]) -> None:
    """What ``vlretrieval-evaluate ranking=FILE`` says."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table()
    names = (
        list(figures["interval"]) if "interval" in figures else [n for n in figures if isinstance(figures[n], float)]
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*[f"{figures[name]:.3f}" if name in ("MRR", "nDCG") else f"{figures[name]:.1f}" for name in names])
    if "interval" in figures:
        table.add_row(*["[{:.2f}, {:.2f}]".format(*figures["interval"][name]) for name in names])
    console.print(table)
    console.print(
        f"{figures['queries']} queries, {figures['without_list']} of them without a list (a miss); "
        f"{figures['unknown_queries']} lists of queries that the truth does not know are left out; "
        f"the shortest list has {figures['shortest_list']} documents.",
        highlight=False,
    )


def print_frontier(results: dict[str, Any]) -> None:
    """What ``vlretrieval-frontier`` says."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    for name, result in results.items():
        for way, way_name in WAYS.items():
            table = Table(title=f"{name}, {way_name}", title_justify="left")
            for head in ("top_k", f"R@{result['k']}, %", "ceiling, %", "ms a query"):
                table.add_column(head, justify="right", no_wrap=True)
            for point in result[way]:
                mark = " *" if point["top_k"] == result["enough"][way] else ""
                cells = (f"{point['recall']:.1f}", f"{point['ceiling']:.1f}", f"{point['ms_a_query']:.2f}")
                table.add_row(f"{point['top_k']}{mark}", *cells)
            console.print(table)
        sizes = result["bytes"]
        console.print(
            f"{name} ({result['heads']}): {sizes['kept_a_picture']:,} bytes kept a picture beside "
            f"{sizes['embedding']:,} of its embedding; "
            f"* the smallest top_k within a tenth of a point of the best; {result['threads']} threads.",
            highlight=False,
        )


def print_differences(first: str, second: str, found: dict[str, Any], seeds: tuple[int, int]) -> None:
    """What ``vlretrieval-compare`` says of two groups of runs."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    console.print(f"[bold]{second}[/] against [bold]{first}[/]", highlight=False)
    for part, rows in found.items():
        table = Table(title=STAGES.get(part, part), title_justify="left")
        for head in ("", "first", "second"):
            table.add_column(head, justify="left" if not head else "right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for row in rows:
            table.add_row(row.name, f"{row.first:.3f}", f"{row.second:.3f}", str(row))
        console.print(table)
    if seeds == (1, 1):
        console.print("One seed each: the interval says nothing of what another seed would give.", highlight=False)
    else:
        console.print(
            f"Means over {seeds[0]} and {seeds[1]} seeds; seeds are drawn with the pictures.", highlight=False
        )


@contextmanager
def progress(shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each kind of work, on a terminal only; what it yields is told of the work done."""
    if not shown or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        known: dict[tuple[str, int], Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if (what, total) not in known:
                known[what, total] = bars.add_task(what, total=total)
            bars.advance(known[what, total], done)

        yield tell
