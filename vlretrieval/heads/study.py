"""What the command does: opens the checkpoints, examines them, changes one if asked, and writes the folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vlretrieval.data.splits import Source
from vlretrieval.deploy.checkpoint import Checkpoint, load_checkpoint
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.subject import Subject, open_subject
from vlretrieval.evaluation.table import progress
from vlretrieval.heads.ablate import closing, small_gallery
from vlretrieval.heads.convert import shared_kv
from vlretrieval.heads.diversity import Copies
from vlretrieval.heads.gates import GateSettings, learn_gates, open_heads
from vlretrieval.heads.laboratory import Ablation, Findings, Plan, examine, importance_of, probe_of
from vlretrieval.heads.layers import heads_of, layers_of
from vlretrieval.heads.page.write import write_report
from vlretrieval.heads.pictures import write_pictures
from vlretrieval.heads.plain import plain
from vlretrieval.heads.prune import pruned
from vlretrieval.heads.pruning_curve import greedy_curve
from vlretrieval.heads.roles import Rule
from vlretrieval.heads.store import save_changed
from vlretrieval.heads.verdict import verdict

MIB = 1 << 20


class Study:
    """One call of the command.

    Args:
        settings: conf/heads.yaml, resolved.
        source_of: the data set of a model: the one named on the command line, or its own.
    """

    def __init__(self, settings: dict[str, Any], source_of: Callable[[Subject], Source]):
        self.settings, self.source_of = settings, source_of
        self.paths = [path.strip() for path in str(settings["checkpoint"]).split(",") if path.strip()]
        if not self.paths:
            raise ValueError("checkpoint= is empty; give a .ckpt or an exported folder")
        self.plan = Plan(
            pictures=settings["pictures"],
            alike_pictures=settings["alike_pictures"],
            examples=settings["examples"],
            rule=Rule(**settings["rule"]),
            copies=Copies(**settings["copies"]),
            ablation=Ablation(**settings["ablation"]),
            seed=settings["seed"],
        )
        gates = {name: value for name, value in settings["gates"].items() if name not in ("split", "pictures")}
        self.gates = GateSettings(**gates, seed=settings["seed"]) if gates["penalty"] is not None else None
        self.folder = folder_for(settings["output"], self.paths[-1], settings["split"])

    @property
    def changes(self) -> bool:
        """Whether a changed model is asked for, and not a report."""
        return self.gates is not None or any(
            value is not None for value in (self.settings["prune"]["heads"], self.settings["convert"]["kv"])
        )

    def run(self) -> dict[str, Any]:
        """Write everything; returns what heads.json holds."""
        if self.changes:
            return self.change()
        subjects = [self.open(path) for path in self.paths]
        with progress() as tell:
            earlier = [
                (step_of(path), self.examine(subject, only_figures=True))
                for path, subject in zip(self.paths[:-1], subjects[:-1], strict=True)
            ]
            found = [self.examine(subjects[-1], tell=tell)]
            if self.settings["compare"]:
                found.append(self.examine(self.open(self.settings["compare"]), tell=tell))
        evolution = sorted([*earlier, (step_of(self.paths[-1]), found[0])], key=lambda item: item[0])
        evolution = evolution if earlier else []
        started_at = time.perf_counter()
        report = write_report(self.folder / "report.html", found, evolution=evolution)
        made = [report, write_json(self.folder / "heads.json", [plain(one) for one in found])]
        if self.settings["png"]:
            made += write_pictures(found[0], self.folder / "pictures", evolution)
        found[0].seconds["writing"] = round(time.perf_counter() - started_at, 2)
        for line in verdict(found[0]):
            print(line)
        print(f"written to {report} ({report.stat().st_size / MIB:.1f} MiB), with {len(made) - 1} files beside it")
        return plain(found[0])

    def open(self, path: str) -> Subject:
        return open_subject(path).to(self.settings["device"])

    def examine(self, subject: Subject, only_figures: bool = False, **more: Any) -> Findings:
        split = self.source_of(subject).split(self.settings["split"])
        return examine(
            subject.model,
            split,
            subject.tokenizer,
            subject.transform,
            self.plan,
            name=name_of(subject.name),
            only_figures=only_figures,
            **more,
        )

    # ---------------------------------------------------------------------------------------------- a changed model

    def change(self) -> dict[str, Any]:
        """Prune, convert or learn gates, one of them; writes a checkpoint and says recall before and after."""
        asked = {
            "prune.heads": self.settings["prune"]["heads"],
            "convert.kv": self.settings["convert"]["kv"],
            "gates.penalty": self.settings["gates"]["penalty"],
        }
        given = [key for key, value in asked.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: one change at a time; give the first's checkpoint to the second")
        if len(self.paths) > 1 or self.settings["compare"]:
            raise ValueError(f"{given[0]} changes one model; give one checkpoint, and no compare")
        if self.plan.ablation.pictures < 1:
            raise ValueError(
                f"ablation.pictures={self.plan.ablation.pictures} with {given[0]}: recall before and after is measured "
                "on them; give at least 1"
            )
        path = Path(self.paths[0])
        if path.is_dir():
            raise ValueError(f"checkpoint={path} is an exported folder; to change heads, give the .ckpt it was made of")
        original, subject = load_checkpoint(path), self.open(str(path))
        source = self.source_of(subject)
        how = f"vlretrieval-heads {given[0]}={asked[given[0]]} checkpoint={path}"
        if given == ["convert.kv"]:
            return self.convert(original, subject, source, how)
        gates = self.chosen_gates(subject, source)
        small = pruned(subject.model, gates)
        name = "pruned.ckpt" if given == ["prune.heads"] else "gated.ckpt"
        made = save_changed(self.folder / name, original, small, how)
        left, whole = (sum(layer.heads for layer in layers_of(model)) for model in (small, subject.model))
        figures = self.before_and_after(subject, small, source, made)
        figures |= {"open": open_heads(full(subject.model, gates)), "heads": left, "of": whole}
        print(f"{left} of {whole} heads left")
        return self.told(figures, made)

    def chosen_gates(self, subject: Subject, source: Source) -> dict[str, torch.Tensor]:
        """Gates that are learnt, or that close the heads that the pruning curve closes first."""
        tokenizer, transform, seed = subject.tokenizer, subject.transform, self.plan.seed
        if self.gates is not None:
            of = self.settings["gates"]
            split = small_gallery(source.split(of["split"]), of["pictures"], 1, seed)
            with progress() as tell:
                return learn_gates(subject.model, Inputs(split, tokenizer, transform), self.gates, tell)
        keep, heads = self.settings["prune"]["heads"], heads_of(layers_of(subject.model))
        if not 1 <= keep < len(heads):
            raise ValueError(f"prune.heads={keep}: the model has {len(heads)} heads; leave from 1 to {len(heads) - 1}")
        split = source.split(self.settings["split"])
        probe = probe_of(subject.model, split, tokenizer, transform, self.plan)
        by = self.plan.ablation.by
        importance = importance_of(probe, by, probe.inputs, [])
        points = 1 if by == "drops" else max(1, self.plan.ablation.points)
        with progress() as tell:
            curve = greedy_curve(probe, importance, points=points, least=keep, tell=tell)
        return closing(subject.model, curve[-1].closed)

    def convert(self, original: Checkpoint, subject: Subject, source: Source, how: str) -> dict[str, Any]:
        kv = self.settings["convert"]["kv"]
        made = save_changed(self.folder / f"kv{kv}.ckpt", original, shared_kv(subject.model, kv), how)
        figures = self.before_and_after(subject, load_checkpoint(made).build().to(device_of(subject)), source, made)
        print(
            "it has to train on for a while; with the experiment it came from:\n"
            f"  vlretrieval-train experiment=... name=kv{kv} heads.kv={kv} init_from={made} trainer.max_epochs=1"
        )
        return self.told(figures, made)

    def before_and_after(self, subject: Subject, small: Any, source: Source, made: Path) -> dict[str, Any]:
        """Recall of both models on the same gallery, their sizes, and how long one pass of it takes."""
        split = source.split(self.settings["split"])
        found: dict[str, Any] = {"checkpoint": str(made)}
        for name, model in (("before", subject.model), ("after", small)):
            probe = probe_of(model, split, subject.tokenizer, subject.transform, self.plan)
            probe.ranks(())  # pictures are read once, before the clock runs
            started_at = time.perf_counter()
            recall = probe.recall(probe.ranks([]))
            found[name] = {
                f"R@{probe.k}": recall,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "seconds": round(time.perf_counter() - started_at, 3),
            }
        return found

    def told(self, figures: dict[str, Any], made: Path) -> dict[str, Any]:
        k = f"R@{self.plan.ablation.k}"
        for name in ("before", "after"):
            of = figures[name]
            print(f"{name:>6}: {k} {of[k]:.1f} %, {of['parameters']:,} parameters, {of['seconds']:.2f} s")
        write_json(made.with_suffix(".json"), figures)
        print(f"written to {made}; vlretrieval-evaluate and vlretrieval-export take it like any other")
        return figures


def full(model: Any, gates: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gates of all layers, 1 where none are given."""
    return {layer.name: gates.get(layer.name, torch.ones(layer.heads)) for layer in layers_of(model)}


def device_of(subject: Subject) -> torch.device:
    return next(subject.model.parameters()).device


def folder_for(output: str | None, checkpoint: str, split: str) -> Path:
    """``output``; or heads/SPLIT in the checkpoint's run, or beside an exported folder."""
    if output:
        return Path(output)
    path = Path(checkpoint)
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return run / "heads" / split


def name_of(path: str) -> str:
    """ "quickstart, best" for runs/quickstart/checkpoints/best.ckpt."""
    where = Path(path)
    run = where.parent.parent.name if where.parent.name == "checkpoints" else where.parent.name
    return f"{run}, {where.stem}" if run else where.stem


def step_of(path: str) -> int:
    """Optimizer steps of a checkpoint, to put several in order; an exported folder says none."""
    if Path(path).is_dir():
        raise ValueError(f"checkpoint={path} is an exported folder, which is no step of a run; give .ckpt files")
    return load_checkpoint(path).step


def write_json(path: Path, data: Any) -> Path:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return partial.replace(path)
