"""Check and time the gated norms at the end of mixers.

    python -m benchmarks gated_norm [--cases 8x4096x64x64-...,...] [--kinds kernel,xla,definition]

A row for each case of `pallas_kernels.gated_norm.cases.TIMED`: for the fused kernel, XLA's form and the definition
differentiated by JAX, [ms forward, ms backward alone, ms of both with the forward pass computed again]; and the largest
difference of each one's output and gradients from the definition in float32, relative to the largest entry.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.run import require_gpu
from benchmarks.timing import alone, batch_milliseconds
from lsm_jax import ops
from lsm_jax.ops.normalization.xla import NormOptions, reference
from pallas_kernels.gated_norm.cases import TIMED, TOLERANCES, Case

BENCHMARK = Benchmark(
    name="gated_norm",
    summary="the norm and gate at the end of mixers, fused, in XLA's passes and as defined",
    key=("case",),
)

KINDS = ("kernel", "xla", "definition")
CASES = {case.id: case for case in TIMED}


def norm(kind: str, case: Case):
    """Return the function of a case's arrays by name that computes its gated norm in one of the `KINDS`."""
    if kind == "definition":
        defined = functools.partial(
            reference, NormOptions(1e-5, case.group, case.activation, case.gate_first)
        )
        return jax.checkpoint(lambda arrays: defined(**arrays), prevent_cse=False)
    call = functools.partial(
        ops.gated_rms_norm, eps=1e-5, group=case.group, activation=case.activation,
        gate_first=case.gate_first, implementation="mosaic_gpu" if kind == "kernel" else "xla",
    )  # fmt: skip
    return lambda arrays: call(**arrays)


def make(case: Case) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return random arrays of a case by name, and a gradient of its output."""
    draws = np.random.default_rng(0)
    shape, bfloat16 = case[:4], jnp.bfloat16

    def normal(shape, dtype):
        return jnp.asarray(draws.standard_normal(shape, np.float32), dtype)

    gate = jnp.float32 if case.wide_gate else bfloat16
    arrays = dict(x=normal(shape, bfloat16), gate=normal(shape, gate))
    arrays["scale"] = normal(shape[2:] if case.group > 1 else shape[3:], jnp.float32)
    if case.skip:
        arrays |= dict(skip=normal(shape[2:3], jnp.float32), skip_input=normal(shape, bfloat16))
    return arrays, normal(shape, bfloat16)


def programs(kind: str, case: Case) -> list:
    """Return three programs, lowered, with their inputs: the forward pass, the backward pass, and both where the backward pass
    computes the output again, as in a layer whose next product requires it.
    """
    call, (arrays, dy) = norm(kind, case), make(case)

    def backward(arrays, dy):
        return jax.vjp(call, arrays)[1](dy)

    def both(arrays, dy):
        output, pull = jax.vjp(call, arrays)
        return output, pull(dy)

    calls: list = [(call, (arrays,)), (backward, (arrays, dy)), (both, (arrays, dy))]
    return [(jax.jit(function).lower(*inputs), inputs) for function, inputs in calls]


def error(got: Any, wanted: Any) -> float:
    """Return the largest difference of two pytrees of arrays, relative to the largest entry of each wanted array."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    errors = [jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max() for a, b in pairs]
    return float(jnp.max(jnp.stack(errors)))  # NaN if one is, unlike Python's `max`


def wanted(case: Case) -> Any:
    """Return output and gradients of the definition in float32, for a case's first row."""
    arrays, dy = jax.tree.map(lambda a: a.astype(jnp.float32), first_row(case))
    output, pull = jax.vjp(norm("definition", case), arrays)
    return output, pull(dy)


def first_row(case: Case) -> Any:
    """Return a case's arrays and the gradient of its output, with the first row of the batch only."""
    return jax.tree.map(lambda a: a[:1] if a.ndim == 4 else a, make(case))


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
    with alone(args.lock, shared=True), concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = [
            [
                [(pool.submit(p.compile), inputs) for p, inputs in programs(kind, CASES[row["case"]])]
                for kind in args.kinds
            ]
            for row in cases
        ]  # fmt: skip
    with alone(args.lock):
        for row, of_kinds in zip(cases, compiled, strict=True):
            case = CASES[row["case"]]
            expected, errors = jax.jit(functools.partial(wanted, case))(), {}
            row = dict(row)
            for kind, triple in zip(args.kinds, of_kinds, strict=True):
                call = norm(kind, case)

                def both(arrays, dy, call=call):
                    output, pull = jax.vjp(call, arrays)
                    return output, pull(dy)

                errors[kind] = round(error(jax.jit(both)(*first_row(case)), expected), 5)
                row[kind] = [
                    round(batch_milliseconds(p.result(), *inputs), 4) for p, inputs in triple
                ]
            yield row | dict(
                errors=errors, right=all(e < TOLERANCES["card"] for e in errors.values())
            )
