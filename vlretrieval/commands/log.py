"""What a command says while it works: one line each on stdout, from rank 0; errors have stderr to themselves."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any, TextIO

OURS = ("vlretrieval", "hydra")
NOISE = (
    "in eval mode at the start of training",  # frozen towers, as asked for
    "isinstance(treespec, LeafSpec)",  # Lightning's own use of torch
    "`weights_only` was not set",  # our checkpoint reader reads plain data only, whatever is asked
    "num_workers",  # a data set in memory is fastest without workers
    "sync_dist=True",  # rank 0 measures for all
    "smaller than the logging interval",
    "try installing [lit",  # advertisements
)


class Stdout(logging.StreamHandler):
    """Writes to whatever stdout is at the moment, so that a progress bar can put the lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stdout

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


def log_to_console(rank: int) -> None:
    """Show our own lines and everyone's warnings; from other ranks, warnings only.

    Before Lightning is imported: it keeps its lines to itself unless someone listens already.
    """
    root = logging.getLogger()
    if not any(isinstance(handler, Stdout) for handler in root.handlers):
        handler = Stdout()
        handler.setFormatter(OneLine("%(message)s"))
        handler.addFilter(worth_showing)
        root.addHandler(handler)
    logging.captureWarnings(True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO if rank == 0 else logging.WARNING)


def quiet_lightning() -> None:
    """Take away the console that Lightning gives itself on import; its lines still reach train.log."""
    logging.getLogger("lightning").handlers.clear()


def worth_showing(record: logging.LogRecord) -> bool:
    """Our lines and everyone's warnings."""
    return worth_keeping(record) and (record.levelno >= logging.WARNING or record.name.split(".")[0] in OURS)


def worth_keeping(record: logging.LogRecord) -> bool:
    """All but what a user can do nothing about."""
    text = record.getMessage()
    return not any(words in text for words in NOISE)


class OneLine(logging.Formatter):
    """``warnings.warn`` as a line without the source line it quotes."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.name == "py.warnings":  # "file.py:3: UserWarning: text", or Lightning's "file.py:3: text"
            text = "warning: " + re.sub(r"^\S+:\d+: (\w+: )?", "", text.strip()).splitlines()[0]
        return text


def log_to_file(path: Path) -> logging.Handler:
    """Send what is logged to a file as well; remove the handler from the root logger to stop."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(worth_keeping)
    logging.getLogger().addHandler(handler)
    return handler
