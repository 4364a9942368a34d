"""Search: a shortlist by cosine, ordered by the cross-modal heads; limits and broken files are stated."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import CAPTIONS
from hypothesis import given, settings
from hypothesis import strategies as st

import vlretrieval
from vlretrieval.deploy.export import export
from vlretrieval.deploy.search import Heads, find_images, ranked, read_gallery, read_texts, search_images, search_texts
from vlretrieval.evaluation.rerank import fuse


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=12),
    st.integers(1, 15),
    st.integers(0, 15),
)
def test_ranking_equals_sorting_by_hand(scores: list[tuple[int, int]], top: int, top_k: int) -> None:
    cosines, matches = torch.tensor(scores).float().T
    by_hand = sorted(range(len(scores)), key=lambda i: (-scores[i][0], i))
    head = sorted(by_hand[:top_k], key=lambda i: (-scores[i][1], by_hand.index(i)))
    expected = (head + by_hand[top_k:])[:top]
    hits = ranked([str(i) for i in range(len(scores))], cosines, Heads(lambda rows: matches[rows]), top, top_k)
    assert [int(hit.item) for hit in hits] == expected
    assert all((hit.match is not None) == (int(hit.item) in head) for hit in hits)


def test_re_ranking_everything_equals_ranking_by_match(tiny_export: Path, photos: Path) -> None:
    model = vlretrieval.load_model(tiny_export)
    gallery = read_gallery(model, find_images(photos))
    hits = search_images(model, CAPTIONS[0], gallery, top=5, top_k=5)
    match = model.match(gallery.files, CAPTIONS[:1])[:, 0]
    assert [hit.item for hit in hits] == [str(gallery.files[i]) for i in match.argsort(descending=True)]
    back = search_texts(model, gallery.files[0], CAPTIONS, top=3, top_k=3)
    assert [hit.item for hit in back] == [
        CAPTIONS[i] for i in model.match(gallery.files[:1], CAPTIONS)[0].argsort(descending=True)
    ]


def test_both_scores_together_order_as_evaluation_does(tiny_export: Path, photos: Path) -> None:
    model = vlretrieval.load_model(tiny_export)
    gallery = read_gallery(model, find_images(photos))
    cosines = (gallery.embeddings @ model.encode_texts(CAPTIONS[:1])[0]).numpy()
    logits = model.match(gallery.files, CAPTIONS[:1])[:, 0].numpy()
    for weight in (0.0, 0.5, 8.0):
        scores, _ = fuse(cosines[None], logits[None], float(model.model.logit_scale), weight)
        hits = search_images(model, CAPTIONS[0], gallery, top=5, top_k=5, weight=weight)
        assert [hit.item for hit in hits] == [str(gallery.files[i]) for i in (-scores[0]).argsort(kind="stable")]
        assert hits[0].score == pytest.approx(scores[0].max())


def test_asking_for_more_than_the_gallery_holds_gives_the_gallery(tiny_export: Path, photos: Path) -> None:
    model = vlretrieval.load_model(tiny_export)
    gallery = read_gallery(model, find_images(photos))
    assert len(search_images(model, "a star", gallery, top=100, top_k=1000)) == 5


def test_broken_pictures_are_left_out_and_told(tiny_export: Path, photos: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    (folder / "broken.jpg").write_bytes(b"not a picture")
    model = vlretrieval.load_model(tiny_export)
    gallery = read_gallery(model, find_images(folder), batch_size=2)
    assert len(gallery.files) == len(gallery.embeddings) == 5
    assert [(file.name, "known kind" in reason) for file, reason in gallery.broken] == [("broken.jpg", True)]
    with pytest.raises(ValueError, match="none of 1 pictures can be read"):
        read_gallery(model, [folder / "broken.jpg"])


def test_a_text_file_is_read_line_by_line_and_faults_name_it(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\ufeffa star\n\n  两个红色的圆  \n", encoding="utf-8")
    assert read_texts(path) == ["a star", "两个红色的圆"]
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="texts.txt: not UTF-8 at byte 3"):
        read_texts(path)
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no text"):
        read_texts(path)


def test_the_search_command_says_which_score_is_which(
    run_command: Callable[..., tuple[int, str, str]], tiny_export: Path, photos: Path
) -> None:
    status, out, err = run_command(
        "search", f"model={tiny_export}", f"images={photos}", "text=it's red, isn't it?", "top=3"
    )
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "3 of 5: the best 5 by cosine, ordered by match" and lines[1].split() == [
        "rank",
        "match",
        "cosine",
    ]
    assert len(lines) == 5 and lines[2].endswith(".png")


def test_the_search_command_finds_texts_for_a_picture(
    run_command: Callable[..., tuple[int, str, str]], tiny_export: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(CAPTIONS))
    status, out, _ = run_command(
        "search", f"model={tiny_export}", f"image={photos}/0_red.png", "texts=texts.txt", "rerank.top_k=0"
    )
    assert status == 0 and "3 of 3: by cosine" in out and "match" not in out


def test_a_dual_encoder_is_searched_by_cosine(
    run_command: Callable[..., tuple[int, str, str]], dual_checkpoint: Path, photos: Path, tmp_path: Path
) -> None:
    export(dual_checkpoint, tmp_path / "dual")
    status, out, _ = run_command("search", "model=dual", f"images={photos}", "text=a star")
    assert status == 0 and "5 of 5: by cosine" in out


def test_a_text_longer_than_the_context_is_cut_and_told(
    run_command: Callable[..., tuple[int, str, str]], tiny_export: Path, photos: Path
) -> None:
    long = "a red circle " * 50
    status, out, err = run_command("search", f"model={tiny_export}", f"images={photos}", f"text={long}")
    assert status == 0 and "note: 1 text(s) longer than 24 tokens, cut there" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["images=IMAGES"], "give index=DIR and a text, or images=DIR"),
        (["images=IMAGES", "text=a", "image=b"], "or images=DIR and"),
        (["images=nowhere", "text=a"], "images=nowhere: no such folder"),
        (["images=EMPTY", "text=a"], "holds no picture"),
        (["image=gone.png", "texts=gone.txt"], "texts=gone.txt: no such file"),
        (["images=IMAGES", "text=a", "top=0"], "top=0: at least 1"),
        (["images=IMAGES", "text=a", "rerank.top_k=-1"], "top_k=-1 is negative"),
        (["images=IMAGES", "text=  "], "text is blank"),
        (["images=IMAGES", "text=a", "rerank.weight=much"], "rerank.weight=much is not a number"),
        (["images=IMAGES", "text=a", "model=nowhere"], "model=nowhere: no such folder"),
        (["images=IMAGES", "text=a", "tpo=3"], "no key 'tpo' in the config; did you mean top"),
    ],
)
def test_what_is_wrong_with_a_search_is_one_line(
    run_command: Callable[..., tuple[int, str, str]],
    tiny_export: Path,
    photos: Path,
    tmp_path: Path,
    words: list[str],
    said: str,
) -> None:
    (tmp_path / "empty").mkdir()
    words = [word.replace("IMAGES", str(photos)).replace("EMPTY", "empty") for word in words]
    if not any(word.startswith("model=") for word in words):
        words.append(f"model={tiny_export}")
    status, out, err = run_command("search", *words)
    assert status == 2 and out == ""
    assert len(err.splitlines()) == 1 and err.startswith("vlretrieval-search: error: ") and said in err
