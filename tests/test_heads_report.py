"""The command and its page: what it writes, that the page needs nothing beside itself, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tiny_heads import SIDE, copy_head, heads_config, heads_model, scene_inputs, scene_split
from vlretrieval.data.tokenizers import BpeTokenizer
from vlretrieval.heads.examples import examples_of
from vlretrieval.heads.laboratory import Ablation, Findings, Plan, examine
from vlretrieval.heads.page.charts import Bar, bars, curves
from vlretrieval.heads.page.scale import apart, ticks
from vlretrieval.heads.page.write import write_report
from vlretrieval.heads.pictures import write_pictures
from vlretrieval.heads.plain import plain
from vlretrieval.heads.verdict import verdict
from vlretrieval.training.watch.heads import WatchHeads

SMALL = Ablation(pictures=8, captions=1, top_k=2, replicates=20, points=2)
PLAN = Plan(pictures=12, alike_pictures=8, examples=2, ablation=SMALL)


def findings(model: Any = None, name: str = "tiny", plan: Plan = PLAN, **scenes: Any) -> Findings:
    split = scene_split(**scenes)
    inputs = scene_inputs(split)
    return examine(model or heads_model(), split, inputs.tokenizer, inputs.transform, plan, name=name)


@pytest.fixture(scope="module")
def found() -> Findings:
    return findings()


class Page(HTMLParser):
    """Every tag with its attributes, what is open at the end, and the text of scripts."""

    VOID = {"meta", "img", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def test_an_examination_leaves_the_model_as_it_was_and_knows_every_head(found: Findings) -> None:
    model = heads_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = findings(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(made.heads) == len(made.roles) == 30 and len(made.examples) == 2
    assert len([drop for drop in made.drops if drop.closure.scope == "head"]) == 30
    assert all(made.drop_of(head) is not None for head in made.heads)
    assert verdict(made)[0].startswith("30 heads in 8 layers: ")
    assert plain(made)["heads"] == plain(found)["heads"]  # the same draws


def test_the_page_is_whole_and_asks_for_nothing(found: Findings, tmp_path: Path) -> None:
    path = write_report(tmp_path / "a" / "report.html", [found])
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open and not page.wrong
    for tag, attributes in page.tags:
        for name in ("src", "href", "data", "action", "srcset"):
            address = attributes.get(name)
            assert address is None or address.startswith(("data:image/", "#")), (tag, address)
    assert "fetch(" not in text and "import(" not in text and not re.search(r"url\(|@import|https?://", text)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:  # links of the page lead somewhere in it
        if tag == "a":
            assert (attributes["href"] or "")[1:] in ids
    assert path.stat().st_size < 1_000_000


def test_the_pages_data_are_the_maps(found: Findings, tmp_path: Path) -> None:
    page = Page(write_report(tmp_path / "report.html", [found]).read_text(encoding="utf-8"))
    data = json.loads(page.scripts[0])
    assert len(data["examples"]) == 2 and len(data["models"][0]["layers"]) == 8
    example = data["examples"][0]
    assert example["side"] == 3 and example["words"][0] == "[start]" and example["named"]
    for name, maps in example["maps"][0].items():
        heads, rows, columns = maps["shape"]
        assert heads == found.layers[name].heads and len(maps["largest"]) == heads * rows
        assert rows == {"words": len(example["words"]), "patches": 9, "caption": 1, "class": 1}[maps["rows"]]
        assert columns == {"words": len(example["words"]), "patches": 9}[maps["columns"]]
    rows = [attributes for tag, attributes in page.tags if tag == "tr" and "data-head" in attributes]
    assert [json.loads(row["data-head"] or "")[1:] for row in rows] == [list(head) for head in found.heads]
    assert all(row["tabindex"] == "0" for row in rows)


def test_a_caption_cannot_end_the_script_and_chinese_is_chinese(tmp_path: Path) -> None:
    made = findings(plan=Plan(pictures=8, examples=1, ablation=Ablation(pictures=0)), language="zh")
    made.examples[0].words[1] = "</script><b>红"
    text = write_report(tmp_path / "report.html", [made, made]).read_text(encoding="utf-8")
    assert "nan" not in re.sub(r"<script.*", "", text, flags=re.DOTALL)
    assert "</script><b>" not in text and Page(text).scripts and '<meta charset="utf-8">' in text
    assert json.loads(Page(text).scripts[0])["examples"][0]["words"][1] == "</script><b>红"
    assert any("一" <= letter <= "鿿" for letter in text)
    assert "What closing heads costs" not in text  # what was left out is not on the page


def test_examples_maps_are_the_recorded_ones_by_words(found: Findings) -> None:
    inputs = scene_inputs()
    example = examples_of(heads_model(), inputs, np.array([3]))[0]
    assert example.caption == inputs.split.captions[3]
    cross = example.layers["crossmodal.text_to_image.blocks.0.cross"]
    assert (cross.rows, cross.columns) == ("words", "patches") and cross.maps.shape == (4, len(example.words), 9)
    assert (cross.maps.sum(-1) < 1).all()  # the class token has the rest
    text = example.layers["text_encoder.transformer.blocks.0.attention"]
    assert np.allclose(text.maps.sum(-1), 1, atol=1e-5)
    back = example.layers["crossmodal.image_to_text.blocks.0.cross"]
    assert (back.rows, back.columns) == ("patches", "words") and np.allclose(back.maps.sum(-1), 1, atol=1e-5)
    assert 0 < example.telling_word < len(example.words) - 1


def test_image_to_text_heads_alone_tell_how_many_patches_a_picture_has(tmp_path: Path) -> None:
    """No layer has the picture's patches as keys: those of the image encoder are not there, and text queries none."""
    model = heads_model(crossmodal__text_to_image=0, image_encoder__depth=0)
    found = findings(model, plan=Plan(pictures=8, examples=1, ablation=Ablation(pictures=0)))
    assert found.examples[0].side == 3
    assert {path.stem for path in write_pictures(found, tmp_path)} >= {"example_1_heads"}


