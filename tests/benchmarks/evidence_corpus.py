"""A small corpus for tests of the benchmark `evidence`."""

from __future__ import annotations

import json

import numpy as np

from benchmarks import evidence_recall
from lsm_jax.data.writer import StoreWriter


def write_corpus(folder):
    """Write a corpus of random bytes, with two long documents, and recall questions."""
    words = np.random.default_rng(0).integers(97, 123, 65_536).astype(np.uint16)
    for name, rows, length in (("train", 64, 1024), ("heldout", 8, 1024), ("long", 2, 1024)):
        with StoreWriter(folder / f"{name}.zarr", length, vocab_size=257, attributes=dict(encoder="bytes")) as writer:  # fmt: skip
            writer.add(words[: rows * length].reshape(rows, length))
    (folder / "recall").mkdir()
    for task in evidence_recall.TASKS:
        texts = [f"{'x' * n} key: value" for n in (9, 300)]
        rows = [dict(context=text, question="\nkey:", answers=["value"]) for text in texts]
        path = folder / "recall" / f"{task}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
