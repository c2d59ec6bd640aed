"""Tokenizers: bytes, GPT-2, any tokenizer.json, and RWKV's World vocabulary. Each can JSON-escape text as LongCrawl64 does."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from absl import logging

from lsm_jax import hub
from lsm_jax.data import tiktoken_file
from lsm_jax.data.chat import chat_text
from lsm_jax.data.instructions import short_text
from lsm_jax.data.token_text import check_ids, json_escape, json_unescape, replace_surrogates
from lsm_jax.data.world_tokenizer import VOCABULARY, WorldTokenizer
from lsm_jax.files import MEGABYTE, bounded_json, check_keys, read_bytes

GPT2_VOCAB_SIZE = 50257
GPT2_END_OF_TEXT = 50256
GPT2_ENCODER = "tiktoken-gpt2"
_MAX_TOKENIZER_BYTES = 128 * MEGABYTE  # the largest published ones have some 35
_MOST_GAPS = 1 << 16  # ids without a token
_GPT2_PROBES = {"hello world": [31373, 995], 'a\n\n"b"': [64, 198, 198, 1, 65, 1]}
_BOS_NAMES = ("<|begin_of_text|>", "<|endoftext|>", "<s>", "<bos>", "[BOS]", "<BOS>")
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]", "<EOS>")


class Tokenizer(Protocol):
    """Base of all tokenizers: an encoder of text to token ids and back.

    Attributes:
        name: the value of "encoder" in a store's `.zattrs`.
        vocab_size: all ids are below it.
        bos_id: the token that begins (and separates) documents; None if the vocabulary has none.
        eos_id: the token that ends an answer; None if the vocabulary has none.
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
        """Return the token ids of a text, without special tokens such as BOS.

        Bytes that are not UTF-8, escaped in the text as by "surrogateescape", are encoded unchanged by the byte tokenizer and
        as U+FFFD by all others.
        """
        ...

    def decode(self, ids: Any) -> str:
        """Return the text of token ids; ids that are no valid text become U+FFFD."""
        ...


class ByteTokenizer:
    """The tokenizer whose tokens are the 256 bytes of UTF-8, and BOS = 256."""

    name = "bytes"
    vocab_size = 257
    bos_id = eos_id = 256

    def __init__(self, *, json_escape: bool = False):
        self.json_escape = json_escape

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text as token ids, 0 to 255. Bytes that are not UTF-8, which the text
        contains escaped as by "surrogateescape", are returned unchanged."""
        if self.json_escape:
            return list(json_escape(replace_surrogates(text)).encode())
        try:
            return list(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:  # a single surrogate, which JSON can contain
            return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Any) -> str:
        """Return the text whose UTF-8 bytes are the token ids; BOS is skipped."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        check_ids(ids, self)
        text = bytes(ids[ids < 256].astype(np.uint8)).decode("utf-8", "replace")
        return json_unescape(text) if self.json_escape else text


