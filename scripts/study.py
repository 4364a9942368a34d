"""Claims about heads, measured: every variant over several seeds, evaluated on the test split; table, plot, JSON.

    python scripts/study.py heads KEY=VALUE ...     recall against the number of heads, at equal parameters
    python scripts/study.py --list

``KEY=VALUE`` are added to every training config (paths of data and towers). Runs that are done are not run again, so a
study that was broken off goes on. Intervals are 95 % t-intervals over the seeds; differences are paired by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CROSS = ("heads.text_to_image", "heads.image_to_text")
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # two-sided, n - 1 degrees of freedom


@dataclass(frozen=True)
class Study:
    """Variants of one thing: name -> overrides; ``against`` names the one that others are held against."""

    title: str
    variants: Mapping[str, tuple[str, ...]]
    against: str
    train_too: bool = False  # recall on the train split as well


def all_heads(count: int) -> tuple[str, ...]:
    return tuple(f"heads.{kind}={count}" for kind in ("text", "image", "text_to_image", "image_to_text"))


def crossed(text_to_image: int, image_to_text: int) -> tuple[str, ...]:
    return (f"heads.text_to_image={text_to_image}", f"heads.image_to_text={image_to_text}")


STUDIES = {
    "heads": Study(
        "Heads of every kind, at equal parameters",
        {f"{count} heads": all_heads(count) for count in (1, 2, 4, 8, 16, 32)},
        "1 heads",
        train_too=True,
    ),
    "self_heads": Study(
        "Self-attention heads of both encoders (no cross-modal heads), at equal parameters",
        {f"{n} heads": ("heads=dual", f"heads.text={n}", f"heads.image={n}") for n in (1, 2, 4, 8, 16, 32)},
        "1 heads",
        train_too=True,
    ),
    "cross": Study(
        "Cross-modal heads in each direction (64 wide)",
        {f"{n} cross-modal": (*crossed(n, n), "model.crossmodal.head_dim=64") for n in (0, 2, 4, 8)},
        "0 cross-modal",
    ),
    "kv": Study(
        "Key/value heads of 8 heads: MHA, GQA, MQA",
        {name: (*all_heads(8), f"heads.kv={kv}") for name, kv in (("MHA", "null"), ("GQA 2", "2"), ("MQA", "1"))},
        "MHA",
    ),
    "directions": Study(
        "Which direction the cross-modal heads look",
        {
            "both": crossed(4, 4),
            "text to image": crossed(4, 0),
            "image to text": crossed(0, 4),
            "joint": (*crossed(0, 0), "model.crossmodal.joint=4"),
        },
        "both",
    ),
    "rows": Study(
        "What each part adds on frozen towers",
        {
            "towers + projections": ("heads=dual", "model.image_encoder.depth=0", "model.text_encoder.depth=0"),
            "+ own self-attention": ("heads=dual",),
            "+ cross-modal heads": (),
        },
        "towers + projections",
    ),
}  # fmt: skip


def main() -> None:
    """Run one study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", choices=STUDIES)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for every training run")
    parser.add_argument("--experiment", default="flickr8k_frozen", help="what is varied (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/study"))
    parser.add_argument("--list", action="store_true")
    args = parser.parse_intermixed_args()
    if args.list or not args.study:
        for name, study in STUDIES.items():
            print(f"{name:<11} {study.title}: {', '.join(study.variants)}")
        return
    study, folder = STUDIES[args.study], args.output / args.experiment / args.study
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(1, args.seeds + 1):  # seed by seed, so that a study that is broken off still compares
        for variant, overrides in study.variants.items():
            figures = one_run(folder / variant.replace(" ", "_") / f"seed_{seed}", args, study, overrides, seed)
            results.setdefault(variant, []).append(figures | gains(figures))
    summary = {variant: summarised(runs) for variant, runs in results.items()}
    base = results[study.against]
    for variant, runs in results.items():
        paired = [
            {k: run[k] - other[k] for k in run.keys() & other.keys()} for run, other in zip(runs, base, strict=True)
        ]
        summary[variant]["difference"] = summarised(paired)
    told = {"title": study.title, "against": study.against, "seeds": args.seeds, "runs": results, "summary": summary}
    (folder / "study.json").write_text(json.dumps(told, indent=1) + "\n")
    plot(told, folder / "study.png")
    text = markdown(told)
    (folder / "study.md").write_text(text)
    print(text)


def one_run(folder: Path, args: Any, study: Study, overrides: Sequence[str], seed: int) -> dict[str, float]:
    """Train one variant with one seed and evaluate it; or read what was measured before."""
    done = folder / "figures.json"
    if done.is_file():
        return json.loads(done.read_text())
    if folder.exists():
        import shutil

        shutil.rmtree(folder)
    started = time.perf_counter()
    common = [f"experiment={args.experiment}", *args.overrides, *overrides]
    name = f"study/{folder.parent.name}/{seed}"
    cfg = composed("train", *common, f"seed={seed}", f"name={name}", f"output_dir={folder}", "progress_bar=false")
    trained(cfg)
    figures = measured(folder, cfg, "test", folder / "test")
    if study.train_too:
        figures |= {f"train {k}": v for k, v in measured(folder, cfg, "train", folder / "train").items()}
    figures["minutes"] = (time.perf_counter() - started) / 60
    done.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{folder}: {figures['minutes']:.1f} min, {json.dumps(figures)}", file=sys.stderr, flush=True)
    return figures


def composed(command: str, *overrides: str) -> Any:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(command, overrides=list(overrides))


