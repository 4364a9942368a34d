"""The model card of an export: what it is, how to use it, what was measured. Its numbers come from files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vlretrieval.deploy.checkpoint import Checkpoint

LOAD = """\
import vlretrieval

model = vlretrieval.load_model("PATH OF THIS FOLDER"{trust})
images = model.encode_images(["a.jpg", "b.jpg"])        # (2, E) unit vectors
texts = model.encode_texts(["a red circle"])            # (1, E)
cosines = images @ texts.T"""

OPEN_CLIP = """\
import open_clip

model, preprocess = open_clip.create_model_from_pretrained("local-dir:PATH OF THIS FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:PATH OF THIS FOLDER")
texts = model.encode_text(tokenizer(["a red circle"]), normalize=True)"""

CLIP = """\
from transformers import CLIPModel, CLIPProcessor

model = CLIPModel.from_pretrained("PATH OF THIS FOLDER")
processor = CLIPProcessor.from_pretrained("PATH OF THIS FOLDER")
outputs = model(**processor(text=["a red circle"], images=[picture], return_tensors="pt", padding=True))"""

USE = {
    "folder": LOAD.format(trust=""),
    "onnx": LOAD.format(trust=""),
    "torch": LOAD.format(trust=", trust=True"),
    "open_clip": OPEN_CLIP,
    "clip": CLIP,
}
BESIDE = {
    "onnx": "Without this project: each `.onnx` names its inputs and outputs; batch, length and shortlist are free.",
    "torch": 'Without this project: `torch.export.load("image.pt2").module()(pixels)`. Reading a `.pt2` can run code '
    "that lies in it; take it from no one you do not trust.",
}
MATCH = 'logits = model.match(["a.jpg"], ["a red circle"])       # cross-modal heads'

NOT_MEASURED = "Not evaluated: the run folder held no figures of these weights at the time of export."
NOT_STATED = "not stated"


@dataclass(frozen=True)
class Licences:
    """Under what the weights and the data they were trained on may be used: an SPDX name or any text; None: unknown."""

    weights: str | None = None
    data: str | None = None


def model_card(
    checkpoint: Checkpoint,
    weights: dict[str, Tensor],
    figures: list[dict[str, Any]],
    certificate: dict[str, Any],
    kind: str = "folder",
    licences: Licences = Licences(),  # noqa: B008  (frozen)
) -> str:
    """README.md of the exported folder, in Markdown; ``figures`` as of :func:`evaluations`."""
    config = checkpoint.config
    heads = config.get("heads", {})
    crossed = any(name.startswith("crossmodal.") for name in weights)
    left_out = bool(heads.get("text_to_image") or heads.get("image_to_text")) and not crossed
    use = USE[kind] + (f"\n{MATCH}" if crossed and kind in ("folder", "onnx", "torch") else "")
    return "\n".join(
        [
            "---",
            f"library_name: {({'open_clip': 'open_clip', 'clip': 'transformers'}).get(kind, 'vlretrieval')}",
            "pipeline_tag: image-text-retrieval",
            *([f"license: {licences.weights}"] if licences.weights else []),
            "---",
            f"# {config.get('name', 'vlretrieval model')}",
            "",
            f"An image-text retrieval model, trained for {checkpoint.step} steps by vlretrieval {checkpoint.version}.",
            "Two encoders and cross-modal heads." if crossed else "A plain dual encoder: no cross-modal heads.",
            *(["Its cross-modal heads were left out of this export."] if left_out else []),
            "",
            "| | |",
            "|---|---|",
            f"| parameters | {sum(value.numel() for value in weights.values()):,} |",
            *(f"| heads.{name} | {value} |" for name, value in heads.items()),
            f"| vocabulary | {checkpoint.tokenizer.vocab_size:,} |",
            f"| longest text, tokens | {checkpoint.tokenizer.context_length} |",
            f"| picture side, pixels | {config['model']['image_encoder']['image_size']} |",
            f"| trained on | {trained_on(config)} |",
            f"| licence of the weights | {licences.weights or NOT_STATED} |",
            f"| licence of the training data | {licences.data or NOT_STATED} |",
            "",
            "## Use",
            "",
            f"```python\n{use}\n```",
            *(["", BESIDE[kind]] if kind in BESIDE else []),
            "",
            "## Measured",
            "",
            "\n\n".join(map(tables, figures)) or NOT_MEASURED,
            *(["", "These are figures of the checkpoint, with its cross-modal heads."] if left_out and figures else []),
            "",
            "## Held against its source",
            "",
            f"{certificate['line']}.",
            "",
            "All figures are in certificate.json.",
            "",
            "## Limits",
            "",
            *limits(checkpoint),
            "",
        ]
    )


def limits(checkpoint: Checkpoint) -> list[str]:
    """What follows from how it was made, a line each."""
    data = trained_on(checkpoint.config)
    return [
        f"- A text beyond {checkpoint.tokenizer.context_length} tokens is cut, its end token kept.",
        f"- It knows what {data} shows and says, and was measured on nothing else than what stands above; other "
        "pictures, wordings and languages have to be tried.",
        "- Scores order candidates; they are no probabilities, and a best answer is found where no right one exists.",
        "- Whatever bias the data have, it has learnt.",
    ]


def trained_on(config: dict[str, Any]) -> str:
    """The class of the data source, and of its reader where there is one. No paths: they are the trainer's own."""
    source = config.get("data", {}).get("source", {})
    names = [
        str(part["_target_"]).rpartition(".")[2] for part in (source, source.get("reader", {})) if "_target_" in part
    ]
    return ", ".join(names) or "unknown"


