"""What a sweep came to: its jobs grouped by setting, as rows, a CSV file, a table and a plot. Knows no Hydra, no torch.

Jobs that differ in nothing but their seed are repetitions of one setting. A failed job is a job too: it is counted and
named, and its setting's mean is that of the others.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RED = "#c0392b"


@dataclass
class Job:
    """One run of a sweep.

    Args:
        number: its place in the sweep.
        setting: the swept keys and their values, as given.
        output_dir: its run folder.
        value: of the metric at its best checkpoint; None where there is none (it failed, or measured nothing).
        parameters: of its model. seconds: it took.
        error: one line, where it failed.
    """

    number: int
    setting: Mapping[str, str]
    output_dir: str = ""
    value: float | None = None
    parameters: int | None = None
    seconds: float | None = None
    error: str | None = None


@dataclass
class Setting:
    """Jobs that differ in their repetition alone."""

    values: dict[str, str]
    jobs: list[Job] = field(default_factory=list)

    @property
    def measured(self) -> list[float]:
        """The metric of each job that has one."""
        return [job.value for job in self.jobs if job.value is not None]

    @property
    def failed(self) -> int:
        return sum(job.error is not None for job in self.jobs)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.measured) if self.measured else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over repetitions (n - 1); None below two."""
        return statistics.stdev(self.measured) if len(self.measured) > 1 else None

    @property
    def parameters(self) -> int | None:
        return next((job.parameters for job in self.jobs if job.parameters is not None), None)

    @property
    def seconds(self) -> float | None:
        """Of a job, in the mean."""
        taken = [job.seconds for job in self.jobs if job.seconds is not None and job.error is None]
        return statistics.fmean(taken) if taken else None

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items()) or "all"


def settings_of(jobs: Sequence[Job], repeats: Sequence[str] = ("seed",)) -> list[Setting]:
    """Jobs grouped by all of their swept keys but ``repeats``, in the order in which they were run."""
    found: dict[tuple[tuple[str, str], ...], Setting] = {}
    for job in sorted(jobs, key=lambda job: job.number):
        values = {key: value for key, value in job.setting.items() if key not in repeats}
        found.setdefault(tuple(values.items()), Setting(values)).jobs.append(job)
    return list(found.values())


def write_summary(path: Path, settings: Sequence[Setting], metric: str) -> None:
    """One row a setting."""
    keys = list(dict.fromkeys(key for setting in settings for key in setting.values))
    columns = [*keys, "jobs", "failed", f"{metric} mean", f"{metric} std", f"{metric} min", f"{metric} max"]
    rows = [
        [
            *(setting.values.get(key, "") for key in keys),
            len(setting.jobs),
            setting.failed,
            *(number(value) for value in (setting.mean, setting.spread)),
            *(number(best(setting.measured)) for best in (least, most)),
            number(setting.parameters),
            number(setting.seconds),
        ]
        for setting in settings
    ]
    _write(path, [*columns, "parameters", "seconds"], rows)


def write_jobs(path: Path, jobs: Sequence[Job], metric: str) -> None:
    """One row a job."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.setting))
    rows = [
        [
            job.number,
            *(job.setting.get(key, "") for key in keys),
            "failed" if job.error is not None else "done",
            *(number(value) for value in (job.value, job.parameters, job.seconds)),
            job.output_dir,
            job.error or "",
        ]
        for job in sorted(jobs, key=lambda job: job.number)
    ]
    _write(path, ["job", *keys, "status", metric, "parameters", "seconds", "output_dir", "error"], rows)


def print_table(settings: Sequence[Setting], metric: str, title: str) -> None:
    """Settings down; the best mean first is for the reader to see, the order is that of the sweep."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("setting")
    for heading in (metric, "min .. max", "jobs", "parameters", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for setting in settings:
        failed = f", {setting.failed} failed" if setting.failed else ""
        mean, low, high = setting.mean, least(setting.measured), most(setting.measured)
        table.add_row(
            str(setting),
            "failed" if mean is None and failed else "-" if mean is None else with_spread(mean, setting.spread),
            "-" if low is None or high is None else f"{low:.2f} .. {high:.2f}",
            f"{len(setting.jobs)}{failed}",
            "-" if setting.parameters is None else f"{setting.parameters:,}",
            "-" if setting.seconds is None else f"{setting.seconds:.0f} s",
        )
    console = Console()
    console.print(table)
    for setting in settings:
        for job in setting.jobs:
            if job.error is not None:
                given = " ".join(f"{key}={value}" for key, value in job.setting.items())
                console.print(f"job {job.number} ({given}) failed: {job.error}", markup=False, highlight=False)


def plot(path: Path, settings: Sequence[Setting], metric: str) -> None:
    """The metric (each job a dot, mean and standard deviation), parameters and time of each setting.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    places = range(len(settings))
    figure = Figure(figsize=(max(5.0, 1.2 + 0.7 * len(settings)), 7.5), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    for place, setting in zip(places, settings, strict=True):
        top.plot([place] * len(setting.measured), setting.measured, "o", color="#4a7db5", alpha=0.5, markersize=5)
        if setting.mean is not None:
            top.errorbar([place], [setting.mean], [setting.spread or 0.0], fmt="_", color="#222222", capsize=4)
        if setting.failed:
            said = f"{setting.failed} of {len(setting.jobs)} failed"
            across = top.get_xaxis_transform()  # x in data, y in shares of the panel
            top.text(place, 0.02, said, color=RED, ha="center", va="bottom", rotation=90, transform=across)
    top.set_ylabel(metric)
    top.set_title(f"mean and standard deviation over {max(len(s.jobs) for s in settings)} jobs a setting", fontsize=10)
    middle.bar(places, [(setting.parameters or 0) / 1e6 for setting in settings], color="#9aa5b1")
    middle.set_ylabel("parameters, M")
    bottom.bar(places, [setting.seconds or 0 for setting in settings], color="#9aa5b1")
    bottom.set_ylabel("time, s")
    crowded = max(len(str(setting)) for setting in settings) > 14 or len(settings) > 8
    bottom.set_xticks(list(places), [str(setting) for setting in settings], rotation=90 if crowded else 0, fontsize=8)
    for panel in (top, middle, bottom):
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=130)
    partial.replace(path)


def least(values: Sequence[float]) -> float | None:
    return min(values, default=None)


def most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def number(value: float | None) -> str:
    """For a CSV file: empty where there is none."""
    return "" if value is None or not math.isfinite(value) else f"{value:.10g}"


def with_spread(mean: float, spread: float | None) -> str:
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


def value_at(metrics_file: Path, metric: str, step: int) -> float | None:
    """A figure from a run's metrics.csv: the last one logged up to ``step``."""
    if not metrics_file.is_file():
        return None
    with metrics_file.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get(metric) and int(row["step"]) <= step]
    return float(rows[-1][metric]) if rows else None


def _write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    partial.replace(path)
