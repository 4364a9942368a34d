"""From a command's config to an outcome on disk: the only file here that meets Hydra."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig, OmegaConf

from vlretrieval.data.features import about_images, about_texts, features_path, open_features
from vlretrieval.data.splits import Source, Split
from vlretrieval.deploy.certificate import Pairs
from vlretrieval.deploy.checkpoint import weights_hash
from vlretrieval.evaluation.describe import versions
from vlretrieval.evaluation.embed import embed
from vlretrieval.evaluation.embedding_files import files_hash, load_embeddings
from vlretrieval.evaluation.error_page import error_page
from vlretrieval.evaluation.evaluate import Settings, choose_weight, evaluate, evaluate_embeddings
from vlretrieval.evaluation.export_pairs import pairs_of
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.outcome import Evaluation
from vlretrieval.evaluation.protocols import protocol_named
from vlretrieval.evaluation.rankings import (
    caption_names,
    image_names,
    ranking_figures,
    read_run,
    read_truth,
    truth_of,
    write_run,
    write_truth,
)
from vlretrieval.evaluation.rerank import answers
from vlretrieval.evaluation.sharing import Processes
from vlretrieval.evaluation.subject import Subject, open_subject
from vlretrieval.evaluation.suites import with_text_edits
from vlretrieval.evaluation.table import print_figures, print_ranking, progress
from vlretrieval.evaluation.towers import check_tower

SUBJECTS = ("checkpoint", "embeddings", "ranking")


def evaluate_from(cfg: DictConfig, processes: Processes) -> dict[str, Any]:
    """Evaluate the one thing that ``cfg`` names; rank 0 prints and writes. Returns the figures."""
    given = [name for name in SUBJECTS if cfg[name]]
    if len(given) != 1:
        raise ValueError(f"give one of checkpoint=, embeddings= or ranking= ({' and '.join(given) or 'none'} given)")
    check_effects(cfg, given[0])
    if given == ["ranking"]:
        figures = from_ranking(cfg) | {"settings": how_made(cfg)}
        if processes.rank == 0:
            print_ranking(figures)
            report(write_figures(figures, folder_for(cfg)))
        return figures
    if given == ["checkpoint"]:
        subject = open_subject(cfg.checkpoint).to(cfg.device)
        outcome = from_checkpoint(cfg, subject, processes)
    else:
        outcome = from_embeddings(cfg)
    outcome.figures["settings"] = how_made(cfg)
    if processes.rank == 0:
        path = outcome.write(folder_for(cfg))
        if cfg.rankings:
            write_rankings(outcome, path.parent, cfg.rankings)
        if cfg.error_page:
            report(error_page(outcome, path.with_name("errors.html"), model=subject.model))
        print_figures(outcome.figures)
        report(path)
    return outcome.figures


def check_effects(cfg: DictConfig, given: str) -> None:
    """Refuse what would have no effect on this subject, before any work is done."""
    protocol = protocol_named(cfg.protocol)
    if cfg.error_page and given != "checkpoint":
        raise ValueError(f"error_page=true shows pictures, and {given}= has none; give checkpoint=")
    if cfg.text_edits and given != "checkpoint":
        raise ValueError(f"text_edits=true makes captions to encode, and {given}= has no model; give checkpoint=")
    if given == "ranking" and (cfg.protocol != "full" or cfg.rankings):
        key = "rankings" if cfg.protocol == "full" else "protocol"
        raise ValueError(f"{key}= has no effect on ranking=, which is measured against its truth; leave it out")
    if given != "ranking" and cfg.qrels:
        raise ValueError(f"qrels= is the truth of ranking=, and has no effect on {given}=; leave it out")
    if given == "embeddings" and cfg.get("data") is not None:
        raise ValueError("data= has no effect on embeddings=, which hold their ids themselves; leave it out")
    if protocol.folds > 1 and (cfg.error_page or cfg.rankings):
        key = "error_page" if cfg.error_page else "rankings"
        raise ValueError(f"{key}= shows one gallery, and protocol={protocol.name} has several; set protocol=full")


def how_made(cfg: DictConfig) -> dict[str, Any]:
    """The keys of the command that the figures hang on, for metrics.json."""
    keys = [str(key) for key in cfg if key not in ("data", "model", "tokenizer", "output", "output_dir", *SUBJECTS)]
    return OmegaConf.to_container(OmegaConf.masked_copy(cfg, keys), resolve=True)  # type: ignore[return-value]


def from_checkpoint(cfg: DictConfig, subject: Subject, processes: Processes) -> Evaluation:
    """A model, its pictures and captions."""
    source = chosen_source(cfg, subject)
    split = with_text_edits(source.split(cfg.split), seed=cfg.seed) if cfg.text_edits else source.split(cfg.split)
    weight = fusion_weight(cfg, cfg.rerank.weight, cfg.rerank.top_k, subject, source, processes)
    settings = settings_of(cfg, top_k=cfg.rerank.top_k, weight=weight)
    inputs = inputs_of(cfg, subject, settings.protocol.prepare(split))
    with progress(shown=processes.rank == 0) as tell:
        outcome = evaluate(
            subject.model,
            split,
            subject.tokenizer,
            subject.transform,
            settings,
            inputs=inputs,
            processes=processes,
            tell=tell,
        )
    outcome.figures["subject"] = {
        "checkpoint": subject.name,
        "weights": weights_hash(subject.model.state_dict()),
        "data": source.fingerprint(),
        "weight_chosen_on": "val" if cfg.rerank.weight == "val" else None,
    }
    return outcome


def inputs_of(cfg: DictConfig, subject: Subject, split: Split) -> Inputs:
    """What the model is shown of ``split``: pictures and captions, or where asked for what frozen towers gave of it."""
    features = {}
    for part, folder in (("image", cfg.image_features), ("text", cfg.text_features), ("negatives", cfg.text_features)):
        edited = cfg.get("text_edits", False)  # made here and now: no tower has seen them
        if folder is None or (part == "negatives" and (edited or not len(split.negatives))):
            continue
        about = (
            about_images(split, subject.transform) if part == "image" else about_texts(split, subject.tokenizer, part)
        )
        features[part] = open_features(features_path(folder, split.name, part), about, split)
        check_tower(subject.model, part, features[part], subject.transform.image_size, subject.tokenizer)
    return Inputs(split, subject.tokenizer, subject.transform, features=features)


def fusion_weight(
    cfg: DictConfig,
    given: Any,
    top_k: int,
    subject: Subject,
    source: Source,
    processes: Processes = Processes(),  # noqa: B008  (frozen)
) -> float | None:
    """A number or None as given; for "val" the one with the best rsum on the validation split."""
    if given is None or isinstance(given, int | float):
        return given
    if given != "val":
        raise ValueError(f"rerank.weight={given} is not a number, null or val")
    if cfg.split == "val":
        raise ValueError("rerank.weight=val would be chosen on the very split that it is measured on; give a number")
    val = source.split("val")
    inputs = inputs_of(cfg, subject, val)
    return choose_weight(subject.model, val, subject.tokenizer, subject.transform, top_k, processes, inputs=inputs)


def from_embeddings(cfg: DictConfig) -> Evaluation:
    """Another program's embeddings."""
    outcome = evaluate_embeddings(load_embeddings(cfg.embeddings), settings_of(cfg, top_k=0, weight=None))
    outcome.figures["subject"] = {"embeddings": str(cfg.embeddings), "files_hash": files_hash(cfg.embeddings)}
    return outcome