def evaluations(run: Path, weights: str) -> list[dict[str, Any]]:
    """What ``vlretrieval-evaluate`` wrote below the run folder of a model with these weights, the test split first.

    Args:
        run: the run folder.
        weights: ``weights_hash`` of the model; figures of other checkpoints of the run are left out.

    Raises:
        ValueError: a metrics.json that is not one.
    """
    found = []
    for path in sorted((run / "evaluation").glob("*/metrics.json"), key=lambda p: (p.parent.name != "test", p)):
        try:
            figures = json.loads(path.read_text(encoding="utf-8"))
            ours = figures["subject"].get("weights") == weights
            _ = tables(figures)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is not what vlretrieval-evaluate writes ({fault}); evaluate again") from None
        if ours:
            found.append(figures)
    return found


def tables(figures: dict[str, Any]) -> str:
    """One evaluation: recalls, hard negatives, and under which protocol they were measured."""
    protocol, split = figures["protocol"], figures["protocol"]["split"]
    recalls = [
        row([stage.replace("_", " "), way, *(recall(figures[stage][way], k) for k in protocol["ks"])])
        for stage in ("first_stage", "reranked")
        if stage in figures
        for way in ("t2i", "i2t")
    ]
    negatives = [
        row([kind, f"{found['pairs']:,}", accuracy(found, "cosine"), accuracy(found, "match")])
        for kind, found in figures.get("hard_negatives", {}).items()
    ]
    says = (
        f"Split {split['name']}: {split['images']:,} pictures, {split['captions']:,} captions, hash "
        f"{split['hash']}; ties count {protocol['ties']}; positives: {protocol['positives']}."
    )
    head = ["stage", "direction", *(f"R@{k}, %" for k in protocol["ks"])]
    lines = [says, "", *table(head, recalls)]
    if negatives:
        lines += ["", "Hard negatives: true caption above the false one.", ""]
        lines += table(["kind", "pairs", "cosine, %", "cross-modal heads, %"], negatives)
    return "\n".join(lines)


def recall(found: dict[str, Any], k: int) -> str:
    """R@k in percent, with its 95 % interval where one was drawn."""
    said = f"{found[f'R@{k}']:.1f}"
    bounds = found.get("interval", {}).get(f"R@{k}")
    return said if bounds is None else f"{said} ({bounds[0]:.1f} to {bounds[1]:.1f})"


def accuracy(found: dict[str, Any], score: str) -> str:
    return f"{found[score]['accuracy']:.1f}" if score in found else ""


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: list[str], rows: list[str]) -> list[str]:
    return [row(head), row(["---"] * len(head)), *rows]
