"""What needs the model a second time: logits of shortlisted pairs, of hard negatives, of Winoground's examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vlretrieval.evaluation.encode import Images, Tell, Texts, encode_texts, silent
from vlretrieval.evaluation.hard_negatives import NegativePairs, draw_negatives
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.outcome import Gallery, Shortlists
from vlretrieval.evaluation.rerank import NOISE, score_pairs, unique_pairs
from vlretrieval.evaluation.sharing import Processes
from vlretrieval.evaluation.shortlist import shortlist
from vlretrieval.evaluation.suites.winoground import paired_figures
from vlretrieval.metrics.scores import IntArray, pair_scores

Floats = npt.NDArray[np.float64]

COSINE_NOISE = 1e-6  # the same text in another batch: its cosine moves by about so much in float32


def match_shortlists(
    model: Any,
    gallery: Gallery,
    top_k: int,
    device: torch.device,
    processes: Processes = Processes(),  # noqa: B008  (frozen)
    tell: Tell = silent,
) -> Shortlists:
    """Both directions' shortlists and the matching logits of their pairs, each pair scored once."""
    images, texts, positives = gallery.images, gallery.texts, gallery.split.positives
    images_of, t2i_cosine = shortlist(texts.embedding, images.embedding, top_k, positives)
    turned = positives[:, ::-1][np.lexsort((positives[:, 0], positives[:, 1]))]
    texts_of, i2t_cosine = shortlist(images.embedding, texts.embedding, top_k, turned)
    count = len(texts.embedding)
    each_text, each_image = np.arange(count)[:, None], np.arange(len(images.embedding))[:, None]
    pairs = unique_pairs(images_of, texts_of, count)
    logits = score_pairs(model, images, texts, pairs // count, pairs % count, device, processes=processes, tell=tell)

    def look_up(image: IntArray, text: IntArray) -> Floats:
        return logits[np.searchsorted(pairs, image * count + text)]

    return Shortlists(
        (images_of, t2i_cosine, look_up(images_of, each_text)),
        (texts_of, i2t_cosine, look_up(each_image, texts_of)),
    )


def score_negatives(
    model: Any,
    inputs: Inputs,
    images: Images,
    texts: Texts,
    settings: Any,
    device: torch.device,
    processes: Processes,
    tell: Tell = silent,
) -> NegativePairs:
    """The split's hard negatives, by cosine and (where the model has the heads) by matching logit."""
    split = inputs.split
    rows = draw_negatives(split.negatives, settings.negatives_per_kind, settings.seed)
    caption = split.negatives.caption[rows]
    image = split.caption_image[caption]  # never goes down: captions and their negatives are grouped by image
    heads = model.crossmodal is not None
    packed = inputs.tokens([split.negatives.texts[row] for row in rows])
    false = encode_texts(
        model, inputs, packed, device, batch_size=4 * settings.batch_size, tokens=heads, processes=processes,
        name="hard negative", features=inputs.features.get("negatives"), at=rows, tell=tell,
    )  # fmt: skip
    scores = {
        "cosine": (
            pair_scores(texts.embedding, images.embedding, caption, image),
            pair_scores(false.embedding, images.embedding, np.arange(len(rows)), image) + COSINE_NOISE,
        )
    }
    if heads:
        asked, at = np.unique(caption, return_inverse=True)
        true = score_pairs(
            model, images, texts, split.caption_image[asked], asked, device, processes=processes, tell=tell
        )
        wrong = score_pairs(model, images, false, image, np.arange(len(rows)), device, processes=processes, tell=tell)
        scores["match"] = (true[at], wrong + NOISE * np.maximum(1, np.abs(wrong)))
    kinds = np.array([split.negatives.kinds[row] for row in rows])
    return NegativePairs(kinds, image, {name: true > wrong for name, (true, wrong) in scores.items()})


def score_examples(
    model: Any,
    images: Images,
    texts: Texts,
    tags: list[str],
    settings: Any,
    device: torch.device,
    processes: Processes,
) -> dict[str, Any]:
    """Winoground's three scores, by cosine and (where the model has the heads) by matching logit."""
    options: dict[str, Any] = {"replicates": settings.bootstrap, "seed": settings.seed}
    found = {
        "cosine": paired_figures(
            lambda image, text: pair_scores(images.embedding, texts.embedding, image, text),
            tags,
            noise=COSINE_NOISE,
            **options,
        )
    }
    if model.crossmodal is not None:
        found["match"] = paired_figures(
            lambda image, text: score_pairs(model, images, texts, image, text, device, processes=processes),
            tags,
            noise=NOISE,
            **options,
        )
    return found
