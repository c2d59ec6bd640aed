"""The tokenizer of a pretrained model as tokenizer.json, with its special tokens and chat template in tokenizer_config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.gguf_file import GGUF

_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# How a text is cut before merging, by the names llama.cpp gives: a pattern, or None for GPT-2's own.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": None,  # digits one by one first
    "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _REST,
    "qwen2": _LETTERS + r"\p{N}" + _REST,
}
# Token types; a user's are added tokens too, but not special.
_CONTROL, _USER, _UNUSED = 3, 4, 5


def tokenizer_of(source: Tensors | str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> Path:
    """Write a source's tokenizer.json, and its special tokens and chat template beside it.

    Args:
        source: a Hugging Face folder or a GGUF file.
        out_dir: where to write; made if it is not there.

    Returns:
        The path of tokenizer.json, which `lsm_jax.data.load_tokenizer` takes.

    Raises:
        ValueError: the source has no tokenizer of a kind known here.
    """
    return write_files(tokenizer_files(source), out_dir)


def write_files(files: dict[str, bytes], out_dir: str | os.PathLike[str]) -> Path:
    """Write what `tokenizer_files` gives; the path of tokenizer.json."""
    out = Path(out_dir).expanduser().absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)
    return out / _FILE


def tokenizer_files(
    source: Tensors | str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None
) -> dict[str, bytes]:
    """What `tokenizer_of` writes, by file name; raises as it does.

    Args:
        source: as there.
        tokenizer: a tokenizer.json or its folder in place of the source's own; it must have a GGUF file's tokens.
    """
    if not isinstance(source, Tensors):
        path = Path(source).expanduser()
        source = GGUF(path) if path.is_file() else path
    if tokenizer is not None:
        path = Path(tokenizer).expanduser()
        if path.is_file() and path.name != _FILE:
            raise ValueError(f"tokenizer={str(path)!r}: accepted are a {_FILE} and its folder")
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
            f"{folder} has no {_FILE}; transformers' save_pretrained of its tokenizer writes one"
        )
    paths = [folder / name for name in (_FILE, _CONFIG, _TEMPLATE)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _check_tokens(source: GGUF, content: bytes, path: Path) -> None:
    """Raise ValueError unless a tokenizer.json has the tokens of a GGUF file; those that are padding may be missing."""
    import tokenizers

    tokens: list[str] = source.fields.get("tokenizer.ggml.tokens", [])
    types = source.fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    try:
        made = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises no narrower one
        raise ValueError(f"tokenizer={str(path)!r} is no tokenizer.json: {error}") from error
    for i, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        found = made.id_to_token(i)
        if found != token and (found is not None or type_ != _UNUSED):
            raise ValueError(
                f"tokenizer={str(path)!r} is not that of {source.folder}: id {i} is {found!r} there, {token!r} in the model"
            )
    if (size := made.get_vocab_size()) > len(tokens):
        raise ValueError(
            f"tokenizer={str(path)!r} is not that of {source.folder}: it has {size} tokens, the model {len(tokens)}"
        )


def _from_gguf(source: GGUF) -> dict[str, Any]:
    """The contents of both files."""
    import tokenizers

    fields, where = source.fields, source.folder
    kind, cut = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in _PATTERNS:
        raise ValueError(
            f"{where}: tokenizer.ggml.model={kind!r}, tokenizer.ggml.pre={cut!r}; accepted are 'gpt2' with "
            f"{', '.join(_PATTERNS)}, and for any other the tokenizer.json of the model it was made of: --tokenizer=FILE "
            "(configs/liger.py: tokenizer=FILE)"
        )
    needed = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    if missing := [name for name in needed if name not in fields]:
        raise ValueError(f"{where}: {', '.join(missing)} missing")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(line.split(" ", 1)) for line in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=cut == "llama-bpe")
    made, pattern = tokenizers.Tokenizer(model), _PATTERNS[cut]
    parts: list[Any] = []
    if cut == "smollm":
        parts.append(tokenizers.pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        split = tokenizers.Regex(pattern)
        parts.append(tokenizers.pre_tokenizers.Split(split, "isolated"))
    parts.append(
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(parts)
    made.decoder = tokenizers.decoders.ByteLevel()
    if cut == "qwen2":
        made.normalizer = tokenizers.normalizers.NFC()
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in (_CONTROL, _USER):
            added = tokenizers.AddedToken(token, special=type_ == _CONTROL, normalized=False)
            (made.add_special_tokens if type_ == _CONTROL else made.add_tokens)([added])
    config: dict[str, Any] = {}
    for name in ("bos", "eos"):
        found = fields.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name}_token"] = None if found is None else tokens[found]
    bos, adds = config["bos_token"], fields.get("tokenizer.ggml.add_bos_token", cut == "llama-bpe")
    if adds and bos is not None:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    if (template := fields.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return {_FILE: json.loads(made.to_str()), _CONFIG: config}
