"""Open the store or the documents that a data config names, for training or for evaluation."""

from __future__ import annotations

from pathlib import Path

from lsm_jax.data.config import DataConfig
from lsm_jax.data.demo import demo_stores
from lsm_jax.data.documents import Documents
from lsm_jax.data.store import TokenStore, is_store


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
            raise ValueError(f"{path} has a train.zarr but no heldout.zarr; set data.heldout_path")
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
            f"data.{field}={path!r} does not exist; accepted is a local file or folder"
        )
    return absolute
