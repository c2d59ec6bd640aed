"""Short convolutions with what surrounds them: `python -m benchmarks.convolution [--shapes 8x4096x2048,1x16384x2048] [--output FILE]`.

Width 4, bfloat16, SiLU, without and with the unit length of heads of 128, one document a row or packed documents: milliseconds
forward, and of the backward alone, fused and through XLA. An NVIDIA Hopper GPU runs the kernels; elsewhere `--kinds xla` times XLA.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import alone, append_row, batch_milliseconds, provenance
from lsm_jax import ops

KINDS = {"kernel": "mosaic_gpu", "xla": "xla"}
HEAD_DIM = 128


def programs(shape: tuple[int, int, int], kind: str, head_dim: int | None, packed: bool) -> list:
    """The forward and the backward, lowered, and what each is called with."""
    draws = np.random.default_rng(0)
    x, dy = (jnp.asarray(draws.normal(size=shape), jnp.bfloat16) for _ in range(2))
    weight = jnp.asarray(draws.normal(size=(4, shape[2])), jnp.bfloat16)
    ids = None
    if packed:  # some 500 tokens each
        ids = jnp.asarray(np.cumsum(draws.random(shape[:2]) < 0.002, axis=1) + 1, jnp.int32)

    def call(x, weight):
        return ops.short_convolution(
            x, weight, silu=True, head_dim=head_dim, segment_ids=ids, contiguous=True,
            implementation=KINDS[kind],
        )[0]  # fmt: skip

    def backward(x, weight, dy):
        return jax.vjp(call, x, weight)[1](dy)

    calls: list = [(call, (x, weight)), (backward, (x, weight, dy))]
    return [(jax.jit(function).lower(*inputs), inputs) for function, inputs in calls]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="8x4096x2048,1x16384x2048")
    parser.add_argument("--kinds", default="kernel,xla")
    parser.add_argument(
        "--lock", type=Path, help="a file, for processes on one card: all compile before one times"
    )
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    if wrong := [k for k in args.kinds.split(",") if k not in KINDS]:
        parser.error(f"--kinds {wrong[0]}; accepted are {', '.join(KINDS)}")
    kinds = args.kinds.split(",")
    cases = itertools.product(args.shapes.split(","), (None, HEAD_DIM), (False, True))
    rows = [dict(shape=t, head_dim=h, packed=p) for t, h, p in cases]
    with alone(args.lock, shared=True), concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = []
        for row in rows:
            batch, length, channels = map(int, row["shape"].split("x"))
            given = row["head_dim"], row["packed"]
            for kind in kinds:
                pair = programs((batch, length, channels), kind, *given)
                compiled.append([(pool.submit(p.compile), inputs) for p, inputs in pair])
    with alone(args.lock):
        for (row, kind), pair in zip(itertools.product(rows, kinds), compiled, strict=True):
            row[kind] = [round(batch_milliseconds(p.result(), *inputs), 4) for p, inputs in pair]
            if kind == kinds[-1]:
                print(json.dumps(row), flush=True)
                if args.output is not None:
                    append_row(args.output, row | provenance())


if __name__ == "__main__":
    main()
