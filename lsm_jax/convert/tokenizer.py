"""Write a pretrained model's tokenizer as tokenizer.json, with special tokens and chat template in tokenizer_config.json; that of
RWKV's models as their vocabulary, a .txt file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from absl import logging

from lsm_jax import hub
from lsm_jax.convert.checkpoint import Checkpoint, Tensors
from lsm_jax.convert.checksums import check_sum, read_sums
from lsm_jax.convert.fields import check_auto_map, check_fields, listed, shown
from lsm_jax.convert.gguf_file import GGUF
from lsm_jax.data import tiktoken_file
from lsm_jax.data.chat import template_error
from lsm_jax.data.tokenizers import special_tokens
from lsm_jax.data.world_tokenizer import VOCABULARY, vocabulary
from lsm_jax.files import MEGABYTE, check_keys, inside, parse_json, read_bytes, write_atomically

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
_MAX_BYTES = 256 * MEGABYTE  # of a tokenizer.json; the largest of published models have some 40 MB
_MAX_CONFIG_BYTES = 16 * MEGABYTE  # of the other files, as `load_tokenizer` accepts
# Fields of tokenizer_config.json that do not change the ids of a text, or that tokenizer.json contains too.
_HARMLESS = {
    "unk_token", "pad_token", "cls_token", "sep_token", "mask_token", "additional_special_tokens", "extra_special_tokens",
    "added_tokens_decoder", "model_max_length", "max_length", "tokenizer_class", "tokenizer_file", "special_tokens_map_file",
    "name_or_path", "_name_or_path", "clean_up_tokenization_spaces", "spaces_between_special_tokens", "model_input_names",
    "padding_side", "truncation_side", "processor_class", "auto_map", "errors", "legacy", "sp_model_kwargs", "vocab_size",
    "use_default_system_prompt", "backend", "is_local", "trust_remote_code", "use_fast", "unk_token_id", "pad_token_id",
    "bos_token_id", "eos_token_id", "pad_to_multiple_of", "pad_token_type_id", "stride", "truncation_strategy", "padding",
    "truncation",
}  # fmt: skip
_SPECIAL = ("bos_token", "eos_token", "chat_template")
_CONFIG_KINDS = {
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space"), "flag"),
    "added_tokens_decoder": "object",
    "tokenizer_class": "text",
}
# The same for the fields "tokenizer.ggml.*" of GGUF files.
_GGUF_USED = {"model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token"}  # fmt: skip
_GGUF_HARMLESS = {
    "scores", "padding_token_id", "unknown_token_id", "seperator_token_id", "cls_token_id", "mask_token_id", "token_type_count",
}  # fmt: skip


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
    tokenizer.json, or of RWKV's vocabulary."""
    out = Path(out_dir).expanduser().absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(out / name, content)
    return out / (VOCABULARY if VOCABULARY in files else _FILE)


def tokenizer_files(
    source: Tensors | str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None
) -> dict[str, bytes]:
    """Return the contents of a pretrained model's tokenizer files, as `tokenizer_of` writes them, by file
    name.

    Args:
        source: a Hugging Face folder or a GGUF file.
        tokenizer: a tokenizer.json, its folder or the id of a model on the Hugging Face hub, to use instead of the source's
            tokenizer; or RWKV's vocabulary, a .txt file. If the source is a GGUF file, its tokens must be the same.

    Raises:
        ValueError: the source has no tokenizer or one of an unsupported kind, or `tokenizer` has other tokens.
    """
    if not isinstance(source, Tensors):
        path = hub.local_path(source)
        source = GGUF(path) if path.is_file() else path
    if tokenizer is not None:
        path = hub.tokenizer_folder(os.fspath(tokenizer)) or Path(tokenizer).expanduser()
        if path.suffix == ".txt" and not isinstance(source, GGUF):
            return _world(path.parent, path.name)
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
    if not (folder / _FILE).is_file() and (folder / tiktoken_file.FILE).is_file():
        return _from_tiktoken(folder)
    if not (folder / _FILE).is_file():
        if (folder / VOCABULARY).is_file():
            return _world(folder, VOCABULARY)
        raise ValueError(
            f"{folder} has no {_FILE}; write one with transformers: tokenizer.save_pretrained(folder); for RWKV's models, "
            f"--tokenizer={VOCABULARY} is the vocabulary that comes with them"
        )
    sums = source.sums if isinstance(source, Checkpoint) else read_sums(folder)
    files: dict[str, bytes] = {}
    for name in (_FILE, _CONFIG, _TEMPLATE):
        path = folder / name
        if path.exists() or path.is_symlink():
            files[name] = read_bytes(
                inside(folder, name, what=f"{folder}", follow_links=True),
                max_bytes=_MAX_BYTES if name == _FILE else _MAX_CONFIG_BYTES,
            )
            check_sum(path, name, sums, files[name])
    _check_files(folder, files)
    return files


