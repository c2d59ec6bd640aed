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
from tests.parallel.sequence_extras import both

LENGTH, CHANNELS = 61, 3  # the last device's part is filled up


def documents() -> np.ndarray:
    """Segment ids: of several documents with padding behind them; of one over several devices, ahead of padding over several
    more; of padding alone; and of an id that comes back just ahead of the end of a device's part, ahead of one that ends with one."""
    ids = np.zeros((4, LENGTH), np.int32)
    ids[0] = np.repeat([1, 0, 2, 3, 4, 0, 5], [3, 2, 20, 1, 2, 3, 30])
    ids[1, :37] = 6
    ids[3] = np.repeat([1, 7, 1, 7], [6, 1, 17, 37])
    return ids


def check(op, mesh, name: str, floats: dict, segment_ids=None, start=None) -> None:
    """Raise unless the mesh gives what one device does that is not told of neighbours.

    `floats` may hold the `tail` of an initial state, whose ids are `start`.
    """

    def run(contiguous, tail=None, **given):
        state = None if tail is None else ops.ShiftState(tail, start)
        y, state = op(**given, initial_state=state, segment_ids=segment_ids, contiguous=contiguous)
        return y, state

    told, alone = (functools.partial(run, contiguous) for contiguous in (True, False))
    both(mesh, name, told, floats, {}, alone=alone, rtol=1e-10, atol=1e-10)


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
        full = floats | dict(tail=rng.normal(size=(4, width, CHANNELS)))
        start = jnp.asarray([1, 2, 5, 1], jnp.int32)
        name = op.__name__
        check(op, mesh, f"{name} whole", full, start=start)
        check(op, mesh, f"{name} documents", floats, ids)
        check(op, mesh, f"{name} state", full, ids, start)


if __name__ == "__main__":
    main()
