"""Compare and time the two kernels of `chunk_backward` of the delta rule with a scalar decay or none, each alone.

    python -m benchmarks delta_chunks [--cases 8x4096x6x256x512,16x2048x3x256x512] [--kinds kept,streamed] [--repeats 10]

A row for each case, B x T x heads x K x V in bfloat16 with a scalar decay ("undecayed" for Comba's keys, "documents" for rows of several
documents, "plain" for no decay): the ms of a call, the largest difference of each gradient of the streamed kernel from that of the kernel
that keeps q and k, in RMS relative to its RMS, and whether repeated calls return the same bits. Kinds: "kept" and "streamed".
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.run import require_gpu
from benchmarks.timing import alone, batch_milliseconds
from pallas_kernels.delta_rule.hopper.chunk_backward import chunk_backward

BENCHMARK = Benchmark(
    name="delta_chunks",
    summary="the gradients of a delta rule's chunks by both of its kernels",
    key=("case",),
)

KINDS = ("kept", "streamed")
MAIN = ("8x4096x6x256x512", "16x2048x3x256x512")
CASES = (
    *MAIN,
    "8x4096x6x256x512-undecayed",
    "8x4096x6x256x512-documents",
    "8x4096x6x256x512-plain",
    "8x4096x8x256x256",
    "8x4096x8x256x128",
    "8x4096x8x128x256",
    "8x4096x16x64x256",
)
GRADIENTS = ("q", "k", "beta", "log_decay")
LARGEST = 2e-3  # bfloat16 rounds to 2^-9 at most, and few entries are rounded differently


def make(case: str) -> dict[str, Any]:
    """Return random arguments of `chunk_backward` for a case, by name. They are drawn where JAX computes."""
    sizes, *words = case.split("-")
    batch, length, heads, depth, width = map(int, sizes.split("x"))
    chunks = length // 64
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    values = {name: normal(batch, length, heads, width) for name in ("missing", "d_out", "dv")}
    memory = batch, heads, chunks, width, depth
    gates = batch, length, heads
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    return values | dict(
        q=normal(batch, length, heads, depth) * depth**-0.5, k=normal(batch, length, heads, depth) * depth**-0.5,
        states=normal(*memory), d_states=normal(*memory), beta=jax.nn.sigmoid(jax.random.normal(next(keys), gates)),
        log_decay=None if "plain" in words else -0.05 * jax.random.uniform(next(keys), gates),
        run=position // 300 if "documents" in words else None,
    )  # fmt: skip


def call(case: str, kind: str, interpret: Any, arrays: dict[str, Any]) -> list[jax.Array]:
    """Return the gradients of q, k, beta and, with a decay, of the log decay by one kind of kernel."""
    erase = "undecayed" if "undecayed" in case else "decayed"
    return chunk_backward(
        **arrays, scale=arrays["k"].shape[-1] ** -0.5, decay_gradient=arrays["log_decay"] is not None,
        erase=erase, stream=kind == "streamed", interpret=interpret,
    )  # fmt: skip


def differences(got: list[jax.Array], wanted: list[jax.Array]) -> dict[str, float]:
    """Return the difference of each gradient from the one that is wanted, in RMS relative to the RMS of the latter."""

    def difference(a: jax.Array, b: jax.Array) -> float:
        a, b = (x.astype(jnp.float32) for x in (a, b))
        return float(jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2)))

    found = zip(GRADIENTS, got, wanted, strict=False)
    return {name: round(difference(a, b), 7) for name, a, b in found}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=options.names(CASES), default=",".join(MAIN), help=f"of {', '.join(CASES)}"
    )
    options.add_kinds(parser, KINDS, ",".join(KINDS))
    parser.add_argument(
        "--repeats", type=int, default=10, help="calls whose results are compared bit by bit"
    )
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [dict(case=name) for name in args.cases]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    require_gpu("delta_chunks")
    with alone(args.lock):
        for row in cases:
            yield row | measure(row["case"], args.kinds, args.repeats)


def measure(case: str, kinds: list[str], repeats: int, interpret: Any = False) -> dict[str, Any]:
    """Return the fields of a case's row: for each kind its ms and whether `repeats` more calls return the same bits, and with both kinds
    the differences of the gradients and whether these are small.
    """
    arrays = jax.jit(functools.partial(make, case))()
    equal = jax.jit(lambda a, b: jnp.stack([jnp.all(x == y) for x, y in zip(a, b, strict=True)]))
    results, measured = {}, {}
    for kind in kinds:
        program = jax.jit(functools.partial(call, case, kind, interpret))
        program = program if interpret else program.lower(arrays).compile()
        results[kind] = program(arrays)
        same = [bool(jnp.all(equal(program(arrays), results[kind]))) for _ in range(repeats)]
        measured[kind] = round(batch_milliseconds(program, arrays), 4)
        measured[f"{kind}_same"] = all(same)
    if len(results) == len(KINDS):
        found = differences(results["streamed"], results["kept"])
        measured["differences"] = found
        # A NaN is not less than the bound.
        measured["right"] = all(math.isfinite(x) and x < LARGEST for x in found.values())
    return measured
