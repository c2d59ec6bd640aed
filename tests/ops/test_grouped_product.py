"""Grouped products: what is refused, rows beyond the last group, and on Hopper the kernels against a loop over the groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.ops.grouped_product import grouped_product


def arrays(sizes, rows, width=64, out=128, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, width))
    kernels = rng.normal(size=(len(sizes), width, out)) / width**0.5
    dy = rng.normal(size=(rows, out))
    return *(jnp.asarray(a, dtype) for a in (x, kernels, dy)), jnp.asarray(sizes, jnp.int32)


def by_loop(x, kernels, dy, sizes):
    """(y, gradients of x and kernels) in float64."""
    x, kernels, dy = (np.asarray(a, np.float64) for a in (x, kernels, dy))
    y, dx, dw, start = (
        np.zeros((len(x), kernels.shape[2])),
        np.zeros_like(x),
        np.zeros_like(kernels),
        0,
    )
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        y[rows], dx[rows] = x[rows] @ kernels[group], dy[rows] @ kernels[group].T
        dw[group], start = x[rows].T @ dy[rows], start + size
    return y, (dx, dw)


def test_rows_beyond_the_last_group_are_zero():
    x, kernels, dy, sizes = arrays([3, 0, 4], 9, dtype=jnp.float32)
    y, vjp = jax.vjp(lambda x, w: grouped_product(x, w, sizes), x, kernels)
    expected = by_loop(x, kernels, dy, sizes)
    for a, b in zip(jax.tree.leaves((y, vjp(dy))), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_wrong_requests_are_refused():
    x, kernels, _, sizes = arrays([3, 4], 8)
    with pytest.raises(ValueError, match="implementation='triton'; accepted are None, 'xla'"):
        grouped_product(x, kernels, sizes, implementation="triton")
    with pytest.raises(NotImplementedError, match="takes bfloat16, not float32"):
        grouped_product(x.astype(jnp.float32), kernels, sizes, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="multiples of 64"):
        grouped_product(x[:, :8], kernels[:, :8], sizes, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[300, 0, 200, 524], [1100, 0, 0, 0], [0, 64, 128, 1]])
def test_the_kernels_equal_a_loop(sizes):
    x, kernels, dy, sizes = arrays(sizes, 1100, width=256, out=192)

    @jax.jit
    def run(x, kernels, dy):
        call = lambda x, w: grouped_product(x, w, sizes, implementation="mosaic_gpu")  # noqa: E731
        y, vjp = jax.vjp(call, x, kernels)
        return y, vjp(dy)

    expected = by_loop(x, kernels, dy, sizes)
    for a, b in zip(jax.tree.leaves(run(x, kernels, dy)), jax.tree.leaves(expected), strict=True):
        error = np.sqrt(np.mean((np.asarray(a, np.float64) - b) ** 2) / np.mean(b**2))
        assert error < 5e-3
