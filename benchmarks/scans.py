"""Selective memories: `python -m benchmarks.scans [--shapes 16x2048,2x16384] [--kinds kernel,xla] [--output FILE.jsonl]`.

Mamba's of 2,048 channels of 16 numbers and GateLoop's of 1,024 complex ones, as models of 340M have them, u in bfloat16, one document
a row or packed ones of some 500 tokens: milliseconds forward, and forward and backward, and what reading the forward's inputs and
writing its output once takes at 4.8 TB/s (an H200's). An NVIDIA Hopper GPU runs the kernels; elsewhere `--kinds xla` times XLA.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import append_row, batch_milliseconds, provenance
from lsm_jax import ops

KINDS = {"kernel": "mosaic_gpu", "xla": "xla"}
OPS = {"mamba": (2048, 16), "gateloop": (1024, 1)}
BYTES_PER_MILLISECOND = 4.8e9


def make_inputs(op: str, batch: int, length: int) -> tuple[dict[str, Any], jax.Array]:
    """Arrays by name, and the output's gradient."""
    channels, states = OPS[op]
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
        ones = jnp.ones((OPS[op][0], 1))
        delta = jax.lax.complex(arrays.pop("log_decay"), arrays.pop("angle"))
        arrays |= dict(delta=delta, A=ones, B=ones, C=arrays["C"][..., None], discretization="none")
    return ops.selective_memory(**arrays, segment_ids=ids, implementation=KINDS[kind])[0]


def programs(op: str, kind: str, packed: bool, batch: int, length: int) -> list:
    """Forward, and forward and backward; lowered."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--shapes", default="16x2048,2x16384")
    parser.add_argument("--kinds", default="kernel,xla")
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    for name, given, accepted in (("kinds", args.kinds, KINDS), ("ops", args.ops, OPS)):
        if wrong := [x for x in given.split(",") if x not in accepted]:
            parser.error(f"--{name} {wrong[0]}; accepted are {', '.join(accepted)}")
    kinds = args.kinds.split(",")
    cases = list(itertools.product(args.ops.split(","), args.shapes.split(","), (False, True)))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = {}
        for (op, shape, packed), kind in itertools.product(cases, kinds):
            lowered = programs(op, kind, packed, *map(int, shape.split("x")))
            compiled[op, shape, packed, kind] = [pool.submit(p.compile) for p in lowered]
        concurrent.futures.wait([p for pair in compiled.values() for p in pair])
    for op, shape, packed in cases:
        row: dict[str, Any] = dict(op=op, shape=shape, packed=packed)
        arrays, dy = make_inputs(op, *map(int, shape.split("x")))
        moved = dy.nbytes + sum(x.nbytes for x in arrays.values())
        row["floor"] = round(moved / BYTES_PER_MILLISECOND, 4)
        for kind in kinds:
            pair = compiled[op, shape, packed, kind]
            calls = 20 if kind == "kernel" else 3
            row[kind] = [
                round(batch_milliseconds(p.result(), arrays, dy, calls=calls), 4) for p in pair
            ]
        print(json.dumps(row), flush=True)
        if args.output is not None:
            append_row(args.output, row | provenance())


if __name__ == "__main__":
    main()
