"""Check and time the gradient of SwiGLU, alone and with the hidden layer.

    python -m benchmarks swiglu [--cases 16x2048x2816,8x4096x5632] [--kinds kernel,xla,joined]

A row for each case of `TIMED` in `pallas_kernels.swiglu.cases`, with the time in ms of each kind: the fused kernel, which writes the gradients
of gate and up into one array, and the hidden layer (`kernel`); XLA's pass that writes the three into arrays of their own (`xla`); and XLA's pass
that writes the two gradients into one array, without the hidden layer (`joined`). Beside them the bytes of six arrays, and of the five
of `joined`, in ms at 4.2 TB/s ("limit", "limit_joined"), and the largest difference of the results from those in float32, relative to the
largest entry.
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
from pallas_kernels.swiglu import swiglu_gradients
from pallas_kernels.swiglu.cases import TIMED, TOLERANCES, Case

BENCHMARK = Benchmark(
    name="swiglu",
    summary="the gradient of SwiGLU, alone and with the hidden layer, fused and by XLA",
    key=("case",),
)

KINDS = ("kernel", "xla", "joined")
CASES = {case.id: case for case in TIMED}
_BANDWIDTH = 4.2e12  # bytes a second


def make(case: Case) -> dict[str, jax.Array]:
    """Return random arrays of a case by name. They are drawn where JAX computes."""
    keys = jax.random.split(jax.random.key(0))
    shapes = dict(gate_up=(*case[:2], 2 * case.channels), d_hidden=case[:3])
    drawn = zip(shapes.items(), keys, strict=True)
    return {n: jax.random.normal(key, shape).astype(jnp.bfloat16) for (n, shape), key in drawn}


def compute(kind: str, scale: float, gate_up, d_hidden) -> tuple[jax.Array, ...]:
    """Return in one of the `KINDS` the gradients of gate and up, as one array or two, and for the first two kinds the hidden layer."""
    if kind == "kernel":
        return swiglu_gradients(gate_up, d_hidden, scale=scale)

    def hidden(gate, up):
        return jax.nn.silu(gate if scale == 1 else scale * gate) * up

    if kind == "joined":
        return jax.vjp(lambda x: hidden(*jnp.split(x, 2, axis=-1)), gate_up)[1](d_hidden)
    y, pull = jax.vjp(hidden, *jnp.split(gate_up, 2, axis=-1))
    return *pull(d_hidden), y


def of_first_row(kind: str, case: Case, dtype: Any, arrays: dict[str, Any]) -> jax.Array:
    """Return what `compute` does of the first row, computed from arrays of their own dtype or `dtype`, side by side."""
    row = {name: a[:1].astype(dtype or a.dtype) for name, a in arrays.items()}
    return jnp.concatenate(compute(kind, case.scale, **row), axis=-1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=options.names(CASES), default=",".join(CASES), help="names, by commas"
    )
    options.add_kinds(parser, KINDS, ",".join(KINDS))
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [dict(case=name) for name in args.cases]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if "kernel" in args.kinds:
        require_gpu("--kinds kernel")
    with alone(args.lock):
        for row in cases:
            case = CASES[row["case"]]
            arrays = jax.jit(functools.partial(make, case))()
            wanted = jax.jit(functools.partial(of_first_row, "xla", case, jnp.float32))(arrays)
            errors, times = {}, {}
            for kind in args.kinds:
                first = jax.jit(functools.partial(of_first_row, kind, case, None))(arrays)
                errors[kind] = round(float(error([first], [wanted[..., : first.shape[-1]]])), 5)
                run = jax.jit(functools.partial(compute, kind, case.scale))
                program = run.lower(**arrays).compile()
                times[kind] = round(batch_milliseconds(lambda a, f=program: f(**a), arrays), 4)
            one = 1e3 * arrays["d_hidden"].nbytes / _BANDWIDTH
            limits = dict(limit=round(6 * one, 4), limit_joined=round(5 * one, 4))
            right = all(e < TOLERANCES["card"] for e in errors.values())
            yield row | times | limits | dict(errors=errors, right=right)
