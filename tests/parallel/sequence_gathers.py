"""Compare what PaTH, MoBA and NSA send on rows that four devices share with what the planner counts: the keys and values of all
tokens, and PaTH's products of matrices, but no queries.

`test_sequence` runs it in a process of eight devices: `python -m tests.parallel.sequence_gathers METHOD ...`.
"""

from __future__ import annotations

import math
import sys

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import mixers
from lsm_jax.parallel import MeshConfig, make_mesh, transfers
from lsm_jax.training.activation_plan import gathered_numbers

LENGTH, WIDTH, DEVICES = 1024, 64, 4


def check(name: str) -> None:
    """Compile the forward pass of a method's layer in float32, and compare the bytes of its gathers with the plan."""
    config = mixers.get_method(name).config.for_width(WIDTH)
    mixer = mixers.build(config, WIDTH, rngs=nnx.Rngs(0))
    graph, state = nnx.split(mixer)
    x = jax.ShapeDtypeStruct((1, LENGTH, WIDTH), jnp.float32)
    mesh = make_mesh(MeshConfig(sequence=DEVICES), jax.devices()[:DEVICES])
    with jax.set_mesh(mesh):
        forward = jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0])
        sent = transfers(forward.lower(state, x).compile())
    gathered = sum(t.bytes for t in sent if t.kind == "all-gather")
    tokens = LENGTH * (DEVICES - 1) // DEVICES
    planned = tokens * math.prod(gathered_numbers(mixer, 4))
    # Besides: each token's document, rank and whether it is written.
    assert planned <= gathered <= planned + 9 * tokens + 4096, (name, gathered, planned, sent)


def main(*names: str) -> None:
    """Check the methods with these names."""
    for name in names:
        check(name)
        print(name, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
