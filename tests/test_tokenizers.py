"""Tokenizers: every language survives, the end token stays, and what was stored comes back equal."""

import json
import logging
import pickle
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_data import tiny_split

from vlretrieval.data.datasets import tokenise
from vlretrieval.data.packed import PackedStrings, PackedTokens, padded_length
from vlretrieval.data.tokenizers import (
    BpeTokenizer,
    ClipTokenizer,
    HuggingFaceTokenizer,
    pad,
    tokenizer_from_dict,
    tokenizer_hash,
)

CAPTIONS = [
    "A brown dog runs",
    "two dogs run on the sand",
    "雪地中奔跑的狗。",
    "一只狗和一只猫",
    "the dogs are running",
] * 3
HARD = [
    "一只狗在雪地里奔跑。",
    "a dog 🐶 and a family 👨‍👩‍👧",
    "كلب يركض على الرمل",
    "e\u0301t\u00e9",
    "कुत्ता दौड़ रहा है",
    "<pad> <start> </s> [CLS] <|endoftext|>",
    "NA",
    "null",
    "tab\tand\u00a0blank",
]


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return BpeTokenizer(vocab_size=320, context_length=64).fit(CAPTIONS)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(CAPTIONS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    ends = [("[CLS]", made.token_to_id("[CLS]")), ("[SEP]", made.token_to_id("[SEP]"))]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    made.enable_padding(length=30)  # as sentence-transformers ships it: must not lengthen our rows
    made.enable_truncation(4)
    folder = tmp_path_factory.mktemp("tower")
    made.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(str(folder), context_length=16)


@pytest.fixture(params=["bpe", "clip", "hugging_face"])
def tokenizer(request):
    return ClipTokenizer() if request.param == "clip" else request.getfixturevalue(request.param)


def test_rows_start_and_end_and_stay_below_the_vocabulary(tokenizer):
    for row in tokenizer([*CAPTIONS, *HARD, ""]):
        assert row[0] == tokenizer.start_id and row[-1] == tokenizer.end_id
        assert max(row) < tokenizer.vocab_size
    assert tokenizer([""]) == [[tokenizer.start_id, tokenizer.end_id]]
    assert tokenizer([]) == []


SPELT = ["<end_of_text>", "<START_OF_TEXT>", "&lt;end_of_text&gt;", "<|endoftext|>", "[SEP]", "[CLS]", "[PAD]", "</s>"]


@pytest.mark.parametrize("spelt", SPELT)
def test_a_caption_cannot_spell_a_special_token(tokenizer, spelt):
    special = {tokenizer.start_id, tokenizer.end_id}
    for text in (f"a dog {spelt} runs", f"a{spelt}b", spelt * 3, f"{spelt} a dog"):
        (row,) = tokenizer([text])
        assert special.isdisjoint(row[1:-1]), text
        assert len(row) > 2
    plain, spelling = tokenizer(["a dog runs", f"a dog {spelt} runs"])
    assert len(spelling) > len(plain) and spelling[:3] == plain[:3]


def hugging_face_of(model, before, specials, tmp_path) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer, processors

    made = Tokenizer(model)
    made.pre_tokenizer = before
    made.add_special_tokens(list(specials))
    ends = [(name, made.token_to_id(name)) for name in specials[:2]]
    made.post_processor = processors.TemplateProcessing(single=f"{specials[0]} $A {specials[1]}", special_tokens=ends)
    made.save(str(tmp_path / "tokenizer.json"))
    return HuggingFaceTokenizer(str(tmp_path), context_length=32)


def test_nor_where_the_vocabulary_itself_holds_its_spelling(tmp_path):
    from tokenizers import models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<s>", "</s>", "[UNK]", "a", "dog", "<", "/s>"])}
    by_word = models.WordLevel(words, unk_token="[UNK]")
    made = hugging_face_of(by_word, pre_tokenizers.WhitespaceSplit(), ["<s>", "</s>"], tmp_path)
    assert made(["a </s> dog <s>"]) == [[0, 3, 5, 6, 4, 5, 2, 1]]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -2.0) for piece in ("▁", "a", "<", "/", "s", ">"))]
    made = hugging_face_of(models.Unigram(pieces, 0), pre_tokenizers.Metaspace(), ["<s>", "</s>"], tmp_path)
    (row,) = made(["a</s>a<s>"])
    assert row[0] == 1 and row[-1] == 2 and {1, 2}.isdisjoint(row[1:-1])
    assert "".join(pieces[i][0] for i in row[1:-1]).replace("▁", "") == "a</s>a<s>"
    assert made.count_truncated(["</s>" * 3]) == 0 and made.count_truncated(["</s>" * 9]) == 1


def test_the_end_token_may_stand_for_unknown_and_still_cannot_be_spelt(tmp_path):
    """As CLIP's own tokenizer.json has it: one token is end, padding and unknown."""
    from tokenizers import models, pre_tokenizers

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = {**alphabet, "<|startoftext|>": 256, "<|endoftext|>": 257}
    model = models.BPE(words, [], unk_token="<|endoftext|>")
    specials = ["<|startoftext|>", "<|endoftext|>"]
    made = hugging_face_of(model, pre_tokenizers.ByteLevel(add_prefix_space=False), specials, tmp_path)
    (row,) = made(["a <|endoftext|> b"])
    assert row[0] == 256 and row[-1] == 257 and {256, 257}.isdisjoint(row[1:-1])
    letters = {number: letter for letter, number in words.items()}
    assert "".join(letters[i] for i in row[1:-1]) == "aĠ<|endoftext|>Ġb"


