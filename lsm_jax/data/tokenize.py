"""Makes LongCrawl-format token stores from text or JSONL files.

    python -m lsm_jax.data.tokenize --input TEXT... --output train.zarr --tokenizer gpt2

A row is one document's first `--sequence_length` tokens and shorter documents are left out, as in
LongCrawl64; with `--pack` documents are put end to end, with BOS after each. The same input and
options give the same store, whatever the number of workers. A store stands under its own name
only when it is complete; what a kill leaves is a hidden folder, `.NAME.partial-PID`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from lsm_jax.data.documents import Documents
from lsm_jax.data.encode import Written, encode_documents, write_documents
from lsm_jax.data.tokenizers import Tokenizer, load_tokenizer
from lsm_jax.data.writer import StoreWriter

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
    """Tokenises files into a store, or into a training and a held-out one.

    Args:
        inputs: text or JSONL files, or folders of them.
        output: the store.
        tokenizer: "bytes", "gpt2" or the path of a tokenizer.json.
        sequence_length: tokens in a row.
        pack: put documents end to end instead of leaving short ones out.
        json_escape: JSON-escape text first, as LongCrawl64 did.
        text_key: the JSONL field of the text.
        heldout: a second store for `heldout_fraction` of the documents, chosen by their name.
        heldout_fraction: how many.
        num_workers: processes; None takes one a core.
        overwrite: replace stores that exist.
        console: shows progress; None shows nothing.

    Returns:
        What was written: for `output`, and for `heldout` if given.

    Raises:
        ValueError: bad input or options; nothing is left behind then.
    """
    loaded = load_tokenizer(tokenizer, json_escape=json_escape)
    loaded.encode("a")  # a missing vocabulary is found here, not in a worker
    if sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length}; it must be at least 1")
    if heldout and not 0.0 < heldout_fraction < 1.0:
        raise ValueError(f"heldout_fraction={heldout_fraction}; it must be in (0, 1)")
    if heldout:
        one, other = (Path(p).expanduser().absolute() for p in (output, heldout))
        if one == other:
            raise ValueError(f"output and heldout are the same store, {output!r}")
        if one.is_relative_to(other) or other.is_relative_to(one):
            raise ValueError(
                f"of output={output!r} and heldout={heldout!r} one is inside the other"
            )
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers={num_workers}; it must be at least 1")
    if pack and loaded.bos_id is None:
        raise ValueError(f"tokenizer {loaded.name!r} has no BOS token to put between documents")
    documents = Documents(inputs, text_key=text_key, piece_bytes=_PIECE_BYTES if pack else None)
    parts = [(output, documents)]
    if heldout:
        train, held = documents.split(heldout_fraction)
        parts = [(output, train), (heldout, held)]
    writers = [
        StoreWriter(
            path,
            sequence_length,
            vocab_size=loaded.vocab_size,
            attributes=store_attributes(loaded, pack=pack),
            overwrite=overwrite,
        )
        for path, _ in parts
    ]
    encoded = encode_documents(
        [part for _, part in parts],
        tokenizer,
        json_escape=json_escape,
        num_workers=num_workers or os.cpu_count() or 1,
    )
    total = sum(int(part.lengths.sum()) for _, part in parts)
    results = []
    with _progress(console) as bar, contextlib.ExitStack() as stack:
        # Both stores get their names after both are complete.
        for writer in writers:
            stack.enter_context(writer)
        stack.enter_context(contextlib.closing(encoded))
        task = bar.add_task("tokenise", total=total, rate="")
        tokens = 0

        def advance(new_tokens: int, size: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            seconds = bar.tasks[task].elapsed or 0.0
            rate = f"{tokens / seconds / 1e6:.2f} M tokens/s" if seconds else ""
            bar.update(task, advance=size, rate=rate)

        for writer, (_, part), pieces in zip(writers, parts, encoded, strict=True):
            results.append(
                write_documents(
                    part,
                    writer,
                    pieces,
                    length=sequence_length,
                    separator=loaded.bos_id if pack else None,
                    progress=advance,
                )
            )
    return results


def store_attributes(tokenizer: Tokenizer, *, pack: bool) -> dict[str, object]:
    """What a store's `.zattrs` says."""
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
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lsm_jax.data.tokenize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="text or JSONL files, or folders of them")
    add("--output", required=True, help="the store to make, e.g. train.zarr")
    add("--tokenizer", default="gpt2", help="bytes, gpt2, or a tokenizer.json (default: gpt2)")
    add("--sequence_length", type=int, default=65536, help="tokens in a row (default: 65536)")
    add("--pack", action="store_true", help="put documents end to end, BOS after each")
    add("--json_escape", action="store_true", help="JSON-escape text first, as LongCrawl64 did")
    add("--text_key", default="text", help="JSONL field of the text (default: text)")
    add("--heldout", default="", help="a second store, for held-out documents")
    add("--heldout_fraction", type=float, default=0.01, help="how many of them (default: 0.01)")
    add("--num_workers", type=int, default=None, help="processes (default: one a core)")
    add("--overwrite", action="store_true", help="replace stores that exist")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        results = write_store(options.input, options.output, console=console, **_keywords(options))
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written")
        return 130
    for path, done in zip([options.output, options.heldout], results, strict=False):
        print(
            f"{path}: {done.rows} rows of {options.sequence_length} tokens from {done.documents} "
            f"documents; {done.tokens} tokens, {done.dropped} of them in no row"
            + (f" ({done.short} documents were shorter than a row)" if done.short else "")
        )
    return 0


def _keywords(options: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(options).items() if k not in ("input", "output")}


if __name__ == "__main__":
    sys.exit(main())
