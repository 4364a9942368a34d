"""Text to token ids: one contract, three tokenizers."""

from vlretrieval.data.tokenizers.bpe import BpeTokenizer
from vlretrieval.data.tokenizers.clip import ClipTokenizer
from vlretrieval.data.tokenizers.contract import Tokenizer, pad
from vlretrieval.data.tokenizers.hugging_face import HuggingFaceTokenizer
from vlretrieval.data.tokenizers.stored import tokenizer_from_dict, tokenizer_hash

__all__ = [
    "BpeTokenizer",
    "ClipTokenizer",
    "HuggingFaceTokenizer",
    "Tokenizer",
    "pad",
    "tokenizer_from_dict",
    "tokenizer_hash",
]
