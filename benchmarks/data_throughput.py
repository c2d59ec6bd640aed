"""Tokens per second that the input pipeline delivers on this machine.

    python -m benchmarks.data_throughput [--output data_throughput.json] [--seconds 5]

Reads a LongCrawl-format store (4,096 documents of 16,384 ids with GPT-2's vocabulary and a Zipf law,
2048 x 2048 chunks, blosc lz4) in rows of 2,048, batch 32, in published and in shuffled order, and
the interpreter's library as text, tokenised and packed on the fly. Prints tokens/s for each and
writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np

from lsm_jax.data import DataConfig, make_train_iterator
from lsm_jax.data.demo import library_files
from lsm_jax.data.writer import StoreWriter

VOCAB, BATCH, LENGTH = 50257, 32, 2048


def write_store(path: Path, documents: int, length: int) -> None:
    generator = np.random.default_rng(0)
    with StoreWriter(
        path, length, vocab_size=VOCAB, attributes={"encoder": "tiktoken-gpt2"}
    ) as writer:
        for _ in range(0, documents, 512):
            ranks = np.exp(generator.random((512, length), np.float32) * np.log(VOCAB))
            writer.add(np.minimum(ranks.astype(np.int64), VOCAB - 1))


def measure(config: DataConfig, seconds: float) -> dict[str, float]:
    """Tokens/s from the first batch asked for on, so the first chunks' decoding counts."""
    start = time.perf_counter()
    iterator = make_train_iterator(config, global_batch_size=BATCH, seed=0)
    opened = time.perf_counter()
    steps, worst = 0, 0.0
    while (now := time.perf_counter()) - opened < seconds:
        next(iterator)
        worst = max(worst, time.perf_counter() - now)
        steps += 1
    elapsed = time.perf_counter() - opened
    iterator.close()
    return {
        "tokens_per_second": steps * BATCH * config.sequence_length / elapsed,
        "longest_wait_s": worst,
        "open_s": opened - start,
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="data_throughput.json")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        store, text = Path(folder) / "x.zarr", Path(folder) / "text"
        write_store(store, documents=4096, length=16384)
        text.mkdir()
        for i, path in enumerate(library_files()):
            (text / f"{i:04d}.py").write_bytes(path.read_bytes())
        gpt2 = {"path": str(store), "tokenizer": "gpt2", "sequence_length": LENGTH}
        configs = {
            "store, published order": DataConfig(**gpt2, shuffle=False),
            "store, shuffled": DataConfig(**gpt2),
            "store, shuffled, rows of 16384": DataConfig(**gpt2 | {"sequence_length": 16384}),
            "store, shuffled, no threads": DataConfig(**gpt2, num_threads=0),
            "text, bytes, concat": DataConfig(path=str(text), sequence_length=LENGTH),
            "text, bytes, first_fit": DataConfig(
                path=str(text), sequence_length=LENGTH, packing="first_fit"
            ),
        }
        for name, config in configs.items():
            results[name] = measure(config, options.seconds)
            print(f"{name:32s} {results[name]['tokens_per_second'] / 1e6:8.2f} M tokens/s")
    report = {
        "batch": BATCH,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "results": results,
    }
    Path(options.output).write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
