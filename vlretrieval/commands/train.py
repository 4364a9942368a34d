"""Train a retrieval model from a config; writes runs/NAME."""

from __future__ import annotations

from omegaconf import DictConfig

from vlretrieval.commands.launch import command, process_rank
from vlretrieval.commands.log import quiet_lightning
from vlretrieval.commands.run_folder import run_folder


@command("train")
def main(cfg: DictConfig) -> dict:
    """``vlretrieval-train experiment=quickstart``"""
    if cfg.dry_run:
        from vlretrieval.commands.dry_run import show

        return show(cfg)
    with run_folder(cfg, process_rank()):
        from vlretrieval.training.fit import train  # torch and Lightning: only now, when the config is known to be good

        quiet_lightning()
        return train(cfg)


if __name__ == "__main__":
    main()
