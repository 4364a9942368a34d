"""Search pictures by a text or a picture, or texts by a picture, with an index or an exported model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from vlretrieval.commands.launch import command

PATHS = ("index", "model", "images", "text", "image", "texts", "queries", "output")


@command("search", literal=PATHS, bare="text")
def main(cfg: DictConfig) -> None:
    """``vlretrieval-search index=INDEX "a red circle"``"""
    if cfg.format not in ("table", "json", "html"):
        raise ValueError(f"format={cfg.format} is not known; choose table, json or html")
    if not isinstance(cfg.rerank.weight, int | float | None):
        raise ValueError(f"rerank.weight={cfg.rerank.weight} is not a number; null takes the export's own")
    if cfg.index:
        by_index(cfg)
    else:
        without_index(cfg)


def by_index(cfg: DictConfig) -> None:
    """Pictures of an index, for texts or for pictures."""
    if cfg.texts or bool(cfg.text) + bool(cfg.image) + bool(cfg.queries) != 1:
        raise ValueError('with index= give one of "text", image=FILE and queries=FILE')
    from vlretrieval.deploy.index.answers import Answer, html_sheet, json_of, table
    from vlretrieval.deploy.index.opened import Index
    from vlretrieval.deploy.search import check, read_texts

    check(cfg.top, cfg.rerank.top_k, cfg.text)
    texts = [cfg.text] if cfg.text else read_texts(cfg.queries, "queries") if cfg.queries else []
    index = Index.open(cfg.index, model=cfg.model, nearest=cfg.nearest, images=cfg.images)
    if not index.complete:
        print(f"note: {cfg.index} is not finished; run vlretrieval-index again to add the rest", file=sys.stderr)
    tell_cut(index.model, texts)
    weight = cfg.rerank.weight
    if cfg.image:
        answers = [Answer(str(cfg.image), found) for found in index.search_images([cfg.image], cfg.top)]
    else:
        answers = []
        for text in texts:
            found = index.search_texts([text], cfg.top, cfg.rerank.top_k, weight)[0]
            answers.append(Answer(text, found))
    if cfg.format == "html":
        said = html_sheet(index, answers)
    elif cfg.format == "json":
        said = json_of(index, answers)
    else:
        said = table(index, answers, index.model.rerank_weight if weight is None else weight)
    if cfg.output:
        part = Path(f"{cfg.output}.part")
        part.write_text(said, encoding="utf-8")
        part.replace(cfg.output)
        print(cfg.output)
    else:
        print(said)


def without_index(cfg: DictConfig) -> None:
    """A folder embedded for this one search, or texts for a picture."""
    by_text, by_image = (cfg.images, cfg.text), (cfg.image, cfg.texts)
    if not (all(by_text) and not any(by_image) or all(by_image) and not any(by_text)):
        raise ValueError('give index=DIR and a text, or images=DIR and "text=...", or image=FILE and texts=FILE')
    if cfg.queries or cfg.format != "table" or cfg.output or cfg.nearest != "exact":
        raise ValueError("queries, format, output and nearest need an index; make one with vlretrieval-index")
    if not cfg.model:
        raise ValueError("model has no value; give model=FOLDER")
    from vlretrieval import load_model
    from vlretrieval.deploy import search

    top_k, weight = cfg.rerank.top_k, cfg.rerank.weight
    search.check(cfg.top, top_k, cfg.text)
    files = search.find_images(cfg.images) if cfg.text else []
    texts = search.read_texts(cfg.texts) if cfg.texts else []
    model = load_model(cfg.model)
    tell_cut(model, [cfg.text] if cfg.text else texts)
    if cfg.text:
        gallery = search.read_gallery(model, files, cfg.batch_size)
        for file, reason in gallery.broken:
            print(f"note: left out {file}: {reason}", file=sys.stderr)
        hits, size = search.search_images(model, cfg.text, gallery, cfg.top, top_k, weight), len(gallery.files)
    else:
        hits, size = search.search_texts(model, cfg.image, texts, cfg.top, top_k, weight), len(texts)
    print_hits(
        hits, size, min(top_k, size) if model.can_match else 0, model.rerank_weight if weight is None else weight
    )


def tell_cut(model: Any, texts: list[str]) -> None:
    """A note on texts that do not fit the model's context."""
    cut = model.tokenizer.count_truncated(texts)
    if cut:
        longest = model.tokenizer.context_length
        print(f"note: {cut} text(s) longer than {longest} tokens, cut there", file=sys.stderr)


def print_hits(hits: list, size: int, shortlist: int, weight: float | None) -> None:
    """A line that says what the order is by, then one line a result."""
    by = "match" if weight is None else f"score = logit_scale * cosine + {weight:g} * match"
    print(
        f"{len(hits)} of {size}: " + (f"the best {shortlist} by cosine, ordered by {by}" if shortlist else "by cosine")
    )
    columns = ["cosine"] if not shortlist else ["match", "cosine"] if weight is None else ["score", "match", "cosine"]
    print("rank" + "".join(f"{name:>10}" for name in columns))
    for rank, hit in enumerate(hits, 1):
        values = (getattr(hit, name) for name in columns)
        print(f"{rank:>4}" + "".join(f"{'-' if v is None else f'{v:.4f}':>10}" for v in values) + f"   {hit.item}")


if __name__ == "__main__":
    main()
