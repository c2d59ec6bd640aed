"""A layer of experts beside a dense SwiGLU of the same active width: `python -m benchmarks.experts [--tokens 16384]`.

Milliseconds forward, and forward and backward, in bfloat16: Linear-MoE's layer (64 experts of 896, 8 a token) grouped, the same
as a loop over all experts, and a dense SwiGLU of 8 x 896. What the grouped products ran as is printed last.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.timing import milliseconds, provenance
from lsm_jax import feedforward, ops

LAYERS = {
    "dense": feedforward.SwiGLUConfig(intermediate_size=8 * 896),
    "grouped": feedforward.MoEConfig(),
    "loop": feedforward.MoEConfig(execution="dense"),
}


def main() -> None:
    """Print a row a layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    x = jax.random.normal(jax.random.key(0), (1, args.tokens, args.width), jnp.bfloat16)
    for name, config in LAYERS.items():
        graph, params = nnx.split(feedforward.build(config, args.width, rngs=nnx.Rngs(1)))

        def loss(params, x, graph=graph):
            y, _, _ = nnx.merge(graph, params)(x)
            return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.shape[-1])))

        forward = milliseconds(jax.jit(loss), params, x)
        both = milliseconds(jax.jit(jax.grad(loss, argnums=(0, 1))), params, x)
        print(f"{name}: {forward:.2f} ms forward, {both:.2f} ms forward and backward", flush=True)
    print(ops.choices(), provenance())


if __name__ == "__main__":
    main()