def from_ranking(cfg: DictConfig) -> dict[str, Any]:
    """Another program's ranked lists."""
    run = read_run(cfg.ranking)
    if cfg.qrels:
        truth = read_truth(cfg.qrels)
    elif cfg.get("data") is not None:
        split = hydra.utils.instantiate(cfg.data.source).split(cfg.split)
        truths = truth_of(split)
        known = {way: sum(query in truth for query in run) for way, truth in truths.items()}
        if not max(known.values()):
            raise ValueError(
                f"{cfg.ranking}: no query is an image of the split, nor a caption (named image#0, image#1, ...); "
                f"the first is {next(iter(run))!r}"
            )
        way = max(known, key=lambda way: known[way])
        truth = truths[way]
    else:
        raise ValueError("ranking= needs its truth: give qrels=FILE, or data=... with the split")
    if not any(query in truth for query in run):
        raise ValueError(
            f"{cfg.ranking}: no query of it is in the truth; "
            f"the first are {next(iter(run))!r} and {next(iter(truth))!r}"
        )
    figures = ranking_figures(run, truth, tuple(cfg.ks), replicates=cfg.bootstrap, seed=cfg.seed)
    figures["protocol"] = {
        "ks": list(cfg.ks),
        "ties": "against the run",
        "recall": "hit rate: share of queries with at least one positive among the first k, percent",
        "order": "by score",
        "intervals": {"level": 0.95, "replicates": cfg.bootstrap, "seed": cfg.seed, "drawn": "queries"},
        "versions": versions(),
    }
    subject = {"ranking": str(cfg.ranking), "run_hash": files_hash(cfg.ranking)}
    if cfg.qrels:
        return figures | {"subject": subject | {"qrels": str(cfg.qrels), "qrels_hash": files_hash(cfg.qrels)}}
    return figures | {"subject": subject | {"split": split.name, "split_hash": split.hash, "direction": way}}


