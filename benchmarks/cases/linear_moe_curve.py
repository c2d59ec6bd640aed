"""Compare the training curve of a hybrid with that of softmax attention.

    python -m benchmarks linear_moe_curve [--models softmax,gla]

Trains models like those of `configs/linear_moe.py`, but smaller (8 layers of 384; 16 experts of 256, 4 per
token; bytes): with pattern N, softmax attention alone, and with pattern LLLN and a linear mixer. All train on
the same text (the demo's: the running interpreter's own library), on the same tokens in the same order, with
the same learning rate, through the loop of `train.py`. A row for each model, with its training and held-out
loss by tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.run import one_by_one
from benchmarks.timing import provenance
from benchmarks.training import median_speed, train_to_end
from configs import linear_moe
from lsm_jax import models
from lsm_jax.data import DataConfig
from lsm_jax.feedforward import MoEConfig
from lsm_jax.training import OptimizerConfig
from lsm_jax.training.metrics import read_rows

BENCHMARK = Benchmark(
    name="linear_moe_curve",
    summary="training curves of a hybrid with experts and of softmax attention",
    key=("model", "tokens", "length", "batch_size", "peak_lr"),
    output="docs/linear_moe_curve.jsonl",
    resume=True,
)

MODELS = "softmax,gla,gated_deltanet"
TOKENS, LENGTH, BATCH, EVERY = 26_214_400, 1024, 64, 10


def config_of(name: str, args: argparse.Namespace) -> linear_moe.TrainConfig:
    """Return the training config of the model `name`: "softmax" (softmax attention in all layers), or a
    mixer that is in three layers of four.
    """
    pattern = "N" if name == "softmax" else "LLLN"
    config = linear_moe.get_config(f"tiny,mixer={name},pattern={pattern}")
    size = linear_moe.Size(
        hidden_size=args.width, num_layers=args.layers, experts={}, recipe=linear_moe.RECIPES["tiny"],
        head_dim=64,
    )  # fmt: skip
    for letter, method in (("L", name), ("N", "softmax")):
        layer = config.model.layers[letter]
        layer.mixer = linear_moe.mixer_config(method, size)
        layer.feedforward = MoEConfig(num_experts=16, top_k=4, expert_size=args.width * 2 // 3)
    model = config.model
    model.hidden_size, model.num_layers, model.init_std = args.width, args.layers, 0.02
    model.remat = args.remat
    config.data = DataConfig(sequence_length=args.length)
    config.optimizer = OptimizerConfig(
        peak_lr=args.peak_lr, warmup_tokens=args.tokens // 10, weight_decay=0.1
    )
    config.batch_size, config.total_tokens = args.batch_size, args.tokens
    config.log_every, config.eval_every = EVERY, args.eval_every
    config.validate()
    return config


def measure(name: str, args: argparse.Namespace, workdir: Path) -> dict:
    """Train the model `name` and return the benchmark's row: its training and held-out loss by tokens."""
    config = config_of(name, args)
    began = time.perf_counter()
    train_to_end(config, workdir)
    rows = read_rows(workdir / "metrics.jsonl")
    a_step = config.batch_size * config.data.sequence_length

    def curve(key):
        pairs = [(r["step"] * a_step, r[key]) for r in rows if r.get(key) is not None]
        return dict(tokens=[n for n, _ in pairs], loss=[round(x, 4) for _, x in pairs])

    counts = models.count_parameters(config.model)
    return dict(
        model=name, pattern=config.model.pattern, train=curve("train/loss"), heldout=curve("val/loss"),
        tokens_per_second=median_speed(rows), parameters=counts,
        tokens=args.tokens, length=args.length, batch_size=args.batch_size, peak_lr=args.peak_lr,
        seconds=round(time.perf_counter() - began, 1), **provenance(),
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=options.words, default=MODELS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--batch_size", type=int, default=BATCH)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--peak_lr", type=float, default=1e-3)
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--eval_every", type=int, default=50, help="steps between evaluations")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    setting = {key: getattr(args, key) for key in BENCHMARK.key if key != "model"}
    return [dict(model=name, **setting) for name in args.models]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    def measure_case(case):
        with tempfile.TemporaryDirectory() as folder:
            return measure(case["model"], args, Path(folder) / case["model"])

    return one_by_one(cases, measure_case)
