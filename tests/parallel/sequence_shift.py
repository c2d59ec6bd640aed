"""Run by `test_sequence`, in a process of eight devices: convolutions and shifts of documents without gaps, their rows cut.

Devices then hear their neighbour alone. What comes out is what one device makes of any documents: outputs, final state and gradients.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax import ops
from lsm_jax.parallel import MeshConfig, make_mesh

LENGTH, CHANNELS = 61, 3  # the last device's part is filled up


def documents() -> np.ndarray:
    """Segment ids: of several documents with padding behind them; of one over several devices, ahead of padding over several
    more; of padding alone; and of an id that comes back just ahead of the end of a device's part, ahead of one that ends with one."""
    ids = np.zeros((4, LENGTH), np.int32)
    ids[0] = np.repeat([1, 0, 2, 3, 4, 0, 5], [3, 2, 20, 1, 2, 3, 30])
    ids[1, :37] = 6
    ids[3] = np.repeat([1, 7, 1, 7], [6, 1, 17, 37])
    return ids


def check(op, mesh, name: str, floats: dict, **given) -> None:
    """Raise unless the mesh gives what one device does that is not told of neighbours."""

    def loss(contiguous, floats):
        y, state = op(**floats, **given, contiguous=contiguous)
        total = jnp.zeros(())
        for a in (y, state.tail):
            total += jnp.sum(a * np.cos(np.arange(a.size)).reshape(a.shape))
        return total, (y, state)

    run = jax.value_and_grad(loss, 1, has_aux=True, allow_int=True)
    expected = jax.jit(functools.partial(run, False))(floats)
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(run, True))(floats)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10, err_msg=name)
    print(name, "ok", flush=True)


def main() -> None:
    """Of whole rows and of documents, from nothing and from a state."""
    jax.config.update("jax_enable_x64", True)
    mesh = make_mesh(MeshConfig(sequence=8))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, LENGTH, CHANNELS))
    ids = documents()
    for op, width, weights in (
        (ops.short_convolution, 3, dict(weight=rng.normal(size=(4, CHANNELS)))),
        (ops.token_shift, 1, {}),
    ):
        floats = dict(x=x) | weights
        state = ops.ShiftState(
            rng.normal(size=(4, width, CHANNELS)), jnp.asarray([1, 2, 5, 1], jnp.int32)
        )
        full = floats | dict(initial_state=state)
        name = op.__name__
        check(op, mesh, f"{name} whole", full)
        check(op, mesh, f"{name} documents", floats, segment_ids=ids)
        check(op, mesh, f"{name} state", full, segment_ids=ids)


if __name__ == "__main__":
    main()
