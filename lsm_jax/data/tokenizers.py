"""Tokenizers: bytes, GPT-2, any tokenizer.json; each can JSON-escape text as LongCrawl64 did."""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lsm_jax.data.chat import chat_text

GPT2_VOCAB_SIZE = 50257
GPT2_END_OF_TEXT = 50256
GPT2_ENCODER = "tiktoken-gpt2"
_GPT2_PROBES = {"hello world": [31373, 995], 'a\n\n"b"': [64, 198, 198, 1, 65, 1]}
_BOS_NAMES = ("<|begin_of_text|>", "<|endoftext|>", "<s>", "<bos>", "[BOS]", "<BOS>")
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]", "<EOS>")


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        name: what a store's `.zattrs` says under "encoder".
        vocab_size: ids are below it.
        bos_id: begins (and separates) documents; None where the vocabulary has no such token.
        eos_id: ends an answer; None where the vocabulary has no such token.
        json_escape: whether text is JSON-escaped before it is encoded.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def bos_id(self) -> int | None: ...  # noqa: D102

    @property
    def eos_id(self) -> int | None: ...  # noqa: D102

    @property
    def json_escape(self) -> bool: ...  # noqa: D102

    def encode(self, text: str) -> list[int]:
        """Ids of the text; special tokens are not added.

        Bytes that are no UTF-8, in it by "surrogateescape", count as U+FFFD, unless bytes are the ids.
        """
        ...

    def decode(self, ids: Any) -> str:
        """Text of the ids; ids that are no valid text become U+FFFD."""
        ...


def json_escape(text: str) -> str:
    r"""The inside of the text's JSON string: `a"b` and a newline become `a\"b\n`, in ASCII."""
    return json.dumps(text)[1:-1]


def json_unescape(text: str) -> str:
    """Undoes `json_escape`; text cut in the middle of an escape is undone as far as it goes."""
    try:
        plain = json.loads(f'"{text}"', strict=False)
    except json.JSONDecodeError:
        raw = text.encode("ascii", "backslashreplace")
        plain = codecs.decode(raw, "unicode_escape", errors="replace")
    # A pair of surrogates is one character; half a pair is none.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ByteTokenizer:
    """The 256 bytes of UTF-8, and BOS = 256."""

    name = "bytes"
    vocab_size = 257
    bos_id = eos_id = 256

    def __init__(self, *, json_escape: bool = False):
        self.json_escape = json_escape

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes, and those that are none as they were."""
        if self.json_escape:
            return list(json_escape(_valid(text)).encode())
        try:
            return list(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:  # half a pair, as JSON can hold
            return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Any) -> str:
        """Text of the bytes; BOS gives nothing."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        _check_ids(ids, self)
        text = bytes(ids[ids < 256].astype(np.uint8)).decode("utf-8", "replace")
        return json_unescape(text) if self.json_escape else text


