"""Zero-shot classification: a class is the mean of its sentences' embeddings, a picture goes to the nearest (CLIP)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlretrieval.data.images import SUFFIXES, open_image
from vlretrieval.data.splits import Split
from vlretrieval.evaluation.encode import encode_images, encode_texts, evaluating
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.sharing import Processes
from vlretrieval.metrics.bootstrap import bootstrap_means, cluster_sums, interval
from vlretrieval.metrics.ranks import rank_both
from vlretrieval.metrics.scores import IntArray, unit_rows

TEMPLATES = ("a photo of a {}.",)


def class_folders(folder: str | Path) -> tuple[list[Path], list[str], IntArray]:
    """Pictures in one folder a class: (files, class names, class of each file), both sorted by name.

    Raises:
        ValueError: no such folder, fewer than two classes, or a class without a picture.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"images={folder}: no such folder")
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    if len(classes) < 2:
        raise ValueError(f"images={folder} has {len(classes)} folders; one folder a class is wanted, two or more")
    files: list[Path] = []
    labels: list[int] = []
    for label, path in enumerate(classes):
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        if not found:
            raise ValueError(f"{path} holds no picture")
        files += found
        labels += [label] * len(found)
    return files, [path.name for path in classes], np.array(labels)


def sentences(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Every class in every template, class by class; a _ in a name is a blank.

    Raises:
        ValueError: a template without its {}.
    """
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"templates: {template!r} has no {{}} for the class name")
    if not templates:
        raise ValueError("templates is empty; give one or more, such as 'a photo of a {}.'")
    return [template.format(name.replace("_", " ")) for name in names for template in templates]


def classify(
    model: Any,
    tokenizer: Any,
    transform: Any,
    files: Sequence[Path],
    names: Sequence[str],
    labels: IntArray,
    *,
    templates: Sequence[str] = TEMPLATES,
    batch_size: int = 64,
    precision: str = "float32",
    replicates: int = 1000,
    seed: int = 0,
    processes: Processes = Processes(),  # noqa: B008  (frozen)
) -> dict[str, Any]:
    """Accuracy in percent: of the first and of the first five answers, and the mean over classes; ties count against.

    Args:
        files: the pictures. names: the classes. labels: (N,) class of each picture.
        templates: sentences with {} for a class; their unit embeddings are averaged and scaled again.
    """
    texts = sentences(names, templates)
    # a split of pictures whose captions are the sentences: all the encoding there is, and no more
    split = Split(
        "pictures", [str(file) for file in files], texts, np.zeros(len(texts), dtype=np.int64),
        lambda index: open_image(files[index]),
    )  # fmt: skip
    inputs = Inputs(split, tokenizer, transform)
    with evaluating(model, precision) as device:
        images = encode_images(model, inputs, device, batch_size=batch_size, processes=processes)
        words = encode_texts(model, inputs, inputs.captions, device, batch_size=4 * batch_size, processes=processes)
    means = words.embedding[:].reshape(len(names), len(templates), -1).mean(1)
    classes = unit_rows(means, "class")[:]
    _, ranks = rank_both(classes, images.embedding, np.stack([labels, np.arange(len(files))], axis=1))
    right = 100 * np.stack([ranks.hits(1), ranks.hits(5)], axis=1)
    by_class = np.array([right[labels == label, 0].mean() for label in range(len(names))])
    figures: dict[str, Any] = {
        "top_1": float(right[:, 0].mean()),
        "top_5": float(right[:, 1].mean()),
        "mean_of_classes": float(by_class.mean()),
        "pictures": len(files),
        "classes": len(names),
        "templates": list(templates),
        "by_class": dict(zip(names, by_class.tolist(), strict=True)),
        "ties": "against the model",
        **inputs.description(),
    }
    if replicates:
        drawn = bootstrap_means(*cluster_sums(right, np.arange(len(files)), len(files)), replicates, seed)
        figures["interval"] = dict(zip(("top_1", "top_5"), interval(drawn).tolist(), strict=True))
    return figures