class GPT2Tokenizer:
    """The tokenizer with GPT-2's byte-pair vocabulary, computed by tiktoken. The vocabulary's files are
    loaded when text is first encoded or decoded, so that a run can train on a store of GPT-2 ids without
    them.

    So a run can train on a store of GPT-2 ids without the vocabulary's files.
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
                "tokenizer 'gpt2' requires tiktoken and GPT-2's two vocabulary files, which could "
                "not be loaded. Without a network, give the path of GPT-2's tokenizer.json as the "
                "tokenizer, or set TIKTOKEN_CACHE_DIR to a folder with tiktoken's cache. "
                f"({type(error).__name__}: {str(error)[:200]})"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Return GPT-2's token ids of a text; "<|endoftext|>" inside it is ordinary text."""
        text = replace_surrogates(text)
        return self._encoding.encode_ordinary(json_escape(text) if self.json_escape else text)

    def decode(self, ids: Any) -> str:
        """Return the text of GPT-2's token ids; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        check_ids(ids, self)
        text = self._encoding.decode(ids.tolist(), errors="replace")
        return json_unescape(text) if self.json_escape else text


class JSONTokenizer:
    """A tokenizer from a `tokenizer.json` file, read by the `tokenizers` package, or from a `tiktoken.model`
    (`lsm_jax.data.tiktoken_file`).

    A file that encodes as GPT-2 does has GPT-2's name, so that it can be used with stores that tiktoken encoded. BOS and EOS
    are those of a tokenizer_config.json in the same folder, as pretrained models have it; otherwise they are tokens with one
    of the usual names.

    Attributes:
        adds_bos: whether the tokenizer adds BOS in front of a text by default; `encode` never does.
        chat_template: Jinja template of conversations, from chat_template.jinja or tokenizer_config.json; None if neither
            has one.
    """

    def __init__(self, path: str | Path, *, json_escape: bool = False):
        import tokenizers

        path = Path(path).expanduser()
        if path.is_dir():
            names = [
                name for name in ("tokenizer.json", tiktoken_file.FILE) if (path / name).exists()
            ]
            path = path / (names[0] if names else "tokenizer.json")
        if not path.is_file():
            raise ValueError(
                f"tokenizer {str(path)!r} is not a file; accepted is the path of a tokenizer.json or its folder"
            )
        try:
            converted = path.name == tiktoken_file.FILE
            content = (
                tiktoken_file.tokenizer_json(path)
                if converted
                else read_bytes(path, max_bytes=_MAX_TOKENIZER_BYTES)
            )
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
            check_keys(content, path)
        except BaseException as error:
            # The package's Rust code may panic, which raises a PanicException that is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            if isinstance(error, ValueError) and str(path.parent) in str(error):
                raise
            raise ValueError(f"{path} is not a tokenizer.json: {short_text(error, 300)}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.json_escape = False  # while the probes below are encoded
        # There may be gaps between the ids of added tokens, so the size follows from the largest id.
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"{path}: its vocabulary is empty")
        last, self.vocab_size = max(vocabulary, key=vocabulary.__getitem__), 1
        self.vocab_size += vocabulary[last]
        if self.vocab_size > _MOST_GAPS + 16 * len(vocabulary):
            raise ValueError(
                f"{path}: the token {short_text(last, 80)} has id {vocabulary[last]}, but there are only {len(vocabulary)} tokens; "
                "an id is the number of a row of the model's embedding"
            )
        self._path = path
        config = _tokenizer_config(path)
        self.bos_id = self._first_id(config.get("bos_token"), *_BOS_NAMES)
        self.eos_id = self._first_id(config.get("eos_token"), *_EOS_NAMES)
        try:
            self.adds_bos = self._tokenizer.encode("a").ids[:1] == [self.bos_id]
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{path} cannot encode a text: {short_text(error, 300)}") from error
        self.chat_template: str | None = config.get("chat_template")
        self._chat_template_file = config.get("chat_template_file")
        if self.vocab_size in (GPT2_VOCAB_SIZE - 1, GPT2_VOCAB_SIZE) and all(
            self.encode(text) == ids for text, ids in _GPT2_PROBES.items()
        ):
            self.name = GPT2_ENCODER
            self.vocab_size, self.bos_id = GPT2_VOCAB_SIZE, GPT2_END_OF_TEXT
            self.eos_id = GPT2_END_OF_TEXT
        else:
            digest = hashlib.sha256(content).hexdigest()[:16]
            self.name = f"tokenizer.json-{digest}"
        self.json_escape = json_escape

    def _first_id(self, *names: str | None) -> int | None:
        """Return the id of the first of these special tokens, given as text, that is in the vocabulary;
        None if none is."""
        ids = (self._tokenizer.token_to_id(name) for name in names if name)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, encoded as the tokenizer.json defines; no special tokens such as
        BOS are added at the start or end."""
        text = replace_surrogates(text)
        text = json_escape(text) if self.json_escape else text
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def chat_text(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as one text by this tokenizer's chat template; see `lsm_jax.data.chat.chat_text`.

        `encode` of the text recognises the special tokens in it.

        Raises:
            ValueError: the tokenizer has no chat template, or the template refuses the conversation.
        """
        if self.chat_template is None:
            raise ValueError(
                f"tokenizer {self.name!r} has no chat template; one is read from tokenizer_config.json or "
                "chat_template.jinja in the folder of its tokenizer.json"
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
            source=self._chat_template_file,
        )

    def decode(self, ids: Any) -> str:
        """Return the text of token ids by the tokenizer.json; special tokens are kept in it."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        check_ids(ids, self)
        text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return json_unescape(text) if self.json_escape else text


def load_tokenizer(name: str, *, json_escape: bool = False) -> Tokenizer:
    """Return the tokenizer of the given name: bytes, GPT-2, that of a tokenizer.json, or RWKV's World tokenizer.

    Args:
        name: "bytes", "gpt2", the path of a tokenizer.json or its folder, the path of RWKV's vocabulary, a .txt file
            (`lsm_jax.data.world_tokenizer`), or its folder, or the id of a model on the Hugging Face hub.
        json_escape: JSON-escape text before encoding it.

    Raises:
        ValueError: `name` is neither a known name nor a path nor an id of the hub, or the file is no tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer(json_escape=json_escape)
    if name == "gpt2":
        return GPT2Tokenizer(json_escape=json_escape)
    path = tokenizer_path(name)
    if path is None:
        raise ValueError(
            f"unknown tokenizer {name!r}; accepted: 'bytes', 'gpt2', the path of a tokenizer.json, or of RWKV's vocabulary, a .txt "
            "file, or the id of a model on the Hugging Face hub, OWNER/NAME[@REVISION]"
        )
    if name.endswith(".txt"):
        return WorldTokenizer(path, json_escape=json_escape)
    if (path / VOCABULARY).is_file() and not (path / "tokenizer.json").is_file():
        return WorldTokenizer(path / VOCABULARY, json_escape=json_escape)
    return JSONTokenizer(path, json_escape=json_escape)


def tokenizer_path(name: str) -> Path | None:
    """Return the path of a tokenizer's file or folder, after downloading its files if `name` is the id of a model on the
    Hugging Face hub; None if it is neither a path nor an id.

    Raises:
        ValueError: the hub has no such model, or cannot be reached and the cache does not have its tokenizer.
    """
    path = Path(name).expanduser()
    if path.exists() or name.endswith(".txt"):
        return path
    return hub.tokenizer_folder(name) or (path if name.endswith(".json") else None)


def special_tokens(fields: dict[str, Any], where: object) -> dict[str, str | None]:
    """Return bos_token, eos_token and chat_template from the contents of a tokenizer_config.json or special_tokens_map.json;
    None for those that it does not have. Of several templates, chat_template is the one named "default".

    Args:
        fields: the contents.
        where: the file, for error messages.

    Raises:
        ValueError: a field has a wrong type; the message names it.
    """
    values: dict[str, str | None] = {}
    for name in ("bos_token", "eos_token"):
        value = fields.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str | None) or (isinstance(value, dict) and text is None):
            raise ValueError(
                f"{where}: {name}={repr(value)[:100]}; accepted is a string, an object with the string content, or null"
            )
        values[name] = text
    template = fields.get("chat_template")
    if isinstance(template, list):
        templates = {
            entry["name"]: entry["template"]
            for entry in template
            if isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
        }
        if len(templates) != len(template):
            raise ValueError(
                f"{where}: chat_template={repr(template[:3])[:100]}; accepted is a string, or a list of objects with "
                "different names and the strings name and template"
            )
        template = templates.get("default")
        if template is None and templates:
            logging.warning(
                "%s: chat_template has no template named 'default', but %s; none is used",
                where, ", ".join(map(repr, templates)),
            )  # fmt: skip
    if not isinstance(template, str | None):
        raise ValueError(
            f"{where}: chat_template={repr(template)[:100]}; accepted is a string, or a list of named templates"
        )
    values["chat_template"] = template
    return values


def _tokenizer_config(path: Path) -> dict[str, str | None]:
    """Return bos_token, eos_token and chat_template from the folder of a tokenizer.json as `special_tokens` does, and
    chat_template_file, the file that has the template.

    Raises:
        ValueError: tokenizer_config.json or chat_template.jinja cannot be read.
    """
    config, template = (
        path.with_name("tokenizer_config.json"),
        path.with_name("chat_template.jinja"),
    )
    values: dict[str, str | None] = {}
    if config.is_file():
        values = special_tokens(bounded_json(config), config)
        values["chat_template_file"] = str(config)
    if template.is_file():
        try:
            values["chat_template"] = read_bytes(template, max_bytes=16 * MEGABYTE).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{template} cannot be read: byte {error.start} is no UTF-8"
            ) from error
        values["chat_template_file"] = str(template)
    return values
