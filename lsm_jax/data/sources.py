"""Open the store or the documents that a data config names, for training or for evaluation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lsm_jax import hub
from lsm_jax.data import tiktoken_file
from lsm_jax.data.config import DataConfig
from lsm_jax.data.datasets_source import data_set, pinned_data
from lsm_jax.data.demo import demo_stores
from lsm_jax.data.documents import Documents
from lsm_jax.data.mixture import format_mixture, parse_mixture
from lsm_jax.data.store import TokenStore, is_store
from lsm_jax.data.store_files import read_attributes
from lsm_jax.data.tokenizers import GPT2_ENCODER, Tokenizer, load_tokenizer
from lsm_jax.data.unpack import cache_root
from lsm_jax.data.world_tokenizer import VOCABULARY


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the sources of a data config: its name in metrics, its weight, and a data config that has it alone."""

    name: str
    weight: float
    config: DataConfig


def parts_of(config: DataConfig) -> list[Part]:
    """Return the sources of a data config: those of `data.mixture`, or the only one.

    Raises:
        ValueError: the mixture cannot be parsed.
    """
    if not config.mixture:
        return [Part(config.path, 1.0, config)]
    return [
        Part(path, weight, dataclasses.replace(config, path=path, mixture=""))
        for weight, path in parse_mixture(config.mixture)
    ]


def open_store(config: DataConfig, *, heldout: bool) -> tuple[TokenStore, int, int] | None:
    """Open the token store that has a data config's training or held-out documents: return (store, number
    of the first document to read, number of documents to read), or None if the config's path contains text.

    Args:
        config: the data config of the run.
        heldout: return the held-out documents instead of the training documents.

    Raises:
        ValueError: the path does not exist or is no store, or there are no held-out documents.
    """
    path, part = locate(config, heldout)
    if not is_store(path):
        return None
    if config.format != "text":
        raise ValueError(
            f"data.format={config.format!r} requires JSONL files or a JSON array, but {path} is a token store"
        )
    store = TokenStore(
        path,
        cached_blocks=2 if heldout or not config.shuffle else config.shuffle_blocks + 1,
        block_length=config.sequence_length,
    )
    if not part:
        return store, 0, store.num_documents
    if config.heldout_first:
        raise ValueError(
            f"data.heldout_first={config.heldout_first} requires text, but {path} is a token store; accepted is 0"
        )
    held = max(1, round(config.heldout_fraction * store.num_documents))
    if held >= store.num_documents:
        raise ValueError(
            f"data.heldout_fraction={config.heldout_fraction} leaves none of the {store.num_documents} documents in "
            f"{path} for training; choose a smaller fraction, or set data.heldout_path"
        )
    trained = store.num_documents - held
    return (store, trained, held) if heldout else (store, 0, trained)


def open_documents(config: DataConfig, *, heldout: bool) -> Documents:
    """Return the documents in the text files of a data config, either those for training or those held out.

    Raises:
        ValueError: the path does not exist, has no text, or too little to hold a part of it out.
    """
    path, part = locate(config, heldout)
    documents = Documents(
        [path],
        text_key=config.text_key,
        format=config.format,
        piece_bytes=max(1 << 16, 16 * config.sequence_length),
        cache_dir=config.cache_dir,
    )
    if not part:
        return documents
    if config.heldout_first:
        return documents.split_first(config.heldout_first)[heldout]
    rows = row_bytes(config.sequence_length, config.tokenizer)
    return documents.split(config.heldout_fraction, rows)[heldout]


def row_bytes(sequence_length: int, tokenizer: str) -> int:
    """Return the bytes of text that fill a row: a byte for each token of the tokenizer "bytes" (also "auto", of text), and six
    for each of another, whose tokens have about four."""
    return sequence_length * (1 if tokenizer in ("auto", "bytes") else 6)


