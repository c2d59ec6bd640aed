"""The World tokenizer of RWKV: the longest token of a vocabulary that the text begins with, again and again.

The vocabulary comes with RWKV's checkpoints as rwkv_vocab_v20230424.txt (BlinkDL/RWKV-LM, ChatRWKV). A line has a token's id, the
token as a literal of Python, a string or bytes, and the token's length in bytes:

    300 '\\r\\n' 2
    3000 b'\\xe4\\xb8' 2

Id 0 is no token: it ends a document.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from lsm_jax.data.instructions import short_text
from lsm_jax.data.token_text import check_ids, json_escape, json_unescape, replace_surrogates
from lsm_jax.files import MEGABYTE, read_bytes

VOCABULARY = "rwkv_vocab_v20230424.txt"
"""The name of the vocabulary's file in released checkpoints."""
END_OF_TEXT = 0
_MAX_BYTES = 64 * MEGABYTE  # the published file has 1.2
_MAX_ID = 1 << 20  # the published vocabulary has 65,529 tokens
_ROLES = dict(system="System", user="User", assistant="Assistant")
_LINE_ENDS = re.compile(r"(?:\r?\n)(?:[ \t]*\r?\n)+")
_LINE = re.compile(r"(\d{1,8}) (b?(?:'[^\n]*'|\"[^\n]*\")) (\d{1,8})")


class WorldTokenizer:
    """RWKV's World tokenizer, whose vocabulary is a .txt file.

    At each place of a text's UTF-8 bytes it takes the longest token that they begin with, as a walk down a trie of the vocabulary
    does. Every single byte is a token, so that every text is encoded without a loss.

    Attributes:
        name: names the vocabulary by a part of its file's SHA-256.
        vocab_size: the largest id plus one.
        adds_bos: False, since RWKV's models read no BOS by default.
    """

    bos_id = eos_id = END_OF_TEXT
    adds_bos = False

    def __init__(self, path: str | Path, *, json_escape: bool = False):
        path = Path(path).expanduser()
        if not path.is_file():
            raise ValueError(
                f"tokenizer {str(path)!r} is not a file; accepted is the path of RWKV's vocabulary, such as {VOCABULARY}"
            )
        content = read_bytes(path, max_bytes=_MAX_BYTES)
        self.json_escape = json_escape
        self.name = f"rwkv-world-{hashlib.sha256(content).hexdigest()[:16]}"
        self._ids = vocabulary(content, path)
        self._tokens = {number: token for token, number in self._ids.items()}
        self.vocab_size = max(self._tokens) + 1
        # The trie, cut after two bytes: the lengths of the tokens that begin with these, longest first.
        lengths: dict[bytes, set[int]] = {}
        for token in self._ids:
            if len(token) > 1:
                lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, the longest token first at each place; END_OF_TEXT is none of them."""
        text = replace_surrogates(text)
        data = (json_escape(text) if self.json_escape else text).encode()
        ids, place, known, lengths = [], 0, self._ids, self._lengths
        while place < len(data):
            for size in lengths.get(data[place : place + 2], ()):
                token = data[place : place + size]
                if token in known:
                    break
            else:
                token = data[place : place + 1]
            ids.append(known[token])
            place += len(token)
        return ids

    def chat_text(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as one text in the form in which RWKV's World models are tuned (BlinkDL/ChatRWKV):

            User: a question

            Assistant: its answer

        A blank line ends a message. Blank lines inside a message therefore become line ends, and white space around it is
        removed, as in the authors' demonstration of chats.

        Args:
            messages: dicts with "role" ("system", "user" or "assistant") and "content".
            add_generation_prompt: end the text with "Assistant:", after which the model's answer begins.

        Raises:
            ValueError: a message has another role, or its content is no text.
        """
        parts = []
        for number, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            name = _ROLES.get(role) if isinstance(role, str) else None
            if name is None or not isinstance(content, str):
                raise ValueError(
                    f"messages[{number}]: role={short_text(role, 80)}, content={short_text(content, 80)}; accepted is a role of "
                    f"{', '.join(_ROLES)}, and a text"
                )
            parts.append(f"{name}: {_LINE_ENDS.sub(chr(10), content.strip())}")
        if add_generation_prompt:
            return "\n\n".join([*parts, "Assistant:"])
        return "".join(f"{part}\n\n" for part in parts)

    def decode(self, ids: Any) -> str:
        """Return the text of token ids: END_OF_TEXT is skipped, and ids without a token and bytes that are no UTF-8 become
        U+FFFD."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        check_ids(ids, self)
        parts = [self._tokens.get(i, b"\xff") for i in ids.tolist() if i != END_OF_TEXT]
        text = b"".join(parts).decode("utf-8", "replace")
        return json_unescape(text) if self.json_escape else text


def vocabulary(content: bytes, where: object) -> dict[bytes, int]:
    """Return the ids of the tokens in a vocabulary file of RWKV, by the tokens' bytes.

    Args:
        content: the file's content.
        where: the file, for error messages.

    Raises:
        ValueError: a line is no entry, an id or a token occurs twice, or a single byte is no token; the message names the line.
    """
    ids: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(content.split(b"\n"), 1):
        line = line.removesuffix(b"\r")
        if not line:
            continue
        try:
            index, token = _entry(line.decode("utf-8"))
        except (ValueError, SyntaxError, MemoryError) as error:
            raise ValueError(f"{where}: line {number}: {short_text(error, 200)}") from error
        if index in seen or token in ids:
            raise ValueError(
                f"{where}: line {number}: {short_text(line, 80)}: the id or the token occurs before"
            )
        seen.add(index)
        ids[token] = index
    absent = [byte for byte in range(256) if bytes([byte]) not in ids]
    if absent:
        raise ValueError(
            f"{where}: {len(absent)} of the 256 bytes are no tokens, the first {absent[0]:#04x}, so that not every text could be "
            "encoded; is it RWKV's vocabulary?"
        )
    return ids


def _entry(line: str) -> tuple[int, bytes]:
    """Return the id and the token of a line of a vocabulary file."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(
            f"{short_text(line, 80)}: accepted are an id, a token as a literal of Python and its length, such as \"257 '\\t\\t' 2\""
        )
    value = ast.literal_eval(match[2])  # a literal of Python: no code is run
    token = value.encode() if isinstance(value, str) else value
    index, length = int(match[1]), int(match[3])
    if not isinstance(token, bytes) or len(token) != length or not token:
        raise ValueError(f"{short_text(line, 80)}: the token is not of {length} bytes")
    if not 0 < index <= _MAX_ID:
        raise ValueError(
            f"{short_text(line, 80)}: id {index}; accepted are 1 to {_MAX_ID}, since 0 ends a document"
        )
    return index, token
