"""Compare convolutions and token shifts of documents without gaps, on rows shared by eight devices, with one
device.

With `contiguous=True` a device receives only its neighbour's last tokens. Outputs, final state and gradients
must equal those of one device with `contiguous=False`. `test_sequence` runs it in a process of eight devices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax import ops
from lsm_jax.parallel import MeshConfig, make_mesh
from tests.parallel.sequence_extras import both

LENGTH, CHANNELS = 61, 3  # the last device's part is padded


def documents() -> np.ndarray:
    """Return the segment ids of four rows in which documents and padding lie in different ways over the
    devices.

    The first row has several documents, with padding after some of them; the second one document over
    several devices, and then padding over several; the third only padding; and the fourth has ids that
    occur again, just before the end of a device's share and in a document that ends there.
    """
    ids = np.zeros((4, LENGTH), np.int32)
    ids[0] = np.repeat([1, 0, 2, 3, 4, 0, 5], [3, 2, 20, 1, 2, 3, 30])
    ids[1, :37] = 6
    ids[3] = np.repeat([1, 7, 1, 7], [6, 1, 17, 37])
    return ids


def check(op, mesh, name: str, floats: dict, segment_ids=None, start=None) -> None:
    """Assert that a short convolution or a token shift on a mesh that divides rows over devices, called with
    `contiguous=True`, has the results of one device with `contiguous=False`.

    `floats` are the input arrays by name; if they contain "tail" (the last tokens that an initial state
    remembers), `start` are the segment ids of that state.
    """

    def run(contiguous, tail=None, **given):
        state = None if tail is None else ops.ShiftState(tail, start)
        y, state = op(**given, initial_state=state, segment_ids=segment_ids, contiguous=contiguous)
        return y, state

    contiguous, general = (functools.partial(run, value) for value in (True, False))
    both(mesh, name, contiguous, floats, {}, alone=general, rtol=1e-10, atol=1e-10)


def main() -> None:
    """Check short convolutions and token shifts on rows divided over devices, with `contiguous=True`: for
    rows of one document and for packed rows, with and without an initial state.
    """
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
        check(op, mesh, f"{name} one document", full, start=start)
        check(op, mesh, f"{name} documents", floats, ids)
        check(op, mesh, f"{name} state", full, ids, start)


if __name__ == "__main__":
    main()