def test_pictures_are_written_and_not_empty(found: Findings, tmp_path: Path) -> None:
    paths = write_pictures(found, tmp_path, [(1, found), (2, found)])
    names = {path.stem for path in paths}
    assert {"example_1_heads", "example_1_words", "layers", "likeness", "closures", "pruning"} <= names
    assert {"training_entropy", "training_grounding"} <= names
    for path in paths:
        with Image.open(path) as picture:
            assert picture.width > 200 and len(picture.convert("RGB").getcolors(1 << 20)) > 4


def test_two_models_and_several_steps_stand_on_one_page(found: Findings, tmp_path: Path) -> None:
    other = findings(heads_model(seed=1), name="other")
    text = write_report(tmp_path / "r.html", [found, other], evolution=[(5, other), (9, found)]).read_text("utf-8")
    assert "Beside other" in text and "While it was trained" in text and "step 5" in text
    page = Page(text)
    assert not page.open and not page.wrong
    assert len(json.loads(page.scripts[0])["models"]) == 2


def test_axes_have_round_numbers_that_hold_the_values() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(-3.2, 4.1)[0] <= -3.2 and ticks(-3.2, 4.1)[-1] >= 4.1
    assert len(ticks(5, 5)) >= 2
    assert apart([1, 2, 50], 10, 100) == [1, 11, 50]
    assert apart([90, 95, 96], 10, 100) == [80, 90, 100]
    assert bars([Bar("a <b>", 1, 0.5, 2), Bar("b", -1, -2, 1)], "x").count("<rect") == 2
    assert "a &lt;b&gt;" in bars([Bar("a <b>", 1, 0.5, 2)], "x")
    assert curves({"": [(1.0, 2.0), (2.0, 3.0)]}, "x", "y").count("<circle") == 2


