"""A layer of experts beside a dense SwiGLU of the same active width: `python -m benchmarks.experts [--output=docs/linear_moe_experts.jsonl]`.

Milliseconds forward, and forward and backward, in bfloat16: Linear-MoE's layer (64 experts of 896, 8 a token) grouped, the same
as a loop over all experts, and a dense SwiGLU of 8 x 896. A row a layer, as JSON, with its speed as a part of the dense one's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.timing import append_row, milliseconds, provenance
from lsm_jax import feedforward, ops

LAYERS = {
    "dense": feedforward.SwiGLUConfig(intermediate_size=8 * 896),
    "grouped": feedforward.MoEConfig(),
    "loop": feedforward.MoEConfig(execution="dense"),
}
_CALLS = 4  # between two waits, so that the host's part is hidden


def main() -> None:
    """Print a row a layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    args = parser.parse_args()
    x = jax.random.normal(jax.random.key(0), (1, args.tokens, args.width), jnp.bfloat16)
    dense = None
    for name in args.layers.split(","):
        config = LAYERS[name]
        graph, params = nnx.split(feedforward.build(config, args.width, rngs=nnx.Rngs(1)))

        def loss(params, x, graph=graph):
            y, _, _ = nnx.merge(graph, params)(x)
            return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.shape[-1])))

        def timed(function, *arrays):
            run = jax.jit(function)
            return milliseconds(lambda: [run(*arrays) for _ in range(_CALLS)]) / _CALLS

        forward = timed(loss, params, x)
        both = timed(jax.value_and_grad(loss, argnums=(0, 1)), params, x)
        dense = both if name == "dense" else dense
        row = dict(layer=name, tokens=args.tokens, forward_ms=round(forward, 3), both_ms=round(both, 3))  # fmt: skip
        row |= dict(part_of_dense=dense and round(dense / both, 3), implementations=ops.choices())
        row |= provenance()
        print(json.dumps(row), flush=True)
        if args.output:
            append_row(args.output, row)


if __name__ == "__main__":
    main()
