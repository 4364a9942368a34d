"""What can be wrong with captions, one rule a line."""

import re
from collections.abc import Callable, Iterator

# UTF-8 that was read as Latin-1 or Windows-1252 and saved again: "Ã©" for "é", "â€™" for an apostrophe.
_MOJIBAKE = re.compile("[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac[\u2018-\u203a\u0153\u017e\u2122]|\u00ef\u00bb\u00bf")
_MARKUP = re.compile(r"</?[a-zA-Z][^<>]{0,80}>|&(?:amp|lt|gt|quot|nbsp|#\d+);")

RULES: dict[str, Callable[[str], bool]] = {
    "empty captions": lambda text: not text.strip(),
    "captions with the replacement character (decoded wrongly)": lambda text: "\ufffd" in text,
    "captions that look decoded twice (Ã© for é)": lambda text: _MOJIBAKE.search(text) is not None,
    "captions with control characters": lambda text: any(ord(c) < 32 and c not in "\t\n\r" for c in text),
    "captions with markup (&amp;, <b>)": lambda text: _MARKUP.search(text) is not None,
    "captions with halves of characters": lambda text: any(0xD800 <= ord(c) < 0xE000 for c in text),
}


def faults_of(caption: str) -> Iterator[str]:
    """The names of the rules that ``caption`` breaks."""
    return (name for name, broken in RULES.items() if broken(caption))
