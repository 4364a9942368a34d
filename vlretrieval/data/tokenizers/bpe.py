"""A small byte-level BPE that learns its vocabulary from captions, in any language."""

import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from vlretrieval.data.tokenizers.framing import check_context, framed, framed_offsets, without_blanks


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
        check_context(context_length)
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
        return framed(rows, self.start_id, self.end_id, self.context_length)

    def count_truncated(self, texts: Sequence[str]) -> int:
        """How many of ``texts`` do not fit into ``context_length``."""
        return sum(len(row) > self.context_length - 2 for row in self._encode(texts))

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Which letters each id of the text's row stands for; see :class:`Tokenizer`."""
        found = self._engine.encode(text.encode("utf-8", "replace").decode("utf-8")).offsets
        return framed_offsets(without_blanks(text, found), text, self.context_length)

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
