"""Measure how far 100,000 tokens drift in float32.

    python -m benchmarks drift [--length 100000]

A row for each class of transition: the error of the chunk form in float32 against the recurrent form in
float64 on the same inputs. The gates remember for thousands of tokens, and no norm hides an error. The rows
have the largest error of the output, relative to the RMS of the output up to there, in the first tenth and in
the last tenth of the sequence.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.registry import Benchmark
from benchmarks.run import one_by_one
from lsm_jax import ops

BENCHMARK = Benchmark(
    name="drift",
    summary="rounding errors of the ops in float32 over 100,000 tokens",
    key=("case", "length"),
)

KEY_DIM, VALUE_DIM = 16, 8


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _slow(rng, *shape):
    """Return random log decays from -1e-1 to -1e-5 per token, of the given shape: memories that last for
    thousands of tokens.
    """
    return -(10.0 ** rng.uniform(-5, -1, size=shape))


def make_cases(length: int) -> dict:
    """Return, by the name of each class of transition, the op and its random float64 inputs for a sequence
    of `length` tokens.
    """
    rng = np.random.default_rng(0)
    shape = (1, length, 1)
    q, v = rng.normal(size=(*shape, KEY_DIM)), rng.normal(size=(*shape, VALUE_DIM))
    k = _unit(rng.normal(size=(*shape, KEY_DIM)))
    qkv, beta = dict(q=q, k=k, v=v), rng.uniform(0, 1, size=shape)
    scalar, channels = _slow(rng, *shape), _slow(rng, *shape, KEY_DIM)
    cases = {
        "linear_memory, no decay": ("linear_memory", qkv),
        "linear_memory, scalar decay": ("linear_memory", qkv | dict(log_decay=scalar)),
        "linear_memory, key-channel decay": ("linear_memory", qkv | dict(log_decay=channels)),
        "delta_memory": ("delta_memory", qkv | dict(beta=beta)),
        "delta_memory, beta to 2": ("delta_memory", qkv | dict(beta=2 * beta)),
        "delta_memory, scalar decay": ("delta_memory", qkv | dict(beta=beta, log_decay=scalar)),
        "delta_memory, key-channel decay": ("delta_memory", qkv | dict(beta=beta, log_decay=channels)),
    }  # fmt: skip
    low_rank = dict(a=-k, b=beta[..., None] * k, log_decay=channels)
    cases["dplr_memory"] = ("dplr_memory", qkv | low_rank)
    # With the same decay at every token, its rounding errors add up.
    for decay in (-1.0137e-5, -1.037e-4, -1.007e-3):
        constant = dict(log_decay=np.array([decay]))
        cases[f"linear_memory, constant decay {decay:g}"] = ("linear_memory", qkv | constant)
        cases[f"linear_memory, constant decay {decay:g}, token by token"] = (
            "linear_memory", qkv | constant | dict(form="recurrent")
        )  # fmt: skip
    return cases


def drift(op: str, inputs: dict, compiler_options: dict | None = None) -> tuple[float, float]:
    """Return the float32 chunk form's error against the float64 recurrent form in the first and in the last
    tenth of the sequence; `compiler_options` are those of `jax.jit`.
    """
    jit = functools.partial(jax.jit, compiler_options=compiler_options)
    function = getattr(ops, op)
    inputs = dict(inputs)
    form = inputs.pop("form", "chunk")
    narrow = {n: jnp.asarray(x, jnp.float32) for n, x in inputs.items()}
    output = np.asarray(jit(lambda x: function(**x, form=form)[0])(narrow), np.float64)
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(np.asarray(x), jnp.float64) for n, x in narrow.items()}
        exact = jit(lambda x: function(**x, form="recurrent")[0])(wide)
        exact = np.asarray(exact)
    scale = np.sqrt(np.cumsum(np.mean(exact**2, axis=(0, 2, 3))) / np.arange(1, exact.shape[1] + 1))
    error = np.max(np.abs(output - exact), axis=(0, 2, 3)) / scale
    tenth = max(1, len(error) // 10)
    return float(error[:tenth].max()), float(error[-tenth:].max())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, default=100_000)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [dict(case=name, length=args.length) for name in make_cases(1)]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    inputs = make_cases(args.length)

    def measure(case):
        first, last = drift(*inputs[case["case"]])
        return dict(case=case["case"], first_tenth=first, last_tenth=last, length=args.length)

    return one_by_one(cases, measure)
