"""Write a pretrained model's tokenizer as tokenizer.json, with special tokens and chat template in tokenizer_config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.gguf_file import GGUF

_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# Regular expressions that split a text before byte pairs are merged, by llama.cpp's names; None is GPT-2's.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": None,  # after each digit is split off
    "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _REST,
    "qwen2": _LETTERS + r"\p{N}" + _REST,
}
# Token types of GGUF. Control and user tokens are added tokens, but only control tokens are special.
_CONTROL, _USER, _UNUSED = 3, 4, 5


def tokenizer_of(source: Tensors | str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> Path:
    """Write the tokenizer of a pretrained model as tokenizer.json, and the files with its special tokens
    and chat template.

    Args:
        source: a Hugging Face folder or a GGUF file.
        out_dir: the folder to write into; it is created if it does not exist.

    Returns:
        The path of tokenizer.json, an argument of `lsm_jax.data.load_tokenizer`.

    Raises:
        ValueError: the source has no tokenizer or one of an unsupported kind.
    """
    return write_files(tokenizer_files(source), out_dir)


def write_files(files: dict[str, bytes], out_dir: str | os.PathLike[str]) -> Path:
    """Write a tokenizer's files, the result of `tokenizer_files`, into a folder, and return the path of
    tokenizer.json."""
    out = Path(out_dir).expanduser().absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)
    return out / _FILE


def tokenizer_files(
    source: Tensors | str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None
) -> dict[str, bytes]:
    """Return the contents of a pretrained model's tokenizer files, as `tokenizer_of` writes them, by file
    name.

    Args:
        source: a Hugging Face folder or a GGUF file.
        tokenizer: a tokenizer.json or its folder, to use instead of the source's tokenizer. If the source is a GGUF file,
            its tokens must be the same.

    Raises:
        ValueError: the source has no tokenizer or one of an unsupported kind, or `tokenizer` has other tokens.
    """
    if not isinstance(source, Tensors):
        path = Path(source).expanduser()
        source = GGUF(path) if path.is_file() else path
    if tokenizer is not None:
        path = Path(tokenizer).expanduser()
        if path.is_file() and path.name != _FILE:
            raise ValueError(f"tokenizer={str(path)!r}; accepted is a {_FILE} or its folder")
        files = tokenizer_files(path.parent if path.is_file() else path)
        if isinstance(source, GGUF):
            _check_tokens(source, files[_FILE], path)
        return files
    if isinstance(source, GGUF):
        return {
            name: (json.dumps(content, ensure_ascii=False) + "\n").encode()
            for name, content in _from_gguf(source).items()
        }
    folder = source.folder if isinstance(source, Tensors) else source
    if not (folder / _FILE).is_file():
        raise ValueError(
            f"{folder} has no {_FILE}; write one with transformers: tokenizer.save_pretrained(folder)"
        )
    paths = [folder / name for name in (_FILE, _CONFIG, _TEMPLATE)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _check_tokens(source: GGUF, content: bytes, path: Path) -> None:
    """Raise ValueError unless a tokenizer.json has the same tokens as the GGUF file with which it is to be
    used; it may lack the file's unused tokens.

    Args:
        source: the GGUF file, opened for reading.
        content: the contents of the tokenizer.json.
        path: the path of the tokenizer.json, for error messages.
    """
    import tokenizers

    tokens: list[str] = source.fields.get("tokenizer.ggml.tokens", [])
    types = source.fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises no narrower class
        raise ValueError(f"tokenizer={str(path)!r} is no tokenizer.json: {error}") from error
    for i, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        given = tokenizer.id_to_token(i)
        if given != token and (given is not None or type_ != _UNUSED):
            raise ValueError(
                f"tokenizer={str(path)!r} is not that of {source.folder}: its id {i} is {given!r}, "
                f"but {token!r} in the model"
            )
    if (size := tokenizer.get_vocab_size()) > len(tokens):
        raise ValueError(
            f"tokenizer={str(path)!r} is not that of {source.folder}: it has {size} tokens, but the model has {len(tokens)}"
        )


def _from_gguf(source: GGUF) -> dict[str, Any]:
    """Return the contents of tokenizer.json and tokenizer_config.json of a GGUF file's tokenizer, made from
    the file's metadata."""
    import tokenizers

    fields, where = source.fields, source.folder
    kind, pattern_name = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pattern_name not in _PATTERNS:
        raise ValueError(
            f"{where}: tokenizer.ggml.model={kind!r}, tokenizer.ggml.pre={pattern_name!r}; accepted are 'gpt2' with "
            f"{', '.join(_PATTERNS)}. For others give the tokenizer.json of the original model: --tokenizer=FILE, "
            "or the option tokenizer=FILE of configs/liger.py"
        )
    required = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    if missing := [name for name in required if name not in fields]:
        raise ValueError(f"{where}: missing fields: {', '.join(missing)}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(line.split(" ", 1)) for line in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=pattern_name == "llama-bpe")
    tokenizer, pattern = tokenizers.Tokenizer(model), _PATTERNS[pattern_name]
    steps: list[Any] = []
    if pattern_name == "smollm":
        steps.append(tokenizers.pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        split = tokenizers.Regex(pattern)
        steps.append(tokenizers.pre_tokenizers.Split(split, "isolated"))
    steps.append(
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if pattern_name == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in (_CONTROL, _USER):
            added = tokenizers.AddedToken(token, special=type_ == _CONTROL, normalized=False)
            add = tokenizer.add_special_tokens if type_ == _CONTROL else tokenizer.add_tokens
            add([added])
    config: dict[str, Any] = {}
    for name in ("bos", "eos"):
        token_id = fields.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name}_token"] = None if token_id is None else tokens[token_id]
    bos = config["bos_token"]
    adds_bos = fields.get("tokenizer.ggml.add_bos_token", pattern_name == "llama-bpe")
    if adds_bos and bos is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    if (template := fields.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return {_FILE: json.loads(tokenizer.to_str()), _CONFIG: config}
