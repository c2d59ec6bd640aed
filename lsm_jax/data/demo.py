"""The demo text: the running interpreter's own library, as a byte-token store.

Real text on every machine, with no download: about 10 MB of Python under the PSF licence, and the
English of `pydoc_data/topics.py`.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from pathlib import Path

from absl import logging

from lsm_jax.data.config import DataConfig
from lsm_jax.data.documents import Documents
from lsm_jax.data.encode import encode_documents, write_documents
from lsm_jax.data.store import is_store
from lsm_jax.data.tokenizers import ByteTokenizer
from lsm_jax.data.writer import StoreWriter

# Tests, tables of numbers, and what isn't the interpreter's own.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
}
_ROW_MULTIPLE = 32  # held-out rows, so that usual batches divide them


def library_files(*, max_bytes: int = 12_000_000) -> list[Path]:
    """The library's source files in sorted order, up to `max_bytes` of them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, size = [], 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS)
        files += [Path(folder) / name for name in sorted(names) if name.endswith(".py")]
    kept = []
    for path in sorted(files):
        size += path.stat().st_size
        if size > max_bytes:
            break
        kept.append(path)
    if not kept:
        raise ValueError(f"the interpreter's library at {root} has no source files; set data.path")
    return kept


def write_demo_store(
    directory: str | os.PathLike[str],
    *,
    row_length: int = 2048,
    heldout_fraction: float = 0.05,
    max_bytes: int = 12_000_000,
) -> tuple[Path, Path]:
    """Writes `train.zarr` and `heldout.zarr` of the interpreter's library, split by file.

    Files are put end to end with BOS (256) after each. Held-out rows over a multiple of 32 (of a
    power of two, below 32) are left out. The same interpreter gives the same bytes.

    Args:
        directory: gets the two stores; must not exist.
        row_length: bytes in a row.
        heldout_fraction: part of the files held out.
        max_bytes: source read at most.

    Returns:
        The two stores' paths.

    Raises:
        ValueError: no source files, rows longer than the text, or `directory` exists.
    """
    directory = Path(directory).expanduser().absolute()
    if directory.exists():
        raise ValueError(f"{directory} exists already")
    directory.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteTokenizer()
    parts = Documents(library_files(max_bytes=max_bytes)).split(heldout_fraction)
    part = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    names, encoded = ("train.zarr", "heldout.zarr"), encode_documents(parts, tokenizer.name)
    try:
        for name, documents, pieces in zip(names, parts, encoded, strict=True):
            with StoreWriter(
                part / name,
                row_length,
                vocab_size=tokenizer.vocab_size,
                attributes={"encoder": tokenizer.name, "separator": tokenizer.bos_id},
                row_multiple=_ROW_MULTIPLE if name == "heldout.zarr" else 1,
            ) as writer:
                done = write_documents(
                    documents,
                    writer,
                    pieces,
                    length=row_length,
                    separator=tokenizer.bos_id,
                )
            logging.info(
                "%s: %d rows of %d bytes from %d files.",
                directory / name,
                writer.num_rows,
                row_length,
                done.documents,
            )
        try:
            os.rename(part, directory)
        except OSError:
            # Another process may have been first; the same interpreter wrote the same bytes.
            if not is_store(directory / "heldout.zarr"):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return directory / "train.zarr", directory / "heldout.zarr"


def demo_stores(config: DataConfig) -> tuple[Path, Path]:
    """The demo's stores for these rows, written at the first use and kept.

    Raises:
        ValueError: the tokenizer isn't "bytes".
    """
    if config.tokenizer != "bytes" or config.json_escape:
        raise ValueError(
            "data.path is empty, which means the demo text in plain bytes, but "
            f"data.tokenizer={config.tokenizer!r}, data.json_escape={config.json_escape}; "
            "set data.path"
        )
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(config.cache_dir or f"{cache}/lsm_jax").expanduser()
    version = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    directory = root / f"demo-{version}-{config.sequence_length}"
    if directory.is_dir():
        return directory / "train.zarr", directory / "heldout.zarr"
    return write_demo_store(directory, row_length=config.sequence_length)
