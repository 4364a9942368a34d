"""The tokenizer that comes with a Hugging Face text tower."""

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from vlretrieval.data.tokenizers.framing import check_context, framed, framed_offsets, without_blanks


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
        check_context(context_length)
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
        return framed(self._encode(texts), self.start_id, self.end_id, self.context_length)

    def count_truncated(self, texts: Sequence[str]) -> int:
        """How many of ``texts`` do not fit into ``context_length``."""
        return sum(len(row) > self.context_length - 2 for row in self._encode(texts))

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Which letters each id of the text's row stands for; see :class:`Tokenizer`."""
        found = self._engine.encode(text.encode("utf-8", "replace").decode("utf-8"), add_special_tokens=False).offsets
        return framed_offsets(without_blanks(text, found), text, self.context_length)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the whole of tokenizer.json in it."""
        return {"kind": self.kind, "context_length": self.context_length, "tokenizer": self._data}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "HuggingFaceTokenizer":
        """The tokenizer that ``to_dict`` described."""
        made = cls.__new__(cls)
        made._set_up(data["tokenizer"], data["context_length"], "stored tokenizer")
        return made
