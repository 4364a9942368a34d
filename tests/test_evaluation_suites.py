"""Hard-negative suites: edits that are false and well formed, and the published files read as they are."""

import json
import random

import numpy as np
import pytest
from PIL import Image

from tests.tiny_retrieval import TRANSFORM, FakeModel, tiny_tokenizer
from vlretrieval.data.splits import Region, Split
from vlretrieval.evaluation.evaluate import Settings, evaluate
from vlretrieval.evaluation.suites import Aro, SugarCrepe, Valse, Winoground, with_text_edits
from vlretrieval.evaluation.suites.text_edits import edits
from vlretrieval.evaluation.suites.winoground import paired_figures
from vlretrieval.evaluation.suites.words import NOUN_CLASS, noun_of, plural


def made(caption, others=(), objects=(), seed=0):
    return dict(edits(caption, others, objects, random.Random(seed)))


@pytest.mark.parametrize(
    ("caption", "kind", "edited"),
    [
        ("A dog chases a cat.", "swap_nouns", "A cat chases a dog."),
        ("an elephant follows a bear", "swap_nouns", "a bear follows an elephant"),
        ("Two dogs chase the horses", "swap_nouns", "Two horses chase the dogs"),
        ("A red ball and a blue car", "swap_adjectives", "A blue ball and a red car"),
        ("a small dog jumps over a large dog", "swap_adjectives", None),  # one small, one large, either way
        ("A boy stands in front of a house", "swap_relation", "A boy stands behind a house"),
        ("a cat to the left of a dog", "swap_relation", "a cat to the right of a dog"),
        ("a man looks over", "swap_relation", None),
        ("A dog and a cat sit.", "swap_nouns", None),  # true both ways round
        ("a dog next to a cat", "swap_nouns", None),
        ("a dog chases dogs", "swap_nouns", None),
        ("a man sees a guy", "swap_nouns", None),  # may be one man
        ("a boy wears a hat", "swap_nouns", None),  # a hat wears nobody, with or without a picture
        ("nothing known here", "replace_noun", None),
    ],
)
def test_an_edit_says_another_thing_or_is_not_made(caption, kind, edited):
    assert made(caption).get(kind) == edited


def test_an_edit_keeps_the_author_s_blanks_articles_and_capitals():
    """Else the false captions are known by their spacing, without a look at the picture."""
    assert made("A dog chases a cat on a union flag .")["swap_nouns"] == "A cat chases a dog on a union flag ."
    assert made("a boy 's dog chases a big Cat .")["swap_nouns"] == "a boy 's Cat chases a big dog ."
    assert made("Dogs chase cats")["swap_nouns"] == "Cats chase dogs"
    assert made("A orange hat .", seed=1)["replace_colour"].endswith(" hat .")


def test_a_person_becomes_one_of_the_other_sex_and_only_where_no_word_tells():
    for seed in range(10):
        assert made("a man runs", seed=seed)["replace_noun"] in ("a woman runs", "a girl runs")
    assert "replace_noun" not in made("a man runs", ["a woman and a girl watch"])
    assert "replace_noun" not in made("a woman shows her hand")
    assert not {"replace_colour", "swap_adjectives"} & set(made("a black man and a white woman"))


def test_a_noun_is_replaced_by_one_of_its_class_that_nothing_names():
    for seed in range(30):
        edited = made("A dog runs on the grass.", ["a puppy and a cat"], ["horse", "sheep"], seed)["replace_noun"]
        word = next(noun_of(token.strip(".")) for token in edited.split() if noun_of(token.strip(".")))
        assert NOUN_CLASS[word] == "animal" and word not in ("dog", "cat", "horse", "sheep")
        assert edited.startswith("An " if word[0] in "aeiou" else "A ")


def test_a_plural_stays_a_plural():
    for seed in range(10):
        assert made("women in the rain", seed=seed)["replace_noun"].split()[0] in ("men", "boys")
        assert made("ponies in the rain", seed=seed)["replace_noun"].split()[0] in map(plural, NOUN_CLASS)


def test_a_colour_is_replaced_by_one_that_no_caption_names():
    found = {made("a red shirt", ["a blue hat"], seed=seed)["replace_colour"] for seed in range(40)}
    assert len(found) > 3 and not any("red" in text or "blue" in text for text in found)


def test_a_thing_is_left_out_only_where_it_is_known_to_be_there():
    caption = "A dog and a black cat lie on a bed."
    assert made(caption, ["a cat sleeps"]).get("leave_out") is None, "the verb would no longer agree"
    assert made("A dog and a black cat on a bed.").get("leave_out") is None
    assert made("A dog and a black cat on a bed.", ["a cat sleeps"])["leave_out"] == "A dog on a bed."
    assert made("A man with a dog and a cat.", objects=["cat"])["leave_out"] == "A man with a dog."


def photos(captions, regions=None):
    return Split(
        "test", [f"i{n}" for n in range(len(captions))], [c for row in captions for c in row],
        np.repeat(np.arange(len(captions)), [len(row) for row in captions]),
        lambda index: Image.new("RGB", (8, 8), (40 * index % 255, 9, 90)),
        regions=regions,
    )  # fmt: skip


