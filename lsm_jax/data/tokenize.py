"""Write token stores in LongCrawl64's format from text, JSON, JSONL and parquet files and data sets.

    python -m lsm_jax.data.tokenize --input TEXT... --output my_store/train.zarr --tokenizer gpt2

One document of a hundred is held out, in my_store/heldout.zarr. A row is the first `--sequence_length` tokens
of one document, and shorter documents are dropped, as in LongCrawl64. With `--pack` the documents are
concatenated, with BOS after each. The same input and options write the same store for any number of workers.
A store has its name only once it is complete; a process that is killed leaves a hidden folder
`.NAME.partial-PID`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from lsm_jax import programs
from lsm_jax.data import tiktoken_file
from lsm_jax.data.documents import Documents
from lsm_jax.data.encode import Written, encode_documents, write_documents
from lsm_jax.data.sources import row_bytes
from lsm_jax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_path
from lsm_jax.data.world_tokenizer import VOCABULARY
from lsm_jax.data.writer import StoreWriter
from lsm_jax.files import disk_error

_PIECE_BYTES = 1 << 20


def write_store(
    inputs: Sequence[str],
    output: str,
    *,
    tokenizer: str,
    sequence_length: int = 65536,
    pack: bool = False,
    json_escape: bool = False,
    text_key: str = "text",
    heldout: str = "",
    heldout_fraction: float = 0.01,
    num_workers: int | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> list[Written]:
    """Tokenise text and write a token store, or a training store and a held-out store. Plain files of compressed files,
    parquet files and data sets are written beside the store and deleted at the end.

    Args:
        inputs: files, folders and data sets, of the kinds of `DataConfig.path`.
        output: path of the store.
        tokenizer: "bytes", "gpt2", the path of a tokenizer.json, or the id of a model on the Hugging Face hub.
        sequence_length: tokens in a row.
        pack: concatenate documents instead of dropping those that are shorter than a row.
        json_escape: JSON-escape the text before it is tokenised, as LongCrawl64 does.
        text_key: name of the JSON field or parquet column that has the text.
        heldout: path of a second store, for documents that are selected by a hash of their names. Empty: none.
        heldout_fraction: share of the documents in the second store.
        num_workers: number of processes; None is one per core.
        overwrite: replace stores that exist.
        console: shows the progress; None shows nothing.

    Returns:
        The counts of `output`, and of `heldout` if it is given.

    Raises:
        ValueError, OSError: input or options are not accepted, or the disk is full. No store or temporary file remains.
    """
    if tokenizer not in ("bytes", "gpt2"):  # so that workers need no network
        tokenizer = str(tokenizer_path(tokenizer) or tokenizer)
    loaded = load_tokenizer(tokenizer, json_escape=json_escape)
    loaded.encode("a")  # raises here, and not in a worker, if the vocabulary is missing
    _check_options(output, heldout, heldout_fraction, sequence_length, num_workers)
    if pack and loaded.bos_id is None:
        raise ValueError(
            f"tokenizer {loaded.name!r} has no BOS token, which pack=True writes after each document"
        )
    target = Path(output).expanduser().absolute()
    cache = target.with_name(f".{target.name}.text-{os.getpid()}")
    try:
        pieces = _PIECE_BYTES if pack else None
        documents = Documents(inputs, text_key=text_key, piece_bytes=pieces, cache_dir=cache)
        return _write(documents, output, loaded, tokenizer, sequence_length, pack, heldout, heldout_fraction, num_workers, overwrite, console)  # fmt: skip
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _write(
    documents: Documents,
    output: str,
    loaded: Tokenizer,
    tokenizer: str,
    sequence_length: int,
    pack: bool,
    heldout: str,
    heldout_fraction: float,
    num_workers: int | None,
    overwrite: bool,
    console: Console | None,
) -> list[Written]:
    """Write the documents to one or two stores, as `write_store` describes; `loaded` is the tokenizer that the option
    `tokenizer` names."""
    parts = [(output, documents)]
    if heldout:
        train, held = documents.split(
            heldout_fraction, row_bytes(sequence_length, tokenizer) if pack else None
        )
        parts = [(output, train), (heldout, held)]
    writers = [
        StoreWriter(
            path,
            sequence_length,
            vocab_size=loaded.vocab_size,
            attributes=store_attributes(loaded, pack=pack),
            overwrite=overwrite,
            files=_tokenizer_files(tokenizer),
        )
        for path, _ in parts
    ]
    encoded = encode_documents(
        [part for _, part in parts],
        tokenizer,
        json_escape=loaded.json_escape,
        num_workers=num_workers or os.cpu_count() or 1,
    )
    total = sum(int(part.lengths.sum()) for _, part in parts)
    separator = loaded.bos_id if pack else None
    results = []
    with _progress(console) as bar, contextlib.ExitStack() as stack:
        # Entered together, so that both stores get their names after both are complete.
        for writer in writers:
            stack.enter_context(writer)
        stack.enter_context(contextlib.closing(encoded))
        advance = _advance_with_rate(bar, total)
        for n, (writer, (_, part), pieces) in enumerate(zip(writers, parts, encoded, strict=True)):
            try:
                written = write_documents(
                    part,
                    writer,
                    pieces,
                    length=sequence_length,
                    separator=separator,
                    progress=advance,
                )
            except ValueError:
                # A document that cannot be read is the reason to be told, if a part that was not read yet has one.
                for _, later in parts[n + 1 :]:
                    later.check_all()
                raise
            results.append(written)
    return results


def _tokenizer_files(tokenizer: str) -> dict[str, Path]:
    """Return the files of a tokenizer, by their names in a store, so that runs on the store need no other file; none for
    the tokenizers that are known by name."""
    if tokenizer in ("bytes", "gpt2"):
        return {}
    path = Path(tokenizer).expanduser()
    world = path / VOCABULARY if path.is_dir() else path
    if world.suffix == ".txt" and world.is_file() and not (path / "tokenizer.json").is_file():
        return {VOCABULARY: world}
    if path.is_dir():
        name = "tokenizer.json" if (path / "tokenizer.json").is_file() else tiktoken_file.FILE
        path = path / name
    beside = ("tokenizer_config.json", "chat_template.jinja")
    files = {name: path.with_name(name) for name in beside if path.with_name(name).is_file()}
    name = tiktoken_file.FILE if path.name == tiktoken_file.FILE else "tokenizer.json"
    return {name: path, **files}


def _check_options(
    output: str,
    heldout: str,
    heldout_fraction: float,
    sequence_length: int,
    num_workers: int | None,
) -> None:
    """Raise ValueError unless the options of `write_store`, which tokenises files into a token store, are
    accepted."""
    if not 1 <= sequence_length < 2**31:
        raise ValueError(
            f"sequence_length={sequence_length}; it must be at least 1, and below 2^31"
        )
    if heldout and not 0.0 < heldout_fraction < 1.0:
        raise ValueError(f"heldout_fraction={heldout_fraction}; it must be in (0, 1)")
    if heldout:
        one, other = (Path(p).expanduser().absolute() for p in (output, heldout))
        if one == other:
            raise ValueError(f"output and heldout are the same store, {output!r}")
        if one.is_relative_to(other) or other.is_relative_to(one):
            raise ValueError(
                f"output={output!r} and heldout={heldout!r}: one is inside the other; "
                "accepted are two separate folders"
            )
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers={num_workers}; it must be at least 1")


def _advance_with_rate(bar: Progress, total: int) -> Callable[[int, int], None]:
    """Add a bar for `total` bytes of text to a progress display. Return the function (new tokens, new
    bytes) by which the caller advances the bar; it also shows the tokens per second."""
    task = bar.add_task("tokenise", total=total, rate="")
    tokens = 0

    def advance(new_tokens: int, size: int) -> None:
        nonlocal tokens
        tokens += new_tokens
        seconds = bar.tasks[task].elapsed or 0.0
        rate = f"{tokens / seconds / 1e6:.2f} M tokens/s" if seconds else ""
        bar.update(task, advance=size, rate=rate)

    return advance


def store_attributes(tokenizer: Tokenizer, *, pack: bool) -> dict[str, object]:
    """Return the contents of a token store's `.zattrs`, which say how its text was tokenised."""
    attributes: dict[str, object] = {"encoder": tokenizer.name}
    if tokenizer.json_escape:
        attributes["json_escape"] = True
    if pack:
        attributes["separator"] = tokenizer.bos_id
    return attributes


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        disable=console is None,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Tokenise text files and write one or two token stores, as the command line says; return its exit
    status: 0, 1 after an error, 130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog=programs.shown_name("python -m lsm_jax.data.tokenize"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        help="text, JSON, JSONL or parquet files (.gz, .zst), folders of them, or data sets: a folder of the package "
        "datasets, or OWNER/NAME[/SUBSET][@REVISION][:SPLIT] of the hub",
    )
    add("--output", required=True, help="path of the store to write, such as train.zarr")
    add(
        "--tokenizer",
        default="gpt2",
        help="bytes, gpt2, a tokenizer.json, or a model of the hub, OWNER/NAME (default: gpt2)",
    )
    add("--sequence_length", type=int, default=65536, help="tokens in a row (default: 65536)")
    add("--pack", action="store_true", help="concatenate documents, with BOS after each")
    add(
        "--json_escape", action="store_true", help="JSON-escape the text first, as LongCrawl64 does"
    )
    add(
        "--text_key",
        default="text",
        help="JSON field or parquet column that has the text (default: text)",
    )
    add(
        "--heldout",
        default=None,
        help="path of a second store, for held-out documents, or none (default: heldout.zarr beside an --output with the "
        "name train.zarr, which training and evaluation find in their folder; otherwise none)",
    )
    add(
        "--heldout_fraction",
        type=float,
        default=0.01,
        help="share of held-out documents (default: 0.01)",
    )
    add("--num_workers", type=int, default=None, help="number of processes (default: one per core)")
    add("--overwrite", action="store_true", help="replace stores that exist")
    options = parser.parse_args(arguments)
    if options.heldout is None and Path(options.output).name == "train.zarr":
        options.heldout = str(Path(options.output).with_name("heldout.zarr"))
    options.heldout = "" if options.heldout in (None, "none") else options.heldout
    console = Console(stderr=True)
    try:
        results = write_store(options.input, options.output, console=console, **_keywords(options))
    except OSError as error:
        message = disk_error(error, kept="no store was written")
        console.print(
            f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )
        return 1
    except ValueError as error:
        console.print(
            f"error: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written")
        return 130
    for path, written in zip([options.output, options.heldout], results, strict=False):
        print(
            f"{path}: {written.rows} rows of {options.sequence_length} tokens from "
            f"{_documents_of(written)}; {written.tokens} tokens, {written.dropped} of them in no row"
            + (f" ({written.short} documents were shorter than a row)" if written.short else "")
        )
    return 0


def _documents_of(written: Written) -> str:
    """Return the number of documents of a store for its line of output; a store that begins none has the end of the only one."""
    if not written.documents:
        return "the end of the only document, which is held out"
    return f"{written.documents} documents"


def _keywords(options: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(options).items() if k not in ("input", "output")}


if __name__ == "__main__":
    sys.exit(main())
