"""Tokenizers as plain data: made again from it, and told apart by its hash."""

import hashlib
import json
from typing import Any

from vlretrieval.data.tokenizers.bpe import BpeTokenizer
from vlretrieval.data.tokenizers.clip import ClipTokenizer
from vlretrieval.data.tokenizers.contract import Tokenizer
from vlretrieval.data.tokenizers.hugging_face import HuggingFaceTokenizer


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
