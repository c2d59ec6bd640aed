"""Tests of the Hopper kernel of products of many tokens by tiles, in Mosaic GPU's interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.row_product import Tiling, tile_product, tile_unsupported
from pallas_kernels.row_product.cases import TILES_INTERPRETED, TOLERANCE, TileCase
from pallas_kernels.row_product.tiles import columns_of_block
from tests.kernels.test_row_product_gpu import apply_behind

EPS = 1e-5


def make(case: TileCase) -> dict[str, jax.Array]:
    """Return random arrays of a call, by name: x, whose rows differ in size, matrix, what is added, and squares in 16 parts, or in 2 of each
    head, which are not those of x.
    """
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    x = normal(case.batch, case.channels) * jnp.exp(normal(case.batch, 1))
    arrays = dict(x=x, matrix=normal(case.size, case.channels))
    if case.heads:
        arrays["squares"] = jnp.exp(normal(case.heads, 2, case.batch)).astype(jnp.float32)
    elif case.squares and case.normed:
        wide = x.astype(jnp.float32).reshape(case.batch, 16, -1)
        arrays["squares"] = jnp.sum(wide**2, axis=-1)
    return arrays | (dict(added=normal(case.batch, case.size)) if case.behind == "added" else {})


def run(case: TileCase, arrays: dict[str, jax.Array], interpret=False) -> Any:
    """Compute a case by the kernel."""
    options: dict[str, Any] = dict(eps=EPS if case.normed else None)
    options["tiling"] = Tiling(*case.tiling) if case.tiling else None
    options["with_squares"] = case.returns_squares
    return tile_product(**arrays, **options, swiglu=case.behind == "swiglu", interpret=interpret)


def check(case: TileCase, got: Any, arrays: dict[str, jax.Array]) -> None:
    """Compare the kernel's result with the definition, row by row, in float32 with the roundings that it names, and the squares with those of
    this result, of the columns of each thread block.
    """
    wide = jnp.float32
    if case.returns_squares:
        got, squares = got
        across = case.tiling[0] if case.tiling else columns_of_block(*got.shape, swiglu=False)
        blocks = got.shape[1] // across
        known = jnp.sum(got.astype(wide).reshape(case.batch, blocks, -1) ** 2, axis=-1)
        assert squares.dtype == wide and squares.shape[1] % 8 == 0
        np.testing.assert_allclose(squares[:, :blocks], known, rtol=1e-6)
        assert not squares[:, blocks:].any()
    x = arrays["x"].astype(wide)
    if case.heads:
        channels = case.channels // case.heads
        root = 1 / jnp.sqrt(arrays["squares"].sum(axis=1).T / channels + EPS)
        x = x * jnp.repeat(root, channels, axis=1)
    y = jnp.matmul(x, arrays["matrix"].astype(wide).T, precision="highest")
    if case.normed and not case.heads:
        y = y / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPS)
    y = apply_behind(case.behind, y, arrays.get("added"))
    assert got.dtype == jnp.bfloat16 and got.shape == y.shape
    difference = jnp.abs(got.astype(wide) - y).max(axis=1) / jnp.abs(y).max(axis=1)
    assert difference.max() < TOLERANCE


@pytest.mark.parametrize("case", TILES_INTERPRETED, ids=lambda case: case.id)
def test_equals_the_definition(case):
    """The kernel's results are those of the definition, two runs give the same bits, and there are no races."""
    arrays = make(case)
    got = run(case, arrays, gpu_interpreter())
    assert not races_found()
    check(case, got, arrays)
    jax.tree.map(np.testing.assert_array_equal, got, run(case, arrays, gpu_interpreter()))


def test_a_large_gate_is_finite():
    """The sigmoid of a gate far below 0 is 0, and far above 1."""
    matrix = jnp.ones((64, 64), jnp.bfloat16)
    for sign in (-1, 1):
        x = jnp.full((64, 64), 8 * sign, jnp.bfloat16)
        got = tile_product(x, matrix, swiglu=True, interpret=gpu_interpreter())
        np.testing.assert_array_equal(got, jnp.full((64, 32), 512 * 512 * (sign > 0), jnp.bfloat16))


def test_columns_of_a_block():
    """As many as leave a card enough blocks; else the fewest."""
    assert [columns_of_block(256, n, False) for n in (3136, 1024, 32000)] == [64, 32, 64]
    assert [columns_of_block(rows, 2816, True) for rows in (64, 128, 256)] == [32, 32, 64]
    assert columns_of_block(64, 48, False) is None


def test_names_what_is_not_accepted():
    x, matrix = jnp.zeros((64, 128), jnp.bfloat16), jnp.zeros((64, 128), jnp.bfloat16)
    assert tile_unsupported(x, matrix) is tile_unsupported(x, matrix, swiglu=True) is None
    assert "float32 and bfloat16" in str(tile_unsupported(x.astype(jnp.float32), matrix))
    assert "a multiple of 64 rows, not 6" in str(tile_unsupported(x[:6], matrix))
    assert "not 96 and 64" in str(tile_unsupported(x[:, :96], matrix[:, :96]))
    assert "not 128 and 16" in str(tile_unsupported(x, matrix[:32], swiglu=True))
    with pytest.raises(NotImplementedError, match="tile_product: the kernel requires x and the"):
        tile_product(x.astype(jnp.float32), matrix)
    with pytest.raises(ValueError, match="either `added` or `swiglu`"):
        tile_product(x, matrix, swiglu=True, added=x)
    with pytest.raises(ValueError, match=r"x \(64, 128\) and the matrix \(64, 64\) are not"):
        tile_product(x, matrix[:, :64])
    with pytest.raises(ValueError, match=r"`added` is \(64, 128\), accepted is \(64, 64\)"):
        tile_product(x, matrix, added=x)
    for tiling in (Tiling(48), Tiling(64, 96), Tiling(32, row_peers=2), Tiling(32, column_peers=4)):
        with pytest.raises(ValueError, match="does not divide"):
            tile_product(x, matrix, tiling=tiling)
    for eps, parts in ((None, 8), (EPS, 4), (EPS, 0)):
        with pytest.raises(ValueError, match="are not those of a norm"):
            tile_product(x, matrix, eps=eps, squares=jnp.zeros((64, parts)))
    for heads, message in ((3, "are not those of a norm"), (4, "steps of 64 channels do not")):
        with pytest.raises(ValueError, match=message):
            tile_product(x, matrix, eps=EPS, squares=jnp.zeros((heads, 2, 64)))
