"""The model card of an export: what it is, how to use it, what was measured. Its numbers come from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from vlretrieval.deploy.checkpoint import Checkpoint

USE = """\
```python
import vlretrieval

model = vlretrieval.load_model("PATH OF THIS FOLDER")
images = model.encode_images(["a.jpg", "b.jpg"])        # (2, E) unit vectors
texts = model.encode_texts(["a red circle"])            # (1, E)
cosines = images @ texts.T
"""


NOT_MEASURED = "Not evaluated: the run folder held no figures of these weights at the time of export."


def model_card(checkpoint: Checkpoint, weights: dict[str, Tensor], figures: list[dict[str, Any]]) -> str:
    """README.md of the exported folder, in Markdown; ``figures`` as of :func:`evaluations`."""
    config = checkpoint.config
    heads = config.get("heads", {})
    crossed = bool(heads.get("text_to_image") or heads.get("image_to_text"))
    use = USE + ('logits = model.match(["a.jpg"], ["a red circle"])  # cross-modal heads\n' if crossed else "") + "```"
    return "\n".join(
        [
            "---",
            "library_name: vlretrieval",
            "pipeline_tag: image-text-retrieval",
            "---",
            f"# {config.get('name', 'vlretrieval model')}",
            "",
            f"An image-text retrieval model, trained for {checkpoint.step} steps by vlretrieval {checkpoint.version}.",
            "Two encoders and cross-modal heads." if crossed else "A plain dual encoder: no cross-modal heads.",
            "",
            "| | |",
            "|---|---|",
            f"| parameters | {sum(value.numel() for value in weights.values()):,} |",
            *(f"| heads.{name} | {value} |" for name, value in heads.items()),
            f"| vocabulary | {checkpoint.tokenizer.vocab_size:,} |",
            f"| longest text, tokens | {checkpoint.tokenizer.context_length} |",
            f"| picture side, pixels | {config['model']['image_encoder']['image_size']} |",
            f"| trained on | {trained_on(config)} |",
            "",
            "## Use",
            "",
            use,
            "",
            "## Measured",
            "",
            "\n\n".join(map(tables, figures)) or NOT_MEASURED,
            "",
        ]
    )


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
        row([stage.replace("_", " "), way, *(f"{figures[stage][way][f'R@{k}']:.1f}" for k in protocol["ks"])])
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


def accuracy(found: dict[str, Any], score: str) -> str:
    return f"{found[score]['accuracy']:.1f}" if score in found else ""


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: list[str], rows: list[str]) -> list[str]:
    return [row(head), row(["---"] * len(head)), *rows]
