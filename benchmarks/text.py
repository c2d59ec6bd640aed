"""Batches of real text for benchmarks whose speed or result depends on the tokens: where experts, memories or
pruned keys are selected, random ids are far more even than text.

The text is the demo's, the running interpreter's standard library (12 MB), encoded by a byte-level BPE
tokenizer that is trained on it. Both are written to `runs/text` at the first use. The batches are those of training: packed
documents with segment ids and positions, and labels that are the next tokens. Nothing is downloaded, and the
same interpreter always makes the same batches.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import numpy as np
import tokenizers

from benchmarks.registry import ROOT
from lsm_jax.data import DataConfig, make_train_iterator
from lsm_jax.data.demo import library_files

MOST = 32_000
"""The largest vocabulary of the tokenizer; ids of a larger model's vocabulary beyond it do not occur."""
_LEAST = 257  # all bytes and the end of a document
_END = "<|endoftext|>"


def data_config(
    length: int, vocab_size: int, *, folder: Path | None = None, max_bytes: int = 12_000_000
) -> DataConfig:
    """Return the data config of a run on the text, with a tokenizer of at most `vocab_size` tokens.

    Args:
        length: tokens of a row.
        vocab_size: vocabulary of the model, at least 257; the tokenizer has `min(vocab_size, 32000)` tokens.
        folder: where the text and the tokenizers are stored; None is `runs/text`.
        max_bytes: largest size of the text in bytes.

    Raises:
        ValueError: `vocab_size` is less than 257.
    """
    if vocab_size < _LEAST:
        raise ValueError(f"vocab_size={vocab_size}: accepted are {_LEAST} (bytes and BOS) and more")
    version = f"{platform.python_implementation().lower()}-{platform.python_version()}-{max_bytes}"
    folder = (folder or ROOT / "runs" / "text") / version
    text = folder / "text.jsonl"
    if not text.is_file():
        files = library_files(max_bytes=max_bytes)
        lines = (json.dumps({"text": path.read_text("utf-8", "replace")}) for path in files)
        _write(text, "".join(line + "\n" for line in lines))
    size = min(vocab_size, MOST)
    tokenizer = folder / f"bpe-{size}" / "tokenizer.json"
    if not tokenizer.is_file():
        _write(tokenizer, _train_tokenizer(text, size))
    return DataConfig(path=str(text), tokenizer=str(tokenizer), sequence_length=length)


def batch(
    rows: int, length: int, vocab_size: int, *, folder: Path | None = None, **config: int
) -> dict[str, np.ndarray]:
    """Return one training batch of the text.

    Args:
        rows: number of rows (token sequences) of the batch, B.
        length: tokens of a row, T.
        vocab_size: number of tokens in the model's vocabulary.
        folder: where the text and the tokenizer are stored; None is `runs/text`.
        config: further arguments of `data_config`, such as `max_bytes`.

    Returns:
        tokens, labels, segment_ids, positions (int32) and loss_mask (float32), each [B, T].
    """
    data = data_config(length, vocab_size, folder=folder, **config)
    data.num_threads = data.prefetch = 0
    iterator = make_train_iterator(data, global_batch_size=rows, seed=0, vocab_size=vocab_size)
    try:
        return next(iterator)
    finally:
        iterator.close()


def stream(
    rows: int, length: int, vocab_size: int, *, folder: Path | None = None, **config: int
) -> dict[str, np.ndarray]:
    """Return tokens and labels of consecutive text, for benchmarks that read each row as one document.

    The arguments are those of `batch`. The result has tokens, labels (the next tokens, int32) and loss_mask
    (ones, float32), each [B, T].
    """
    size = rows * (length + 1)
    joined = batch(1, size, vocab_size, folder=folder, **config)["tokens"].reshape(rows, -1)
    mask = np.ones((rows, length), np.float32)
    tokens, labels = (np.ascontiguousarray(x) for x in (joined[:, :-1], joined[:, 1:]))
    return dict(tokens=tokens, labels=labels, loss_mask=mask)


def activations(
    rows: int, length: int, width: int, *, folder: Path | None = None, **config: int
) -> np.ndarray:
    """Return float32 [rows, length, width]: random normal embeddings of the tokens of text.

    They are the input of the first layer of a model with random parameters. A router sends equal tokens to the same
    experts or memories, so that loads are as uneven as the frequencies of tokens in text.
    """
    tokens = stream(rows, length, MOST, folder=folder, **config)["tokens"]
    used, index = np.unique(tokens, return_inverse=True)
    table = np.random.default_rng(0).standard_normal((len(used), width), np.float32)
    return table[index.reshape(tokens.shape)]


def _train_tokenizer(text: Path, size: int) -> str:
    """Return the JSON of a byte-level BPE tokenizer of `size` tokens, trained on the lines of the file
    `text`.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = text.read_text("utf-8").splitlines()
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    return tokenizer.to_str()


def _write(path: Path, content: str) -> None:
    """Write `content` to a file so that the file is either complete or absent, also if several processes
    write it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(content, "utf-8")
    os.replace(draft, path)
