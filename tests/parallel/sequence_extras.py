"""Compare functions without a test case in `tests.ops.cases` (such as sums of angles and time-invariant
memories), on rows divided over eight devices, with one device.

`test_sequence` runs it in a process of eight devices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax import ops
from lsm_jax.mixers.clock import Clock, advance
from lsm_jax.parallel import MeshConfig, make_mesh

BATCH, LENGTH = 2, 29


def both(mesh, name: str, function, floats: dict, rest: dict, *, alone=None, rtol=1e-8, atol=1e-9) -> None:  # fmt: skip
    """Assert that the outputs of `function` on a mesh that shares rows, and the gradients of a weighted sum
    of them, are those of one device.

    On one device `alone` is called instead of `function` if it is given.
    """

    def loss(function, floats, rest):
        out = function(**floats, **rest)
        total = jnp.zeros(())
        for x in jax.tree.leaves(out):
            if jnp.issubdtype(x.dtype, jnp.inexact):
                total += jnp.sum(jnp.real(x) * np.cos(np.arange(x.size)).reshape(x.shape))
        return total, out

    def run(function):
        run = functools.partial(loss, function)
        return jax.jit(jax.value_and_grad(run, has_aux=True))(floats, rest)

    expected = run(alone or function)
    with jax.set_mesh(mesh):
        got = run(function)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=name)
    print(name, "ok", flush=True)


def main() -> None:
    """Compare sums of angles, time-invariant memories, document numbers and positions on rows shared by
    eight devices with one device.
    """
    jax.config.update("jax_enable_x64", True)
    mesh = make_mesh(MeshConfig(sequence=8))
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(1, 4, size=(BATCH, LENGTH)), axis=1)
    ids[rng.random(ids.shape) < 0.1] = 0
    mask = rng.random((BATCH, LENGTH)) < 0.7
    angle = dict(angle=rng.uniform(-3, 3, size=(BATCH, LENGTH, 2)))

    both(mesh, "phase", ops.cumulative_phase, angle, dict(segment_ids=ids, update_mask=mask))
    both(mesh, "phase of a row", ops.cumulative_phase, angle, {})

    def by_segment(angle, segment_ids):
        return ops.cumulative_phase(angle, num_segments=3, segment_ids=segment_ids)

    both(mesh, "phase by segment", by_segment, angle, dict(segment_ids=ids))

    x = dict(x=rng.normal(size=(BATCH, LENGTH, 3)))
    sums, row = ops.running_logsumexp, dict(segment_ids=ids, update_mask=mask)
    value = rng.normal(size=(BATCH, 3))
    last = ops.LogSumExpState(value, np.ones_like(value), np.asarray([1, 2], np.int32))
    both(mesh, "logsumexp", sums, x, row | dict(initial_state=last))
    both(mesh, "logsumexp of a row", sums, x, {})
    each = ops.logsumexp_state(BATCH, 3, num_segments=3, dtype=jnp.float64)
    both(mesh, "logsumexp by segment", sums, x, dict(segment_ids=ids, initial_state=each))

    shapes = dict(u=(BATCH, LENGTH, 3), delta=(3,), A=(3, 2), B=(3, 2), C=(3, 2))
    constants = {n: -np.abs(rng.normal(size=s)) for n, s in shapes.items()}
    constants["delta"] *= -0.1
    both(mesh, "time-invariant", ops.time_invariant_memory, constants, {})

    seen = ops.DocumentCount(jnp.asarray([1, 4], jnp.int32), jnp.asarray([1, 3], jnp.int32))
    both(mesh, "documents", ops.number_documents, {}, dict(segment_ids=ids, state=seen))

    clock = Clock(jnp.asarray([3, 5], jnp.int32), jnp.asarray([1, 2], jnp.int32))

    def positions(clock, **given):
        given = dict(segment_ids=None, update_mask=None) | given
        return advance(clock, (BATCH, LENGTH), **given)

    given = np.cumsum(mask, axis=1)
    for name, rest in (
        ("positions", dict(segment_ids=ids, update_mask=mask)),
        ("positions of a row", dict(update_mask=mask)),
        ("given positions", dict(segment_ids=ids, update_mask=mask, positions=given)),
    ):
        both(mesh, name, positions, {}, dict(clock=clock) | rest)


if __name__ == "__main__":
    main()