def test_a_long_text_is_cut_and_keeps_its_end_token(tokenizer):
    short, long = "a dog", "a dog and a dog " * 50
    row = tokenizer([long])[0]
    assert len(row) == tokenizer.context_length and row[-1] == tokenizer.end_id
    assert tokenizer.count_truncated([short, long, short]) == 1


def test_a_text_that_just_fits_does_not_count_as_cut(tokenizer):
    texts = ["a" + " a" * n for n in range(tokenizer.context_length)]
    lengths = [len(row) for row in tokenizer(texts)]
    longest = max(length for length in lengths[:-1])
    assert longest == tokenizer.context_length
    just = lengths.index(longest)
    assert tokenizer.count_truncated(texts[: just + 1]) == 0
    assert tokenizer.count_truncated(texts[: just + 2]) == 1


def test_what_was_stored_comes_back_equal(tokenizer):
    stored = json.loads(json.dumps(tokenizer.to_dict()))
    again = tokenizer_from_dict(stored)
    assert again([*CAPTIONS, *HARD]) == tokenizer([*CAPTIONS, *HARD])
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer)
    for name in ("vocab_size", "context_length", "pad_id", "start_id", "end_id", "fitted"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert pickle.loads(pickle.dumps(tokenizer))(HARD) == tokenizer(HARD)


@pytest.mark.parametrize("text", HARD)
def test_the_trainable_one_gives_every_text_back(bpe, text):
    assert bpe.decode(bpe([text])[0]) == unicodedata.normalize("NFC", text).lower().strip()


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=12))
def test_no_text_is_unknown_to_the_trainable_one(bpe, text):
    row = bpe([text])[0]
    assert row.count(bpe.start_id) == row.count(bpe.end_id) == 1 and bpe.pad_id not in row
    clean = text.encode("utf-8", "replace").decode()
    assert bpe.decode(row).split() == unicodedata.normalize("NFC", clean).lower().split() or " " not in bpe.decode(row)


def test_composed_and_decomposed_letters_are_one_text(bpe):
    assert bpe(["e\u0301t\u00e9"]) == bpe(["\u00e9te\u0301"])


def test_the_same_captions_always_give_the_same_tokenizer(bpe):
    assert BpeTokenizer(320, 64).fit(iter(CAPTIONS)).to_dict() == bpe.to_dict()


def test_an_unfitted_tokenizer_says_what_to_do():
    with pytest.raises(ValueError, match="not fitted: call .fit"):
        BpeTokenizer()(["a dog"])
    assert not tokenizer_from_dict(BpeTokenizer().to_dict()).fitted


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BpeTokenizer(vocab_size=200), "vocab_size=200 cannot hold 256 bytes"),
        (lambda: ClipTokenizer(context_length=2), "context_length=2 has no room"),
        (lambda: tokenizer_from_dict({"kind": "words"}), "'words' is not known; known are bpe, clip, huggingface"),
        (lambda: HuggingFaceTokenizer("/nowhere"), "/nowhere: no such file"),
        (lambda: HuggingFaceTokenizer(__file__), "not a tokenizer.json"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_padding_is_to_the_longest_and_never_beyond_the_context():
    token_ids, mask = pad([[1, 5, 2], [1, 2]], pad_id=9)
    assert token_ids.tolist() == [[1, 5, 2, 9], [1, 2, 9, 9]]
    assert mask.tolist() == [[True, True, True, False], [True, True, False, False]]
    assert token_ids.dtype == torch.int64
    assert pad([[1] * 77], 0, limit=77)[0].shape == (1, 77)
    assert pad([[1] * 77], 0)[0].shape == (1, 80)
    assert pad([[], []], 0)[1].sum() == 0


@given(
    rows=st.lists(st.lists(st.integers(0, 999), max_size=9), max_size=8),
    multiple=st.integers(1, 5),
    picks=st.lists(st.integers(0, 7), max_size=6),
)
def test_packed_tokens_read_back_as_plain_padding_does(rows, multiple, picks):
    packed = PackedTokens(rows, pad_id=3)
    index = [pick % len(rows) for pick in picks] if rows else []
    ids, mask = packed.gather(np.asarray(index, dtype=np.int64), multiple)
    expected_ids, expected_mask = pad([rows[i] for i in index], 3, multiple)
    assert ids.tolist() == expected_ids.tolist() and mask.tolist() == expected_mask.tolist()


def test_a_missing_row_is_all_padding():
    ids, mask = PackedTokens([[1, 2], [3]], pad_id=0).gather(np.array([[0, -1], [1, -1]]), multiple=1)
    assert ids.tolist() == [[[1, 2], [0, 0]], [[3, 0], [0, 0]]]
    assert mask.sum(-1).tolist() == [[2, 0], [1, 0]]
    assert (padded_length(0, 4), padded_length(1, 4), padded_length(5, 4), padded_length(75, 4, 77)) == (1, 4, 8, 76)


@given(st.lists(st.text(max_size=8)))
def test_packed_strings_are_the_strings(texts):
    packed = PackedStrings(texts)
    assert list(packed) == texts and len(packed) == len(texts) and packed == texts
    assert packed[:2] == texts[:2] and [packed[-1 - i] for i in range(len(texts))] == texts[::-1]


def test_cut_captions_are_counted_and_warned_about_once_a_split(caplog):
    split = tiny_split(images=4, captions=3)
    tokenizer = BpeTokenizer(300, 16).fit(["nothing like it"])
    with caplog.at_level(logging.WARNING):
        tokenise(split, tokenizer)
    expected = tokenizer.count_truncated(split.captions)
    assert expected > 0 and split.notes["captions_cut"] == expected
    assert [f"{expected} of 12 captions" in record.message for record in caplog.records] == [True]
