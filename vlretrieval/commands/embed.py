"""Write a model's embeddings of a split, for any other program; goes on where a killed run stopped."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from vlretrieval.commands.launch import command


@command("embed", literal=("checkpoint", "output"))
def main(cfg: DictConfig) -> Path:
    """``vlretrieval-embed checkpoint=runs/NAME/checkpoints/best.ckpt output=FILE.npz``"""
    from vlretrieval.evaluation.run import embed_from
    from vlretrieval.evaluation.sharing import process_group

    with process_group() as processes:
        path = embed_from(cfg, processes)
        if processes.rank == 0:
            print(f"written to {path}; evaluate it with: vlretrieval-evaluate embeddings={path}")
    return path


if __name__ == "__main__":
    main()
