"""Time the matrix products of a dense layer under options of XLA, which choose among the libraries' kernels.

    python -m benchmarks products [--shapes 32768x2048x5632,...] [--products forward,inputs,weights] [--compiler_options none,xla_gpu_enable_cublaslt=true,...]

A row for each product of a layer of T tokens, D input and F output channels (T x D x F, bfloat16): the forward product, the gradient of
the inputs or of the weights. It has for each set of options the time in ms and the rate in TFLOP/s; a set is its `name=value` joined by `+`. `grouped` among
the options is the fused kernel of experts' products, for one group of rows. Times are medians of 7 batches of 50 calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import log, require_gpu
from benchmarks.timing import alone, batch_milliseconds
from pallas_kernels import grouped_product

BENCHMARK = Benchmark(
    name="products",
    summary="matrix products of dense layers under options of XLA",
    key=("shape", "product"),
)

_PRODUCTS = {
    "forward": lambda x, kernel, dy: x @ kernel,
    "inputs": lambda x, kernel, dy: dy @ kernel.T,
    "weights": lambda x, kernel, dy: x.T @ dy,
}
_SHAPES = "32768x2048x5632,32768x5632x2048,32768x2048x2048,32768x1024x2816,32768x2816x1024,32768x1024x1024"


def _grouped(product: str, x: jax.Array, kernel: jax.Array, dy: jax.Array) -> jax.Array:
    """Return one of the products by the kernel for groups of rows, with one group."""
    blocks, one = len(x) // 128, jnp.ones(1, jnp.int32)
    if product == "weights":
        return grouped_product.grouped_sums(x, dy, 0 * one, 2 * blocks * one)[0]
    groups = jnp.zeros(blocks, jnp.int32)
    transposed = product == "inputs"
    rows = dy if transposed else x
    return grouped_product.grouped_product(
        rows, kernel[None], groups, blocks * one, transposed=transposed
    )


def _compiler_options(text: str) -> dict[str, str]:
    """Return the options of a set such as `a=1+b=true`; none of `none`.

    Raises:
        UsageError: a part has no `=`.
    """
    parts = [] if text == "none" else text.split("+")
    if wrong := [part for part in parts if "=" not in part]:
        raise UsageError(
            f"--compiler_options {wrong[0]!r}: accepted are none, grouped and name=value joined by +"
        )
    return dict(part.split("=", 1) for part in parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=options.words, default=_SHAPES, help="T x D x F")
    parser.add_argument(
        "--products", type=options.names(_PRODUCTS), default=",".join(_PRODUCTS)
    )  # fmt: skip
    parser.add_argument(
        "--compiler_options", type=options.words, default="none,grouped,xla_gpu_enable_cublaslt=true",
        help="sets of options, by commas",
    )  # fmt: skip
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    for text in args.compiler_options:
        if text != "grouped":
            _compiler_options(text)
    for shape in args.shapes:
        sizes = shape.split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise UsageError(
                f"--shapes {shape!r}: accepted are three sizes such as 32768x2048x5632"
            )
        if "grouped" in args.compiler_options and int(sizes[0]) % 128:
            raise UsageError(f"--shapes {shape!r}: grouped requires a multiple of 128 tokens")
    return [dict(shape=shape, product=name) for shape in args.shapes for name in args.products]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    require_gpu("products")
    for row in cases:
        tokens, width, size = map(int, row["shape"].split("x"))
        arrays = [
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(
                jax.random.split(jax.random.key(0), 3),
                [(tokens, width), (width, size), (tokens, size)],
                strict=True,
            )
        ]
        times, rates = {}, {}
        for text in args.compiler_options:
            grouped, name = text == "grouped", row["product"]

            def compute(x, kernel, dy, grouped=grouped, name=name):
                return _grouped(name, x, kernel, dy) if grouped else _PRODUCTS[name](x, kernel, dy)

            chosen = {} if grouped else _compiler_options(text)
            try:
                program = jax.jit(compute).lower(*arrays).compile(compiler_options=chosen)
            except jax.errors.JaxRuntimeError as error:
                log(f"{text}: {error}")
                continue
            with alone(args.lock):
                times[text] = round(batch_milliseconds(program, *arrays, calls=50), 4)
            rates[text] = round(2e-9 * tokens * width * size / times[text], 1)
        yield row | dict(milliseconds=times, tflops=rates)
