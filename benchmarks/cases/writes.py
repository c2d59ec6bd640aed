"""Check and time Mamba2's memory: linear attention with a scalar decay, factors of writes and a skip, whose heads share q and k.

    python -m benchmarks writes [--cases 16x2048x32,8x4096x64] [--kinds pairs,heads,roles]

A row for each case, B x T x heads of 128 key and 64 value channels, in bfloat16: the ms of the forward pass and of forward and backward, and
the largest error of the gradients of the first row, in RMS relative to float32's RMS. Kinds: gradients of two heads in one thread block
("pairs", the kernel's rule where it is possible), or of each head, which XLA adds ("heads"); "roles" is "pairs" with the forward pass by
the scan by roles.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.run import require_gpu
from benchmarks.timing import alone, batch_milliseconds
from lsm_jax import ops
from pallas_kernels.linear_attention.cases import GRADIENT_TOLERANCE
from pallas_kernels.linear_attention.hopper import scalar_decay, scalar_scan

BENCHMARK = Benchmark(
    name="writes",
    summary="Mamba2's memory, whose heads share q and k: gradients of two heads at once or of each",
    key=("case",),
    output="docs/writes.jsonl",
)

KINDS = ("pairs", "heads", "roles")
CASES = {"16x2048x32": (16, 2048, 32), "8x4096x64": (8, 4096, 64), "2x16384x32": (2, 16384, 32)}


def make(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return random arguments of `linear_memory` for B, T and the number of heads, and the gradient of its output, by name. They are drawn
    where JAX computes.
    """
    keys = iter(jax.random.split(jax.random.key(0), 7))

    def normal(heads: int, width: int, size: float = 1) -> jax.Array:
        drawn = jax.random.normal(next(keys), (*shape[:2], heads, width)) * size
        return drawn.astype(jnp.bfloat16)

    step = jax.nn.softplus(jax.random.normal(next(keys), shape) - 3)
    return dict(
        q=normal(1, 128, 0.3), k=normal(1, 128, 0.3), v=normal(shape[2], 64), d_output=normal(shape[2], 64),
        log_decay=-4 * step, log_write=jnp.log(step), skip=jax.random.normal(next(keys), shape[2:]),
    )  # fmt: skip


def forward(implementation: str, arrays: dict[str, Any]) -> jax.Array:
    """Return the output of `linear_memory` by a backend."""
    given = {name: x for name, x in arrays.items() if name != "d_output"}
    return ops.linear_memory(**given, scale=1.0, implementation=implementation)[0]


def both(implementation: str, arrays: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
    """Return the output and the gradients of all arguments."""
    given = {name: x for name, x in arrays.items() if name != "d_output"}
    output, pull = jax.vjp(functools.partial(forward, implementation), given)
    return output, pull(arrays["d_output"].astype(output.dtype))[0]


def errors(got: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Return the error of each gradient, in RMS relative to the RMS of the gradient that is wanted."""

    def error(a: jax.Array, b: jax.Array) -> float:
        a, b = (x.astype(jnp.float32) for x in (a, b))
        return round(float(jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2))), 5)

    return {name: error(x, wanted[name]) for name, x in got.items()}


def of_first_row(implementation: str, dtype: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients of the first row, from arrays of their own dtype or `dtype`."""
    row = {name: x[:1] if x.ndim > 1 else x for name, x in arrays.items()}
    return both(implementation, {name: x.astype(dtype or x.dtype) for name, x in row.items()})[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=options.names(CASES), default="16x2048x32,8x4096x64", help="B x T x heads"
    )
    options.add_kinds(parser, KINDS, "pairs,heads")
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [dict(case=name) for name in args.cases]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    require_gpu("writes")
    before = scalar_decay.GRADIENTS_OF_PAIRS, scalar_scan.ROLES
    try:
        with alone(args.lock):
            for row in cases:
                arrays = jax.jit(functools.partial(make, CASES[row["case"]]))()
                with jax.default_matmul_precision("highest"):
                    wanted = jax.jit(functools.partial(of_first_row, "xla", jnp.float32))(arrays)
                measured: dict[str, Any] = {}
                for kind in args.kinds:
                    jax.clear_caches()  # of traces of the same shapes with the other switches
                    scalar_decay.GRADIENTS_OF_PAIRS = kind != "heads"
                    scalar_scan.ROLES = True if kind == "roles" else None
                    got = jax.jit(functools.partial(of_first_row, "mosaic_gpu", None))(arrays)
                    found = errors(got, wanted)
                    programs = (
                        jax.jit(functools.partial(f, "mosaic_gpu")).lower(arrays).compile()
                        for f in (forward, both)
                    )
                    measured[kind] = [round(batch_milliseconds(p, arrays), 4) for p in programs]
                    measured[f"{kind}_errors"] = found
                    measured[f"{kind}_right"] = max(found.values()) < GRADIENT_TOLERANCE
                yield row | measured
    finally:
        scalar_decay.GRADIENTS_OF_PAIRS, scalar_scan.ROLES = before
