"""Evaluate a model: recall both ways, re-ranked recall, hard negatives; a table and metrics.json."""

from __future__ import annotations

from omegaconf import DictConfig

from vlretrieval.commands.launch import command


@command("evaluate", literal=("checkpoint", "output"))
def main(cfg: DictConfig) -> dict:
    """``vlretrieval-evaluate checkpoint=runs/NAME/checkpoints/best.ckpt``"""
    from vlretrieval.evaluation.run import evaluate_checkpoint
    from vlretrieval.evaluation.sharing import process_group
    from vlretrieval.evaluation.table import print_figures

    with process_group() as processes:
        figures, path = evaluate_checkpoint(cfg, processes)
        if processes.rank == 0:
            print_figures(figures)
            print(f"written to {path}")
    return figures


if __name__ == "__main__":
    main()
