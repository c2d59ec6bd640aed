"""Compare the losses of models that train with products in FP8 with the losses with products in bfloat16.

    python -m benchmarks fp8_curve --corpus data/corpus [--models softmax,gated_deltanet]

A row for each model (`configs/lm.py`) and `matmul`, with its training and held-out loss by tokens. Both runs of a model have the
same initial parameters, tokens, order and learning rate. With a corpus (`scripts.make_corpus`) they read its tokens, otherwise the
demo's bytes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import evidence, options
from benchmarks.registry import Benchmark
from benchmarks.run import one_by_one
from benchmarks.timing import provenance
from benchmarks.training import median_speed, train_to_end
from configs import lm
from lsm_jax.training import TrainConfig
from lsm_jax.training.metrics import read_rows

BENCHMARK = Benchmark(
    name="fp8_curve",
    summary="losses of training with products in FP8 beside those with products in bfloat16",
    output="docs/fp8_curve.jsonl",
    key=("model", "matmul", "steps", "length", "batch_size", "corpus"),
)


def config_of(case: dict[str, Any], args: argparse.Namespace) -> TrainConfig:
    """Return the training config of one row's run."""
    config = lm.get_config(case["model"])
    config.model.matmul, config.model.remat = case["matmul"], "dots"
    config.data.sequence_length, config.batch_size = args.length, args.batch_size
    config.total_tokens = args.steps * args.length * args.batch_size
    config.optimizer.warmup_tokens = config.total_tokens // 10
    config.log_every = config.eval_every = max(1, args.steps // 40)
    if args.corpus:
        config.model.vocab_size = evidence.vocab_size(args.corpus)
        config.data = evidence.of_corpus(config.data, args.corpus, args.length)
    config.validate()
    return config


def measure(case: dict[str, Any], args: argparse.Namespace, workdir: Path) -> dict[str, Any]:
    """Train one run and return its row."""
    config, began = config_of(case, args), time.perf_counter()
    train_to_end(config, workdir, checkpoints=False)
    rows = read_rows(workdir / "metrics.jsonl")

    def curve(key: str) -> list[list[float]]:
        return [[row["step"], round(row[key], 5)] for row in rows if row.get(key) is not None]

    return dict(
        **case,
        train=curve("train/loss"),
        heldout=curve("val/loss"),
        tokens_per_second=median_speed(rows),
        seconds=round(time.perf_counter() - began, 1),
        **provenance(),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", type=options.words, default="softmax,gated_deltanet", help="methods; default: softmax,gated_deltanet")  # fmt: skip
    add("--size", default="125m", help="default: 125m")
    add("--corpus", type=Path, help="folder of scripts.make_corpus; default: the demo's text")
    add("--steps", type=int, default=2000, help="default: 2000")
    add("--length", type=int, default=2048, help="tokens in a row; default: 2048")
    add("--batch_size", type=int, default=16, help="rows in a step; default: 16")
    options.add_shard(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    setting = dict(steps=args.steps, length=args.length, batch_size=args.batch_size)
    setting["corpus"] = args.corpus.name if args.corpus else ""
    return [
        dict(model=f"{name}-{args.size}", matmul=matmul, **setting)
        for name in args.models
        for matmul in ("default", "fp8")
    ][args.shard]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    def measure_case(case):
        with tempfile.TemporaryDirectory() as folder:
            return measure(case, args, Path(folder) / "run")

    return one_by_one(cases, measure_case)
