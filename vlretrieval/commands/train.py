"""Train a retrieval model from a config; writes runs/NAME."""

from __future__ import annotations

from omegaconf import DictConfig

from vlretrieval.commands.launch import command, process_rank
from vlretrieval.commands.log import quiet_lightning
from vlretrieval.commands.memory import keep_freed_memory
from vlretrieval.commands.run_folder import run_folder


@command("train")
def main(cfg: DictConfig) -> dict:
    """``vlretrieval-train experiment=quickstart``"""
    if cfg.dry_run:
        from vlretrieval.commands.dry_run import show

        return show(cfg)
    if cfg.check:
        return check(cfg)
    if cfg.write_features:
        return write_features(cfg)
    with run_folder(cfg, process_rank()):
        from vlretrieval.training.fit import train  # torch and Lightning: only now, when the config is known to be good

        quiet_lightning()
        keep_freed_memory()
        return train(cfg)


def check(cfg: DictConfig) -> dict:
    """Prints a line for each thing looked at; exits with 1 if one of them is wrong. Writes nothing."""
    if process_rank() > 0:
        return {}
    from vlretrieval.training.fit import check as findings_of

    quiet_lightning()
    findings = findings_of(cfg)
    for finding in findings:
        print(finding)
    wrong = sum(not finding.good for finding in findings)
    if wrong:
        print(f"check: {wrong} of {len(findings)} need a look; nothing was written")
        raise SystemExit(1)
    print(f"check: {len(findings)} of {len(findings)} ok; nothing was written")
    return {"findings": len(findings)}


def write_features(cfg: DictConfig) -> dict:
    """Prints a line for each part of each split; what is there already is left alone."""
    from vlretrieval.evaluation.table import progress
    from vlretrieval.training.fit import write_features as written

    if process_rank() > 0:
        return {}
    with progress() as tell:
        paths = written(cfg, tell)
    for path in paths:
        print(f"{path}: {sum(file.stat().st_size for file in path.iterdir()) / 1e6:.1f} MB")
    return {"written": [str(path) for path in paths]}


if __name__ == "__main__":
    main()
