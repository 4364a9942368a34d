"""Build an index of pictures for search, or bring one up to date."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from vlretrieval.commands.launch import command


@command("index", literal=("model", "images", "output"))
def main(cfg: DictConfig) -> None:
    """``vlretrieval-index model=FOLDER images=DIR output=INDEX``"""
    from vlretrieval import load_model
    from vlretrieval.deploy.index.made import Settings, identity
    from vlretrieval.deploy.index.nearest import KINDS
    from vlretrieval.deploy.index.sources import source_of

    settings = Settings(cfg.embeddings, cfg.kept, cfg.thumbs)
    if cfg.nearest not in KINDS:
        raise ValueError(f"nearest={cfg.nearest} is not known; choose {', '.join(KINDS)}")
    source = source_of(cfg.images)
    model = load_model(cfg.model)
    if cfg.dry_run:
        from vlretrieval.deploy.index.plan import plan, printed

        figures = plan(model.to(device_of(cfg.device)), identity(cfg.model), source, cfg.output, settings, **cfg.plan)
        print(printed(figures))
        return
    from vlretrieval.deploy.index.build import Share, build
    from vlretrieval.evaluation.sharing import process_group

    with process_group() as processes:
        model.to(device_of(cfg.device))
        report = build(
            model,
            identity(cfg.model),
            source,
            cfg.output,
            settings,
            sources={"model": str(Path(cfg.model).resolve())},
            batch_size=cfg.batch_size,
            verify=cfg.verify,
            share=Share(processes.rank, processes.count, barrier),
            tell=Progress("pictures") if processes.rank == 0 else lambda done, total: None,
        )
        if processes.rank:
            return
        for name, reason in report.broken:
            print(f"note: left out {name}: {reason}", file=sys.stderr)
        print(
            f"{cfg.output}: {report.total:,} pictures; {report.added:,} added, {report.changed:,} changed, "
            f"{report.gone:,} gone, {report.copied:,} copies, {report.unchanged + report.touched:,} as they were"
            + (f", {len(report.broken):,} unreadable" if report.broken else "")
        )
        if cfg.nearest != "exact":
            from vlretrieval.deploy.index.opened import approximate

            print(f"{approximate(cfg.output, cfg.nearest)}: written")


def barrier() -> None:
    """Waits for the other processes, where there are any."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def device_of(name: str | None) -> str:
    """The device by its name, a GPU if there is one by default."""
    import torch

    return name or ("cuda" if torch.cuda.is_available() else "cpu")


class Progress:
    """A line on stderr with the rate and the time left: over itself on a terminal, else every ten seconds."""

    def __init__(self, what: str, now: Callable[[], float] = time.monotonic) -> None:
        self.what, self._now = what, now
        self._started_at = self._told_at = now()
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        at, last = self._now(), done == total
        if at - self._told_at < (0.5 if self._terminal else 10) and not (last and self._terminal):
            return
        self._told_at = at
        rate = done / max(1e-9, at - self._started_at)
        left = f"{clock(int((total - done) / rate))} left" if rate else ""
        said = f"{done:,} of {total:,} {self.what}, {rate:,.0f} a second, {left}"
        print(
            f"\r{said:<76}" if self._terminal else said, end="\n" if last or not self._terminal else "", file=sys.stderr
        )


def clock(seconds: int) -> str:
    """3725 -> "1:02:05"."""
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


if __name__ == "__main__":
    main()
