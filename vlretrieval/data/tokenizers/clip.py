"""The tokenizer of open_clip's towers."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from vlretrieval.data.tokenizers.framing import check_context, framed, framed_offsets


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
        check_context(context_length)
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
        return framed(rows, self.start_id, self.end_id, self.context_length)

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
        return framed_offsets(spans, text, self.context_length)

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
