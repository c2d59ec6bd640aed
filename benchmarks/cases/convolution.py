"""Time short convolutions together with the operations around them.

    python -m benchmarks convolution [--shapes 8x4096x2048,1x16384x2048] [--head_dims 0,128] [--kinds kernel,separate,triton,xla]
        [--packed 0,1] [--tilings table,registers,forward=8:4:4:128:512]

A row for each shape (B x T x channels) of width 4 in bfloat16 with SiLU, with heads of these channels scaled to unit
length or not (0), and with one document in a row or packed documents: [ms forward, ms backward alone] of the
fused kernel, of the kernel with the unit length by XLA (`separate`), of the Triton kernel and of XLA. With --tilings, a row for each of
them, which are those of the Hopper kernels (`pallas_kernels.short_convolution.hopper.tilings`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import require_gpu
from benchmarks.timing import alone, batch_milliseconds
from lsm_jax import ops
from lsm_jax.ops.convolution.backends import l2_normalize
from pallas_kernels.short_convolution.cases import TIMED, TIMED_HEAD_DIM
from pallas_kernels.short_convolution.hopper import tilings

BENCHMARK = Benchmark(
    name="convolution",
    summary="short convolutions with SiLU and unit length, fused and in XLA",
    key=("shape", "head_dim", "packed"),
    optional_key={"tiling": "table"},
    more_files=("docs/convolution.jsonl",),
)

KINDS = {"kernel": "mosaic_gpu", "separate": "mosaic_gpu", "triton": "triton", "xla": "xla"}
_TABLE = dict(tilings.TILINGS)


@functools.lru_cache
def _inputs(
    shape: tuple[int, int, int], packed: bool
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """Return random tokens, weight, gradient of the output and segment ids (None unless `packed`), the same for all kinds."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (shape, (4, shape[2]), shape)
    x, weight, dy = (
        jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)
    )
    ids = None
    if packed:  # documents of some 500 tokens
        draws = np.random.default_rng(0).random(shape[:2])
        ids = jnp.asarray(np.cumsum(draws < 0.002, axis=1) + 1, jnp.int32)
    return x, weight, dy, ids


def programs(shape: tuple[int, int, int], kind: str, head_dim: int | None, packed: bool) -> list:
    """Return two programs of a short convolution, its forward and its backward pass, lowered and ready to be
    compiled, each with its input arrays.
    """
    x, weight, dy, ids = _inputs(shape, packed)
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


def set_tiling(word: str) -> None:
    """Change the tilings of the Hopper kernels as a word of --tilings says: "table" is the table as it is, "registers" loads into registers
    in all kernels, and KERNEL=CHANNELS:STEP:STAGES:TOKENS:BLOCKS[:GROUPS] changes one kernel of the table.

    Raises:
        UsageError: the word is none of these, or names no kernel of `TILINGS` or a tiling that is not accepted.
    """
    tilings.TILINGS.update(_TABLE)
    if word == "registers":
        tilings.TILINGS.update(dict.fromkeys(_TABLE, tilings.REGISTERS))
    elif word != "table":
        name, _, text = word.partition("=")
        numbers = [int(n) for n in text.split(":") if n.isdecimal()]
        if name not in _TABLE or len(numbers) not in (5, 6):
            raise UsageError(
                f"--tilings {word!r}: accepted are table, registers and kernel=channels:step:stages:tokens:blocks[:groups] with a kernel of "
                f"{', '.join(_TABLE)}"
            )
        if (problem := tilings.unaccepted_tiling(*numbers)) is not None:
            raise UsageError(f"--tilings {word!r}: {problem}")
        tilings.TILINGS[name] = tilings.Tiling(*numbers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", type=options.words, default=options.shapes(TIMED), help="B x T x channels"
    )
    parser.add_argument(
        "--head_dims", type=options.integers, default=f"0,{TIMED_HEAD_DIM}",
        help="channels of heads of unit length; 0 is no unit length",
    )  # fmt: skip
    parser.add_argument(
        "--packed", type=options.integers, default="0,1",
        help="0 is one document in a row, 1 is packed documents",
    )  # fmt: skip
    parser.add_argument(
        "--tilings", type=options.words, default=["table"],
        help="tilings of the Hopper kernels to time: table, registers or kernel=channels:step:stages:tokens:blocks[:groups]",
    )  # fmt: skip
    options.add_kinds(parser, KINDS, "kernel,xla")
    options.add_lock(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    for word in args.tilings:
        set_tiling(word)
    combinations = itertools.product(
        args.shapes, args.head_dims, map(bool, args.packed), args.tilings
    )
    return [
        dict(shape=shape, head_dim=dim or None, packed=packed, tiling=word)
        for shape, dim, packed, word in combinations
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if kernels := {"kernel", "separate", "triton"} & set(args.kinds):
        require_gpu(f"--kinds {','.join(sorted(kernels))}")
    with alone(args.lock, shared=True), concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = []
        for case in cases:
            batch, length, channels = map(int, case["shape"].split("x"))
            set_tiling(case["tiling"])
            kinds = [
                k
                for k in args.kinds
                if case["tiling"] == args.tilings[0] or KINDS[k] == "mosaic_gpu"
            ]
            pairs = {
                k: programs((batch, length, channels), k, case["head_dim"], case["packed"])
                for k in kinds
            }
            compiled.append(
                {k: [(pool.submit(p.compile), x) for p, x in pair] for k, pair in pairs.items()}
            )
    set_tiling("table")
    with alone(args.lock):
        for case, pairs in zip(cases, compiled, strict=True):
            row = dict(case)
            for kind, pair in pairs.items():
                row[kind] = [
                    round(batch_milliseconds(p.result(), *inputs), 4) for p, inputs in pair
                ]
            yield row