def test_training_is_told_of_a_copied_pair_once(caplog: pytest.LogCaptureFixture) -> None:
    model = heads_model()
    watch = WatchHeads(scene_inputs(), 1, pairs=8)
    assert not any(line.startswith("text, layer 1") for line in watch.look(model))
    copy_head(model.text_encoder.transformer.blocks[0].attention, 0, 2)

    class Trainer:
        current_epoch, strategy = 0, None

    class Task:
        pass

    task: Any = Task()
    task.model = model
    for epoch in range(2):
        Trainer.current_epoch = epoch
        watch.on_train_epoch_end(Trainer(), task)  # type: ignore[arg-type]
    said = [record.message for record in caplog.records if "text, layer 1: heads 1 and 3" in record.message]
    assert len(said) == 1 and said[0].startswith("epoch 1: ")
    with pytest.raises(ValueError, match="every_n_epochs=0"):
        WatchHeads(scene_inputs(), 0)


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/tiny/checkpoints/best.ckpt of the tiny model, which was trained on drawn scenes."""
    path = tmp_path_factory.mktemp("runs") / "tiny" / "checkpoints" / "best.ckpt"
    path.parent.mkdir(parents=True)
    model = heads_model()
    tokenizer = BpeTokenizer(vocab_size=400, context_length=32).fit(scene_split().captions)
    scenes = {"_target_": "vlretrieval.data.scenes.Scenes", "train": 40, "val": 20, "test": 0, "image_size": SIDE}
    config = {
        "model": heads_config(),
        "heads": {"text": 4, "image": 4, "text_to_image": 4, "image_to_text": 2, "kv": None},
        "data": {"resize": "squash", "source": scenes},
    }
    content = {
        "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
        "vlretrieval": {"version": "0", "config": config, "tokenizer": tokenizer.to_dict(), "step": 3},
    }
    torch.save(content, path)
    return path


QUICK = ("pictures=8", "alike_pictures=4", "examples=1", "device=cpu", "png=false")
FEW = ("ablation.pictures=6", "ablation.captions=1", "ablation.top_k=2", "ablation.points=2", "ablation.replicates=10")

Run = Callable[..., tuple[int, str, str]]


def test_the_command_writes_the_page_and_the_figures(run_command: Run, checkpoint: Path, tmp_path: Path) -> None:
    status, out, err = run_command("heads", f"checkpoint={checkpoint}", f"output={tmp_path}/out", *QUICK, *FEW)
    assert status == 0, err
    assert "30 heads in 8 layers" in out and "report.html" in out
    figures = json.loads((tmp_path / "out" / "heads.json").read_text())[0]
    assert len(figures["heads"]) == 30 and figures["curve"] and figures["rule"]["sink"]
    assert (tmp_path / "out" / "report.html").stat().st_size > 20_000


def test_pruning_writes_a_checkpoint_that_the_command_examines_again(
    run_command: Run, checkpoint: Path, tmp_path: Path
) -> None:
    words = (f"output={tmp_path}/out", *QUICK, *FEW)
    status, out, err = run_command("heads", f"checkpoint={checkpoint}", "prune.heads=20", *words)
    assert status == 0, err
    assert "20 of 30 heads left" in out or "heads left" in out
    made = tmp_path / "out" / "pruned.ckpt"
    figures = json.loads(made.with_suffix(".json").read_text())
    assert figures["after"]["parameters"] < figures["before"]["parameters"] and figures["open"] == 20
    status, out, err = run_command(
        "heads", f"checkpoint={made}", f"output={tmp_path}/again", "ablation.pictures=0", *QUICK
    )
    assert status == 0, err


@pytest.mark.parametrize("change", ["convert.kv=2", "gates.penalty=l1"])
def test_other_changes_write_checkpoints_too(run_command: Run, checkpoint: Path, tmp_path: Path, change: str) -> None:
    words = (f"output={tmp_path}/out", "gates.steps=2", "gates.batch_size=4", "gates.pictures=8", *QUICK, *FEW)
    status, out, err = run_command("heads", f"checkpoint={checkpoint}", change, *words)
    assert status == 0, err
    assert "before: R@1" in out and "after: R@1" in out
    if change.startswith("convert"):
        assert "heads.kv=2 init_from=" in out and (tmp_path / "out" / "kv2.ckpt").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("prune.heads=30",), "prune.heads=30: the model has 30 heads; leave from 1 to 29"),
        (("prune.heads=2", "convert.kv=1"), "one change at a time"),
        (("convert.kv=1", "ablation.pictures=0"), "ablation.pictures=0 with convert.kv: recall before and after"),
        (("convert.kv=3",), "does not divide"),
        (("rule.sink=2.0",), "sink=2.0 must be a share"),
        (("gates.penalty=l3",), "choose l0 or l1"),
        (("split=night",), "split 'night' does not exist"),
        (("ablation.by=luck",), "choose drops, recall or gradient"),
        (("pictures=0",), "pictures=0"),
    ],
)
def test_what_cannot_be_is_one_line(run_command: Run, checkpoint: Path, words: tuple[str, ...], says: str) -> None:
    status, _, err = run_command("heads", f"checkpoint={checkpoint}", "device=cpu", *words)
    assert status == 2 and says in err and len(err.strip().splitlines()) == 1, err
