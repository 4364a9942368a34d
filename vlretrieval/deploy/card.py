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


def model_card(checkpoint: Checkpoint, weights: dict[str, Tensor], run: Path) -> str:
    """README.md of the exported folder, in Markdown."""
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
            measured(run),
            "",
        ]
    )


def trained_on(config: dict[str, Any]) -> str:
    source = config.get("data", {}).get("source", {})
    name = str(source.get("_target_", "unknown")).rpartition(".")[2]
    return name


def measured(run: Path) -> str:
    """The table of the run's metrics.json; says so when there is none."""
    found = next((p for p in (run / "metrics.json", run / "evaluation" / "metrics.json") if p.is_file()), None)
    if found is None:
        return "Not evaluated: there was no metrics.json in the run folder at the time of export."
    try:
        metrics = json.loads(found.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{found} cannot be read: {error}") from None
    rows = [f"| {name} | {value} |" for name, value in flat(metrics)]
    return "\n".join([f"From `{found.name}` of the run.", "", "| | |", "|---|---|", *rows])


def flat(node: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Numbers and short texts of nested dicts as (dotted name, text)."""
    if isinstance(node, dict):
        return [row for key, value in node.items() for row in flat(value, f"{prefix}{key}.")]
    if isinstance(node, bool) or node is None:
        return [(prefix[:-1], str(node).lower())]
    if isinstance(node, int | float):
        return [(prefix[:-1], f"{node:.4g}" if isinstance(node, float) else f"{node:,}")]
    if isinstance(node, str) and len(node) < 120:
        return [(prefix[:-1], node)]
    return []
