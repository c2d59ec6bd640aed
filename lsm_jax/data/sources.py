"""Open the store or the documents that a data config names, for training or for evaluation."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from lsm_jax.data.config import DataConfig
from lsm_jax.data.demo import demo_stores
from lsm_jax.data.documents import Documents
from lsm_jax.data.store import TokenStore, is_store
from lsm_jax.data.store_files import read_attributes
from lsm_jax.data.tokenizers import GPT2_ENCODER, Tokenizer, load_tokenizer
from lsm_jax.data.world_tokenizer import VOCABULARY


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
    )
    if not part:
        return documents
    if config.heldout_first:
        return documents.split_first(config.heldout_first)[heldout]
    return documents.split(config.heldout_fraction)[heldout]


def with_tokenizer(config: DataConfig) -> DataConfig:
    """Return the data config with a tokenizer in place of "auto": the one with which the store of `config.path` was written,
    also its JSON-escaping; bytes for text, and for a store that does not name its tokenizer.

    Raises:
        ValueError: the path does not exist, or the store has a tokenizer of which it has no file.
    """
    if config.tokenizer != "auto":
        return config
    path = locate(config, heldout=False)[0] if config.path else None
    if path is None or not is_store(path):
        return dataclasses.replace(config, tokenizer="bytes")
    attributes = read_attributes(path)
    encoder, escape = attributes.get("encoder", "bytes"), bool(attributes.get("json_escape"))
    names = {"bytes": "bytes", GPT2_ENCODER: "gpt2"}
    files = [file for file in ("tokenizer.json", VOCABULARY) if (path / file).is_file()]
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
    """Return the path of a data config's training or held-out data, and whether the documents there must
    still be split into training and held-out ones."""
    if heldout and config.heldout_path:
        return _existing(config.heldout_path, "heldout_path"), False
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
    if "://" in path or not absolute.exists():
        raise ValueError(
            f"data.{field}={path!r} does not exist; accepted is a local file or folder{_download(path)}"
        )
    return absolute


def _download(path: str) -> str:
    """Return the end of an error message, how to download a dataset, if a path looks like the id of one on the Hugging Face
    hub; otherwise ""."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
        return ""
    return (
        f". If it is the id of a dataset on the Hugging Face hub: `hf download {path} --repo-type dataset --local-dir FOLDER` "
        "downloads it"
    )
