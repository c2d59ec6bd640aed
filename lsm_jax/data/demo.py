"""The demo text: the standard library of the running interpreter, as a store of byte tokens.

Every machine has it without a download: about 10 MB of Python under the PSF licence, with the English text of
`pydoc_data/topics.py`.
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
from lsm_jax.data.unpack import cache_root
from lsm_jax.data.writer import StoreWriter

# Tests, tables of character codes, and installed packages.
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
_ROW_MULTIPLE = 32  # of the number of held-out rows, so that usual batch sizes divide it


def library_files(*, max_bytes: int = 12_000_000) -> list[Path]:
    """Return the paths of the Python standard library's source files in sorted order, at most `max_bytes`
    in total, as the demo's text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, size = [], 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS)
        files += [Path(folder) / name for name in sorted(names) if name.endswith(".py")]
    selected = []
    for path in sorted(files):
        size += path.stat().st_size
        if size > max_bytes:
            break
        selected.append(path)
    if not selected:
        raise ValueError(
            f"data.path is empty, but the standard library at {root} has no source files for the demo text; "
            "set data.path"
        )
    return selected


def write_demo_store(
    directory: str | os.PathLike[str],
    *,
    row_length: int = 2048,
    heldout_fraction: float = 0.05,
    max_bytes: int = 12_000_000,
) -> tuple[Path, Path]:
    """Write the demo's text (Python's standard library) as two stores of byte tokens, `train.zarr` and
    `heldout.zarr`, split by file.

    The files are concatenated, with BOS (256) after each. The number of held-out rows is cut to a multiple of 32, or to
    a power of two if there are fewer. The same interpreter always writes the same bytes.

    Args:
        directory: folder for the two stores; it must not exist yet.
        row_length: bytes in a row.
        heldout_fraction: share of the files to hold out.
        max_bytes: read at most this many bytes of source files.

    Returns:
        The paths of the training store and the held-out store.

    Raises:
        ValueError: there are no source files, a row is longer than the text, or `directory` exists.
    """
    directory = Path(directory).expanduser().absolute()
    if directory.exists():
        raise ValueError(f"directory={str(directory)!r} exists already; accepted is a new folder")
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
            # Another process may have written the same bytes first.
            if not is_store(directory / "heldout.zarr"):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return directory / "train.zarr", directory / "heldout.zarr"


def demo_stores(config: DataConfig) -> tuple[Path, Path]:
    """Return the paths of the (training, held-out) token stores of the demo's text, Python's standard
    library, with rows of `sequence_length` bytes.

    They are written at the first use and stay in the cache folder.

    Raises:
        ValueError: the tokenizer is not "bytes", or `json_escape` is set.
    """
    if config.tokenizer not in ("auto", "bytes") or config.json_escape:
        raise ValueError(
            "data.path is empty, which selects the demo text in plain bytes, but "
            f"data.tokenizer={config.tokenizer!r} and data.json_escape={config.json_escape}; "
            "set data.path"
        )
    root = cache_root(config.cache_dir)
    version = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    directory = root / f"demo-{version}-{config.sequence_length}"
    if directory.is_dir():
        return directory / "train.zarr", directory / "heldout.zarr"
    return write_demo_store(directory, row_length=config.sequence_length)
