"""Sentences of the two grammars: grammar, variety, and which words speak of which object."""

import re

import pytest

from vlretrieval.data.scenes import Scenes, chinese, english
from vlretrieval.data.scenes.query import Query, Thing
from vlretrieval.data.scenes.vocabulary import COLOURS, PLACES, SHAPES
from vlretrieval.data.scenes.wording import read_marks

RED, BLUE, ORANGE = (list(COLOURS).index(name) for name in ("red", "blue", "orange"))
CIRCLE, STAR, CROSS, HEART, ARROW = (SHAPES.index(name) for name in ("circle", "star", "cross", "heart", "arrow"))
MIDDLE, TOP = (list(PLACES).index(name) for name in ("middle", "top"))


@pytest.fixture(scope="module")
def split():
    return Scenes(test=600, shapes=10, colours=10).split("test")


@pytest.mark.parametrize(
    ("thing", "en", "zh"),
    [
        (Thing(CIRCLE, RED), "a red circle", "一个红色的圆"),
        (Thing(STAR, BLUE, 0), "a small blue star", "一颗蓝色的小星星"),
        (Thing(CROSS, ORANGE), "an orange cross", "一个橙色的十字"),
        (Thing(CROSS, ORANGE, 1), "a large orange cross", "一个橙色的大十字"),
        (Thing(CROSS, RED, quantity=3), "three red crosses", "三个红色的十字"),
        (Thing(HEART, quantity=2), "two hearts", "两颗爱心"),
        (Thing(colour=BLUE, quantity=2), "two blue shapes", "两个蓝色的图形"),
        (Thing(ARROW), "an arrow", "一个箭头"),
    ],
)
def test_phrases_have_their_article_plural_and_measure_word(thing, en, zh):
    assert english.phrase(thing) == en
    assert chinese.phrase(thing) == zh


def test_sentences_of_each_sort_read_as_they_should():
    pair = (Thing(CIRCLE, RED), Thing(STAR, BLUE, quantity=2))
    listing, only = Query(pair), Query(pair, exhaustive=True)
    left = Query((Thing(CIRCLE, RED), Thing(STAR, BLUE)), relation=0)
    placed = Query((Thing(CIRCLE, RED, place=MIDDLE), Thing(STAR, BLUE, place=TOP)))
    said = lambda query, grammar: {grammar.render(query, form) for form in range(60)}
    assert {
        "A red circle and two blue stars.",
        "There is a red circle and two blue stars.",
        "red circle and two blue stars",
    } <= said(listing, english)
    assert {
        "Only a red circle and two blue stars.",
        "A red circle and two blue stars, and nothing else.",
        "Exactly three shapes: a red circle and two blue stars.",
    } <= said(only, english)
    assert {
        "A red circle is to the left of a blue star.",
        "To the left of a blue star there is a red circle.",
        "A red circle left of a blue star.",
    } <= said(left, english)
    assert {
        "A red circle in the middle, and a blue star at the top.",
        "A red circle is in the middle of the picture, and a blue star is at the top.",
        "In the middle of the picture there is a red circle, and a blue star at the top.",
    } <= said(placed, english)
    assert "There are two blue stars and a red circle." in said(Query(pair[::-1]), english)
    assert {"图片里有一个红色的圆和两颗蓝色的星星。", "红色的圆和两颗蓝色的星星"} <= said(listing, chinese)
    assert "只有一个红色的圆和两颗蓝色的星星。" in said(only, chinese)
    assert "一共有三个图形：一个红色的圆和两颗蓝色的星星。" in said(only, chinese)
    assert {"一个红色的圆在一颗蓝色的星星的左边。", "一颗蓝色的星星的左边有一个红色的圆。"} <= said(left, chinese)
    assert "图片的正中间有一个红色的圆，一颗蓝色的星星在上部。" in said(placed, chinese)


def test_every_english_caption_keeps_to_simple_rules_of_writing(split):
    for text in [*split.captions, *split.negatives.texts]:
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", text), text
        assert not re.search(r"[{}]|  | [.,:]|\.\.", text), text
        if text.endswith("."):
            assert text[0].isupper() and text[1:] == text[1:].lower(), text
        else:
            assert text == text.lower(), text
        assert not re.search(r"\b(two|three|four) (\w+ ){0,2}(circle|star|cross|heart|shape)\b", text), text
        assert not re.search(r"there is (only )?(two|three|four)|there are (only )?an? ", text.lower()), text


def test_every_chinese_caption_has_its_measure_words():
    split = Scenes(test=300, language="zh", shapes=10).split("test")
    for text in [*split.captions, *split.negatives.texts]:
        for number, measure, rest in re.findall(r"([一两三四])([个颗弯])((?:..的)?[大小]?[^、，。和在的位]+)", text):
            noun = rest.split("的")[-1].lstrip("大小")
            wanted = "颗" if noun.startswith(("星星", "爱心")) else "弯" if noun.startswith("月牙") else "个"
            assert measure == wanted, (text, number, rest)


def test_captions_are_of_many_forms_and_lengths(split):
    lengths = [len(text.split()) for text in split.captions]
    assert 10 <= sum(lengths) / len(lengths) <= 16
    assert min(lengths) <= 5 and max(lengths) >= 20
    assert len(set(split.captions)) > 0.98 * len(split.captions)
    openings = {" ".join(text.split()[:2]) for text in split.captions if "shape" not in text}
    assert len(openings) > 30


@pytest.mark.parametrize("language", ["en", "zh"])
def test_mentions_point_at_the_objects_that_their_words_describe(language):
    split = Scenes(test=200, language=language).split("test")
    grammar = english if language == "en" else chinese
    for caption, text in enumerate(split.captions):
        draft = split.written.drafts[caption]
        mentions = split.mentions(caption)
        assert len(mentions) == len(draft.query.things)
        scene = split.scenes[split.caption_image[caption]]
        for mention in mentions:
            words = text[mention.start : mention.end].lower()
            thing = next(t for t, o in zip(draft.query.things, draft.objects, strict=True) if o == mention.objects)
            assert words in (grammar.phrase(thing), grammar.phrase(thing, True))
            assert len(mention.objects) == thing.quantity
            for number in mention.objects:
                placed = scene[number]
                if language == "en" and thing.shape >= 0:
                    assert SHAPES[placed.shape] in words
                if language == "en" and thing.colour >= 0:
                    assert list(COLOURS)[placed.colour] in words


def test_marks_leave_the_text_as_it_was():
    query = Query((Thing(CIRCLE, RED), Thing(STAR, BLUE), Thing(CROSS, ORANGE)), relation=2)
    for form in range(30):
        for grammar in (english, chinese):
            plain, spans = read_marks(grammar.render(query, form, True))
            assert plain == grammar.render(query, form)
            assert sorted(thing for thing, _, _ in spans) == [0, 1, 2]