class GPT2Tokenizer:
    """GPT-2's byte-pair vocabulary through tiktoken, which loads its files at the first use.

    A store of GPT-2 ids can so be trained on where the vocabulary's files are missing.
    """

    name = GPT2_ENCODER
    vocab_size = GPT2_VOCAB_SIZE
    bos_id = eos_id = GPT2_END_OF_TEXT

    def __init__(self, *, json_escape: bool = False):
        self.json_escape = json_escape

    @functools.cached_property
    def _encoding(self) -> Any:
        try:
            import tiktoken

            return tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise ValueError(
                "tokenizer 'gpt2' needs tiktoken and GPT-2's two vocabulary files, and they could "
                "not be loaded. Without a network, give the path of GPT-2's tokenizer.json as the "
                "tokenizer, or set TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's cache. "
                f"({type(error).__name__}: {str(error)[:200]})"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Ids of the text; "<|endoftext|>" inside it is ordinary text."""
        text = json_escape(_valid(text)) if self.json_escape else _valid(text)
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Any) -> str:
        """Text of the ids."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        _check_ids(ids, self)
        text = self._encoding.decode(ids.tolist(), errors="replace")
        return json_unescape(text) if self.json_escape else text


class JSONTokenizer:
    """A `tokenizer.json` file, read by the `tokenizers` package.

    A file that gives GPT-2's ids goes by GPT-2's name, so stores of tiktoken's ids agree with it. BOS and EOS are those of a
    tokenizer_config.json beside it, as pretrained models have, or else tokens of customary names.

    Attributes:
        adds_bos: whether the file itself sets BOS in front of a text; `encode` never does.
        chat_template: a Jinja template of conversations, from chat_template.jinja or tokenizer_config.json; None without.
    """

    def __init__(self, path: str | Path, *, json_escape: bool = False):
        import tokenizers

        path = Path(path).expanduser()
        if path.is_dir():
            path = path / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"tokenizer {str(path)!r} is not a file; give a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.json_escape = False  # for the probes below
        # Added tokens may leave gaps, so the size is the largest id's.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        beside = _beside(path)
        self.bos_id = self._first_id(beside.get("bos_token"), *_BOS_NAMES)
        self.eos_id = self._first_id(beside.get("eos_token"), *_EOS_NAMES)
        self.adds_bos = self._tokenizer.encode("a").ids[:1] == [self.bos_id]
        self.chat_template: str | None = beside.get("chat_template")
        if self.vocab_size in (GPT2_VOCAB_SIZE - 1, GPT2_VOCAB_SIZE) and all(
            self.encode(text) == ids for text, ids in _GPT2_PROBES.items()
        ):
            self.name = GPT2_ENCODER
            self.vocab_size, self.bos_id = GPT2_VOCAB_SIZE, GPT2_END_OF_TEXT
            self.eos_id = GPT2_END_OF_TEXT
        else:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            self.name = f"tokenizer.json-{digest}"
        self.json_escape = json_escape

    def _first_id(self, *names: str | None) -> int | None:
        found = (self._tokenizer.token_to_id(name) for name in names if name)
        return next((i for i in found if i is not None), None)

    def encode(self, text: str) -> list[int]:
        """Ids of the text."""
        text = json_escape(_valid(text)) if self.json_escape else _valid(text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def chat_text(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation by this tokenizer's chat template, as `lsm_jax.data.chat.chat_text`; `encode` finds the
        special tokens in it.

        Raises:
            ValueError: it has no template, or one that refuses the conversation.
        """
        if self.chat_template is None:
            raise ValueError(
                f"tokenizer {self.name!r} has no chat template; one is read from tokenizer_config.json or "
                "chat_template.jinja beside its tokenizer.json"
            )
        bos, eos = (
            None if i is None else self._tokenizer.id_to_token(i)
            for i in (self.bos_id, self.eos_id)
        )
        return chat_text(
            self.chat_template,
            messages,
            bos_token=bos,
            eos_token=eos,
            add_generation_prompt=add_generation_prompt,
        )

    def decode(self, ids: Any) -> str:
        """Text of the ids, special tokens included."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        _check_ids(ids, self)
        text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return json_unescape(text) if self.json_escape else text


def load_tokenizer(name: str, *, json_escape: bool = False) -> Tokenizer:
    """The tokenizer of that name: "bytes", "gpt2", or the path of a tokenizer.json.

    Raises:
        ValueError: for any other name, and for a file that is no tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer(json_escape=json_escape)
    if name == "gpt2":
        return GPT2Tokenizer(json_escape=json_escape)
    if name.endswith(".json") or Path(name).expanduser().exists():
        return JSONTokenizer(name, json_escape=json_escape)
    raise ValueError(
        f"unknown tokenizer {name!r}; accepted: 'bytes', 'gpt2', or the path of a tokenizer.json"
    )


def _beside(path: Path) -> dict[str, Any]:
    """bos_token, eos_token and chat_template of what stands beside a tokenizer.json; none where nothing does.

    Raises:
        ValueError: a tokenizer_config.json that cannot be read.
    """
    config, template = (
        path.with_name("tokenizer_config.json"),
        path.with_name("chat_template.jinja"),
    )
    found: dict[str, Any] = {}
    if config.is_file():
        try:
            given = json.loads(config.read_text(encoding="utf-8"))
            for name in ("bos_token", "eos_token", "chat_template"):
                value = given.get(name)
                if isinstance(value, list):  # several templates, by name
                    value = {v["name"]: v["template"] for v in value}.get("default")
                found[name] = value.get("content") if isinstance(value, dict) else value
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{config} is no tokenizer_config.json: {error!r}") from error
    if template.is_file():
        found["chat_template"] = template.read_text(encoding="utf-8")
    return found


def _valid(text: str) -> str:
    """The text with U+FFFD where "surrogateescape" stands for a wrong byte, or JSON held half of a surrogate pair."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _check_ids(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if wrong.size:
        raise ValueError(
            f"token id {wrong[0]} is outside tokenizer {tokenizer.name!r}'s vocabulary of "
            f"{tokenizer.vocab_size}"
        )
