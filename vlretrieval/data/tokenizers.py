"""Text to token ids: one contract, three tokenizers.

Padding is a step of its own (``pad``), so that a batch is only as long as its longest caption.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vlretrieval.data.packed import padded_length


@runtime_checkable
class Tokenizer(Protocol):
    """Texts in, lists of ids out: start, text, end, cut to ``context_length`` with the end token kept."""

    vocab_size: int
    context_length: int

    @property
    def pad_id(self) -> int: ...

    @property
    def start_id(self) -> int: ...

    @property
    def end_id(self) -> int: ...

    @property
    def fitted(self) -> bool:
        """False only for a trainable tokenizer before its ``fit``."""
        ...

    def __call__(self, texts: Sequence[str]) -> list[list[int]]: ...

    def count_truncated(self, texts: Sequence[str]) -> int:
        """How many of ``texts`` do not fit into ``context_length``."""
        ...

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Which letters ``text[start:end]`` each id of its row stands for; (0, 0) for the start token, and for the end
        token the text's end. Ids that together spell one letter all have that letter."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which ``tokenizer_from_dict`` makes an equal tokenizer."""
        ...


def pad(
    ids: Sequence[Sequence[int]], pad_id: int, multiple: int = 4, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token lists as one rectangle.

    Args:
        ids: B lists of ids.
        pad_id: id written beyond a list's end.
        multiple: the length is rounded up to it, so that few shapes occur.
        limit: the context length; rounding never goes beyond it.

    Returns:
        token_ids (B, L) int64 and token_mask (B, L) bool, True where there is a token; L is the longest of the batch.
    """
    length = padded_length(max(map(len, ids), default=0), multiple, limit)
    token_ids = np.full((len(ids), length), pad_id, dtype=np.int64)
    mask = np.zeros((len(ids), length), dtype=bool)
    for row, tokens in enumerate(ids):
        token_ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = True
    return torch.from_numpy(token_ids), torch.from_numpy(mask)


def tokenizer_from_dict(data: dict[str, Any]) -> Tokenizer:
    """The tokenizer that ``to_dict`` described. Reads data, runs nothing."""
    kinds = {kind.kind: kind for kind in (BpeTokenizer, ClipTokenizer, HuggingFaceTokenizer)}
    kind = data.get("kind")
    if kind not in kinds:
        raise ValueError(f"tokenizer kind {kind!r} is not known; known are {', '.join(kinds)}")
    return kinds[kind].from_dict(data)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """First 16 hex digits of the sha256 of ``to_dict()``: two results are comparable only if it is equal."""
    return hashlib.sha256(json.dumps(tokenizer.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def _check_context(context_length: int) -> None:
    if context_length < 3:
        raise ValueError(f"context_length={context_length} has no room for start, one token and end; use at least 3")


def _framed(rows: Iterable[Sequence[int]], start: int, end: int, context_length: int) -> list[list[int]]:
    return [[start, *row[: context_length - 2], end] for row in rows]


def _framed_offsets(inner: Sequence[tuple[int, int]], text: str, context_length: int) -> list[tuple[int, int]]:
    return [(0, 0), *inner[: context_length - 2], (len(text), len(text))]


def _without_blanks(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans without the blanks that a token may begin with."""
    shorter = []
    for start, end in spans:
        while start < end and text[start].isspace():
            start += 1
        shorter.append((start, end))
    return shorter


class BpeTokenizer:
    """A small byte-level BPE learnt from the training captions: any language, and no unknown word can exist.

    Ids: 0 pad, 1 start, 2 end, then 256 bytes, then what was learnt. The three special tokens have no spelling, so
    no caption can contain one.

    Args:
        vocab_size: the most ids, at least 259; the model is built for this many even where the captions yield fewer.
        context_length: longest row, start and end included.
        lowercase: fold case before anything else.
    """

    kind = "bpe"
    pad_id, start_id, end_id = 0, 1, 2
    _SPECIAL = 3

    def __init__(self, vocab_size: int = 512, context_length: int = 64, lowercase: bool = True) -> None:
        if vocab_size < self._SPECIAL + 256:
            raise ValueError(f"vocab_size={vocab_size} cannot hold 256 bytes and 3 special tokens; use at least 259")
        _check_context(context_length)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.lowercase = lowercase
        self._model: dict[str, Any] | None = None

    @property
    def fitted(self) -> bool:
        """Whether ``fit`` was called, or the tokenizer came from a checkpoint."""
        return self._model is not None

    def fit(self, captions: Iterable[str]) -> "BpeTokenizer":
        """Learn the merges from ``captions``, which must be those of the training split alone."""
        from tokenizers import trainers

        engine = _bpe_engine({}, [], self.lowercase)
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size - self._SPECIAL,
            initial_alphabet=sorted(_byte_alphabet()),
            special_tokens=[],
            show_progress=False,
            min_frequency=2,
        )
        engine.train_from_iterator(captions, trainer)
        model = json.loads(engine.to_str())["model"]
        self._model = {"vocab": model["vocab"], "merges": [list(merge) for merge in model["merges"]]}
        self.__dict__.pop("_engine", None)
        return self

    @cached_property
    def _engine(self) -> Any:
        if self._model is None:
            raise ValueError(
                "this BpeTokenizer is not fitted: call .fit(captions of the train split), "
                "or load it from a checkpoint with tokenizer_from_dict"
            )
        merges = [(left, right) for left, right in self._model["merges"]]
        return _bpe_engine(self._model["vocab"], merges, self.lowercase)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_engine"}

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]  # lone surrogates
        return [encoding.ids for encoding in self._engine.encode_batch_fast(clean)]

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        rows = ([i + self._SPECIAL for i in row] for row in self._encode(texts))
        return _framed(rows, self.start_id, self.end_id, self.context_length)

    def count_truncated(self, texts: Sequence[str]) -> int:
        """How many of ``texts`` do not fit into ``context_length``."""
        return sum(len(row) > self.context_length - 2 for row in self._encode(texts))

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Which letters each id of the text's row stands for; see :class:`Tokenizer`."""
        found = self._engine.encode(text.encode("utf-8", "replace").decode("utf-8")).offsets
        return _framed_offsets(_without_blanks(text, found), text, self.context_length)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        return self._engine.decode([i - self._SPECIAL for i in ids if i >= self._SPECIAL]).strip()

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``model`` is None before the fit."""
        return {
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "lowercase": self.lowercase,
            "model": self._model,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "BpeTokenizer":
        """The tokenizer that ``to_dict`` described."""
        made = cls(data["vocab_size"], data["context_length"], data["lowercase"])
        made._model = data["model"]
        return made


def _bpe_engine(vocab: dict[str, int], merges: list[tuple[str, str]], lowercase: bool) -> Any:
    # One thread: two busy cores are shared with training, and a fork after threads makes the library warn.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    engine = Engine(models.BPE(vocab=vocab, merges=merges))
    # NFC: a letter with its combining mark is the same caption however it was typed.
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    engine.normalizer = normalizers.Sequence(steps)
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    engine.decoder = decoders.ByteLevel()
    return engine


def _byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


class ClipTokenizer:
    """open_clip's own BPE (49,408 ids), for its towers; the vocabulary ships in the open_clip wheel, no network.

    Args:
        context_length: longest row, start and end included; 77 in CLIP.
        vocab_size: repeated in a config, where the model reads it; no other number is taken.
    """

    kind = "clip"
    vocab_size = 49408
    pad_id, start_id, end_id = 0, 49406, 49407
    fitted = True

    def __init__(self, context_length: int = 77, vocab_size: int = 49408) -> None:
        _check_context(context_length)
        if vocab_size != self.vocab_size:
            raise ValueError(f"vocab_size={vocab_size}: CLIP's vocabulary has {self.vocab_size} ids; leave it out")
        self.context_length = context_length

    @cached_property
    def _engine(self) -> Any:
        import regex  # open_clip's own requirement
        from open_clip.tokenizer import SimpleTokenizer

        engine = SimpleTokenizer()
        # It takes a caption's own "<end_of_text>" for the end token; without the two spellings it is text like any.
        spelt = "<start_of_text>|<end_of_text>|"
        assert engine.pat.pattern.startswith(spelt), "open_clip has another pattern"
        engine.pat = regex.compile(engine.pat.pattern.removeprefix(spelt), regex.IGNORECASE)
        return engine

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_engine"}

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        rows = (self._engine.encode(text) for text in texts)
        return _framed(rows, self.start_id, self.end_id, self.context_length)

    def count_truncated(self, texts: Sequence[str]) -> int:
        """How many of ``texts`` do not fit into ``context_length``."""
        return sum(len(self._engine.encode(text)) > self.context_length - 2 for text in texts)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Which letters each id of the text's row stands for; see :class:`Tokenizer`.

        The library keeps no places, so its pieces are looked for in the text one after another; a piece of a text that
        it repairs first (broken encodings, HTML) may be found nowhere, and then has no letters.
        """
        letters = text.lower() if len(text.lower()) == len(text) else text
        raw, owner = bytearray(), []  # the text's bytes, and the letter that each belongs to
        for place, letter in enumerate(letters):
            spelt = letter.encode("utf-8", "replace")
            raw += spelt
            owner += [place] * len(spelt)
        engine, spans, at = self._engine, [], 0
        for number in engine.encode(text):
            piece = engine.decoder[number].removesuffix("</w>")
            spelt = bytes(engine.byte_decoder[sign] for sign in piece)
            found = raw.find(spelt, at)
            if found < 0 or not spelt:
                here = owner[at] if at < len(owner) else len(text)
                spans.append((here, here))
                continue
            at = found + len(spelt)
            spans.append((owner[found], owner[at - 1] + 1))
        return _framed_offsets(spans, text, self.context_length)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        return self._engine.decode([i for i in ids if i not in (self.pad_id, self.start_id, self.end_id)]).strip()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": self.kind, "context_length": self.context_length}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ClipTokenizer":
        """The tokenizer that ``to_dict`` described."""
        return cls(data["context_length"])


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face text tower, from its ``tokenizer.json`` (a file, or the folder that holds it).

    Start and end are the ones the file's own template puts around a text; a caption that spells one of the file's
    special tokens ("</s>", "<|endoftext|>") gets it as text. The whole file travels in ``to_dict``.

    Args:
        path: ``tokenizer.json`` or a folder with one.
        context_length: longest row, start and end included.
        vocab_size: repeated in a config, where the model reads it; must be what the file holds. None: not checked.
    """

    kind = "huggingface"
    fitted = True

    def __init__(self, path: str, context_length: int = 64, vocab_size: int | None = None) -> None:
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        try:
            with open(file, encoding="utf-8") as opened:
                data = json.load(opened)
        except FileNotFoundError:
            raise ValueError(f"{file}: no such file; give a tokenizer.json, or a folder that holds one") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{file}: not a tokenizer.json ({error})") from None
        self._set_up(data, context_length, file)
        if vocab_size not in (None, self.vocab_size):
            raise ValueError(f"vocab_size={vocab_size}, but {file} holds {self.vocab_size} ids; set it to that")

    def _set_up(self, data: dict[str, Any], context_length: int, called: str) -> None:
        _check_context(context_length)
        self._data = data
        self.context_length = context_length
        try:
            self.vocab_size = self._engine.get_vocab_size(with_added_tokens=True)
            framed = self._engine.encode("", add_special_tokens=True).ids
        except Exception as error:  # the library's own errors are plain Exceptions
            raise ValueError(f"{called}: not a tokenizer.json ({error})") from None
        if len(framed) != 2:
            raise ValueError(f"{called}: its template adds {len(framed)} special tokens to a text; two are needed")
        self.start_id, self.end_id = framed
        named = (data.get("padding") or {}).get("pad_id")
        known = (self._engine.token_to_id(token) for token in ("[PAD]", "<pad>", "<|endoftext|>"))
        self.pad_id = named if named is not None else next((i for i in known if i is not None), 0)
        special = {t["content"]: t["id"] for t in data.get("added_tokens") or () if t.get("special")}
        model = data["model"]
        unknown = model.get("unk_id", self._engine.token_to_id(model.get("unk_token") or ""))
        self._reserved = {i for i in special.values() if i != unknown} | {self.start_id, self.end_id}
        spelt = sorted((token for token, i in special.items() if i in self._reserved), key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, spelt)) or r"(?!)")

    @cached_property
    def _engine(self) -> Any:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as Engine

        engine = Engine.from_str(json.dumps(self._data))
        engine.no_padding()
        engine.no_truncation()
        engine.encode_special_tokens = True  # what a caption spells is text
        return engine

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_engine"}

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        rows = [encoding.ids for encoding in self._engine.encode_batch_fast(clean, add_special_tokens=False)]
        return [
            ids if self._reserved.isdisjoint(ids) else self._as_text(text)
            for text, ids in zip(clean, rows, strict=True)
        ]

    def _as_text(self, text: str) -> list[int]:
        # Whole words and pieces of a vocabulary may still be its special tokens: a blank within them makes them text.
        apart = self._spelt.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return [i for i in self._engine.encode(apart, add_special_tokens=False).ids if i not in self._reserved]

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return _framed(self._encode(texts), self.start_id, self.end_id, self.context_length)

    def count_truncated(self, texts: Sequence[str]) -> int:
        """How many of ``texts`` do not fit into ``context_length``."""
        return sum(len(row) > self.context_length - 2 for row in self._encode(texts))

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Which letters each id of the text's row stands for; see :class:`Tokenizer`."""
        found = self._engine.encode(text.encode("utf-8", "replace").decode("utf-8"), add_special_tokens=False).offsets
        return _framed_offsets(_without_blanks(text, found), text, self.context_length)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the whole of tokenizer.json in it."""
        return {"kind": self.kind, "context_length": self.context_length, "tokenizer": self._data}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "HuggingFaceTokenizer":
        """The tokenizer that ``to_dict`` described."""
        made = cls.__new__(cls)
        made._set_up(data["tokenizer"], data["context_length"], "stored tokenizer")
        return made
