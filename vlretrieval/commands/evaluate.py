"""Evaluate a model: recall both ways, re-ranked recall, hard negatives; a table and metrics.json."""

from __future__ import annotations

from omegaconf import DictConfig

from vlretrieval.commands.launch import command


@command("evaluate", literal=("checkpoint", "embeddings", "ranking", "qrels", "output"))
def main(cfg: DictConfig) -> dict:
    """``vlretrieval-evaluate checkpoint=runs/NAME/checkpoints/best.ckpt``"""
    from vlretrieval.evaluation.run import evaluate_from
    from vlretrieval.evaluation.sharing import process_group

    with process_group() as processes:
        return evaluate_from(cfg, processes)


if __name__ == "__main__":
    main()
