"""Compare evaluations on the same queries: a paired test, over seeds too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from vlretrieval.commands.launch import command


@command("compare", literal=("runs", "output"))
def compare_runs(cfg: DictConfig) -> list[dict[str, Any]]:
    """Each later run, or group of seeds, against the first."""
    from vlretrieval.evaluation.compare import compare, load_run
    from vlretrieval.evaluation.table import print_differences

    words = str(cfg.runs).split()
    if len(words) < 2:
        raise ValueError(f"{len(words)} run given; compare two or more, as in: vlretrieval-compare A B")
    groups = [[load_run(path) for path in word.split(",") if path] for word in words]
    results = []
    for word, group in zip(words[1:], groups[1:], strict=True):
        found = compare(groups[0], group, replicates=cfg.bootstrap, seed=cfg.seed)
        print_differences(words[0], word, found, (len(groups[0]), len(group)))
        results.append(
            {
                "first": words[0],
                "second": word,
                "differences": {
                    part: {d.name: {"value": d.value, "interval": [d.low, d.high], "verdict": d.verdict} for d in rows}
                    for part, rows in found.items()
                },
            }
        )
    if cfg.output:
        Path(cfg.output).parent.mkdir(parents=True, exist_ok=True)
        Path(cfg.output).write_text(json.dumps(results, indent=2) + "\n")
    return results


def main() -> Any:
    """``vlretrieval-compare A B [C ...]``; a word with commas is one model's seeds: ``A0,A1,A2 B0,B1,B2``."""
    words = [word for word in sys.argv[1:] if "=" not in word and not word.startswith("-")]
    if words:
        others = [word for word in sys.argv[1:] if word not in words]
        sys.argv = [sys.argv[0], *others, f"runs={' '.join(words)}"]
    return compare_runs()


if __name__ == "__main__":
    main()
