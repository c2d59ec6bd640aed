"""Measure the tokens per second that the input pipeline delivers on this machine.

    python -m benchmarks data_throughput [--seconds 5]

A row for each way to read: a store in LongCrawl64's format (4,096 documents of 16,384 ids of GPT-2's
vocabulary by Zipf's law, chunks of 2048 x 2048, blosc lz4) in rows of 2,048 with batch 32, in published and
in shuffled order; and the interpreter's library as text, which is tokenized and packed during reading.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.run import one_by_one
from benchmarks.timing import provenance
from lsm_jax.data import DataConfig, make_train_iterator
from lsm_jax.data.demo import library_files
from lsm_jax.data.writer import StoreWriter

BENCHMARK = Benchmark(
    name="data_throughput",
    summary="tokens/s of the input pipeline on this machine; no GPU",
    key=("case", "batch"),
)

VOCAB, BATCH, LENGTH = 50257, 32, 2048


def write_store(path: Path, documents: int, length: int) -> None:
    """Write a store (zarr v2) of random documents of `length` token ids, which follow Zipf's law."""
    generator = np.random.default_rng(0)
    with StoreWriter(
        path, length, vocab_size=VOCAB, attributes={"encoder": "tiktoken-gpt2"}
    ) as writer:
        for _ in range(0, documents, 512):
            ranks = np.exp(generator.random((512, length), np.float32) * np.log(VOCAB))
            writer.add(np.minimum(ranks.astype(np.int64), VOCAB - 1))


def measure(config: DataConfig, seconds: float) -> dict[str, float]:
    """Read batches from the input pipeline for `seconds`, decoding of the first chunks included, and return
    the speed.
    """
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


def make_configs(store: Path, text: Path) -> dict[str, DataConfig]:
    """Return the data configs that the benchmark times, by name: reading a store in several orders, and
    reading text.
    """
    gpt2 = {"path": str(store), "tokenizer": "gpt2", "sequence_length": LENGTH}
    return {
        "store, published order": DataConfig(**gpt2, shuffle=False),
        "store, shuffled": DataConfig(**gpt2),
        "store, shuffled, rows of 16384": DataConfig(**gpt2 | {"sequence_length": 16384}),
        "store, shuffled, no threads": DataConfig(**gpt2, num_threads=0),
        "text, bytes, concat": DataConfig(path=str(text), sequence_length=LENGTH),
        "text, bytes, first_fit": DataConfig(
            path=str(text), sequence_length=LENGTH, packing="first_fit"
        ),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_seconds(parser, 5.0, "seconds to read in each way")
    parser.add_argument(
        "--documents", type=int, default=4096, help="documents of the store, a multiple of 512"
    )


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [dict(case=name, batch=BATCH) for name in make_configs(Path(), Path())]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        store, text = Path(folder) / "x.zarr", Path(folder) / "text"
        write_store(store, documents=args.documents, length=16384)
        text.mkdir()
        for i, path in enumerate(library_files()):
            (text / f"{i:04d}.py").write_bytes(path.read_bytes())
        configs = make_configs(store, text)
        machine = dict(
            cpus=os.cpu_count(), machine=platform.machine(), python=platform.python_version()
        )
        yield from one_by_one(
            cases,
            lambda case: (
                case
                | measure(configs[case["case"]], args.seconds)
                | machine
                | provenance(device=False)
            ),
        )


def line(row: dict[str, Any]) -> str:
    return f"{row['case']:32s} {row['tokens_per_second'] / 1e6:8.2f} M tokens/s"
