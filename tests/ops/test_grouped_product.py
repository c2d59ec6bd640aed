"""Grouped matrix products (each group of rows of x with its own matrix): errors, rows after the last group,
and the kernels against a loop over the groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.ops.experts.grouped_product import grouped_product, segment_product, supports_segments
from pallas_kernels import compat
from pallas_kernels.grouped_product import hopper
from pallas_kernels.grouped_product.cases import (
    HOPPER,
    INTERPRETED,
    INTERPRETED_PARTS,
    SEGMENTS,
    TOLERANCES,
)


def make_arrays(sizes, rows, width=64, out=128, dtype=jnp.bfloat16):
    """Return random arrays of a grouped product: x [rows, width], kernels [groups, width, out], the
    output's gradient dy [rows, out], and the sizes of the groups.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, width))
    kernels = rng.normal(size=(len(sizes), width, out)) / width**0.5
    dy = rng.normal(size=(rows, out))
    return *(jnp.asarray(a, dtype) for a in (x, kernels, dy)), jnp.asarray(sizes, jnp.int32)


def by_loop(x, kernels, dy, sizes):
    """Return the output of the grouped product, and its gradients with respect to x and kernels, computed
    group by group in float64.
    """
    x, kernels, dy = (np.asarray(a, np.float64) for a in (x, kernels, dy))
    y, dx, dw = np.zeros((len(x), kernels.shape[2])), np.zeros_like(x), np.zeros_like(kernels)
    start = 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        y[rows], dx[rows] = x[rows] @ kernels[group], dy[rows] @ kernels[group].T
        dw[group], start = x[rows].T @ dy[rows], start + size
    return y, (dx, dw)


def relative_error(result, expected):
    """Return the root mean square of the error of `result`, relative to that of `expected`."""
    result = np.asarray(result, np.float64)
    return np.sqrt(np.mean((result - expected) ** 2) / np.mean(expected**2))


def test_rows_after_the_last_group_are_zero():
    x, kernels, dy, sizes = make_arrays([3, 0, 4], 9, dtype=jnp.float32)
    y, vjp = jax.vjp(lambda x, w: grouped_product(x, w, sizes), x, kernels)
    expected = by_loop(x, kernels, dy, sizes)
    for a, b in zip(jax.tree.leaves((y, vjp(dy))), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_errors():
    x, kernels, _, sizes = make_arrays([3, 4], 8)
    with pytest.raises(ValueError, match="implementation='triton'; accepted are None, 'xla'"):
        grouped_product(x, kernels, sizes, implementation="triton")
    with pytest.raises(
        NotImplementedError, match="requires x and kernels in bfloat16, not float32"
    ):
        grouped_product(x.astype(jnp.float32), kernels, sizes, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="matrices of multiples of 128 x 64"):
        grouped_product(x[:, :8], kernels[:, :8], sizes, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="x has 8 rows; accepted are multiples of multiple=3"):
        grouped_product(x, kernels, sizes, multiple=3)


@pytest.mark.slow
@pytest.mark.parametrize("product", ["forward", "transposed", "sums"])
def test_the_kernels_equal_a_loop_in_the_interpreter(monkeypatch, product):
    """The grouped-product kernels equal a loop over the groups, with an empty group and rows after the last
    group; the interpreter detects races.
    """
    monkeypatch.setattr(hopper, "PROCESSORS", 2)
    interpreter = compat.gpu_interpreter()
    x, kernels, dy, sizes = make_arrays(*INTERPRETED)
    y, (dx, dw) = by_loop(x, kernels, dy, sizes)
    groups, count = jnp.array([0, 2, 2, 2], jnp.int32), jnp.array([3], jnp.int32)
    if product == "forward":
        result = hopper.product(x, kernels, groups, count, interpret=interpreter)[:384]
        expected = y[:384]
    elif product == "transposed":
        result = hopper.product(dy, kernels, groups, count, transposed=True, interpret=interpreter)[
            :384
        ]
        expected = dx[:384]
    else:
        starts = jnp.cumsum(sizes) - sizes
        result, expected = hopper.sums(x, dy, starts, sizes // 64, interpret=interpreter), dw
    assert relative_error(result, expected) < TOLERANCES["interpreted"]
    assert not compat.races_found()


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_of_64_rows_in_the_interpreter(monkeypatch, transposed):
    """Grouped-product kernels are right with blocks of 64 rows: groups with an odd number of blocks end
    with half a tile, also at the end of the array.
    """
    monkeypatch.setattr(hopper, "PROCESSORS", 2)
    x, kernels, dy, sizes = make_arrays(*INTERPRETED_PARTS)
    y, (dx, _) = by_loop(x, kernels, dy, sizes)
    blocks = (jnp.array(b, jnp.int32) for b in ([0, 1, 3, 4, 0], [1, 3, 4, 5, 1]))
    groups, count = jnp.array([0, 1, 1, 2, 0], jnp.int32), jnp.array([4], jnp.int32)
    result = hopper.product(
        dy if transposed else x,
        kernels,
        groups,
        count,
        *blocks,
        transposed=transposed,
        interpret=compat.gpu_interpreter(),
    )
    assert relative_error(result, dx if transposed else y) < TOLERANCES["interpreted"]
    assert not compat.races_found()


def check_segments(run):
    """Compare the output and the gradients of a grouped product whose groups use two matrices in turn with
    those of a loop over the groups; `run(x, kernels, ends)` computes the product.
    """
    x, kernels, dy, ends = make_arrays(*SEGMENTS)
    twice = jnp.concatenate([kernels[:2], kernels[:2]])
    y, (dx, dw) = by_loop(x, twice, dy, ends)
    ends = jnp.cumsum(ends) // 64
    result, vjp = jax.vjp(lambda x, w: run(x, w, ends), x, kernels[:2])
    expected = y, dx, dw[:2] + dw[2:]
    for got, want in zip((result, *vjp(dy)), expected, strict=True):
        assert relative_error(got, want) < TOLERANCES["segments"]


def test_xla_segments_equal_a_loop():
    assert not supports_segments(jnp.zeros((128, 128)), jnp.zeros((2, 128, 128)))
    check_segments(segment_product)


@pytest.mark.gpu
def test_segments_equal_a_loop():
    assert supports_segments(*(jnp.zeros(s, jnp.bfloat16) for s in ((128, 128), (2, 128, 128))))
    check_segments(jax.jit(segment_product))


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER, ids=lambda case: case.id)
def test_the_kernels_equal_a_loop(case):
    x, kernels, dy, sizes = make_arrays(*case)
    used = int(sizes.sum())

    @jax.jit
    def run(x, kernels, dy):
        call = lambda x, w: grouped_product(x, w, sizes, multiple=128, implementation="mosaic_gpu")  # noqa: E731
        y, vjp = jax.vjp(call, x, kernels)
        return y, vjp(dy)

    result, again = run(x, kernels, dy), run(x, kernels, dy)
    y, (dx, dw) = by_loop(x, kernels, dy, sizes)
    pairs = (result[0][:used], y[:used]), (result[1][0][:used], dx[:used]), (result[1][1], dw)
    assert all(relative_error(*pair) < TOLERANCES["card"] for pair in pairs)
    assert jnp.array_equal(result[0][:used], again[0][:used])
    assert jnp.array_equal(result[1][1], again[1][1])