def embed_from(cfg: DictConfig, processes: Processes) -> Path:
    """Write a checkpoint's embeddings of a split."""
    subject = open_subject(cfg.checkpoint).to(cfg.device)
    source = chosen_source(cfg, subject)
    inputs = Inputs(source.split(cfg.split), subject.tokenizer, subject.transform)
    return embed(
        subject.model, inputs, cfg.output, batch_size=cfg.batch_size, precision=cfg.precision, processes=processes
    )


def export_pairs(cfg: DictConfig) -> tuple[Pairs, Callable[[Any], Any]]:
    """What an export is held against, of the data set that ``cfg`` names or the checkpoint knows."""
    subject = open_subject(cfg.checkpoint)
    try:
        split = chosen_source(cfg, subject).split(cfg.split)
    except ValueError as error:
        raise ValueError(f"{error}; or set pairs=0, which tries the export on noise") from None
    settings = Settings(top_k=cfg.rerank.top_k, bootstrap=0)
    return pairs_of(split, subject, cfg.pairs, settings)


def settings_of(cfg: DictConfig, **given: Any) -> Settings:
    return Settings(
        ks=tuple(cfg.ks),
        hard_negatives=cfg.hard_negatives,
        negatives_per_kind=cfg.negatives_per_kind,
        bootstrap=cfg.bootstrap,
        seed=cfg.seed,
        precision=cfg.precision,
        batch_size=cfg.batch_size,
        protocol=protocol_named(cfg.protocol),
        further=cfg.further,
        **given,
    )


def chosen_source(cfg: DictConfig, subject: Subject) -> Source:
    """The data set named on the command line, or else the one the model was trained on."""
    if cfg.get("data") is None:
        return subject.source()
    with_model = OmegaConf.merge(cfg, {"model": {"image_encoder": {"image_size": subject.transform.image_size}}})
    return hydra.utils.instantiate(with_model.data.source)


def folder_for(cfg: DictConfig) -> Path:
    """``output``; or evaluation/SPLIT in the checkpoint's run, evaluation/NAME beside a file."""
    if cfg.output:
        return Path(cfg.output)
    if not cfg.checkpoint:
        path = Path(cfg.embeddings or cfg.ranking)
        return path.parent / "evaluation" / path.stem
    checkpoint = Path(cfg.checkpoint)
    run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    return run / "evaluation" / cfg.split


def write_figures(figures: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.json"
    partial = path.with_name("metrics.json.partial")
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    return partial.replace(path)


def write_rankings(outcome: Evaluation, folder: Path, depth: int) -> None:
    """t2i.run, i2t.run and their .qrels, the re-ranked lists where the model re-ranked."""
    gallery = outcome.galleries[0]
    scale, weight = (outcome.figures["protocol"]["rerank"].get(name) for name in ("logit_scale", "weight"))
    captions, images = caption_names(gallery.split), image_names(gallery.split)
    truths = truth_of(gallery.split)
    for way, queries, documents in (("t2i", captions, images), ("i2t", images, captions)):
        candidates = answers(gallery, way, depth, scale, weight)
        write_run(folder / f"{way}.run", queries, documents, np.asarray(candidates))
        write_truth(folder / f"{way}.qrels", truths[way])


def report(path: Path) -> None:
    print(f"written to {path}")
