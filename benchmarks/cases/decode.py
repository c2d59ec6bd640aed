"""Time decoding by token, to show that neither its time nor its memory grows.

    python -m benchmarks decode [--methods gla,softmax]

A row for each method, whose model of two layers decodes 4,096 tokens one by one: the median time of a token
among the first 512 and among the last 512, and the state's bytes before and after. The cache of softmax
attention has its size for all 4,096 from the start.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.run import one_by_one
from lsm_jax import mixers, models

BENCHMARK = Benchmark(
    name="decode",
    summary="time and memory of each method's decoding over thousands of tokens",
    key=("method", "tokens"),
)

TOKENS, WINDOW = 4096, 512


def decode(method: str, tokens: int = TOKENS, window: int = WINDOW) -> dict:
    """Decode `tokens` tokens greedily from an empty state with a small model of two layers of `method`, and
    return the benchmark's row: median ms of the first and of the last `window` tokens, and the state's
    bytes before and after.
    """
    config = models.lm(method, "tiny", vocab_size=256)
    config.num_layers, config.dtype = 2, "float32"
    model = models.Decoder(config, rngs=nnx.Rngs(0))

    @jax.jit
    def step(model, token, state):
        logits, state, _ = model(token, state=state)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), state

    def size(state):
        return sum(x.nbytes for x in jax.tree.leaves(state))

    state = model.init_state(1, tokens)
    token, before, times = jnp.zeros((1, 1), jnp.int32), size(state), []
    for _ in range(tokens):
        began = time.perf_counter()
        token, state = jax.block_until_ready(step(model, token, state))
        times.append(time.perf_counter() - began)
    first, last = np.median(times[1 : window + 1]), np.median(times[-window:])
    return dict(
        method=method,
        first_ms=round(1e3 * float(first), 4),
        last_ms=round(1e3 * float(last), 4),
        state_bytes_before=before,
        state_bytes_after=size(state),
        programs=step._cache_size(),
        tokens=tokens,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", type=options.words, default=",".join(mixers.METHODS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens to decode")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    for method in args.methods:
        mixers.get_method(method)
    return [dict(method=method, tokens=args.tokens) for method in args.methods]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return one_by_one(cases, lambda case: decode(case["method"], case["tokens"]))