def test_a_split_gets_negatives_that_no_caption_of_its_picture_equals():
    split = photos(
        [["a dog chases a cat", "a cat chases a dog"], ["a red hat", "a man rides a horse in front of a bus"]]
    )
    edited = with_text_edits(split)
    found = list(zip(edited.negatives.kinds, edited.negatives.texts, edited.negatives.caption, strict=True))
    assert not any(kind == "swap_nouns" and caption < 2 for kind, _, caption in found), "the other caption is true"
    assert {kind for kind, *_ in found} >= {"replace_noun", "replace_colour", "swap_relation", "swap_nouns"}
    assert with_text_edits(split).negatives.texts == edited.negatives.texts, "the same every time"
    split._stamp = lambda contents: f"files {contents}"
    assert with_text_edits(split).stamp(True) == "files True", "stored features of the pictures hold for it too"
    assert edited.hash == split.hash
    tokenizer = tiny_tokenizer(split)
    figures = evaluate(FakeModel(), edited, tokenizer, TRANSFORM, Settings(bootstrap=10)).figures
    assert figures["hard_negatives"]["all"]["pairs"] == len(found)


def test_object_lists_confirm_what_is_left_out():
    regions = {0: (Region("cat", (0, 0, 1, 1)),)}
    split = photos([["a dog and a cat."], ["a dog and a cat."]], lambda index: regions.get(index, ()))
    found = with_text_edits(split, ["leave_out"]).negatives
    assert list(found.texts) == ["a dog."] and found.caption.tolist() == [0]


def test_captions_that_cannot_be_edited_are_an_error_not_an_empty_suite():
    with pytest.raises(ValueError, match="no caption of split 'test' could be edited"):
        with_text_edits(photos([["一只狗"], ["qwerty"]]))
    with pytest.raises(ValueError, match="choose from swap_nouns"):
        with_text_edits(photos([["a dog"]]), ["swap"])


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    (folder / "coco").mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (20, 30), (60 * number, 10, 99)).save(folder / f"{number}.jpg")
    Image.new("RGB", (20, 30), "red").save(folder / "coco" / "7.jpg")
    return folder


def test_sugarcrepe_files_make_one_kind_each(tmp_path, pictures):
    files = tmp_path / "sugar"
    files.mkdir()
    for kind, key in (("swap_obj", "0"), ("add_att", "1")):
        entries = {
            str(n): {"filename": f"{n}.jpg", "caption": "a dog", "negative_caption": f"{kind} {n}"} for n in (3, 1)
        }
        (files / f"{kind}.json").write_text(json.dumps(entries | {key: {**entries["3"], "caption": "a cat"}}))
    split = SugarCrepe(str(files), str(pictures)).split("test")
    assert set(split.negatives.kinds) == {"swap_obj", "add_att"} and len(split.negatives) >= 5
    assert sorted(split.image_ids) == ["1.jpg", "3.jpg"] and split.picture(0).size == (20, 30)
    tokenizer = tiny_tokenizer(split)
    found = evaluate(FakeModel(), split, tokenizer, TRANSFORM, Settings(bootstrap=10)).figures["hard_negatives"]
    assert found["all"]["pairs"] == len(split.negatives) and "match" in found["swap_obj"]
    with pytest.raises(ValueError, match="no split 'val' in a suite"):
        SugarCrepe(str(files), str(pictures)).split("val")


def test_aro_pictures_are_cut_to_their_box(tmp_path, pictures):
    entry = {"image_path": "1.jpg", "bbox_x": 2, "bbox_y": 4, "bbox_w": 10, "bbox_h": 8}
    entry |= {"true_caption": "the dog is on the bed", "false_caption": "the bed is on the dog", "relation_name": "on"}
    (tmp_path / "visual_genome_relation.json").write_text(json.dumps([entry, {**entry, "bbox_w": 5}]))
    split = Aro(str(tmp_path), str(pictures)).split("test")
    assert [split.picture(i).size for i in range(2)] == [(10, 8), (5, 8)]
    assert list(split.negatives.kinds) == ["visual_genome_relation"] * 2
    assert list(Aro(str(tmp_path), str(pictures), by="relation").split("test").negatives.kinds) == ["on", "on"]
    # boxes are drawn by hand: an edge may lie beyond the picture's (never black pixels), not the whole box
    (tmp_path / "visual_genome_relation.json").write_text(json.dumps([{**entry, "bbox_w": 500, "bbox_x": -3}]))
    assert Aro(str(tmp_path), str(pictures)).split("test").picture(0).size == (20, 8)
    for wrong in ({"bbox_x": 20}, {"bbox_w": 0}, {"bbox_h": -9}):
        (tmp_path / "visual_genome_relation.json").write_text(json.dumps([{**entry, **wrong}]))
        with pytest.raises(ValueError, match=r"1.jpg: the box \(.*\) holds nothing of the picture of 20 x 30"):
            Aro(str(tmp_path), str(pictures)).split("test").picture(0)
    (tmp_path / "visual_genome_relation.json").write_text(json.dumps([{**entry, "bbox_w": None}]))
    with pytest.raises(ValueError, match="entry 0 has no box"):
        Aro(str(tmp_path), str(pictures)).split("test")


