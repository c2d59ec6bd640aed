"""Pack a corpus' texts into small parts for a machine without a network, and make the stores there from them.

    python -m scripts.make_corpus --out=data/corpus --text_only
    python -m scripts.pack_corpus pack --corpus=data/corpus --out=parts --first_bytes=200e6 --group_bytes=300e6 --part_bytes=55e6
    python -m scripts.pack_corpus unpack --parts=parts --out=data/corpus

A part is a tar file of at most `--part_bytes`. The training documents are groups of consecutive ones of the shuffled order, the
first with `--first_bytes` of text and the others with `--group_bytes`; each begins in a new part, after the tokenizer, the
held-out documents and the files of `--also` in the first one. A group is sorted by name and compressed by xz in blocks, since
files of one program repeat each other.

`unpack` keeps the blocks of the parts that it has read, and says which are missing; so parts can come one after another, in
any order. It restores the shuffled order and makes the stores by the functions of make_corpus, on all cores: their ids are
those of make_corpus' stores, of which train.zarr is the beginning. With `--groups=N` it requires and uses the first N groups.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lsm_jax.files import inside, write_atomically
from scripts.corpus import blocks, build

STORES = {"train": True, "heldout": True, "long": False}  # whether documents are concatenated
MANIFEST = "manifest.json"
_BLOCKS = ".blocks"  # folder of the blocks, in the parts and beside them while they are made
_FILES = "files"
_MOST_GROUPS = 100  # two digits in their names


def _groups(options: argparse.Namespace) -> tuple[dict[str, list[blocks.Line]], dict[str, str]]:
    """Return the documents of each group that the options select, in the order in which the parts have them, and the SHA-256 of
    the texts of each; those of a training group are all training texts to its end.

    Raises:
        ValueError: the groups do not have all training documents, or as many as --train_bytes allows.
    """
    corpus = options.corpus
    groups, digests = {}, {}
    for name, most in (("heldout", None), ("long", options.long_documents)):
        path = corpus / f"{name}.jsonl"
        if path.stat().st_size:
            (groups[name],), (digests[name],) = blocks.groups_of(path, [math.inf], most=most)
    size = min(options.first_bytes, options.train_bytes)
    sizes = [size]
    while size < options.train_bytes and len(sizes) < _MOST_GROUPS:
        sizes.append(min(options.group_bytes, options.train_bytes - size))
        size += sizes[-1]
    found = blocks.groups_of(corpus / "train.jsonl", sizes)
    if size < options.train_bytes and len(found[0]) == _MOST_GROUPS:
        with (corpus / "train.jsonl").open("rb") as file:
            if sum(map(len, found[0])) < sum(1 for _ in file):
                raise ValueError(f"--group_bytes={options.group_bytes:g}: the training text has more than {_MOST_GROUPS} such groups; accepted are larger ones, or --train_bytes")  # fmt: skip
    for number, (lines, digest) in enumerate(zip(*found, strict=True)):
        groups[_training(number)], digests[_training(number)] = lines, digest
    return groups, digests


def _training(number: int) -> str:
    return f"train-{number:02}"


def _is_training(group: str) -> bool:
    return group.startswith("train-")


def _source(corpus: Path, group: str) -> Path:
    """Return the file of documents of a group."""
    return corpus / f"{group.partition('-')[0]}.jsonl"


def pack(options: argparse.Namespace) -> str:
    """Write the parts of a corpus and return what was written, as a line of text. A block that an interrupted call wrote is
    not compressed again.

    Raises:
        ValueError: the folder has no texts, or the first group does not fit into the first part.
    """
    corpus, out = options.corpus, options.out
    report_path = corpus / "corpus.json"
    if not report_path.is_file() or not (corpus / "train.jsonl").is_file():
        raise ValueError(f"--corpus={corpus}: it has no texts; make them with python -m scripts.make_corpus --text_only --out={corpus}")  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("part-*.tar")):
        raise ValueError(f"--out={out}: it has parts already; give a new folder")
    report = json.loads(report_path.read_text())
    groups, digests = _groups(options)
    divided = {name: blocks.divide(lines) for name, lines in groups.items()}
    manifest = dict(
        key=report["key"], length=report["sequence_length"], sha256=digests,
        documents={name: len(lines) for name, lines in groups.items()},
        blocks={name: len(found) for name, found in divided.items()},
    )  # fmt: skip
    work = out / _BLOCKS
    work.mkdir(exist_ok=True)

    def block(name: str, number: int) -> bytes:
        lines = divided[name][number]
        key = hashlib.sha256(repr((str(corpus), report["key"], lines)).encode()).hexdigest()[:16]
        path = work / f"{name}-{number:03}-{key}.xz"
        if not path.is_file():
            write_atomically(path, blocks.write_block(_source(corpus, name), lines))
            print(f"{path.name}: {path.stat().st_size} bytes", file=sys.stderr, flush=True)
        return path.read_bytes()

    files = {MANIFEST: json.dumps(manifest).encode()}
    for name in ("tokenizer.json", *options.also):
        file = inside(corpus, name, what="--also")
        files[f"{_FILES}/{name}.xz"] = blocks.compress(file.read_bytes())
    names = [(name, number) for name, found in divided.items() for number in range(len(found))]
    size = blocks.size_of_part(map(len, files.values()))
    with ThreadPoolExecutor(options.num_workers) as pool:
        try:
            for (name, _), data in zip(names, pool.map(lambda pair: block(*pair), names), strict=True):  # fmt: skip
                size += blocks.size_of_file(len(data)) if name <= _training(0) else 0
                if size > options.part_bytes:
                    raise ValueError(
                        f"--first_bytes={options.first_bytes:g}: the first group and the held-out documents do not fit into "
                        f"the first part, of --part_bytes={options.part_bytes:g}"
                    )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    # Parts are written once all blocks are there, so that a call that was killed leaves blocks and no part.
    parts = blocks.Parts(out, int(options.part_bytes))
    for name, data in files.items():
        parts.add(name, data)
    for name, number in names:
        if name > _training(0) and not number:
            parts.close()
        parts.add(f"{_BLOCKS}/{name}-{number:03}.xz", block(name, number))
    parts.close()
    shutil.rmtree(work)
    size = sum(path.stat().st_size for path in out.glob("part-*.tar"))
    training = [line.size for name, lines in groups.items() if _is_training(name) for line in lines]
    return f"{parts.count} parts in {out}: {size} bytes, {sum(training)} bytes of training text in {len(training)} documents"


def unpack(options: argparse.Namespace) -> str:
    """Read the parts of a folder, make the stores once every block is there, and return what was done.

    Raises:
        ValueError: a part is damaged, blocks are missing, or texts differ from the packed ones.
    """
    out, kept = options.out, options.out / _BLOCKS
    kept.mkdir(parents=True, exist_ok=True)
    for path, data in blocks.read_parts(options.parts, out):
        if path.parent.parts[len(out.resolve().parts) :][:1] == (_FILES,):
            name = path.relative_to(out.resolve() / _FILES).with_suffix("")
            path, data = out / name, _decompressed(path, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    manifest = _manifest(out, options.parts)
    training = [name for name in manifest["blocks"] if _is_training(name)]
    if options.groups is not None and options.groups > len(training):
        raise ValueError(f"--groups={options.groups}: the parts have {len(training)} groups")
    training = training[: options.groups]
    wanted = {name: [kept / f"{name}-{i:03}.xz" for i in range(manifest["blocks"][name])]
              for name in manifest["blocks"] if name in STORES or name in training}  # fmt: skip
    missing = [str(path.relative_to(out)) for paths in wanted.values() for path in paths if not path.is_file()]  # fmt: skip
    if missing:
        raise ValueError(f"--parts={options.parts}: {len(missing)} blocks are missing, the first is {missing[0]}; copy the other parts and repeat the command")  # fmt: skip
    wanted["train"] = [path for name in training for path in wanted.pop(name)]
    digests = dict(manifest["sha256"], train=manifest["sha256"][training[-1]])
    stores = {}
    for name, paths in wanted.items():
        text = out / f"{name}.jsonl"
        count = _write_documents(paths, text, digests[name], options.num_workers)
        written, _ = build.write_store(
            text, [""] * count, out / f"{name}.zarr", out / "tokenizer.json", length=manifest["length"],
            pack=STORES[name], key=manifest["key"], num_workers=options.num_workers,
        )  # fmt: skip
        stores[name] = dict(rows=written.rows, documents=count, tokens=written.tokens,
                            sha256=build.store_digest(out / f"{name}.zarr"))  # fmt: skip
        if name == "train":
            text.unlink()
    write_atomically(out / "corpus.json", json.dumps(dict(key=manifest["key"], training=training, stores=stores), indent=1) + "\n")  # fmt: skip
    return "\n".join(f"{name}.zarr: {s['rows']} rows, {s['documents']} documents, {s['tokens']} tokens; sha256 {s['sha256']}" for name, s in stores.items())  # fmt: skip


def _decompressed(path: Path, data: bytes) -> bytes:
    try:
        return lzma.decompress(data)
    except lzma.LZMAError as error:
        raise ValueError(f"{path}: the file is damaged: {error}") from error


def _manifest(out: Path, parts: Path) -> dict[str, Any]:
    """Return the description of the parts, after checking that it is one."""
    path = out / MANIFEST
    if not path.is_file():
        raise ValueError(f"--parts={parts}: the first part, which has {MANIFEST}, is missing")
    manifest = json.loads(path.read_text())
    fields = {"key", "length", "sha256", "documents", "blocks"}
    if not isinstance(manifest, dict) or set(manifest) != fields or not {_training(0), "heldout"} <= set(manifest["blocks"]):  # fmt: skip
        raise ValueError(f"--parts={parts}: {MANIFEST} is not one that pack wrote")
    return manifest


def _write_documents(paths: Sequence[Path], target: Path, sha256: str, num_workers: int) -> int:
    """Write the documents of blocks to a file in the shuffled order, and return their number.

    Raises:
        ValueError: a block is damaged, or the texts differ from the packed ones.
    """
    with ThreadPoolExecutor(num_workers) as pool:
        documents = [pair for block in pool.map(blocks.read_block, paths) for pair in block]
    documents.sort(key=lambda pair: pair[0])
    digest, draft = hashlib.sha256(), target.with_name(f".{target.name}.partial")
    with draft.open("w", encoding="utf-8") as file:
        for _, text in documents:
            digest.update(text + b"\0")
            file.write(json.dumps(dict(text=text.decode("utf-8")), ensure_ascii=False) + "\n")
    if digest.hexdigest() != sha256:
        raise ValueError(f"{target}: the texts have SHA-256 {digest.hexdigest()}, and those packed {sha256}")  # fmt: skip
    draft.replace(target)
    return len(documents)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line, checked."""
    parser = argparse.ArgumentParser(
        "python -m scripts.pack_corpus", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    packer = commands.add_parser("pack", help="write the parts of a corpus")
    add = packer.add_argument
    add("--corpus", type=Path, required=True, help="folder that make_corpus --text_only wrote")
    add("--out", type=Path, required=True, help="new folder of the parts")
    add("--first_bytes", type=float, default=200e6, help="training text in the first part; default: 200e6")  # fmt: skip
    add("--group_bytes", type=float, default=300e6, help="training text in each other group; default: 300e6")  # fmt: skip
    add("--train_bytes", type=float, default=math.inf, help="training text in all parts; default: all")  # fmt: skip
    add("--long_documents", type=int, help="documents of long.zarr; default: all")
    add("--part_bytes", type=float, default=55e6, help="size of a part at most; default: 55e6")
    add("--also", nargs="*", default=[], help="further files of the corpus, such as recall/fields.jsonl")  # fmt: skip
    unpacker = commands.add_parser("unpack", help="make the stores of the parts")
    unpacker.add_argument("--parts", type=Path, required=True, help="folder of the parts")
    unpacker.add_argument("--out", type=Path, required=True, help="folder of the corpus")
    unpacker.add_argument("--groups", type=int, help="groups of training text, from the first on; default: all")  # fmt: skip
    for command in (packer, unpacker):
        command.add_argument("--num_workers", type=int, default=os.cpu_count() or 1, help="threads and processes; default: one per core")  # fmt: skip
    options = parser.parse_args(given)
    packing = ("num_workers", "first_bytes", "group_bytes", "train_bytes", "part_bytes", "long_documents")  # fmt: skip
    for name in packing if options.command == "pack" else ("num_workers", "groups"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name}={value}: accepted are numbers above 0")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Pack or unpack as the command line says, and print what was done; return 1 after an error."""
    options = arguments(given)
    try:
        print(pack(options) if options.command == "pack" else unpack(options))
    except (ValueError, OSError) as error:
        print(f"pack_corpus: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pack_corpus: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
