"""Pack a corpus into small parts for a machine without a network, and unpack them there into the same token ids.

    python -m scripts.pack_corpus pack --corpus=data/corpus --out=parts --train_tokens=100e6 --part_bytes=55e6
    python -m scripts.pack_corpus unpack --parts=parts --out=data/corpus

A part is a tar file of at most `--part_bytes` with blocks of rows of the stores, each compressed by xz. Parts can be unpacked in several calls and any order: `unpack` keeps the
blocks that it has, says which are missing, and writes the stores once all are there. The training store has its first
`--train_tokens` tokens, which are a random sample since the documents are shuffled; the held-out stores are complete, or
have `--heldout_tokens` and `--long_rows`. The tokenizer and the files of `--also`, such as recall/fields.jsonl, are in the
first part. `unpack` compares the SHA-256 of each store's ids with the packed one.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lsm_jax.data.store import TokenStore
from lsm_jax.data.writer import StoreWriter
from lsm_jax.files import inside, write_atomically

STORES = ("train", "heldout", "long")
_BLOCKS = ".blocks"  # in the parts and, until the stores are written, in the folder of the corpus
MANIFEST = "manifest.json"
_BLOCK_TOKENS = 1 << 22
_MARGIN = 20_480  # bytes of tar's headers and end


def compress(rows: np.ndarray) -> bytes:
    """Return rows of token ids, uint16, as xz. Its model knows that the data are pairs of bytes (lp, pb), which makes ids
    smaller than the compressed text that they stand for."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 1, "pb": 1}]  # fmt: skip
    return lzma.compress(np.ascontiguousarray(rows, "<u2").tobytes(), filters=filters)


def decompress(data: bytes, length: int) -> np.ndarray:
    """Return the rows [n, length] of token ids that `compress` packed."""
    return np.frombuffer(lzma.decompress(data), "<u2").reshape(-1, length)