def _world(folder: Path, name: str) -> dict[str, bytes]:
    """Return the content of RWKV's vocabulary, by the name that it has in a run.

    Raises:
        ValueError: the file cannot be read or is no vocabulary.
    """
    path = folder / name
    if not path.is_file():
        raise ValueError(
            f"tokenizer={str(path)!r} does not exist; accepted is RWKV's vocabulary, such as {VOCABULARY}"
        )
    content = read_bytes(
        inside(folder, name, what=f"{folder}", follow_links=True), max_bytes=_MAX_BYTES
    )
    check_sum(path, name, read_sums(folder), content)
    vocabulary(content, path)
    return {VOCABULARY: content}


def _from_tiktoken(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder's tokenizer as those of a tokenizer.json, which is converted from its tiktoken.model."""
    path = inside(folder, tiktoken_file.FILE, what=f"{folder}", follow_links=True)
    files = {_FILE: tiktoken_file.tokenizer_json(folder / tiktoken_file.FILE)}
    sums = read_sums(folder)
    check_sum(path, tiktoken_file.FILE, sums, read_bytes(path, max_bytes=_MAX_BYTES))
    for name in (_CONFIG, _TEMPLATE):
        if (folder / name).exists():
            place = inside(folder, name, what=f"{folder}", follow_links=True)
            files[name] = read_bytes(place, max_bytes=_MAX_CONFIG_BYTES)
            check_sum(folder / name, name, sums, files[name])
    _check_files(folder, files)
    return files


def _check_files(folder: Path, files: dict[str, bytes]) -> None:
    """Raise ValueError if a tokenizer's files cannot be used, and warn of fields that are not used.

    Args:
        folder: the folder of the files, for messages.
        files: their contents by name.
    """
    tokenizer = _parse(files[_FILE], folder / _FILE)
    config, where = {}, folder / _CONFIG
    if _CONFIG in files:
        config = parse_json(files[_CONFIG], where)
        check_fields(config, where, _CONFIG_KINDS)
        check_auto_map(config, where)
    special = special_tokens(config, where)
    unused = {n: v for n, v in config.items() if n not in _HARMLESS and n not in _SPECIAL}
    bos = special["bos_token"]
    bos_id = None if bos is None else tokenizer.token_to_id(bos)
    if bos_id is not None and "add_bos_token" in unused:
        adds_bos = tokenizer.encode("a").ids[:1] == [bos_id]
        if unused["add_bos_token"] in (None, adds_bos):
            del unused["add_bos_token"]
    unused = {n: v for n, v in unused.items() if v not in (None, False, "", [], {})}
    if unused:
        logging.warning(
            "%s: fields that are copied, but not used, since %s alone decides the ids of a text: %s",
            where, _FILE, listed(f"{n}={shown(v)}" for n, v in unused.items()),
        )  # fmt: skip
    template, place = special["chat_template"], f"{where}: chat_template"
    if _TEMPLATE in files:
        place = str(folder / _TEMPLATE)
        try:
            template = files[_TEMPLATE].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{place} cannot be read: byte {error.start} is no UTF-8") from error
    if template is not None and (problem := template_error(template)):
        logging.warning("%s cannot be used, and --chat will be refused: %s", place, problem)


def _parse(content: bytes, path: Path) -> Any:
    """Return the tokenizer of a tokenizer.json.

    Raises:
        ValueError: the package `tokenizers` cannot read it.
    """
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        if not tokenizer.get_vocab_size():
            raise ValueError("it has no tokens")
    except Exception as error:  # the package raises no narrower class
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} is no tokenizer.json: {problem}") from error
    check_keys(content, path)
    return tokenizer


def check_companions(source: Tensors) -> None:
    """Check the types of the fields of generation_config.json and special_tokens_map.json of a folder, if it has them. An
    import does not use these files, and an export copies them.

    Raises:
        ValueError: a file cannot be read or is no JSON object, or a field has a wrong type.
    """
    if not isinstance(source, Checkpoint):
        return
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    for name in ("generation_config.json", "special_tokens_map.json"):
        path = source.folder / name
        if not (path.exists() or path.is_symlink()):
            continue
        fields = source.read_json(name)
        if name == "special_tokens_map.json":
            special_tokens(fields, path)
        else:
            check_fields(fields, path, dict.fromkeys(tokens, "token"))


def _check_tokens(source: GGUF, content: bytes, path: Path) -> None:
    """Raise ValueError unless a tokenizer.json has the same tokens as the GGUF file with which it is to be
    used; it may lack the file's unused tokens.

    Args:
        source: the GGUF file, opened for reading.
        content: the contents of the tokenizer.json.
        path: the path of the tokenizer.json, for error messages.
    """
    tokens, types = _gguf_tokens(source)
    tokenizer = _parse(content, path)
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


