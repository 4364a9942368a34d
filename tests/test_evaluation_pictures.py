"""Sheets of queries and answers: right ones are marked, letters without a font are told, heads show where they look."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_retrieval import TRANSFORM, FakeModel, tiny_split, tiny_tokenizer
from tiny_training import tiny_batch, tiny_model

from vlretrieval.data.splits import Split
from vlretrieval.evaluation import fonts
from vlretrieval.evaluation.evaluate import Settings, evaluate
from vlretrieval.evaluation.head_maps import head_maps
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.picture_sheet import RIGHT, SHOWN, WRONG, Sheet, picture_sheet, true_of
from vlretrieval.training.watch.pictures import Pictures

PRIVATE = "\ue123\ue456"  # letters of private use, which no font of a system has to have


def sheet_of(split: Split, top_k: int = 0, font: str | None = None, queries: int = 3) -> Sheet:
    tokenizer = tiny_tokenizer(split)
    model = FakeModel()
    model.crossmodal.text_to_image = model.crossmodal.image_to_text = None
    inputs = Inputs(split, tokenizer, TRANSFORM)
    settings = Settings(top_k=top_k, bootstrap=0, hard_negatives=False)
    outcome = evaluate(model, split, tokenizer, TRANSFORM, settings, inputs=inputs)
    return picture_sheet(outcome, inputs, model, queries=queries, title="epoch 4", beside="a.txt", font=font)


def answers_said(text: str) -> list[tuple[str, list[tuple[bool, str]]]]:
    """The text of a sheet as (query, [(said to be right, answer)])."""
    found: list[tuple[str, list[tuple[bool, str]]]] = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith(("caption ", "picture ")):
            found.append((line, []))
        elif len(words) > 2 and words[0].isdigit() and words[1] in ("right", "wrong"):
            answer = words[3].strip(":") if words[2] == "caption" else words[2]
            found[-1][1].append((words[1] == "right", answer))
    return found


@pytest.mark.parametrize("top_k", [0, 4])
def test_what_is_right_by_the_truth_of_the_split_is_marked_right(top_k: int) -> None:
    split = tiny_split(positives=np.array([[0, 3], [0, 5]]))
    said = answers_said(sheet_of(split, top_k).text)
    assert len(said) == 6 and all(len(found) == SHOWN for _, found in said)
    for query, found in said:
        if query.startswith("caption"):
            good = {split.image_ids[i] for i in true_of(split, int(query.split()[1].strip(":")), 0)}
        else:
            good = {str(c) for c in true_of(split, split.image_ids.index(query.split()[1]), 1)}
        assert [right for right, _ in found] == [answer in good for _, answer in found]


def test_the_picture_shows_both_colours_where_both_occur() -> None:
    sheet = sheet_of(tiny_split())
    colours = {colour for _, colour in sheet.picture.getcolors(1 << 24) or []}
    marks = [tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in (RIGHT, WRONG)]
    said = {right for _, found in answers_said(sheet.text) for right, _ in found}
    assert [mark in colours for mark in marks] == [True in said, False in said] and False in said


def renamed(captions: str) -> Split:
    """The tiny split with the same caption everywhere."""
    split = tiny_split(negatives=False)
    split.captions = [captions] * len(split.captions)
    return split


def test_captions_that_no_font_can_draw_are_told_and_stand_in_the_text(tmp_path: Path) -> None:
    sheet = sheet_of(renamed(PRIVATE))
    assert sheet.unseen > 3 and PRIVATE in sheet.text
    path = sheet.write(tmp_path / "pictures" / "epoch_004.png")
    assert Image.open(path).size == sheet.picture.size
    assert PRIVATE in path.with_suffix(".txt").read_text(encoding="utf-8")
    assert sorted(p.name for p in path.parent.iterdir()) == ["epoch_004.png", "epoch_004.txt"]
    assert sheet_of(renamed("a red circle")).unseen == 0


def test_a_font_has_its_letters_or_not() -> None:
    latin = fonts.font_for("a red circle", 13)
    assert latin is not None and fonts.has_letters(latin, "abc") and not fonts.has_letters(latin, PRIVATE)
    assert fonts.font_for(PRIVATE, 13) is None
    with pytest.raises(ValueError, match=r"pictures.font=.*cannot be read as a font"):
        fonts.font_for("a", 13, __file__)


def test_a_script_that_pillow_s_own_font_lacks_is_found_among_the_systems() -> None:
    text = "красный круг"
    if not any("DejaVuSans" in file for file in fonts.system_fonts()):
        pytest.skip("this system has no font with Cyrillic letters")
    font = fonts.font_for(text, 13)
    assert font is not None and fonts.has_letters(font, "круг")


def test_chinese_is_drawn_where_a_font_has_it_and_told_where_none_has() -> None:
    text = "一个红色的圆在蓝色方块上方"
    font = fonts.font_for(text, 13)
    sheet = sheet_of(renamed(text))
    assert (sheet.unseen == 0) == (font is not None)


def test_there_is_a_map_for_every_cross_modal_head_between_0_and_1() -> None:
    model, batch = tiny_model().eval(), tiny_batch()
    maps = head_maps(model, batch.pixels[:1], batch.token_ids[:1], batch.token_mask[:1])
    assert [name for name, _ in maps] == [
        *(f"text-to-image, layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2)),
        *(f"image-to-text, layer 1, head {head}" for head in (1, 2)),
    ]
    for _, weights in maps:
        assert weights.shape == (4, 4) and weights.min() == 0 and weights.max() == pytest.approx(1)
    crossings = [m for m in model.modules() if hasattr(m, "observer")]
    assert all(m.observer is None for m in crossings)
    assert head_maps(tiny_model(0, 0), batch.pixels[:1], batch.token_ids[:1], batch.token_mask[:1]) == []


def test_a_map_is_bright_where_the_head_was_made_to_look() -> None:
    model, batch = tiny_model(image_to_text=0).eval(), tiny_batch()
    pixels = batch.pixels[:1]
    cross = model.crossmodal.text_to_image.blocks[0].cross
    with torch.no_grad():  # the head likes keys along the direction of one patch
        kept = model.crossmodal.text_to_image.keep(model.encode_image(pixels).tokens)[0]
        key = kept.key[0, 0]  # (P, D)
        far = (key - key.mean(0)).norm(dim=-1).argmax()
        cross.q.weight[: cross.head_dim] = 0
        cross.q.bias[: cross.head_dim] = 100 * (key[far] - key.mean(0))
    (_, weights), *_ = head_maps(model, pixels, batch.token_ids[:1], batch.token_mask[:1])
    prefix = len(key) - 16  # a class token comes before the patches
    assert int(far) < prefix or int(weights.argmax()) == int(far) - prefix


def test_a_full_disk_costs_the_sheet_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    split = tiny_split(negatives=False)
    tokenizer = tiny_tokenizer(split)
    inputs = Inputs(split, tokenizer, TRANSFORM)
    model = FakeModel()
    model.crossmodal = None
    outcome = evaluate(model, split, tokenizer, TRANSFORM, Settings(bootstrap=0), inputs=inputs)
    (tmp_path / "pictures").write_text("in the way")
    Pictures(tmp_path / "pictures", inputs, 1, queries=2)(model, outcome, 1, False)
    assert "could not be written" in caplog.text
