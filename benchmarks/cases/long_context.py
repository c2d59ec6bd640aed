"""Measure the memory and time of evaluating one long document.

    python -m benchmarks long_context [--methods fox,gla] [--lengths 16384,65536]

A row for each method and length: a document of text is scored by a model with random parameters as
in `eval.py --tasks=perplexity`, in pieces, each of which continues from the state of the one before. Rows
have the bytes of the parameters, of the state, and of the compiled program's temporary arrays (activations
and logits of one piece), and the tokens/s of a second pass. `peak_bytes` is the peak of the process so far,
where the device reports it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import options, text
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import one_by_one
from lsm_jax import models
from lsm_jax.evaluation import Scorer

BENCHMARK = Benchmark(
    name="long_context",
    summary="memory and time of evaluating one long document in pieces",
    key=("method", "size", "length", "piece_length"),
)


def measure(method: str, size: str, length: int, piece_length: int, vocab_size: int) -> dict:
    """Score one document of `length` tokens with a model of random parameters, and return the benchmark's
    row of memory and speed; `length` is a multiple of `piece_length` and longer than it.
    """
    config = models.lm(method, size, vocab_size=vocab_size)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    scorer = Scorer(model, piece_length=piece_length)
    batch = text.stream(1, length, vocab_size)
    for _ in range(2):
        began = time.perf_counter()
        losses = [nll.mean() for _, nll in scorer(batch)]
        seconds = time.perf_counter() - began
    program = scorer.compiled(rows=1, length=length).memory_analysis()
    stats = jax.local_devices()[0].memory_stats() or {}
    state = jax.eval_shape(lambda: model.init_state(1, length))
    return dict(
        method=method,
        size=size,
        length=length,
        piece_length=piece_length,
        parameter_bytes=sum(x.nbytes for x in jax.tree.leaves(nnx.state(model))),
        state_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
        program_bytes=program.temp_size_in_bytes,
        peak_bytes=stats.get("peak_bytes_in_use"),
        tokens_per_second=round(length / seconds),
        loss=round(float(np.mean(losses)), 4),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", type=options.words, default="fox,softmax,gated_deltanet")
    parser.add_argument("--size", default="125m")
    parser.add_argument(
        "--lengths", type=options.integers, default="16384,65536", help="ascending, for peak_bytes"
    )
    parser.add_argument("--piece_length", type=int, default=4096)
    parser.add_argument("--vocab_size", type=int, default=50304)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    for length in args.lengths:
        if length % args.piece_length or length <= args.piece_length:
            raise UsageError(
                f"--lengths {length}: accepted are multiples of {args.piece_length}, from two times it on"
            )
    return [
        dict(method=method, size=args.size, length=length, piece_length=args.piece_length)
        for method in args.methods
        for length in args.lengths
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return one_by_one(cases, lambda case: measure(**case, vocab_size=args.vocab_size))
