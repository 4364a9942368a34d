"""``vlretrieval``: lists the commands; ``vlretrieval train ...`` becomes ``vlretrieval-train ...``."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import shutil
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

from vlretrieval import __version__

PREFIX = "vlretrieval-"


def commands() -> dict[str, str]:
    """Command name -> the module that holds it, as the installed package declares its console scripts."""
    scripts = distribution("vlretrieval").entry_points.select(group="console_scripts")
    return {s.name.removeprefix(PREFIX): s.module for s in sorted(scripts) if s.name.startswith(PREFIX)}


def summary(module: str) -> str:
    """The first line of a module's docstring, read without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return "(not installed)"
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def overview() -> str:
    known = commands()
    width = max(map(len, known), default=0)
    lines = [f"vlretrieval {__version__}: image-text retrieval with self-attention and cross-modal heads", ""]
    lines += [f"  vlretrieval {name:<{width}}   {summary(module)}" for name, module in known.items()]
    lines += ["", "vlretrieval COMMAND --help shows every key it takes; vlretrieval-COMMAND is the same."]
    return "\n".join(lines)


def main() -> None:
    """Replace this process by the command's own console script.

    By exec and not by a call: Lightning starts the other ranks by repeating ``argv[0]`` and ``argv[1:]``, and a
    front door that has eaten its first word would break every rank but the first.
    """
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return
    if words[0] in ("-V", "--version"):
        print(__version__)
        return
    known = commands()
    if words[0] not in known:
        guess = difflib.get_close_matches(words[0], known, n=1)
        hint = f"did you mean {guess[0]}?" if guess else f"there are {', '.join(known)}"
        print(f"vlretrieval: error: no command {words[0]!r}; {hint}", file=sys.stderr)
        raise SystemExit(2)
    name = PREFIX + words[0]
    beside = Path(sysconfig.get_path("scripts")) / name
    script = str(beside) if beside.is_file() else shutil.which(name)
    if script:
        os.execv(script, [script, *words[1:]])
    os.execv(sys.executable, [sys.executable, "-m", known[words[0]], *words[1:]])
