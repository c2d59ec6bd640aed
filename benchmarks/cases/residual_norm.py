"""Check and time the gradient of a residual stream and of the norm that products read of it.

    python -m benchmarks residual_norm [--cases 16x2048x1024-norms=5,...] [--kinds kernel,xla] [--ahead 0,1,2]

A row for each case of `pallas_kernels.residual_norm.cases.TIMED`: for the fused kernel and for XLA the time in ms, the bytes that a pass
over every array once moves, in ms at 4.2 TB/s ("limit"), and the largest difference of the gradients from those in float32, relative to
the largest entry. `--ahead` loads as many tokens ahead of the kernel's sums, each its own row; 0 is the kernel's rule.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import options
from benchmarks.cases.gated_norm import error
from benchmarks.registry import Benchmark
from benchmarks.run import require_gpu
from benchmarks.timing import alone, batch_milliseconds
from lsm_jax.ops.normalization import branches
from pallas_kernels.residual_norm import hopper, residual_norm_gradients
from pallas_kernels.residual_norm.cases import TIMED, TOLERANCES, Case

BENCHMARK = Benchmark(
    name="residual_norm",
    summary="the gradient of a residual stream and its norm, fused and by XLA",
    key=("case",),
    optional_key={"ahead": 0},
)

KINDS = ("kernel", "xla")
CASES = {case.id: case for case in TIMED}
_BANDWIDTH = 4.2e12  # bytes a second


def make(case: Case) -> dict[str, Any]:
    """Return random arrays of a case by name. They are drawn where JAX computes."""
    keys = iter(jax.random.split(jax.random.key(0), case.norms + 3))

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    shape = case[:3]
    return dict(
        x=normal(*shape),
        scale=normal(case.channels, dtype=jnp.float32),
        d_stream=normal(*shape),
        d_norms=tuple(normal(*shape) for _ in range(case.norms)),
    )


def compute(kind: str, arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of x and scale in one of the `KINDS`."""
    if kind == "kernel":
        return residual_norm_gradients(**arrays, eps=1e-5)
    return branches.gradients(1e-5, **arrays)


def of_first_row(kind: str, dtype: Any, arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the first row, computed from arrays of their own dtype or `dtype`."""
    row = jax.tree.map(lambda a: a[:1] if a.ndim == 3 else a, arrays)
    return compute(kind, jax.tree.map(lambda a: a.astype(dtype or a.dtype), row))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=options.names(CASES), default=",".join(CASES), help="names, by commas"
    )
    options.add_kinds(parser, KINDS, ",".join(KINDS))
    parser.add_argument("--ahead", type=options.names(("0", "1", "2")), default="0")
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        dict(case=name) | ({"ahead": int(ahead)} if ahead != "0" else {})
        for name in args.cases
        for ahead in args.ahead
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if "kernel" in args.kinds:
        require_gpu("--kinds kernel")
    with alone(args.lock):
        for row in cases:
            case, hopper.TOKENS_AHEAD = CASES[row["case"]], row.get("ahead", 0)
            arrays = jax.jit(functools.partial(make, case))()
            wanted = jax.jit(functools.partial(of_first_row, "xla", jnp.float32))(arrays)
            errors, times = {}, {}
            for kind in args.kinds:
                first = jax.jit(functools.partial(of_first_row, kind, None))(arrays)
                errors[kind] = round(float(error(first, wanted)), 5)
                program = jax.jit(functools.partial(compute, kind)).lower(arrays).compile()
                times[kind] = round(batch_milliseconds(program, arrays), 4)
            limit = 2 * case.batch * case.length * case.channels * (case.norms + 3) / _BANDWIDTH
            right = all(e < TOLERANCES["card"] for e in errors.values())
            yield row | times | dict(limit=round(1e3 * limit, 4), errors=errors, right=right)