def with_tokenizer(config: DataConfig) -> DataConfig:
    """Return the data config with a tokenizer in place of "auto": the one with which the store of `config.path` was written,
    also its JSON-escaping; bytes for text, and for a store that does not name its tokenizer.

    Raises:
        ValueError: the path does not exist, or the store has a tokenizer of which it has no file.
    """
    if config.tokenizer != "auto":
        return config
    if config.mixture:
        known = with_tokenizer(parts_of(config)[0].config)
        return dataclasses.replace(config, tokenizer=known.tokenizer, json_escape=known.json_escape)
    path = locate(config, heldout=False)[0] if config.path else None
    if path is None or not is_store(path):
        return dataclasses.replace(config, tokenizer="bytes")
    attributes = read_attributes(path)
    encoder, escape = attributes.get("encoder", "bytes"), bool(attributes.get("json_escape"))
    names = {"bytes": "bytes", GPT2_ENCODER: "gpt2"}
    names_of_files = ("tokenizer.json", VOCABULARY, tiktoken_file.FILE)
    files = [name for name in names_of_files if (path / name).is_file()]
    if files:
        # Relative if `config.path` is, so that both move together.
        given = Path(config.path)
        store = given if is_store(given.expanduser()) else given / "train.zarr"
        name = str(store / files[0])
    elif encoder in names:
        name = names[encoder]
    else:
        raise ValueError(
            f"{path} was written with encoder {encoder!r}, whose file it does not have; set data.tokenizer to the path of "
            "that tokenizer.json"
        )
    return dataclasses.replace(config, tokenizer=name, json_escape=config.json_escape or escape)


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """Return the tokenizer of a data config.

    Raises:
        ValueError: there is no such tokenizer.
    """
    config = with_tokenizer(config)
    return load_tokenizer(config.tokenizer, json_escape=config.json_escape)


def locate(config: DataConfig, heldout: bool) -> tuple[Path, bool]:
    """Return the path of a data config's training or held-out data (the name of a data set is returned as a path), and
    whether the documents there must still be split into training and held-out ones.

    Raises:
        ValueError: the path does not exist, there are no held-out data, or the config has a mixture.
    """
    if heldout and config.heldout_path:
        return _existing(config.heldout_path, "heldout_path"), False
    if config.mixture:
        raise ValueError(
            f"data.mixture={config.mixture!r} has several sources; one is required here: eval.py --data=PATH, or "
            "data.heldout_path"
        )
    if not config.path:
        return demo_stores(config)[heldout], False
    path = _existing(config.path, "path")
    pair = path / "train.zarr", path / "heldout.zarr"
    if pair[0].is_dir():
        if not pair[heldout].is_dir():
            raise ValueError(
                f"{path} has a train.zarr but no heldout.zarr; set data.heldout_path, write both stores by "
                "`python -m lsm_jax.data.tokenize`, or train without held-out data by eval_every=0"
            )
        return pair[heldout], False
    if config.heldout_path:
        return path, False
    if heldout and not (config.heldout_fraction or config.heldout_first):
        raise ValueError(
            "there are no held-out data: data.heldout_path is empty and data.heldout_fraction=0; set one of them"
        )
    return path, config.heldout_fraction > 0 or config.heldout_first > 0


def _existing(path: str, field: str) -> Path:
    absolute = Path(path).expanduser().absolute()
    if absolute.exists() and "://" not in path:
        return absolute
    if "://" in path or data_set(path) is None:
        raise ValueError(
            f"data.{field}={path!r} does not exist; accepted is a local file or folder, or a data set of the Hugging Face hub "
            "as OWNER/NAME[/SUBSET][@REVISION][:SPLIT]"
        )
    return Path(path)


def pin(config: DataConfig, before: DataConfig | None = None) -> DataConfig:
    """Return the data config with commits in place of the hub's branches: in the names of data sets and of the tokenizer.

    Args:
        config: the data config of a run.
        before: the data config with which the run began, whose commits are used for the same names.

    Raises:
        ValueError: the hub has no such data set or tokenizer, or cannot be reached and the cache does not have it.
    """
    cache = cache_root(config.cache_dir)
    changes: dict[str, Any] = {}
    for name in ("path", "heldout_path"):
        old = getattr(before, name) if before else ""
        changes[name] = pinned_data(getattr(config, name), f"data.{name}", cache, before=old)
    if config.mixture:
        given = parse_mixture(config.mixture)
        old = (
            [path for _, path in parse_mixture(before.mixture)] if before and before.mixture else []
        )
        old += [""] * (len(given) - len(old))
        changes["mixture"] = format_mixture(
            (weight, pinned_data(path, "data.mixture", cache, before=past))
            for (weight, path), past in zip(given, old, strict=False)
        )
    if config.tokenizer not in ("auto", "bytes", "gpt2"):
        old = before.tokenizer if before else ""
        changes["tokenizer"] = hub.pinned(config.tokenizer, "data.tokenizer", before=old)
    return dataclasses.replace(config, **changes)
