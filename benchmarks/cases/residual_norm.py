"""Check and time a residual stream's sum with the norm that products read of it, and the gradient of stream and norm.

    python -m benchmarks residual_norm [--cases 16x2048x1024-norms=5,16x2048x1024-forward,...] [--kinds kernel,xla] [--ahead 0,1,2]

A row for each case of `TIMED` (gradients) and `FORWARD_TIMED` (sums) in `pallas_kernels.residual_norm.cases`: for the fused kernel and for
XLA the time in ms, the bytes that a pass over every array once moves, in ms at 4.2 TB/s ("limit"), and the largest difference of the
results from those in float32, relative to the largest entry. `--ahead` loads as many tokens ahead of the kernel's sums, each its own row; 0 is the kernel's rule.
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
from pallas_kernels.residual_norm import (
    forward,
    hopper,
    residual_norm_forward,
    residual_norm_gradients,
)
from pallas_kernels.residual_norm.cases import FORWARD_TIMED, TIMED, TOLERANCES, Case, ForwardCase

BENCHMARK = Benchmark(
    name="residual_norm",
    summary="a residual stream's sum with its norm, and the gradient of both, fused and by XLA",
    key=("case",),
    optional_key={"ahead": 0},
)

KINDS = ("kernel", "xla")
CASES: dict[str, Case | ForwardCase] = {case.id: case for case in (*TIMED, *FORWARD_TIMED)}
_BANDWIDTH = 4.2e12  # bytes a second


def make(case: Case | ForwardCase) -> dict[str, Any]:
    """Return random arrays of a case by name. They are drawn where JAX computes."""
    count = 3 if isinstance(case, ForwardCase) else case.norms + 3
    keys = iter(jax.random.split(jax.random.key(0), count))

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    shape = case[:3]
    if isinstance(case, ForwardCase):
        x, y = (normal(*shape, dtype=case.dtype) for _ in range(2))
        return dict(x=x, y=y, scale=normal(case.channels, dtype=jnp.float32))
    return dict(
        x=normal(*shape),
        scale=normal(case.channels, dtype=jnp.float32),
        d_stream=normal(*shape),
        d_norms=tuple(normal(*shape) for _ in range(case.norms)),
    )


def compute(kind: str, arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
    """Return in one of the `KINDS` the gradients of x and scale, or of arrays with a y the sum, its norm and the root [B, T]."""
    if "y" in arrays:
        x, y, scale = (arrays[name] for name in ("x", "y", "scale"))
        if kind == "kernel":
            return residual_norm_forward(x, y, scale, eps=1e-5)
        stream, normed, root = branches.sum_and_norm(1e-5, x, y, scale)
        return stream, normed, root[..., 0]
    if kind == "kernel":
        return residual_norm_gradients(**arrays, eps=1e-5)
    return branches.gradients(1e-5, **arrays)


def of_first_row(kind: str, dtype: Any, arrays: dict[str, Any]) -> tuple[jax.Array, ...]:
    """Return what `compute` does of the first row, computed from arrays of their own dtype or `dtype`."""
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
            case = CASES[row["case"]]
            forward.TOKENS_AHEAD = hopper.TOKENS_AHEAD = row.get("ahead", 0)
            arrays = jax.jit(functools.partial(make, case))()
            wanted = jax.jit(functools.partial(of_first_row, "xla", jnp.float32))(arrays)
            errors, times = {}, {}
            for kind in args.kinds:
                first = jax.jit(functools.partial(of_first_row, kind, None))(arrays)
                errors[kind] = round(float(error(first, wanted)), 5)
                program = jax.jit(functools.partial(compute, kind)).lower(arrays).compile()
                times[kind] = round(batch_milliseconds(program, arrays), 4)
            count = 4 if isinstance(case, ForwardCase) else case.norms + 3
            size = arrays["x"].dtype.itemsize * arrays["x"].size
            limit = size * count / _BANDWIDTH
            right = all(e < TOLERANCES["card"] for e in errors.values())
            yield row | times | dict(limit=round(1e3 * limit, 4), errors=errors, right=right)
