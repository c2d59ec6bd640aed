"""Make plain text of a package's file, and say why a file is no document."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

MIN_CHARACTERS = 400
END = "<|endoftext|>"  # the token that ends a document
_MAX_MEAN_LINE = 1000
PIECE_CHARACTERS = 1 << 20
_HIDDEN = re.compile(
    r"<!--.*?-->|<(script|style|head|nav|header|footer|svg|form|select)\b.*?</\1\s*>", re.S | re.I
)
_PRE = re.compile(r"<pre\b[^>]*>(.*?)</pre\s*>", re.S | re.I)
_BLOCK = re.compile(
    r"</?(p|div|br|li|ul|ol|dl|dt|dd|tr|table|h[1-6]|section|article|blockquote|hr|title|body)\b[^>]*>",
    re.I,
)
_CELL = re.compile(r"</(td|th)\s*>", re.I)
_TAG = re.compile(r"<[a-zA-Z/!?][^>]*>")
_BLANKS = re.compile(r"[ \t\r\f\v]+")
_EMPTY_LINES = re.compile(r"\n{3,}")


def html_text(source: str) -> str:
    """Return the text of an HTML page: no scripts, menus or tags; a line for each block; code as it is."""
    parts = _PRE.split(_HIDDEN.sub(" ", source))
    result = []
    for number, part in enumerate(parts):
        if number % 2:  # the inside of <pre>
            result.append("\n" + html.unescape(_TAG.sub("", part)).strip("\n") + "\n")
            continue
        flat = _CELL.sub("\t", _BLOCK.sub("\n", part.replace("\n", " ")))
        text = html.unescape(_TAG.sub("", flat))
        result.append("\n".join(_BLANKS.sub(" ", line).strip() for line in text.split("\n")))
    return _EMPTY_LINES.sub("\n\n", "\n".join(result)).strip() + "\n"


def document(path: str, content: bytes) -> tuple[str, str]:
    """Return (text, "") of a file that is a document, or ("", reason) of one that is not.

    Texts are UTF-8, otherwise Latin-1 if at most one character of a thousand is one of its control characters. The reasons:
    "not text", "short" (fewer than 400 characters), "minified" (lines of over 1,000 characters on average, of which less than
    a tenth is blank), "numbers" (less than half of the characters are letters or blanks) and "end token" (the text has
    `END`, which the tokenizer would read as the end of a document).
    """
    if b"\0" in content:
        return "", "not text"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
        if 1000 * len(re.findall(r"[\x80-\x9f]", text)) > len(text):
            return "", "not text"
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if path.lower().endswith((".html", ".htm", ".xhtml", ".html.en")):
        text = html_text(text)
    if len(text) < MIN_CHARACTERS:
        return "", "short"
    if len(text) > _MAX_MEAN_LINE * (1 + text.count("\n")) and 10 * text.count(" ") < len(text):
        return "", "minified"
    if END in text:
        return "", "end token"
    sample = text[:20_000]
    if 2 * sum(character.isalpha() or character.isspace() for character in sample) < len(sample):
        return "", "numbers"
    return text, ""


def pieces(document: str) -> Iterator[str]:
    """Yield the parts of a document: itself, or of a longer one than 2^20 characters, such as a dictionary, parts of that
    length that end at line ends."""
    start = 0
    while len(document) - start > PIECE_CHARACTERS:
        end = document.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        yield document[start:end]
        start = end
    yield document[start:]
