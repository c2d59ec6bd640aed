"""Short convolutions with what surrounds them: `python -m benchmarks.convolution [--shapes 8x4096x2048,1x16384x2048] [--output FILE]`.

Width 4, bfloat16, SiLU, without and with the unit length of heads of 128, one document a row or packed documents: milliseconds
forward, and of the backward alone, fused and through XLA. An NVIDIA Hopper GPU runs the kernels; elsewhere `--kinds xla` times XLA.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import append_row, batch_milliseconds, provenance
from lsm_jax import ops

KINDS = {"kernel": "mosaic_gpu", "xla": "xla"}
HEAD_DIM = 128


def measure(shape: tuple[int, int, int], kind: str, head_dim: int | None, packed: bool) -> list:
    """Milliseconds of the forward and of the backward."""
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

    times = (
        batch_milliseconds(jax.jit(call), x, weight),
        batch_milliseconds(jax.jit(backward), x, weight, dy),
    )
    return [round(t, 4) for t in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="8x4096x2048,1x16384x2048")
    parser.add_argument("--kinds", default="kernel,xla")
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    if wrong := [k for k in args.kinds.split(",") if k not in KINDS]:
        parser.error(f"--kinds {wrong[0]}; accepted are {', '.join(KINDS)}")
    for text in args.shapes.split(","):
        batch, length, channels = map(int, text.split("x"))
        for head_dim in (None, HEAD_DIM):
            for packed in (False, True):
                row: dict = dict(shape=text, head_dim=head_dim, packed=packed)
                for kind in args.kinds.split(","):
                    row[kind] = measure((batch, length, channels), kind, head_dim, packed)
                print(json.dumps(row), flush=True)
                if args.output is not None:
                    append_row(args.output, row | provenance())


if __name__ == "__main__":
    main()
