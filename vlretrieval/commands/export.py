"""Export a checkpoint as a folder that opens by itself."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, ListConfig

from vlretrieval.commands.launch import command


@command("export", literal=("checkpoint", "output"))
def main(cfg: DictConfig) -> None:
    """``vlretrieval-export checkpoint=runs/NAME/checkpoints/best.ckpt``"""
    from vlretrieval.deploy.card import Licences
    from vlretrieval.deploy.export import check_formats, export
    from vlretrieval.deploy.loaded import CERTIFICATE, read_json
    from vlretrieval.evaluation.run import export_pairs

    several = isinstance(cfg.format, ListConfig)
    formats = list(cfg.format) if several else [cfg.format or "folder"]
    check_formats(cfg.checkpoint, formats, cfg.precision, cfg.towers_only)
    pairs, measure = export_pairs(cfg) if cfg.pairs else (None, None)
    for format in formats:
        output = Path(cfg.output) / format if several and cfg.output is not None else cfg.output
        folder = export(
            cfg.checkpoint,
            output,
            cfg.overwrite,
            format=format,
            precision=cfg.precision,
            towers_only=cfg.towers_only,
            pairs=pairs,
            measure=measure,
            tolerance=cfg.tolerance,
            licences=Licences(cfg.license, cfg.data_license),
        )
        print(f"exported to {folder}:")
        for path in sorted(folder.iterdir()):
            print(f"  {path.name:<18} {path.stat().st_size:>12,} bytes")
        print(read_json(folder / CERTIFICATE)["line"])


if __name__ == "__main__":
    main()
