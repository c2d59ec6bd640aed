"""Time every op and measure its error on this machine's device.

    python -m benchmarks ops [--ops "scalar decay,delta"] [--forms chunk,associative]

A row for each op and form: milliseconds forward, and forward and backward, the medians of 20 calls at B8
T4096 H16 D128 in bfloat16 (on a CPU B1 T512 H4 D64 in float32). The error is that of the output and all
gradients in bfloat16 at T = 512 against the recurrent form in float32 at full precision, relative in RMS; the
largest of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import options
from benchmarks.registry import Benchmark
from benchmarks.run import one_by_one
from benchmarks.timing import milliseconds
from lsm_jax import ops
from pallas_kernels.memory_cases import TIMED

BENCHMARK = Benchmark(
    name="ops",
    summary="time and error of every op on this machine's device",
    key=("op", "form", "shape"),
)


def make_inputs(name: str, batch: int, length: int, heads: int, dim: int, dtype) -> dict:
    """Return the random arguments of the op that the benchmark calls `name`, by argument name."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32)

    q, k, v = (normal(batch, length, heads, dim) for _ in range(3))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    inputs = {"q": q, "k": k, "v": v}
    if "delta" in name:
        inputs["beta"] = jax.nn.sigmoid(normal(batch, length, heads))
    if name in ("retention",):
        inputs["log_decay"] = jnp.log1p(-(2.0 ** (-5 - jnp.arange(heads))))
    if name in ("scalar decay", "gated delta"):
        inputs["log_decay"] = jax.nn.log_sigmoid(normal(batch, length, heads) + 3)
    if name in ("key decay", "key-gated delta"):
        inputs["log_decay"] = jax.nn.log_sigmoid(normal(batch, length, heads, dim) + 3)
    if name == "value decay":
        inputs["value_log_decay"] = jax.nn.log_sigmoid(normal(batch, length, heads, dim) + 3)
    decay = {n: x for n, x in inputs.items() if "decay" in n}
    return {n: x.astype(dtype) for n, x in inputs.items()} | decay


_OPS = (
    "no decay",
    "retention",
    "scalar decay",
    "key decay",
    "value decay",
    "delta",
    "gated delta",
    "key-gated delta",
    "attention",
    "attention, window 512",
)


def function(name: str, **options):
    """Return the op that the benchmark calls `name`, as a function of its arguments that returns only the
    output, without the state.
    """
    if name.startswith("attention"):
        window = 512 if "window" in name else None
        return lambda inputs: ops.attention(**inputs, window=window)[0]
    op = ops.delta_memory if "delta" in name else ops.linear_memory
    return lambda inputs: op(**inputs, **options)[0]


def with_gradients(f):
    """Return a function of the same arguments as `f` that returns the output of `f` and the gradients of
    all arguments.
    """

    def loss(inputs):
        output = f(inputs).astype(jnp.float32)
        return jnp.sum(output * jnp.cos(jnp.arange(output.size).reshape(output.shape))), output

    def both(inputs):
        (_, output), grads = jax.value_and_grad(loss, has_aux=True)(inputs)
        return output, grads

    return both


def error(name: str) -> float:
    """Return the largest relative RMS error, in bfloat16 and against float32, of an op's output and
    gradients.
    """
    narrow = make_inputs(name, 2, 512, 4, 64, jnp.bfloat16)
    wide = {n: x.astype(jnp.float32) for n, x in narrow.items()}
    if name.startswith("attention"):
        reference = with_gradients(
            lambda i: ops.attention(
                **i, window=512 if "window" in name else None, implementation="xla"
            )[0]
        )
    else:
        reference = with_gradients(function(name, form="recurrent"))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(reference)(wide)
    actual = jax.jit(with_gradients(function(name)))(narrow)
    errors = []
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        errors.append(np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2)))
    return float(np.max(errors))  # NaN stays NaN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", type=options.names(_OPS), default="", help="all by default")
    parser.add_argument("--forms", type=options.names(("chunk", "associative")), default="chunk")
    parser.add_argument("--shape", help="B x T x H x D")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    shape = args.shape or ("1x512x4x64" if _on_cpu() else options.shapes(TIMED[:1]))
    return [dict(op=op, form=form, shape=shape) for op in args.ops or _OPS for form in args.forms]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return one_by_one(cases, measure)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Return the benchmark's row of results for one op in one form: its times in ms and the error of its
    output and gradients.
    """
    name = case["op"]
    options = {} if name.startswith("attention") else {"form": case["form"]}
    dtype = jnp.float32 if _on_cpu() else jnp.bfloat16
    inputs = make_inputs(name, *map(int, case["shape"].split("x")), dtype)
    forward = milliseconds(jax.jit(function(name, **options)), inputs)
    backward = milliseconds(jax.jit(with_gradients(function(name, **options))), inputs)
    return case | dict(forward_ms=forward, forward_backward_ms=backward, bf16_error=error(name))


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def line(row: dict[str, Any]) -> str:
    times = f"forward {row['forward_ms']:9.3f} ms   + backward {row['forward_backward_ms']:9.3f} ms"
    return f"{row['op']:24s} {row['form']:12s} {row['shape']:16s} {times}   error {row['bf16_error']:.1e}"
