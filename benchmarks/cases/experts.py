"""Time a layer of experts, and a dense SwiGLU of the same active width.

    python -m benchmarks experts [--tokens 16384] [--layers dense,grouped,fp8] [--leads 0,1,2]

A row for each layer: milliseconds forward, and forward and backward, in bfloat16, and its speed as a fraction
of the dense layer's. The layers are Linear-MoE's (64 experts of 896, 8 per token) grouped, the same with products
of 8-bit floats ("fp8"), the same with SwiGLU apart from the grouped products ("apart"), the same as a loop over all
experts, and a dense SwiGLU of 8 x 896. Inputs are random embeddings of text, which load the experts unevenly; rows without `largest_load`
had random inputs. `--leads` are numbers of steps by which the first warpgroup of a grouped product begins before the second
one (`pallas_kernels.grouped_product.pipeline.LEAD`); rows with another one than the kernels' have it as `lead`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import options, text
from benchmarks.registry import Benchmark, UsageError
from benchmarks.released import without_kernels
from benchmarks.timing import milliseconds
from lsm_jax import feedforward, ops
from pallas_kernels.grouped_product import pipeline

BENCHMARK = Benchmark(
    name="experts",
    summary="a layer of experts beside a dense SwiGLU of the same active width",
    key=("layer", "tokens"),
    optional_key={"lead": None},
    output="docs/linear_moe_experts.jsonl",
)

LAYERS = {
    "dense": feedforward.SwiGLUConfig(intermediate_size=8 * 896),
    "grouped": feedforward.MoEConfig(),
    "fp8": feedforward.MoEConfig(matmul="fp8"),
    "apart": feedforward.MoEConfig(),
    "loop": feedforward.MoEConfig(execution="dense"),
}
_CALLS = 4  # calls between two waits, which hide the host's time


def measure(name: str, x: jax.Array) -> dict[str, float]:
    """Return the milliseconds of a layer's forward, and of its forward and backward, and the part of all
    choices that the most loaded expert receives."""
    width = x.shape[-1]
    graph, params = nnx.split(feedforward.build(LAYERS[name], width, rngs=nnx.Rngs(1)))

    def loss(params, x):
        y, _, _ = nnx.merge(graph, params)(x)
        return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.shape[-1])))

    def timed(function, *arrays):
        run = jax.jit(function)
        return milliseconds(lambda: [run(*arrays) for _ in range(_CALLS)]) / _CALLS

    _, _, statistics = jax.jit(lambda params, x: nnx.merge(graph, params)(x))(params, x)
    return dict(
        forward_ms=round(timed(loss, params, x), 3),
        both_ms=round(timed(jax.value_and_grad(loss, argnums=(0, 1)), params, x), 3),
        largest_load=round(float(jnp.max(statistics.get("moe/load", jnp.ones(())))), 4),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument(
        "--leads", type=options.integers, default=str(pipeline.LEAD),
        help="steps by which the first warpgroup of a grouped product begins before the second one, of 0 to 3; each its own rows",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=options.names(LAYERS), default=",".join(LAYERS), help=", ".join(LAYERS)
    )


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if wrong := [n for n in args.leads if not 0 <= n < pipeline.STAGES]:
        raise UsageError(f"--leads {wrong[0]}: accepted are 0 to {pipeline.STAGES - 1}")
    return [
        dict(layer=layer, tokens=args.tokens) | ({} if lead == pipeline.LEAD else {"lead": lead})
        for lead in args.leads
        for layer in args.layers
        if lead == pipeline.LEAD or layer in ("grouped", "fp8", "apart")
    ]


@contextlib.contextmanager
def leading_by(steps: int) -> Iterator[None]:
    """Let the first warpgroup of grouped products begin so many steps before the second one, in programs that are compiled inside."""
    jax.clear_caches()  # of kernels with another lead
    with mock.patch.object(pipeline, "LEAD", steps):
        yield
    jax.clear_caches()


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    x = jnp.asarray(text.activations(1, args.tokens, args.width), jnp.bfloat16)
    dense = None
    for case in cases:
        apart = without_kernels("grouped_swiglu") if case["layer"] == "apart" else None
        with leading_by(case.get("lead", pipeline.LEAD)), apart or contextlib.nullcontext():
            row = case | measure(case["layer"], x)
        dense = row["both_ms"] if case["layer"] == "dense" else dense
        yield row | dict(
            part_of_dense=dense and round(dense / row["both_ms"], 3), implementations=ops.choices()
        )
