"""Helpers of the tests of TPU kernels: documents, comparison of values and gradients with a recurrence, and lowering."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def runs(length: int):
    """Return the index of each token's document in a row of `length` tokens, [1, T] int32: documents begin at
    a chunk's start and inside chunks, and one has a single token.
    """
    starts = [5, 16, 17, 20] if length < 128 else [30, 128, 129, 150]
    return jnp.asarray(np.cumsum(np.isin(np.arange(length), starts))[None], jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def both(function, x, run, cotangents):
    """Return the outputs of `function(x, run)`, where x are a kernel's input arrays and run the index of each
    token's document, and the gradients of x for the given cotangents of the outputs.
    """
    values, pull = jax.vjp(lambda x: function(x, run), x)
    return values, pull(jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, values))[0]


def compare(fused, by_token, x, run, tolerance):
    """Check that the values and all gradients of a TPU kernel, `fused(x, run)`, equal those of the recurrence
    `by_token` in float32, up to `tolerance` relative to the largest entry.
    """
    rng = np.random.default_rng(1)
    q, v, initial = (x[n] for n in ("q", "v", "initial"))
    shape = (*q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3])
    cotangents = tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in (shape, initial.shape))
    cotangents = cotangents[0].astype(v.dtype), cotangents[1]
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), x)
    recurrence = lambda x, run: by_token(**x, run=run)  # noqa: E731
    actual, wanted = both(fused, x, run, cotangents), both(recurrence, wide, run, cotangents)
    assert actual[0][0].dtype == v.dtype and actual[0][1].dtype == jnp.float32
    for (path, a), b in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.float64(a), np.float64(b)
        limit = tolerance * max(1, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=str(path))


def check_lowering(fused, x, run, aligned: bool):
    """Check that the kernel `fused` of the inputs x and the documents `run`, lowered for a TPU, is one kernel
    forward and one backward, and that arrays are transposed if and only if not `aligned`.
    """

    def step(x, run):
        values, pull = jax.vjp(lambda x: fused(x, run, interpret=False), x)
        return pull(values)

    device = AbstractDevice("TPU v5 lite", 1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(step).trace(x, run).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("custom_call @tpu_custom_call") == 2
    transposed = [x for x in text.splitlines() if "stablehlo.transpose" in x and "bf16" in x]
    assert (not transposed) == aligned
