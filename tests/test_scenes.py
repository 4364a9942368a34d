"""The built-in data set as a whole: what a seed fixes, what splits share, what is refused, what the pictures show."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlretrieval.data.scenes import Scenes
from vlretrieval.data.scenes.draw import box_of, draw_scene
from vlretrieval.data.scenes.layout import Placed, tenth
from vlretrieval.data.scenes.vocabulary import COLOURS, DIAMETERS, SHAPES


def test_the_same_arguments_give_the_same_split_to_the_last_pixel():
    one, other = Scenes(seed=5, test=40).split("test"), Scenes(seed=5, test=40).split("test")
    assert one.hash == other.hash
    assert one.negatives.texts == other.negatives.texts
    assert all(one.picture(k).tobytes() == other.picture(k).tobytes() for k in range(40))
    assert Scenes(seed=6, test=40).split("test").hash != one.hash


def test_a_split_travels_to_other_processes():
    split = Scenes(test=20).split("test")
    there = pickle.loads(pickle.dumps(split))
    assert there.hash == split.hash and there.picture(7).tobytes() == split.picture(7).tobytes()


def test_a_longer_split_begins_with_the_shorter_one_and_leaves_the_others_alone():
    # 1,000 scenes are written at once: across that border too.
    short, long = Scenes(train=90, test=30), Scenes(train=1100, test=30)
    a, b = short.split("train"), long.split("train")
    assert b.captions[: len(a.captions)] == a.captions
    assert b.negatives.texts[: len(a.negatives)] == a.negatives.texts
    assert b.picture(89).tobytes() == a.picture(89).tobytes()
    assert short.split("test").hash == long.split("test").hash


def content(scene: tuple[Placed, ...]) -> tuple:
    return tuple(sorted(placed[:3] for placed in scene))


def test_no_content_is_in_two_splits_and_no_scene_twice_in_one():
    # Few kinds of objects, so that chance alone would let many contents fall into several splits.
    source = Scenes(train=400, val=60, test=60, shapes=3, colours=3)
    contents = {name: {content(scene) for scene in source.split(name).scenes} for name in ("train", "val", "test")}
    assert not contents["train"] & contents["test"]
    assert not contents["train"] & contents["val"]
    assert not contents["val"] & contents["test"]
    for name in contents:
        scenes = [tuple(sorted(placed[:4] for placed in scene)) for scene in source.split(name).scenes]
        assert len(set(scenes)) == len(scenes)


@given(st.permutations([(0, 1, 0), (3, 2, 1), (3, 2, 1), (7, 0, 1)]))
@settings(max_examples=10, deadline=None)
def test_the_order_of_objects_does_not_change_their_split(kinds):
    assert tenth(kinds) == tenth([(0, 1, 0), (3, 2, 1), (3, 2, 1), (7, 0, 1)])


def test_a_scene_has_five_different_captions():
    split = Scenes(test=100).split("test")
    for number in range(100):
        assert len(set(split.captions[5 * number : 5 * number + 5])) == 5
    assert (split.caption_image == np.repeat(np.arange(100), 5)).all()


def test_one_kind_of_caption_five_times_still_gives_five_different_ones():
    split = Scenes(test=50, captions=["only"] * 5).split("test")
    assert all(len(set(split.captions[k : k + 5])) == 5 for k in range(0, 250, 5))
    assert set(split.written.kinds) == {"only"}


def test_the_language_changes_the_words_and_nothing_else():
    english, chinese = (Scenes(test=50, language=language).split("test") for language in ("en", "zh"))
    assert english.written.drafts == chinese.written.drafts
    assert (english.positives == chinese.positives).all()
    assert english.negatives.kinds == chinese.negatives.kinds
    assert all(text.isascii() for text in english.captions)
    assert not any(letter.isascii() and letter.isalpha() for text in chinese.captions for letter in text)
    both = Scenes(test=50, language="both").split("test")
    assert both.captions[0::5] == english.captions[0::5] and both.captions[1::5] == chinese.captions[1::5]


@pytest.mark.parametrize("placement", ["grid", "free"])
@pytest.mark.parametrize("image_size", [48, 64, 97])
def test_objects_lie_inside_and_apart_and_where_their_boxes_say(placement, image_size):
    jitter = 1.0 if placement == "grid" else None
    split = Scenes(val=60, placement=placement, jitter=jitter, image_size=image_size).split("val")
    for number in range(60):
        pixels = np.asarray(split.picture(number)).astype(int)
        assert pixels.shape == (image_size, image_size, 3)
        ground = np.median(pixels.reshape(-1, 3), axis=0)
        painted = np.abs(pixels - ground).max(-1) > 24
        covered = np.zeros_like(painted)
        for region in split.regions(number):
            x0, y0, x1, y1 = region.box
            assert 0 <= x0 < x1 <= image_size and 0 <= y0 < y1 <= image_size
            # Half a pixel each way: centres are rounded to quarters, and edges are soft.
            columns, rows = slice(max(0, round(x0 - 1)), round(x1 + 1)), slice(max(0, round(y0 - 1)), round(y1 + 1))
            inside = painted[rows, columns]
            assert inside.any(0).sum() >= x1 - x0 - 3 and inside.any(1).sum() >= y1 - y0 - 3, region
            covered[rows, columns] = True
        assert not (painted & ~covered).any(), "paint outside of every box"
        boxes = [box_of(SHAPES.index("circle"), o.size, o.x, o.y, 1) for o in split.scenes[number]]
        for k, a in enumerate(boxes):
            for b in boxes[:k]:
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_an_object_has_its_colour():
    split = Scenes(val=80, shapes=["circle", "square", "diamond", "heart"], colours=10).split("val")
    table = np.array(list(COLOURS.values()))
    for number, scene in enumerate(split.scenes):
        pixels = np.asarray(split.picture(number)).astype(int)
        for placed in scene:
            seen = pixels[int(placed.y * 64), int(placed.x * 64)]
            assert np.abs(table - seen).sum(1).argmin() == placed.colour


def test_no_shape_shares_most_of_its_paint_with_another():
    for size, diameter in enumerate(DIAMETERS):
        stencils = []
        for shape in range(len(SHAPES)):
            scene = (Placed(shape, 6, size, 4, 0.5, 0.5),)
            picture = draw_scene(scene, 64, (255, 255, 255), np.zeros((1, 3), dtype=int))
            stencils.append(255 - np.asarray(picture.convert("L")).astype(float))
        for k, a in enumerate(stencils):
            for b in stencils[:k]:
                assert np.minimum(a, b).sum() / np.maximum(a, b).sum() < 0.86, diameter


def test_regions_speak_the_captions_language():
    assert Scenes(val=3).split("val").regions(0)[0].label.split()[0] in ("small", "large")
    assert "色的" in Scenes(val=3, language="zh").split("val").regions(0)[0].label


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": -1}, "train=-1 must be 0 or more"),
        ({"image_size": 16}, "image_size=16 is too small"),
        ({"min_objects": 5}, "min_objects=5, max_objects=4 must be"),
        ({"max_objects": 9}, "max_objects=9 must be"),
        ({"shapes": 0}, "shapes=0 must be from 1 to 10"),
        ({"shapes": ["circle", "blob"]}, r"shapes=\['circle', 'blob'\] must be different names out of \['circle'"),
        ({"colours": ["red", "red"]}, "must be different names"),
        ({"colours": "red"}, "colours='red' must be a list"),
        ({"placement": "ring"}, "placement='ring' must be 'grid' or 'free'"),
        ({"placement": "free", "jitter": 0.5}, "jitter=0.5 has no effect with placement='free'"),
        ({"jitter": 1.5}, "jitter=1.5 must be from 0 to 1"),
        ({"repeat": -0.1}, "repeat=-0.1 must be from 0 to 1"),
        ({"captions": ["poem"]}, r"captions=\['poem'\] must be one or more of \['objects'"),
        ({"captions": []}, r"captions=\[\] must be one or more"),
        ({"language": "fr"}, r"language='fr' must be one of \['en', 'zh', 'both'\]"),
        ({"shapes": 1, "colours": 1}, "are 1 kinds of object, which max_objects=4 could use up"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_with_the_way_out(settings, message):
    with pytest.raises(ValueError, match=message):
        Scenes(**settings)


def test_an_unknown_or_empty_split_is_refused_by_name():
    source = Scenes(train=10, val=0, test=5)
    with pytest.raises(ValueError, match=r"'dev' does not exist; there are: train \(10 scenes\), test \(5 scenes\)"):
        source.split("dev")
    with pytest.raises(ValueError, match="split 'val' has no scenes"):
        source.split("val")


def test_more_scenes_than_there_are_is_refused():
    source = Scenes(test=5000, shapes=1, colours=3, max_objects=2)
    with pytest.raises(ValueError, match="test=5000 scenes asked for, but these settings give about"):
        source.split("test")


def test_the_fingerprint_is_plain_data_and_tells_settings_apart():
    prints = [
        Scenes(), Scenes(seed=1), Scenes(jitter=0.1), Scenes(language="zh"), Scenes(shapes=["star", "ring"]),
        Scenes(placement="free"), Scenes(captions=["only", "relation"]),
    ]  # fmt: skip
    assert len({json.dumps(source.fingerprint(), sort_keys=True) for source in prints}) == len(prints)
    assert Scenes(shapes=2).fingerprint() == Scenes(shapes=["circle", "square"]).fingerprint()
