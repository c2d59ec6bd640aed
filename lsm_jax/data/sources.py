"""From a config's paths to an opened store or list of documents, for training or held-out."""

from __future__ import annotations

from pathlib import Path

from lsm_jax.data.config import DataConfig
from lsm_jax.data.demo import demo_stores
from lsm_jax.data.documents import Documents
from lsm_jax.data.store import TokenStore, is_store


def open_store(config: DataConfig, *, heldout: bool) -> tuple[TokenStore, int, int] | None:
    """(store, first document, number of documents), or None where the path holds text.

    Raises:
        ValueError: nothing there, not a store, or nothing held out.
    """
    path, part = locate(config, heldout)
    if not is_store(path):
        return None
    if config.format != "text":
        raise ValueError(
            f"data.format={config.format!r} takes JSONL files; {path} is a token store"
        )
    store = TokenStore(
        path,
        cached_blocks=2 if heldout or not config.shuffle else config.shuffle_blocks + 1,
        block_length=config.sequence_length,
    )
    if not part:
        return store, 0, store.num_documents
    held = max(1, round(config.heldout_fraction * store.num_documents))
    if held >= store.num_documents:
        raise ValueError(
            f"{path} has {store.num_documents} documents, too few to hold out "
            f"{config.heldout_fraction}; set data.heldout_path"
        )
    kept = store.num_documents - held
    return (store, kept, held) if heldout else (store, 0, kept)


def open_documents(config: DataConfig, *, heldout: bool) -> Documents:
    """The documents of a text path.

    Raises:
        ValueError: nothing there, no text, or too little to hold a part out.
    """
    path, part = locate(config, heldout)
    documents = Documents(
        [path],
        text_key=config.text_key,
        format=config.format,
        piece_bytes=max(1 << 16, 16 * config.sequence_length),
    )
    return documents.split(config.heldout_fraction)[heldout] if part else documents


def locate(config: DataConfig, heldout: bool) -> tuple[Path, bool]:
    """The path to read, and whether only the training or held-out part of it is meant."""
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
    if heldout and not config.heldout_fraction:
        raise ValueError(
            "nothing is held out: set data.heldout_path, or data.heldout_fraction above 0"
        )
    return path, config.heldout_fraction > 0


def _existing(path: str, field: str) -> Path:
    found = Path(path).expanduser().absolute()
    if "://" in path or not found.exists():
        raise ValueError(
            f"data.{field}={path!r} does not exist (it must be a local file or folder)"
        )
    return found
