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
    from vlretrieval.evaluation.run import chosen_source, fusion_weight, inputs_of
    from vlretrieval.evaluation.subject import open_subject
    from vlretrieval.evaluation.table import print_frontier

    results = {}
    for path in str(cfg.checkpoint).split(","):
        subject = open_subject(path).to(cfg.device)
        source = chosen_source(cfg, subject)
        inputs = inputs_of(cfg, subject, source.split(cfg.split))
        weight = fusion_weight(cfg, cfg.weight, 16, subject, source)
        name = Path(path).parent.parent.name if Path(path).parent.name == "checkpoints" else Path(path).stem
        results[name if name not in results else path] = frontier(
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
