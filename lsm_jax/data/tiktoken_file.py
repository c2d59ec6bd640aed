"""Convert a `tiktoken.model` to a tokenizer.json: the tokens and their ranks, as the models of Moonshot AI (Kimi) have them.

The file has the tokens alone. How a text is split before bytes are merged is in the code of the model's folder, which is never
run, so that only folders whose tokenizer_config.json names a known class are accepted.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from lsm_jax.data.instructions import short_text
from lsm_jax.files import MEGABYTE, bounded_json, read_bytes

FILE = "tiktoken.model"
_MAX_BYTES = 64 * MEGABYTE
_RESERVED = 256  # ids after those of the file, for special tokens
_NOT_HAN = "&&[^\\p{Han}]"
_UPPER = f"[\\p{{Lu}}\\p{{Lt}}\\p{{Lm}}\\p{{Lo}}\\p{{M}}{_NOT_HAN}]"
_LOWER = f"[\\p{{Ll}}\\p{{Lm}}\\p{{Lo}}\\p{{M}}{_NOT_HAN}]"
_SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The regular expressions that split a text, by the class of the tokenizer.
PATTERNS = {
    "TikTokenTokenizer": "|".join(
        (
            "[\\p{Han}]+",
            f"[^\\r\\n\\p{{L}}\\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}",
            f"[^\\r\\n\\p{{L}}\\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}",
            "\\p{N}{1,3}",
            " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*",
            "\\s*[\\r\\n]+",
            "\\s+(?!\\S)",
            "\\s+",
        )
    )
}


def tokenizer_json(path: Path) -> bytes:
    """Return the contents of the tokenizer.json that encodes texts as a `tiktoken.model` does.

    Special tokens are those of added_tokens_decoder in the tokenizer_config.json beside it; the other ids after the file's are
    reserved, as by the model's own code. That code cuts texts of over 400,000 characters first, which this one does not.

    Raises:
        ValueError: the file has no tokens and ranks, or the tokenizer's class is not known; the message names the file.
    """
    config_path = path.with_name("tokenizer_config.json")
    config = bounded_json(config_path) if config_path.is_file() else {}
    kind = config.get("tokenizer_class")
    if kind not in PATTERNS:
        raise ValueError(
            f"{config_path}: tokenizer_class={short_text(kind, 80)}; accepted with a {FILE}, which does not say how it splits a "
            f"text, are {', '.join(PATTERNS)}"
        )
    ranks = read_ranks(path)
    letters = _byte_letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(config, len(ranks), config_path),
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"Regex": PATTERNS[kind]},
                        "behavior": "Isolated",
                        "invert": False,
                    },
                    {
                        "type": "ByteLevel",
                        "add_prefix_space": False,
                        "trim_offsets": True,
                        "use_regex": False,
                    },
                ],
            },
            "post_processor": None,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": True,
                "vocab": {names[token]: rank for token, rank in ranks.items()},
                "merges": [[names[a], names[b]] for a, b in _merges(ranks)],
            },
        },
        ensure_ascii=False,
    ).encode()


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token of a `tiktoken.model`: on each line the token's bytes in base64, and its rank.

    Raises:
        ValueError: a line has another form, a token or rank occurs twice, or the ranks are not 0, 1, 2, ...
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, max_bytes=_MAX_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token, value = base64.b64decode(text, validate=True), int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"{path}, line {number}, is no token in base64 with its rank: {short_text(line, 80)}"
            ) from error
        if not token or token in ranks or value != len(ranks):
            raise ValueError(
                f"{path}, line {number}, has the token {short_text(token, 60)} with the rank {value}; accepted are different "
                f"tokens, in the order of their ranks from 0, so that {len(ranks)} is next"
            )
        ranks[token] = value
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"{path} has no token of the byte {missing[0]}; all single bytes are required"
        )
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens whose bytes together are a token, by the rank of that token. tiktoken merges by that rank,
    however the token is divided."""
    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ranks and second in ranks:
                merges.append((rank, ranks[first], ranks[second], first, second))
    return [(first, second) for *_, first, second in sorted(merges)]


def _added_tokens(config: dict[str, Any], count: int, where: Path) -> list[dict[str, Any]]:
    """Return the special tokens with the ids after the `count` tokens of the file.

    Raises:
        ValueError: an id or a token of added_tokens_decoder is not accepted.
    """
    given = config.get("added_tokens_decoder") or {}
    names = {i: f"<|reserved_token_{i}|>" for i in range(count, count + _RESERVED)}
    if not isinstance(given, dict):
        raise ValueError(
            f"{where}: added_tokens_decoder={short_text(given, 80)}; accepted is an object of tokens by id"
        )
    for key, token in given.items():
        content = token.get("content") if isinstance(token, dict) else None
        if (
            not key.isdecimal()
            or int(key) not in names
            or not isinstance(content, str)
            or not content
        ):
            raise ValueError(
                f"{where}: added_tokens_decoder has {short_text({key: token}, 120)}; accepted are ids from {count} to "
                f"{count + _RESERVED - 1} with an object that has the string content"
            )
        names[int(key)] = content
    if len(set(names.values())) < len(names):
        raise ValueError(f"{where}: added_tokens_decoder has a token twice")
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    return [dict(id=i, content=name, **flags) for i, name in names.items()]


def _byte_letters() -> list[str]:
    """Return the character by which the package `tokenizers` writes each byte: itself if it is printable, otherwise one from
    U+0100 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]
