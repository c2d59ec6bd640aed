"""Check and time the gated norms at the end of mixers.

    python -m benchmarks gated_norm [--cases 8x4096x64x64-...,...] [--kinds kernel,stored,xla,definition]

A row for each case of `pallas_kernels.gated_norm.cases.TIMED`: for the fused kernel, XLA's form and the definition
differentiated by JAX, [ms forward, ms backward alone, ms of both with the forward pass computed again]; "stored" is the kernel whose backward
pass stores the output, so that nothing is computed again, for groups without a skip; and the largest
difference of each one's output and gradients from the definition in float32, relative to the largest entry. Inputs are drawn and
results compared on the device; all programs are compiled side by side before any is timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.run import log, require_gpu
from benchmarks.timing import alone, batch_milliseconds
from lsm_jax import ops
from lsm_jax.ops.normalization.xla import NormOptions, reference
from pallas_kernels.gated_norm import gated_rms_norm_gradients
from pallas_kernels.gated_norm.cases import TIMED, TOLERANCES, Case

BENCHMARK = Benchmark(
    name="gated_norm",
    summary="the norm and gate at the end of mixers, fused, in XLA's passes and as defined",
    key=("case",),
)

KINDS = ("kernel", "stored", "xla", "definition")
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
        gate_first=case.gate_first, implementation="xla" if kind == "xla" else "mosaic_gpu",
    )  # fmt: skip
    return lambda arrays: call(**arrays)


def make(case: Case) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return random arrays of a case by name, and a gradient of its output. They are drawn where JAX computes."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    shape, bfloat16 = case[:4], jnp.bfloat16

    def normal(shape, dtype):
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    gate = jnp.float32 if case.wide_gate else bfloat16
    arrays = dict(x=normal(shape, bfloat16), gate=normal(shape, gate))
    arrays["scale"] = normal(shape[2:] if case.group > 1 else shape[3:], jnp.float32)
    if case.skip:
        arrays |= dict(skip=normal(shape[2:3], jnp.float32), skip_input=normal(shape, bfloat16))
    return arrays, normal(shape, bfloat16)


def programs(kind: str, case: Case) -> list[jax.stages.Lowered]:
    """Return three programs of a case's arrays and the gradient of its output, lowered: the forward pass, the backward pass, and
    both where the backward pass computes the output again, as in a layer whose next product requires it.
    """
    call = norm(kind, case)

    def forward(arrays, dy):
        return call(arrays)

    def backward(arrays, dy):
        return jax.vjp(call, arrays)[1](dy)

    shapes = jax.eval_shape(functools.partial(make, case))
    functions = [forward, backward, functools.partial(both, call)]
    if kind == "stored":
        functions[1:] = [functools.partial(stored, case)] * 2
    return [jax.jit(function).lower(*shapes) for function in functions]


def both(call: Any, arrays: dict[str, jax.Array], dy: jax.Array) -> Any:
    """Return the output and the gradients of a function of arrays by name."""
    output, pull = jax.vjp(call, arrays)
    return output, pull(dy)


def stored(case: Case, arrays: dict[str, jax.Array], dy: jax.Array) -> Any:
    """Return what `both` returns, by the backward kernel alone."""
    *gradients, output = gated_rms_norm_gradients(
        **arrays, dy=dy, eps=1e-5, group=case.group, activation=case.activation, gate_first=case.gate_first
    )  # fmt: skip
    return output, (dict(zip(("x", "gate", "scale"), gradients, strict=True)),)


def kinds_of(case: Case, kinds: list[str]) -> list[str]:
    """Return those of the kinds that a case has: the kernel that stores the output has no skip, and a scale of each head."""
    return [kind for kind in kinds if kind != "stored" or not case.skip and case.group > 1]


def of_first_row(kind: str, case: Case, dtype: Any = None) -> jax.stages.Lowered:
    """Return the program of a case's arrays and the gradient of its output, lowered, that returns the output and gradients of the
    first row, computed from arrays of their own dtype or `dtype`. Two kinds in one program would share its roundings.
    """

    def first(arrays, dy):
        row = jax.tree.map(lambda a: a[:1] if a.ndim == 4 else a, (arrays, dy))
        row = jax.tree.map(lambda a: a.astype(dtype or a.dtype), row)
        return stored(case, *row) if kind == "stored" else both(norm(kind, case), *row)

    return jax.jit(first).lower(*jax.eval_shape(functools.partial(make, case)))


@jax.jit
def error(got: Any, wanted: Any) -> jax.Array:
    """Return the largest difference of two pytrees of arrays, relative to the largest entry of each wanted array."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    errors = [jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max() for a, b in pairs]
    return jnp.max(jnp.stack(errors))  # NaN if one is, unlike Python's `max`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", type=options.names(CASES), default=",".join(CASES), help="names, by commas"
    )
    options.add_kinds(parser, KINDS, ",".join(KINDS))
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [dict(case=name) for name in args.cases]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for kind in {"kernel", "stored"}.intersection(args.kinds):
        require_gpu(f"--kinds {kind}")

    def compile_case(case: Case) -> tuple:
        draw = jax.jit(functools.partial(make, case)).lower()
        wanted = of_first_row("definition", case, jnp.float32)
        of_kinds = {
            kind: [
                pool.submit(p.compile) for p in (of_first_row(kind, case), *programs(kind, case))
            ]
            for kind in kinds_of(case, args.kinds)
        }
        return pool.submit(draw.compile), pool.submit(wanted.compile), of_kinds

    with alone(args.lock, shared=True), concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = [compile_case(CASES[row["case"]]) for row in cases]
    log("compiled")
    with alone(args.lock):
        for row, (draw, wanted, of_kinds) in zip(cases, compiled, strict=True):
            inputs, errors, times = draw.result()(), {}, {}
            expected = wanted.result()(*inputs)
            for kind, futures in of_kinds.items():
                first, *timed = (future.result() for future in futures)
                errors[kind] = round(float(error(first(*inputs), expected)), 5)
                times[kind] = [round(batch_milliseconds(p, *inputs), 4) for p in timed]
            right = all(e < TOLERANCES["card"] for e in errors.values())
            yield row | times | dict(errors=errors, right=right)