def _gguf_tokens(source: GGUF) -> tuple[list[str], list[int]]:
    """Return the tokens of a GGUF file, and their types.

    Raises:
        ValueError: the fields are no lists of strings and numbers of one length, or there are more tokens than embeddings.
    """
    where, prefix = source.folder, "tokenizer.ggml."
    check_fields(source.fields, where, {f"{prefix}tokens": "texts"})
    tokens: list[str] = source.fields.get(f"{prefix}tokens", [])
    types = source.fields.get(f"{prefix}token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        size = len(types) if isinstance(types, list) else shown(types)
        raise ValueError(
            f"{where}: {prefix}token_type has length {size}; accepted is a list of {len(tokens)}, as {prefix}tokens"
        )
    if len(tokens) > source.config["vocab_size"]:
        raise ValueError(
            f"{where}: {prefix}tokens has {len(tokens)} tokens, but the model has {source.config['vocab_size']} embeddings"
        )
    return tokens, types


def _from_gguf(source: GGUF) -> dict[str, Any]:
    """Return the contents of tokenizer.json and tokenizer_config.json of a GGUF file's tokenizer, made from
    the file's metadata.

    Raises:
        ValueError: the tokenizer is of an unsupported kind, or a field is missing or has a wrong value.
    """
    fields, where = source.fields, source.folder
    check_fields(
        fields, where,
        {
            "tokenizer.ggml.model": "text", "tokenizer.ggml.pre": "text", "tokenizer.ggml.merges": "texts",
            "tokenizer.chat_template": "text", "tokenizer.ggml.add_bos_token": "flag",
        },
    )  # fmt: skip
    kind, pattern_name = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pattern_name not in _PATTERNS:
        raise ValueError(
            f"{where}: tokenizer.ggml.model={shown(kind)}, tokenizer.ggml.pre={shown(pattern_name)}; accepted are 'gpt2' "
            f"with {', '.join(_PATTERNS)}. For others give the tokenizer.json of the original model: --tokenizer=FILE, "
            "or the option tokenizer=FILE of configs/liger.py"
        )
    required = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    if missing := [name for name in required if name not in fields]:
        raise ValueError(f"{where}: missing fields: {', '.join(missing)}")
    tokens, types = _gguf_tokens(source)
    config: dict[str, Any] = {}
    for name in ("bos", "eos"):
        token_id = fields.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and not (type(token_id) is int and token_id < len(tokens)):
            raise ValueError(
                f"{where}: tokenizer.ggml.{name}_token_id={shown(token_id)}; accepted are the ids of {len(tokens)} tokens"
            )
        config[f"{name}_token"] = None if token_id is None else tokens[token_id]
    adds_bos = fields.get("tokenizer.ggml.add_bos_token", pattern_name == "llama-bpe")
    try:
        content = _byte_pair_tokenizer(
            tokens, types, fields["tokenizer.ggml.merges"], pattern_name,
            config["bos_token"] if adds_bos else None,
        )  # fmt: skip
    except Exception as error:  # the package `tokenizers` raises no narrower class
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{where}: tokenizer.ggml.tokens and tokenizer.ggml.merges are no tokenizer: {problem}"
        ) from error
    if (template := fields.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
        if problem := template_error(template):
            logging.warning(
                "%s: tokenizer.chat_template cannot be used, and --chat will be refused: %s", where, problem
            )  # fmt: skip
    known = {f"tokenizer.ggml.{name}" for name in _GGUF_USED | _GGUF_HARMLESS}
    unused = {
        name: value
        for name, value in fields.items()
        if name.startswith("tokenizer.")
        and name not in known | {"tokenizer.chat_template"}
        and value not in (None, False, "", [])
    }
    if unused:
        logging.warning(
            "%s: fields of the tokenizer that are not used and not copied: %s",
            where, listed(f"{n}={shown(v)}" for n, v in unused.items()),
        )  # fmt: skip
    return {_FILE: content, _CONFIG: config}


def _byte_pair_tokenizer(
    tokens: list[str], types: list[int], merges: list[str], pattern_name: str, bos: str | None
) -> dict[str, Any]:
    """Return the contents of a tokenizer.json that merges pairs of bytes.

    Args:
        tokens: the tokens in the order of their ids.
        types: their types, as GGUF numbers them.
        merges: two tokens with a space between them each, in the order of merging.
        pattern_name: the name in `_PATTERNS` of the expression that splits a text.
        bos: the token to add in front of a text, or None.
    """
    import tokenizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        repeated = next(t for i, t in enumerate(tokens) if vocabulary[t] != i)
        raise ValueError(f"the token {shown(repeated)} occurs twice")
    if wrong := [line for line in merges if " " not in line]:
        raise ValueError(f"the merge {shown(wrong[0])} is not two tokens with a space between them")
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in merges)]
    model = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pattern_name == "llama-bpe")
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
    if bos is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return json.loads(tokenizer.to_str())