def _blocks(store: TokenStore, rows: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, rows) of the first `rows` rows of a store, 4 M tokens at a time."""
    step = max(1, _BLOCK_TOKENS // store.length)
    for first in range(0, rows, step):
        numbers = np.arange(first, min(first + step, rows))
        yield first, store.read(numbers, 0, store.length, vocab_size=1 << 16).astype("<u2")


class _Parts:
    """Writes files one after another into tar files of at most `limit` bytes."""

    def __init__(self, folder: Path, limit: int):
        self._folder, self._limit = folder, limit
        self._files: list[tuple[str, bytes]] = []
        self._size = self.count = 0

    def add(self, name: str, data: bytes) -> None:
        """Add a file, in a new part if it does not fit into the present one."""
        size = len(data) + 1024
        if size + _MARGIN > self._limit:
            raise ValueError(f"--part_bytes={self._limit}: {name} alone has {len(data)} bytes")
        if self._size + size + _MARGIN > self._limit:
            self.close()
        self._files.append((name, data))
        self._size += size

    def close(self) -> None:
        """Write the present part."""
        if not self._files:
            return
        with tarfile.open(self._folder / f"part-{self.count:03}.tar", "w") as archive:
            for name, data in self._files:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        self._files, self._size, self.count = [], 0, self.count + 1


def _rows(name: str, store: TokenStore, options: argparse.Namespace) -> int:
    """Return how many rows of a store the options select, after checking that its ids have 16 bits."""
    if (store.largest_token_id or 0) >= 1 << 16:
        raise ValueError(
            f"{store.path}: ids up to {store.largest_token_id}; accepted are ids of 16 bits"
        )
    wanted = options.long_rows
    if name != "long":
        tokens = options.train_tokens if name == "train" else options.heldout_tokens
        wanted = None if tokens is None else int(tokens // store.length)
    if wanted is not None and wanted < 1:
        raise ValueError(
            f"{store.path}: {wanted} rows of {store.length} tokens; accepted is 1 or more"
        )
    return store.num_documents if wanted is None else min(wanted, store.num_documents)


def pack(options: argparse.Namespace) -> str:
    """Write the parts of a corpus and return what was written, as a line of text."""
    corpus = options.corpus
    stores, rows, digests = {}, {}, {}
    for name in STORES:
        path = corpus / f"{name}.zarr"
        if path.is_dir() or name == "train":
            stores[name] = TokenStore(path)
            rows[name] = _rows(name, stores[name], options)
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.glob("part-*.tar")):
        raise ValueError(f"--out={options.out}: it has parts already; give a new folder")
    parts = _Parts(options.out, int(options.part_bytes))
    for name in ("tokenizer.json", *options.also):
        file = inside(corpus, name, what="--also")
        parts.add(f"files/{name}", file.read_bytes())
    tokens = 0
    with ThreadPoolExecutor(options.num_workers) as pool:
        for name, store in stores.items():
            digest, waiting = hashlib.sha256(), []
            for first, block in _blocks(store, rows[name]):
                digest.update(block.tobytes())
                tokens += block.size
                waiting.append((first, pool.submit(compress, block)))
                while len(waiting) > options.num_workers:
                    number, data = waiting.pop(0)
                    parts.add(f"{_BLOCKS}/{name}/{number:06}.xz", data.result())
            for number, data in waiting:
                parts.add(f"{_BLOCKS}/{name}/{number:06}.xz", data.result())
            digests[name] = digest.hexdigest()
            print(f"{name}: {rows[name]} rows, {tokens / 1e6:.1f} M tokens so far, part {parts.count}", file=sys.stderr, flush=True)  # fmt: skip
    manifest = {
        name: dict(rows=rows[name], length=store.length, sha256=digests[name],
                   attributes=store.attributes, step=max(1, _BLOCK_TOKENS // store.length))
        for name, store in stores.items()
    }  # fmt: skip
    parts.add(MANIFEST, json.dumps(manifest).encode())
    parts.close()
    size = sum(path.stat().st_size for path in options.out.glob("part-*.tar"))
    return f"{parts.count} parts in {options.out}: {tokens} tokens, {size} bytes, {8 * size / tokens:.2f} bits per token"  # fmt: skip


def unpack(options: argparse.Namespace) -> str:
    """Read all parts of a folder, write the stores once every block is there, and return what was done.

    Raises:
        ValueError: a part is damaged, blocks are missing, or ids differ from the packed ones.
    """
    blocks, manifest = options.out / _BLOCKS, None
    for path in sorted(options.parts.glob("part-*.tar")):
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is None:
                        raise ValueError(f"{path}: {member.name} is no plain file; accepted are parts that pack wrote")  # fmt: skip
                    data, name = content.read(), member.name.removeprefix("files/")
                    target = inside(options.out, name, what=f"{path}: a file's name")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(target, data)
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(f"{path}: the part is damaged: {error}; copy it again") from error
    if (options.out / MANIFEST).is_file():
        manifest = _checked(json.loads((options.out / MANIFEST).read_text()), options.parts)
    if manifest is None:
        raise ValueError(f"--parts={options.parts}: the last part, which has {MANIFEST}, is missing")  # fmt: skip
    names = {
        store: [blocks / store / f"{first:06}.xz" for first in range(0, fields["rows"], fields["step"])]
        for store, fields in manifest.items()
    }  # fmt: skip
    missing = [str(path.relative_to(options.out)) for paths in names.values() for path in paths if not path.is_file()]  # fmt: skip
    if missing:
        raise ValueError(f"--parts={options.parts}: {len(missing)} blocks are missing, the first is {missing[0]}; copy the other parts and repeat the command")  # fmt: skip
    tokens = 0
    for name, fields in manifest.items():
        tokens += _unpack_store(options.out / f"{name}.zarr", fields, names[name], options.out)
    shutil.rmtree(blocks)
    return f"{', '.join(manifest)} in {options.out}: {tokens} tokens, equal to the packed ones"


def _checked(manifest: Any, parts: Path) -> dict[str, Any]:
    """Return the description of the stores, after checking that it is one."""
    fields = {"rows", "length", "sha256", "attributes", "step"}
    right = isinstance(manifest, dict) and set(manifest) <= set(STORES)
    if not right or not all(isinstance(m, dict) and set(m) == fields for m in manifest.values()):
        raise ValueError(f"--parts={parts}: {MANIFEST} is not one that pack wrote")
    return manifest


def _unpack_store(path: Path, fields: dict[str, Any], files: list[Path], out: Path) -> int:
    digest = hashlib.sha256()
    with StoreWriter(
        path, fields["length"], vocab_size=1 << 16, attributes=fields["attributes"], overwrite=True,
        files={"tokenizer.json": out / "tokenizer.json"},
    ) as writer:  # fmt: skip
        for file in files:
            try:
                block = decompress(file.read_bytes(), fields["length"])
            except (lzma.LZMAError, ValueError) as error:
                raise ValueError(f"{file}: the block is damaged: {error}") from error
            digest.update(block.tobytes())
            writer.add(block)
        if digest.hexdigest() != fields["sha256"]:
            raise ValueError(f"{path}: the ids have SHA-256 {digest.hexdigest()}, and those packed {fields['sha256']}")  # fmt: skip
    return fields["rows"] * fields["length"]


def main(given: Sequence[str] | None = None) -> int:
    """Pack or unpack as the command line says, and print one line; return 1 after an error."""
    parser = argparse.ArgumentParser(
        "python -m scripts.pack_corpus", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    packer = commands.add_parser("pack", help="write the parts of a corpus")
    add = packer.add_argument
    add("--corpus", type=Path, required=True, help="folder that make_corpus wrote")
    add("--out", type=Path, required=True, help="new folder of the parts")
    add("--train_tokens", type=float, help="tokens of the training store; default: all")
    add("--heldout_tokens", type=float, help="tokens of the held-out store; default: all")
    add("--long_rows", type=int, help="rows of the store of long documents; default: all")
    add("--part_bytes", type=float, default=55e6, help="size of a part at most; default: 55e6")
    add("--also", nargs="*", default=[], help="further files of the corpus, such as recall/fields.jsonl")  # fmt: skip
    add("--num_workers", type=int, default=1, help="threads that compress; default: 1")
    unpacker = commands.add_parser("unpack", help="write the stores of the parts")
    unpacker.add_argument("--parts", type=Path, required=True, help="folder of the parts")
    unpacker.add_argument("--out", type=Path, required=True, help="folder of the corpus")
    options = parser.parse_args(given)
    for name in (
        ("train_tokens", "heldout_tokens", "part_bytes") if options.command == "pack" else ()
    ):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name}={value}: accepted are numbers above 0")
    try:
        print(pack(options) if options.command == "pack" else unpack(options))
    except (ValueError, OSError) as error:
        print(f"pack_corpus: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pack_corpus: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
