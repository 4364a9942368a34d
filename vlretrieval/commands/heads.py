"""Look into a model's attention heads: what each does, what closing it costs; prune them or share their keys."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from vlretrieval.commands.launch import command


@command("heads", literal=("checkpoint", "compare", "output"))
def main(cfg: DictConfig) -> dict[str, Any]:
    """``vlretrieval-heads checkpoint=runs/NAME/checkpoints/best.ckpt``"""
    from vlretrieval.evaluation.run import chosen_source
    from vlretrieval.heads.study import Study

    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    return Study(settings, lambda subject: chosen_source(cfg, subject)).run()


if __name__ == "__main__":
    main()
