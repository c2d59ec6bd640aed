"""Memory and time of evaluating one long document: `python -m benchmarks.long_context [--methods fox,gla] [--lengths 16384,65536]`.

A document of random tokens is scored by a model with random parameters as `eval.py --tasks=perplexity` does, in pieces with the
state carried on. A row a method and length: the bytes of parameters, of the state, and of what the compiled program needs beside
them (activations and logits of one piece), and tokens a second of a second pass. `peak_bytes` is the process's so far, where the
device tells it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from benchmarks.timing import append_row, provenance
from lsm_jax import models
from lsm_jax.evaluation import Scorer


def measure(method: str, size: str, length: int, piece_length: int, vocab_size: int) -> dict:
    """One document of `length` tokens, a multiple of `piece_length` and longer than it."""
    config = models.lm(method, size, vocab_size=vocab_size)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    scorer = Scorer(model, piece_length=piece_length)
    text = np.random.default_rng(0).integers(0, vocab_size, (1, length + 1)).astype(np.int32)
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}
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


def main() -> None:
    """Print a row a method and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="fox,softmax,gated_deltanet")
    parser.add_argument("--size", default="125m")
    parser.add_argument("--lengths", default="16384,65536", help="ascending, for peak_bytes")
    parser.add_argument("--piece_length", type=int, default=4096)
    parser.add_argument("--vocab_size", type=int, default=50304)
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    for method in args.methods.split(","):
        for length in map(int, args.lengths.split(",")):
            if length % args.piece_length or length <= args.piece_length:
                parser.error(
                    f"length {length}: accepted are multiples of {args.piece_length}, two or more"
                )
            row = measure(method, args.size, length, args.piece_length, args.vocab_size)
            row |= provenance()
            print(json.dumps(row), flush=True)
            if args.output:
                append_row(args.output, row)


if __name__ == "__main__":
    main()
