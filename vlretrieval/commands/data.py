"""Prepare, convert, examine and cache data sets: prepare, convert, doctor, cache, features."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from vlretrieval.commands.launch import USER_ERROR, command


@command("data_convert")
def convert(cfg: DictConfig) -> None:
    """Write a data set in another format."""
    from vlretrieval.data.convert import convert as run

    done = run(records_of(cfg), cfg.to, cfg.output, per_shard=cfg.per_shard, progress=bar("pictures"))
    print(f"{done.records} records written to {cfg.output}")


@command("data_doctor")
def doctor(cfg: DictConfig) -> None:
    """Look at every picture and caption once."""
    from hydra.utils import instantiate

    from vlretrieval.data.doctor import examine
    from vlretrieval.data.doctor.page import page, summary
    from vlretrieval.data.exclude import write_fix_list

    tokenizer = instantiate(cfg.tokenizer) if cfg.tokenizer is not None else None
    report = examine(records_of(cfg), tokenizer=tokenizer, longest_words=cfg.longest_words, progress=bar("pictures"))
    folder = Path(cfg.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text(page(report, "Data doctor"), encoding="utf-8")
    write_fix_list(folder / "fix_list.jsonl", report.fixes)
    print(summary(report))
    print(f"\npage: {folder / 'report.html'}\nfix list: {folder / 'fix_list.jsonl'} (take it with data.exclude=FILE)")


@command("data_cache")
def cache(cfg: DictConfig) -> None:
    """Decode and resize the pictures once."""
    from vlretrieval.data.cache import write_cache
    from vlretrieval.data.transforms import EvalTransform

    source = records_of(cfg)
    for name in cfg.splits:
        path = write_cache(source.split(name), EvalTransform(cfg.size, cfg.resize), cfg.output)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


@command("data_features", literal=("checkpoint", "output"))
def features(cfg: DictConfig) -> None:
    """Compute what frozen towers say of the pictures or captions once."""
    from vlretrieval.data.features import PARTS
    from vlretrieval.data.records import Records
    from vlretrieval.evaluation.subject import open_subject
    from vlretrieval.evaluation.table import progress
    from vlretrieval.training.frozen_features import write_features

    unknown = sorted(set(cfg.parts) - set(PARTS[:2]))
    if unknown or not cfg.parts:
        raise ValueError(f"parts={list(cfg.parts)}: choose from {', '.join(PARTS[:2])}")
    subject = open_subject(cfg.checkpoint).to(cfg.device)
    source: Any = subject.source() if cfg.get("data") is None else records_of(cfg)
    if not isinstance(source, Records):
        raise ValueError("this data set has no files: it is drawn anew each time")
    for split in map(source.split, cfg.splits):
        parts = [*cfg.parts, *(["negatives"] if "text" in cfg.parts and len(split.negatives) else [])]
        for part in parts:
            with progress() as tell:
                path = write_features(
                    subject.model,
                    split,
                    part,
                    cfg.output,
                    transform=subject.transform,
                    tokenizer=subject.tokenizer,
                    batch_size=cfg.batch_size,
                    precision=cfg.precision,
                    tell=tell,
                )
            print(f"{path}: {sum(file.stat().st_size for file in path.iterdir()) / 1e6:.1f} MB")


@command("data_prepare", literal=("folder",))
def prepare(cfg: DictConfig) -> None:
    """Check a downloaded Flickr8k, Flickr30k or COCO, and lay it out."""
    from vlretrieval.data.prepare import prepare as run

    done = run(str(cfg.dataset), cfg.folder)
    counts = ", ".join(f"{count} {split}" for split, count in sorted(done.counts.items()))
    print(f"{cfg.dataset} is whole: {counts}")
    print(f"train on it with data=karpathy data.json={done.json} data.images={done.images}")


def records_of(cfg: DictConfig) -> Any:
    """The data set's source."""
    from hydra.utils import instantiate

    from vlretrieval.data.records import Records

    if cfg.get("data") is None:
        raise ValueError("no data set is given; choose one, as data=karpathy data.json=FILE data.images=DIR")
    source = instantiate(OmegaConf.to_container(cfg.data, resolve=True)["source"])  # type: ignore[index, call-overload]
    if not isinstance(source, Records):
        raise ValueError("this data set has no files: it is drawn anew each time")
    return source


def bar(what: str) -> Any:
    """A progress bar for a terminal; elsewhere nothing."""

    def shown(items: Iterable[Any], total: int) -> Iterator[Any]:
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        if not console.is_terminal:
            yield from items
            return
        yield from track(items, total=total, description=what, console=console)

    return shown


VERBS = {"prepare": prepare, "convert": convert, "doctor": doctor, "cache": cache, "features": features}


def main() -> None:
    """``vlretrieval-data VERB key=value ...``"""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print("vlretrieval-data VERB key=value ...; vlretrieval-data VERB --help shows its keys\n")
        for name, verb in VERBS.items():
            print(f"  {name:<9} {(verb.__doc__ or '').splitlines()[0]}")
        return
    if words[0] not in VERBS:
        guess = difflib.get_close_matches(words[0], VERBS, n=1)
        hint = f"did you mean {guess[0]}?" if guess else f"there are {', '.join(VERBS)}"
        print(f"vlretrieval-data: error: no verb {words[0]!r}; {hint}", file=sys.stderr)
        raise SystemExit(USER_ERROR)
    sys.argv = [sys.argv[0], *words[1:]]
    VERBS[words[0]]()


if __name__ == "__main__":
    main()
