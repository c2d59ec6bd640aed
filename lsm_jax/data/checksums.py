"""Write or check the checksums of token stores that exist already.

    python -m lsm_jax.data.checksums longcrawl64/train.zarr
    python -m lsm_jax.data.checksums --check longcrawl64/train.zarr

Stores that are written here have `checksums.json` from the beginning. For others, such as the published LongCrawl64, the
first command reads and decodes the store once and writes the file, so that later damage is noticed. The second reads
all chunk files and compares them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lsm_jax.data.store import TokenStore
from lsm_jax.data.store_files import CHECKSUMS, checksum, read_metadata, write_checksums
from lsm_jax.files import disk_error

_ANY_ID = 1 << 31


def add_checksums(path: str | Path) -> int:
    """Read a whole token store, and write the checksums of its files as they are now; return the number of
    chunk files.

    An existing `checksums.json` is replaced.

    Raises:
        ValueError: the folder is no token store, or a chunk file is missing or cannot be decoded.
        OSError: `checksums.json` cannot be written.
    """
    path = Path(path).expanduser().absolute()
    store, metadata = TokenStore(path, compare_checksums=False), read_metadata(path)
    largest, checksums = 0, {}
    for row, first in enumerate(range(0, store.num_documents, store.chunks[0])):
        documents = np.arange(first, min(first + store.chunks[0], store.num_documents))
        for column, start in enumerate(range(0, store.length, store.chunks[1])):
            length = min(store.chunks[1], store.length - start)
            ids = store.read(documents, start, length, vocab_size=_ANY_ID)
            largest = max(largest, int(ids.max()))
            name = metadata.chunk_name(row, column)
            checksums[name] = checksum((path / name).read_bytes())
    write_checksums(path, checksums, largest_token_id=largest)
    return len(checksums)


def check_store(path: str | Path) -> int:
    """Compare all files of a token store with their checksums, and return the number of chunk files.

    Raises:
        ValueError: the store has no checksums, or a file does not match; the message names it.
    """
    store = TokenStore(path)
    if not store.has_checksums:
        raise ValueError(f"{store.path} has no {CHECKSUMS}; run this command without --check first")
    return store.check_files()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the checksums of the stores on the command line, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lsm_jax.data.checksums",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stores", nargs="+", help="paths of token stores")
    parser.add_argument(
        "--check", action="store_true", help="compare the files with checksums.json"
    )
    options = parser.parse_args(arguments)
    failed = False
    for path in options.stores:
        try:
            count = check_store(path) if options.check else add_checksums(path)
            print(f"{path}: {count} chunk files {'match' if options.check else 'have checksums'}")
        except (ValueError, OSError) as error:
            failed = True
            message = (
                error
                if isinstance(error, ValueError)
                else disk_error(error, kept="no checksums were written")
            )
            print(f"error: {message}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