def test_valse_keeps_what_the_annotators_confirmed(tmp_path, pictures):
    def entry(votes, image="1.jpg"):
        return {
            "image_file": image,
            "caption": "two dogs",
            "foil": "three dogs",
            "mturk": {"caption": votes},
            "dataset": "coco",
        }

    (tmp_path / "counting.json").write_text(json.dumps({"a": entry(3), "b": entry(1), "c": entry(2, "7.jpg")}))
    assert len(Valse(str(tmp_path), str(pictures)).split("test").negatives) == 2
    split = Valse(str(tmp_path), str(pictures), valid_only=False).split("test")
    (tmp_path / "counting.json").write_text(json.dumps({"a": entry(1)}))
    with pytest.raises(ValueError, match="no trial was confirmed by two of three annotators"):
        Valse(str(tmp_path), str(pictures)).split("test")
    (tmp_path / "counting.json").write_text(json.dumps({"a": entry(3) | {"mturk": [3]}}))
    with pytest.raises(ValueError, match="a has no mturk.caption votes"):
        Valse(str(tmp_path), str(pictures)).split("test")
    assert len(split.negatives) == 3 and split.image_ids[1] == "coco/7.jpg" and split.picture(1).size == (20, 30)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("{}", "holds no entries"),
        ('{"a": 3}', "entry a is a int"),
        ('{"a": {"filename": "1.jpg", "caption": ""}}', "entry a has no text 'caption'"),
    ],
)
def test_a_suite_file_that_is_wrong_is_named(tmp_path, pictures, content, message):
    (tmp_path / "swap_obj.json").write_text(content)
    with pytest.raises(ValueError, match=rf"swap_obj.json.*{message}"):
        SugarCrepe(str(tmp_path), str(pictures)).split("test")


def test_winoground_scores_text_image_and_group(tmp_path, pictures):
    lines = [
        {
            "image_0": f"{n}",
            "image_1": f"{n + 1}",
            "caption_0": "some plants",
            "caption_1": "plants some",
            "tag": f"t{n % 2}",
        }
        for n in range(3)
    ]
    (tmp_path / "examples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    split = Winoground(str(tmp_path / "examples.jsonl"), str(pictures)).split("test")
    assert split.image_ids[3] == "1.1" and split.picture(3).size == (20, 30) and split.tags == ["t0", "t1", "t0"]
    found = evaluate(FakeModel(), split, tiny_tokenizer(split), TRANSFORM, Settings(bootstrap=10)).figures["winoground"]
    assert set(found) == {"cosine", "match"} and found["match"]["t0"]["examples"] == 2
    # the same words in any order are one to the fake model: equal scores are wrong
    assert found["cosine"]["all"]["text"] == found["match"]["all"]["text"] == found["cosine"]["all"]["group"] == 0


def test_winoground_by_hand():
    right = np.array([[[3, 1], [1, 3]], [[3, 1], [2, 4]], [[1, 3], [3, 1]], [[3, 3], [1, 4]]], float)
    found = paired_figures(lambda image, text: right[image // 2, image % 2, text % 2], ["a"] * 4, replicates=0)["all"]
    assert (found["text"], found["image"], found["group"]) == (50, 75, 50)


def test_a_line_of_winoground_that_is_wrong_is_named(tmp_path, pictures):
    (tmp_path / "examples.jsonl").write_text('{"image_0": "1"}\n')
    with pytest.raises(ValueError, match=r"examples.jsonl:1: not an example of Winoground"):
        Winoground(str(tmp_path / "examples.jsonl"), str(pictures)).split("test")


def test_pictures_are_classified_by_the_names_of_their_folders(tmp_path, run_command, tiny_checkpoint):
    for number, name in enumerate(("red_circle", "blue_square", "green_star")):
        (tmp_path / "classes" / name).mkdir(parents=True)
        for copy in range(3):
            Image.new("RGB", (32, 32), (80 * number, 20 * copy, 9)).save(tmp_path / "classes" / name / f"{copy}.png")
    words = [f"checkpoint={tiny_checkpoint}", "images=classes", "output=found.json", "device=cpu", "bootstrap=20"]
    status, out, err = run_command("classify", *words, "templates=['a {}', 'the {}']")
    assert status == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["pictures"] == 9 and found["top_5"] == 100 and len(found["by_class"]) == 3
    assert found["mean_of_classes"] == pytest.approx(found["top_1"])
    status, _, err = run_command("classify", *words, "templates=['a photo']")
    assert status == 2 and "has no {} for the class name" in err
    status, _, err = run_command("classify", *words[:1], "images=nowhere")
    assert status == 2 and "images=nowhere: no such folder" in err
