"""Search pictures by a text, or texts by a picture, with an exported model."""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from vlretrieval.commands.launch import command


@command("search", literal=("model", "images", "text", "image", "texts"))
def main(cfg: DictConfig) -> None:
    """``vlretrieval-search model=FOLDER images=DIR "text=a red circle"``"""
    by_text, by_image = (cfg.images, cfg.text), (cfg.image, cfg.texts)
    if not (all(by_text) and not any(by_image) or all(by_image) and not any(by_text)):
        raise ValueError('give either images=DIR and "text=...", or image=FILE and texts=FILE')
    from vlretrieval import load_model
    from vlretrieval.deploy import search

    search.check(cfg.top, cfg.top_k, cfg.text)
    if not isinstance(cfg.weight, int | float | None):
        raise ValueError(f"weight={cfg.weight} is not a number; null takes the export's own")
    files = search.find_images(cfg.images) if cfg.text else []
    texts = search.read_texts(cfg.texts) if cfg.texts else []
    model = load_model(cfg.model)
    cut = model.tokenizer.count_truncated([cfg.text] if cfg.text else texts)
    if cut:
        longest = model.tokenizer.context_length
        print(f"note: {cut} text(s) longer than {longest} tokens, cut there", file=sys.stderr)
    if cfg.text:
        gallery = search.read_gallery(model, files, cfg.batch_size)
        for file, reason in gallery.broken:
            print(f"note: left out {file}: {reason}", file=sys.stderr)
        hits, size = search.search_images(model, cfg.text, gallery, cfg.top, cfg.top_k, cfg.weight), len(gallery.files)
    else:
        hits, size = search.search_texts(model, cfg.image, texts, cfg.top, cfg.top_k, cfg.weight), len(texts)
    weight = model.rerank_weight if cfg.weight is None else cfg.weight
    print_hits(hits, size, min(cfg.top_k, size) if model.can_match else 0, weight)


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
