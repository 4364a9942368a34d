"""Measure what re-ranking buys: recall against top_k, time and memory, for one model or several."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from vlretrieval.commands.launch import command


@command("frontier", literal=("checkpoint", "output"))
def main(cfg: DictConfig) -> dict:
    """``vlretrieval-frontier checkpoint=A,B output=FOLDER``"""
    from vlretrieval.evaluation.frontier import frontier, plot
    from vlretrieval.evaluation.names import names_apart
    from vlretrieval.evaluation.run import chosen_source, fusion_weight, inputs_of
    from vlretrieval.evaluation.subject import open_subject
    from vlretrieval.evaluation.table import print_frontier

    results = {}
    paths = str(cfg.checkpoint).split(",")
    for name, path in zip(names_apart(paths), paths, strict=True):
        subject = open_subject(path).to(cfg.device)
        source = chosen_source(cfg, subject)
        inputs = inputs_of(cfg, subject, source.split(cfg.split))
        weight = fusion_weight(cfg, cfg.weight, 16, subject, source)
        results[name] = frontier(
            subject.model, inputs, tuple(cfg.top_ks), k=cfg.k, weight=weight, batch_size=cfg.batch_size
        )
    print_frontier(results)
    folder = Path(cfg.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "frontier.json").write_text(json.dumps(results, indent=2) + "\n")
    if cfg.plot:
        plot(results, str(folder / "frontier.png"))
    print(f"written to {folder}")
    return results


if __name__ == "__main__":
    main()
