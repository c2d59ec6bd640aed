"""Measure perplexity by length, up to 16 times the training length.

    python -m benchmarks lengths [--models pro,llama] [--beyond 16]

Trains models of one width and depth on the demo's text (the running interpreter's own library, as bytes; a
fifth of its files held out) in rows of `--length` bytes, through the loop of `train.py` with one budget and
one learning rate, and evaluates each on rows that are `--beyond` times as long. The models are the blocks of
FoX's paper (pro, llama, transformer-pro, transformer-llama), or any method by name. A row for each model,
with the perplexity at several lengths and the loss by position.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import one_by_one
from benchmarks.timing import provenance
from benchmarks.training import last_value, median_speed, train_to_end
from lsm_jax import load_run, mixers, models
from lsm_jax.data import DataConfig, make_eval_iterator
from lsm_jax.data.demo import write_demo_store
from lsm_jax.data.tokenizers import ByteTokenizer
from lsm_jax.evaluation import evaluate, moving_average
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.training import OptimizerConfig, TrainConfig
from lsm_jax.training.metrics import read_rows

BENCHMARK = Benchmark(
    name="lengths",
    summary="perplexity by length, up to 16 times the training length",
    key=("model", "length", "tokens", "peak_lr"),
    output="docs/lengths.jsonl",
    resume=True,
)

MODELS = "pro,llama,transformer-pro,transformer-llama,gated_deltanet"
VOCABULARY, POINTS = 257, 512


def model_config(name: str, hidden_size: int, num_layers: int) -> models.ModelConfig:
    """Return the config of the language model `name`: one of FoX's blocks with heads of 64 channels, or a
    method in its usual proportions.
    """
    if name in ("pro", "llama", "transformer-pro", "transformer-llama"):
        config = models.fox(name, "125m", vocab_size=VOCABULARY)
        config.layers["L"].mixer.num_heads = hidden_size // 64
    else:
        method = mixers.get_method(name)
        inner = SwiGLUConfig.for_width(hidden_size, 64) if method.feedforward else None
        layer = models.LayerConfig(mixer=method.config.for_width(hidden_size), feedforward=inner)
        num_layers *= 1 if method.feedforward else 2
        config = models.ModelConfig(
            vocab_size=VOCABULARY, hidden_size=0, num_layers=0, layers={"L": layer}
        )
    config.hidden_size, config.num_layers = hidden_size, num_layers
    config.tie_embeddings, config.remat = False, "dots"
    config.validate()
    return config


def measure(name: str, args: argparse.Namespace, data: Path, workdir: Path) -> dict:
    """Train the model `name`, evaluate its perplexity on rows longer than those of training, and return the
    benchmark's row.
    """
    config = TrainConfig(
        name=name,
        model=model_config(name, args.width, args.layers),
        data=DataConfig(path=str(data), sequence_length=args.length),
        optimizer=OptimizerConfig(
            peak_lr=args.peak_lr, warmup_tokens=args.tokens // 10, weight_decay=0.1
        ),
        batch_size=args.step_tokens // args.length,
        total_tokens=args.tokens,
        log_every=16,
        eval_every=0,
    )
    train_to_end(config, workdir)
    rows = read_rows(workdir / "metrics.jsonl")
    run = load_run(workdir)
    long = dataclasses.replace(config.data, sequence_length=args.beyond * args.length)
    batches = make_eval_iterator(
        long, ByteTokenizer(), global_batch_size=args.batch_size, vocab_size=VOCABULARY, remainder="pad"
    )  # fmt: skip
    batches = itertools.islice(batches, args.batches)
    result = evaluate(run.model, batches, piece_length=min(args.length, 4096))
    lengths = [(args.length << i) // 4 for i in range(7) if 1 << i <= 4 * args.beyond]
    smooth = moving_average(result.curve.loss, 101)
    places = np.unique(np.geomspace(50, len(smooth) - 51, POINTS).astype(int))
    return dict(
        model=name,
        length=args.length,
        perplexity={n: round(result.curve.perplexity(n), 4) for n in lengths},
        curve={"position": places.tolist(), "loss": np.round(smooth[places], 4).tolist()},
        train_loss=last_value(rows, "train/loss"),
        tokens_per_second=median_speed(rows),
        parameters=models.count_parameters(config.model)["non_embedding"],
        tokens=args.tokens,
        peak_lr=args.peak_lr,
        heldout_rows=result.num_sequences,
        evaluation_seconds=round(result.seconds, 1),
        **provenance(),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=options.words, default=MODELS)
    parser.add_argument("--length", type=int, default=4096, help="bytes of a training row")
    parser.add_argument("--tokens", type=int, default=33_554_432, help="tokens of training")
    parser.add_argument("--step_tokens", type=int, default=131_072, help="tokens of a step")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--peak_lr", type=float, default=1e-3)
    parser.add_argument("--batch_size", type=int, default=4, help="long rows evaluated at a time")
    parser.add_argument(
        "--beyond", type=int, default=16, help="length of evaluated rows / --length"
    )
    parser.add_argument("--batches", type=int, help="batches of held-out rows; all by default")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="write the text and the runs here, and keep them",
    )
    options.add_shard(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    for name in args.models:
        model_config(name, args.width, args.layers)
    if args.step_tokens < 1 or args.step_tokens % args.length:
        raise UsageError(f"--step_tokens {args.step_tokens}: accepted are multiples of --length={args.length}")  # fmt: skip
    setting = dict(length=args.length, tokens=args.tokens, peak_lr=args.peak_lr)
    return [dict(model=name, **setting) for name in args.models]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    location = contextlib.nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory()
    with location as folder:
        data = Path(folder) / "text"
        if not data.exists():
            write_demo_store(data, row_length=args.beyond * args.length, heldout_fraction=0.2)

        def measure_case(case):
            try:
                return measure(case["model"], args, data, Path(folder) / case["model"])
            finally:
                jax.clear_caches()

        yield from one_by_one(cases, measure_case)


def line(row: dict[str, Any]) -> str:
    return str({key: value for key, value in row.items() if key != "curve"})