def trained(cfg: Any) -> None:
    from vlretrieval.commands.log import quiet_lightning
    from vlretrieval.commands.run_folder import run_folder
    from vlretrieval.training.fit import train

    with run_folder(cfg):
        quiet_lightning()
        train(cfg)


def measured(folder: Path, cfg: Any, split: str, output: Path) -> dict[str, float]:
    """The figures of the best checkpoint; the train split as galleries of 1,000 pictures, first stage alone."""
    from vlretrieval.evaluation.protocols import PROTOCOLS, Protocol
    from vlretrieval.evaluation.run import evaluate_from
    from vlretrieval.evaluation.sharing import Processes

    PROTOCOLS.setdefault("thousands", Protocol("thousands", None, 5, folds=6))
    stored = [f"{key}={cfg.data[key]}" for key in ("image_features", "text_features") if cfg.data.get(key)]
    how = ["rerank.weight=val", "further=false"] if split == "test" else ["rerank.top_k=0", "protocol=thousands"]
    eval_cfg = composed(
        "evaluate", f"checkpoint={folder}/checkpoints/best.ckpt", f"split={split}", f"output={output}", "bootstrap=0",
        *stored, *how, *([] if split == "test" else ["hard_negatives=false", "further=false"]),
    )  # fmt: skip
    found = evaluate_from(eval_cfg, Processes())
    figures: dict[str, float] = {}
    for stage in ("first_stage", "reranked"):
        for way in ("t2i", "i2t"):
            recall = found.get(stage, {}).get(way, {})
            figures |= {f"{stage} {way} R@{k}": recall[f"R@{k}"] for k in (1, 5, 10) if f"R@{k}" in recall}
    for kind, scores in found.get("hard_negatives", {}).items():
        for score in ("cosine", "match"):
            if score in scores:
                figures[f"{kind} {score}"] = scores[score]["accuracy"]
    return figures


def gains(figures: Mapping[str, float]) -> dict[str, float]:
    """What the cross-modal heads add within one run: taken before the means, as seeds differ by more than this does."""
    found = {}
    for way in ("t2i", "i2t"):
        first, then = (figures.get(f"{stage} {way} R@1") for stage in ("first_stage", "reranked"))
        if first is not None and then is not None:
            found[f"re-ranking adds, {way} R@1"] = then - first
    for kind in ("leave_out", "all"):
        cosine, match = (figures.get(f"{kind} {score}") for score in ("cosine", "match"))
        if cosine is not None and match is not None:
            found[f"{kind}: match - cosine"] = match - cosine
    return found


def summarised(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """figure -> [mean, half width of its 95 % interval]."""
    keys = [key for key in runs[0] if all(key in run for run in runs)]
    return {key: interval([run[key] for run in runs]) for key in keys}


def interval(values: Sequence[float]) -> list[float]:
    count = len(values)
    half = T95[count] * statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan
    return [statistics.fmean(values), half]


def columns(told: Mapping[str, Any]) -> list[str]:
    """The figures a table shows: recalls at 1 and 10, the left-out object, all hard negatives."""
    found = {key for summary in told["summary"].values() for key in summary}
    order = [f"{stage} {way} R@{k}" for stage in ("first_stage", "reranked") for way in ("t2i", "i2t") for k in (1, 10)]
    order += [f"re-ranking adds, {way} R@1" for way in ("t2i", "i2t")]
    order += [f"{kind}{score}" for kind in ("leave_out", "all") for score in (" cosine", " match", ": match - cosine")]
    order += ["train first_stage t2i R@1", "minutes"]
    return [key for key in order if key in found]


def markdown(told: Mapping[str, Any]) -> str:
    """Variants down, figures across; below each figure its difference from the one held against."""
    keys = columns(told)
    lines = [
        f"{told['title']} (mean and 95 % interval over {told['seeds']} seeds; in brackets against {told['against']})",
        "",
    ]
    lines += ["| | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|"]
    for variant, summary in told["summary"].items():
        cells = []
        for key in keys:
            if key not in summary:
                cells.append("-")
                continue
            mean, half = summary[key]
            cell = f"{mean:.1f} ± {half:.1f}"
            if variant != told["against"] and key in summary["difference"]:
                off, off_half = summary["difference"][key]
                cell += f" ({off:+.1f} ± {off_half:.1f})"
            cells.append(cell)
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(told: Mapping[str, Any], path: Path) -> None:
    """Each figure of the table but R@10: mean and interval of each variant, and its seeds as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = [key for key in columns(told) if key != "minutes" and "R@10" not in key]
    variants, across = list(told["summary"]), min(4, len(keys))
    down = -(-len(keys) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(3.2 * across, 2.9 * down), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(keys) :]:
        axis.set_visible(False)
    for axis, key in zip(axes.flat, keys, strict=False):
        points = [(i, told["summary"][v][key]) for i, v in enumerate(variants) if key in told["summary"][v]]
        means, halves = [p[1][0] for p in points], [0 if math.isnan(p[1][1]) else p[1][1] for p in points]
        axis.errorbar([p[0] for p in points], means, halves, fmt="o", capsize=3)
        seeds = [(i, run[key]) for i, v in enumerate(variants) for run in told["runs"][v] if key in run]
        axis.plot(*zip(*seeds, strict=True), "k.", markersize=4, alpha=0.5)
        axis.set_xticks(range(len(variants)), variants, rotation=30, ha="right")
        axis.set_title(key, fontsize=9)
        axis.grid(alpha=0.3)
    figure.suptitle(told["title"])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
