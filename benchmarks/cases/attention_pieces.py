"""Time softmax attention of a piece of a prompt to the keys that a state holds, and of complete rows, by backend.

    python -m benchmarks attention_pieces [--cases 1x4096x16x4x256+32768,...] [--kinds mosaic_gpu,xla]

A row for each case (B x T x H x Hk x D + keys that the state holds, bfloat16) has for each kind ms forward; for complete rows
also ms forward and backward; the backends that ran (`choices`); and the largest difference of the output from that of
XLA in float32, for the last 128 queries of the first row, relative to the largest entry.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import require_gpu
from benchmarks.timing import alone, batch_milliseconds
from lsm_jax import ops
from lsm_jax.ops.backends.select import clear_choices

BENCHMARK = Benchmark(
    name="attention_pieces",
    summary="softmax attention of a prompt's piece to held keys, and of complete rows, by backend",
    key=("case",),
)

KINDS = ("default", "mosaic_gpu", "cudnn", "xla")
CASES = (
    "1x4096x16x4x256+32768",
    "1x4096x16x4x256+0",
    "1x16384x16x4x256+0",
    "1x4096x32x8x128+32768",
    "1x4096x32x8x128+0",
)
BACKWARD = {"default": True, "mosaic_gpu": False, "cudnn": True, "xla": True}
TOLERANCE = 1e-2


def sizes_of(case: str) -> tuple[int, ...]:
    """Return B, T, H, Hk, D and the number of held keys of a case's name.

    Raises:
        UsageError: the name is not of this form.
    """
    if not re.fullmatch(r"\d+(x\d+){4}\+\d+", case):
        raise UsageError(f"--cases {case}: accepted are names such as {CASES[0]}")
    sizes = tuple(map(int, re.split(r"[x+]", case)))
    _, length, heads, key_heads, _, held = sizes
    if 0 in sizes[:5] or heads % key_heads or length + held <= 128:
        raise UsageError(
            f"--cases {case}: accepted are sizes from 1, H a multiple of Hk, and more than 128 tokens with those held"
        )
    return sizes


def make(case: str) -> tuple[dict[str, jax.Array], ops.AttentionState | None]:
    """Return random q, k and v of a case by name, and a state with its held keys, or None if it has none."""
    batch, length, heads, key_heads, dim, held = sizes_of(case)
    draws = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape):
        return jax.random.normal(next(draws), shape, jnp.bfloat16)

    q = normal(batch, length, heads, dim)
    arrays = dict(q=q) | {name: normal(batch, length, key_heads, dim) for name in "kv"}
    if not held:
        return arrays, None
    sizes = (batch, held + length, key_heads, dim, dim)
    state = ops.attention_state(*sizes, dtype=jnp.bfloat16)
    keys, values = (normal(batch, held, key_heads, dim) for _ in range(2))
    return arrays, ops.store_tokens(keys, values, initial_state=state)


def attend(arrays, state, implementation):
    return ops.attention(**arrays, initial_state=state, implementation=implementation)[0]


def expected(arrays, state) -> jax.Array:
    """Return the output [T', H, D] of the first row's last 128 queries, by XLA in float32: all other tokens are in the
    state that the queries attend to.
    """
    arrays, state = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x,
        jax.tree.map(lambda x: x[:1], (arrays, state)),
    )
    last = {name: x[:, -128:] for name, x in arrays.items()}
    k, v = (arrays[name][:, :-128] for name in "kv")
    capacity = arrays["k"].shape[1]
    if state is None:
        state = ops.attention_state(1, capacity, *k.shape[2:], v.shape[-1])
    return attend(last, ops.store_tokens(k, v, initial_state=state), "xla")[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=options.words, default=",".join(CASES), help="names, by commas")  # fmt: skip
    options.add_kinds(parser, KINDS, ",".join(KINDS))
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    for case in args.cases:
        sizes_of(case)
    return [dict(case=case) for case in args.cases]


def measure(kind: str, inputs: tuple) -> tuple[list[float], str, jax.Array] | None:
    """Return the times [ms forward] or [ms forward, ms forward and backward] of one kind, the text of `ops.choices()`, and
    the output; None if the backend does not support the case.
    """
    run = functools.partial(attend, implementation=None if kind == "default" else kind)

    def both(arrays, state):
        output, pull = jax.vjp(lambda x: run(x, state), arrays)
        return output, pull(output)

    whole = inputs[1] is None
    clear_choices()
    jax.clear_caches()
    try:
        lowered = [jax.jit(run).lower(*inputs)]
        lowered += [jax.jit(both).lower(*inputs)] if whole and BACKWARD[kind] else []
    except NotImplementedError:
        return None
    chosen = ops.choices()["attention"]
    programs = [program.compile() for program in lowered]
    output = programs[0](*inputs)
    return [round(batch_milliseconds(p, *inputs, calls=5), 4) for p in programs], chosen, output


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if args.kinds != ["xla"]:
        require_gpu(f"--kinds {','.join(args.kinds)}")
    with alone(args.lock):
        for row in cases:
            inputs = make(row["case"])
            wanted = jax.jit(expected)(*inputs)
            row = dict(row, choices={}, errors={})
            for kind in args.kinds:
                measured = measure(kind, inputs)
                if measured is None:
                    continue
                row[kind], row["choices"][kind], output = measured
                difference = jnp.abs(output[0, -128:].astype(jnp.float32) - wanted).max()
                row["errors"][kind] = round(float(difference / jnp.abs(wanted).max()), 5)
            yield row | dict(right=all(e < TOLERANCE for e in row["errors"].values()))
