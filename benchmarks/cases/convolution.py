"""Time short convolutions together with the operations around them.

    python -m benchmarks convolution [--shapes 8x4096x2048,1x16384x2048] [--head_dims 0,128] [--kinds kernel,separate,xla]

A row for each shape (B x T x channels) of width 4 in bfloat16 with SiLU, with heads of these channels scaled to unit
length or not (0), and with one document in a row or packed documents: [ms forward, ms backward alone] of the
fused kernel, of the kernel with the unit length by XLA (`separate`), and of XLA.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
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
from lsm_jax.ops.convolution.backends import l2_normalize
from pallas_kernels.short_convolution.cases import TIMED, TIMED_HEAD_DIM

BENCHMARK = Benchmark(
    name="convolution",
    summary="short convolutions with SiLU and unit length, fused and in XLA",
    key=("shape", "head_dim", "packed"),
    more_files=("docs/convolution.jsonl",),
)

KINDS = {"kernel": "mosaic_gpu", "separate": "mosaic_gpu", "xla": "xla"}


def programs(shape: tuple[int, int, int], kind: str, head_dim: int | None, packed: bool) -> list:
    """Return two programs of a short convolution, its forward and its backward pass, lowered and ready to be
    compiled, each with its input arrays.
    """
    draws = np.random.default_rng(0)
    x, dy = (jnp.asarray(draws.normal(size=shape), jnp.bfloat16) for _ in range(2))
    weight = jnp.asarray(draws.normal(size=(4, shape[2])), jnp.bfloat16)
    ids = None
    if packed:  # documents of some 500 tokens
        ids = jnp.asarray(np.cumsum(draws.random(shape[:2]) < 0.002, axis=1) + 1, jnp.int32)

    separate = kind == "separate" and head_dim is not None

    def call(x, weight):
        y, _ = ops.short_convolution(
            x, weight, silu=True, head_dim=None if separate else head_dim, segment_ids=ids, contiguous=True,
            implementation=KINDS[kind],
        )  # fmt: skip
        return l2_normalize(y, head_dim) if separate else y

    def backward(x, weight, dy):
        return jax.vjp(call, x, weight)[1](dy)

    calls: list = [(call, (x, weight)), (backward, (x, weight, dy))]
    return [(jax.jit(function).lower(*inputs), inputs) for function, inputs in calls]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", type=options.words, default=options.shapes(TIMED), help="B x T x channels"
    )
    parser.add_argument(
        "--head_dims", type=options.integers, default=f"0,{TIMED_HEAD_DIM}",
        help="channels of heads of unit length; 0 is no unit length",
    )  # fmt: skip
    options.add_kinds(parser, KINDS, "kernel,xla")
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    combinations = itertools.product(args.shapes, args.head_dims, (False, True))
    return [
        dict(shape=shape, head_dim=dim or None, packed=packed)
        for shape, dim, packed in combinations
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if kernels := {"kernel", "separate"} & set(args.kinds):
        require_gpu(f"--kinds {','.join(sorted(kernels))}")
    with alone(args.lock, shared=True), concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = []
        for case in cases:
            batch, length, channels = map(int, case["shape"].split("x"))
            for kind in args.kinds:
                pair = programs((batch, length, channels), kind, case["head_dim"], case["packed"])
                compiled.append([(pool.submit(p.compile), inputs) for p, inputs in pair])
    pairs = iter(compiled)
    with alone(args.lock):
        for case in cases:
            row = dict(case)
            for kind in args.kinds:
                row[kind] = [
                    round(batch_milliseconds(p.result(), *inputs), 4) for p, inputs in next(pairs)
                ]
            yield row
