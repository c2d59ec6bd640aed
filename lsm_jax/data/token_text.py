"""Functions that tokenizers share: text escaped as in JSON, bytes that are not UTF-8, and the range of token ids."""

from __future__ import annotations

import codecs
import json
from typing import Any

import numpy as np


def json_escape(text: str) -> str:
    r"""Return the text as in a JSON string, without the quotes: `a"b` and a newline become `a\"b\n`, in ASCII."""
    return json.dumps(text)[1:-1]


def json_unescape(text: str) -> str:
    """Return the text whose JSON-escaped form is given, the inverse of `json_escape`; text that ends inside
    an escape sequence is decoded up to there."""
    try:
        plain = json.loads(f'"{text}"', strict=False)
    except json.JSONDecodeError:
        raw = text.encode("ascii", "backslashreplace")
        plain = codecs.decode(raw, "unicode_escape", errors="replace")
    # Join pairs of surrogates into characters, and replace single ones by U+FFFD.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def replace_surrogates(text: str) -> str:
    """Return the text with U+FFFD in place of bytes escaped by "surrogateescape", and of single surrogates,
    which JSON can contain."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_ids(ids: np.ndarray, tokenizer: Any) -> None:
    """Raise ValueError unless token ids are from 0 to below the size of a tokenizer's vocabulary."""
    wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if wrong.size:
        raise ValueError(
            f"token id {wrong[0]} is outside the vocabulary of tokenizer {tokenizer.name!r}, "
            f"which has {tokenizer.vocab_size} ids"
        )
