"""Time selective memories.

    python -m benchmarks scans [--shapes 16x2048,2x16384] [--kinds kernel,xla]

A row for each op (Mamba's memory of 2,048 channels with 16 states each, GateLoop's of 1,024 complex channels,
as models of 340M have them; u in bfloat16) and shape (B x T), with one document in a row or packed documents
of some 500 tokens: [ms forward, ms forward and backward], and `floor`, the ms in which an H200 (4.8 TB/s)
reads the forward's inputs and writes its output once.
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
from benchmarks.timing import batch_milliseconds
from lsm_jax import ops
from pallas_kernels.selective_scan.cases import TIMED_CHANNELS, TIMED_ROWS

BENCHMARK = Benchmark(
    name="scans",
    summary="selective memories of Mamba and GateLoop, fused and in XLA",
    key=("op", "shape"),
    optional_key={"packed": False},
    output="docs/scans.jsonl",
)

KINDS = {"kernel": "mosaic_gpu", "xla": "xla"}
BYTES_PER_MILLISECOND = 4.8e9


def make_inputs(op: str, batch: int, length: int) -> tuple[dict[str, Any], jax.Array]:
    """Return the random input arrays of a selective memory (Mamba's or GateLoop's) by name, and the
    gradient of its output.
    """
    channels, states = TIMED_CHANNELS[op]
    keys = jax.random.split(jax.random.key(0), 5)
    shape = batch, length, channels
    u, c, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:3])
    wide = jax.random.normal(keys[3], shape)
    if op == "gateloop":
        angle = jax.random.normal(keys[4], shape)
        return dict(u=u, log_decay=jax.nn.log_sigmoid(wide + 3), angle=angle, C=c), dy
    b, c = jax.random.normal(keys[4], (2, batch, length, states), jnp.bfloat16)
    rates = -jnp.tile(jnp.arange(1.0, states + 1), (channels, 1))
    return dict(u=u, delta=jax.nn.softplus(wide - 4), A=rates, B=b, C=c), dy


def call(op: str, kind: str, ids: jax.Array | None, arrays: dict[str, Any]) -> jax.Array:
    arrays = dict(arrays)
    if op == "gateloop":
        ones = jnp.ones((TIMED_CHANNELS[op][0], 1))
        delta = jax.lax.complex(arrays.pop("log_decay"), arrays.pop("angle"))
        arrays |= dict(delta=delta, A=ones, B=ones, C=arrays["C"][..., None], discretization="none")
    return ops.selective_memory(**arrays, segment_ids=ids, implementation=KINDS[kind])[0]


def programs(op: str, kind: str, packed: bool, batch: int, length: int) -> list:
    """Tests of the values and gradients that the functions of `pallas_kernels.tiles.delta` compute for one
    chunk of the delta rule, compared with the token-by-token recurrence in float64.
    """
    arrays, dy = jax.eval_shape(lambda: make_inputs(op, batch, length))
    ids = None
    if packed:
        begins = np.random.default_rng(0).random((batch, length)) < 0.002
        ids = jnp.asarray(np.cumsum(begins, axis=1) + 1, jnp.int32)

    def forward(arrays, dy):
        del dy
        return call(op, kind, ids, arrays)

    def both(arrays, dy):
        output, pull = jax.vjp(lambda a: call(op, kind, ids, a), arrays)
        return output, pull(dy)

    return [jax.jit(f).lower(arrays, dy) for f in (forward, both)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ops",
        type=options.names(TIMED_CHANNELS),
        default=",".join(TIMED_CHANNELS),
        help=", ".join(TIMED_CHANNELS),
    )
    parser.add_argument(
        "--shapes", type=options.words, default=options.shapes(TIMED_ROWS), help="B x T"
    )
    options.add_kinds(parser, KINDS, "kernel,xla")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    combinations = itertools.product(args.ops, args.shapes, (False, True))
    return [dict(op=op, shape=shape, packed=packed) for op, shape, packed in combinations]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if "kernel" in args.kinds:
        require_gpu("--kinds kernel")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = {}
        for case, kind in itertools.product(cases, args.kinds):
            op, shape, packed = case.values()
            lowered = programs(op, kind, packed, *map(int, shape.split("x")))
            compiled[op, shape, packed, kind] = [pool.submit(p.compile) for p in lowered]
        concurrent.futures.wait([p for pair in compiled.values() for p in pair])
    for case in cases:
        op, shape, packed = case.values()
        row: dict[str, Any] = dict(case)
        arrays, dy = make_inputs(op, *map(int, shape.split("x")))
        moved = dy.nbytes + sum(x.nbytes for x in arrays.values())
        row["floor"] = round(moved / BYTES_PER_MILLISECOND, 4)
        for kind in args.kinds:
            pair = compiled[op, shape, packed, kind]
            calls = 20 if kind == "kernel" else 3
            row[kind] = [
                round(batch_milliseconds(p.result(), arrays, dy, calls=calls), 4) for p in pair
            ]
        yield row
