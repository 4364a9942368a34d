"""Export a checkpoint as a folder that opens by itself."""

from __future__ import annotations

from omegaconf import DictConfig

from vlretrieval.commands.launch import command


@command("export", literal=("checkpoint", "output"))
def main(cfg: DictConfig) -> None:
    """``vlretrieval-export checkpoint=runs/NAME/checkpoints/best.ckpt``"""
    from vlretrieval.deploy.export import export

    folder = export(cfg.checkpoint, cfg.output, cfg.overwrite)
    print(f"exported to {folder}:")
    for path in sorted(folder.iterdir()):
        print(f"  {path.name:<18} {path.stat().st_size:>12,} bytes")


if __name__ == "__main__":
    main()
