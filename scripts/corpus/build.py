"""Train the tokenizer of a corpus and write its parts as token stores."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import tokenizers

from lsm_jax.data.documents import Documents
from lsm_jax.data.encode import Written, encode_documents, write_documents
from lsm_jax.data.store import TokenStore
from lsm_jax.data.tokenize import store_attributes
from lsm_jax.data.tokenizers import load_tokenizer
from lsm_jax.data.writer import StoreWriter
from scripts.corpus.progress import Progress
from scripts.corpus.text import END

SAMPLE_BYTES = 64_000_000  # of text, on which the tokenizer is trained
_ROWS = 64  # of a store, read at a time


def train_tokenizer(text: Path, vocab_size: int, path: Path) -> None:
    """Write the tokenizer.json of a byte-level BPE that is trained on the first 64 MB of a file of documents, which are in
    a shuffled order; its token 0 ends a document.

    Raises:
        ValueError: the text has too few different words for `vocab_size` tokens.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(text, SAMPLE_BYTES), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"--vocab_size={vocab_size}: the text has words for {tokenizer.get_vocab_size()} tokens only"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.partial")
    draft.write_text(tokenizer.to_str(), "utf-8")
    draft.replace(path)


def _first(path: Path, size: int) -> Iterator[str]:
    with path.open("rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]
            size -= len(line)
            if size <= 0:
                return


def write_store(
    text: Path,
    sources: Sequence[str],
    store: Path,
    tokenizer: Path,
    *,
    length: int,
    pack: bool,
    key: str,
    num_workers: int,
) -> tuple[Written, Counter]:
    """Tokenise a file of documents and write a token store; return its counts, and the tokens of each package.

    Args:
        text: the file of documents.
        sources: the package of each document.
        store: path of the store, which is replaced if it exists.
        tokenizer: the tokenizer.json, which is copied into the store.
        length: tokens in a row.
        pack: whether the documents are concatenated with BOS after each; otherwise a row is the beginning of one
            document, and shorter ones are left out.
        key: digest of all that the corpus is made of, stored with the store.
        num_workers: number of processes.
    """
    documents = Documents([text], piece_bytes=None)
    loaded = load_tokenizer(str(tokenizer))
    attributes = store_attributes(loaded, pack=pack) | {"corpus": key}
    progress = Progress(f"{store.name}: tokenise", int(documents.lengths.sum()))
    by_source: Counter = Counter()
    encoded = encode_documents([documents], str(tokenizer), num_workers=num_workers)
    with (
        StoreWriter(
            store,
            length,
            vocab_size=loaded.vocab_size,
            attributes=attributes,
            overwrite=True,
            files={"tokenizer.json": tokenizer},
        ) as writer,
        closing(encoded),
    ):
        pieces = _counted(next(encoded), sources, by_source, progress)
        separator = loaded.bos_id if pack else None
        written = write_documents(documents, writer, pieces, length=length, separator=separator)
    progress.show()
    return written, by_source


def _counted(
    encoded: Iterable[tuple[int, list[np.ndarray]]],
    sources: Sequence[str],
    by_source: Counter,
    progress: Progress,
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield the token ids of documents unchanged, and count them by package."""
    number = 0
    for size, pieces in encoded:
        for ids in pieces:
            by_source[sources[number]] += len(ids)
            number += 1
        progress.add(size, len(pieces), sum(map(len, pieces)))
        yield size, pieces


def store_digest(path: Path) -> str:
    """Return the SHA-256 of a store's token ids, row by row as little-endian integers of 16 bits; it does not depend on
    chunks or compression."""
    store = TokenStore(path)
    result = hashlib.sha256()
    for row in range(0, store.num_documents, _ROWS):
        rows = np.arange(row, min(row + _ROWS, store.num_documents))
        result.update(store.read(rows, 0, store.length, vocab_size=1 << 16).astype("<u2").tobytes())
    return result.hexdigest()


def has_store(path: Path, key: str) -> bool:
    """Return whether a complete store of this corpus is at `path`."""
    attributes = path / ".zattrs"
    return attributes.is_file() and json.loads(attributes.read_text()).get("corpus") == key
