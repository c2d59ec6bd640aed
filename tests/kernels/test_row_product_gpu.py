"""Tests of the Hopper kernel of products of a few tokens, in Mosaic GPU's interpreter."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.row_product import GatedNorm, Norm, row_product, unsupported
from pallas_kernels.row_product.cases import INTERPRETED, TOLERANCE, Case

EPS = 1e-5


def make(case: Case) -> dict[str, Any]:
    """Return random arrays of a call, by name: x, matrix, scale and gate of what stands in front, and what is added."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    x, total = normal(case.batch, case.channels), sum(case.widths)
    scale = normal(256 if case.first == "gated norm" else case.channels, dtype=jnp.float32)
    return dict(
        x=3 * x,
        matrix=normal(total, case.channels),
        scale=scale if case.first else None,
        gate=normal(case.batch, case.channels) if case.first == "gated norm" else None,
        added=normal(case.batch, total) if case.behind == "added" else None,
    )


def run(case: Case, arrays: dict[str, Any], interpret: Any = False) -> tuple[jax.Array, ...]:
    """Compute a case by the kernel."""
    first: Any = None
    if case.first:
        gated = case.first == "gated norm"
        first = GatedNorm(arrays["gate"], arrays["scale"], EPS) if gated else Norm(arrays["scale"], EPS)  # fmt: skip
    options = dict(swiglu=True) if case.behind == "swiglu" else dict(widths=case.widths)
    call = functools.partial(row_product, dtype=case.dtype, interpret=interpret, **options)
    return call(arrays["x"], arrays["matrix"], first, added=arrays["added"])


def apply_behind(behind: str, y: jax.Array, added: jax.Array | None) -> jax.Array:
    """Return a product in float32 with what stands behind it, "added", "swiglu" or "", and the roundings that it names."""
    wide = jnp.float32
    if behind:
        y = y.astype(jnp.bfloat16).astype(wide)
    if added is not None:
        y = y + added.astype(wide)
    if behind == "swiglu":
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.nn.silu(gate) * up
    return y


def plain(case: Case, arrays: dict[str, Any]) -> list[jax.Array]:
    """Compute a case by its definition, in float32, with the roundings that it names."""
    wide = jnp.float32
    x = arrays["x"].astype(wide)
    if case.first:
        heads = x.reshape(case.batch, -1, arrays["scale"].shape[0])
        mean = jnp.mean(heads**2, axis=-1, keepdims=True)
        x = (heads / jnp.sqrt(mean + EPS) * arrays["scale"]).reshape(x.shape)
    if arrays["gate"] is not None:
        x = x * jax.nn.silu(arrays["gate"].astype(wide))
    x = x.astype(jnp.bfloat16).astype(wide)
    y = jnp.matmul(x, arrays["matrix"].astype(wide).T, precision="highest")
    y = apply_behind(case.behind, y, arrays["added"])
    if case.behind == "swiglu":
        return [y]
    return jnp.split(y, np.cumsum(case.widths)[:-1], axis=-1)


def check(case: Case, got: tuple[jax.Array, ...], arrays: dict[str, Any]) -> None:
    """Compare the kernel's results with the plain form's."""
    wanted = plain(case, arrays)
    assert [y.shape for y in got] == [y.shape for y in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == case.dtype
        difference = jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()
        assert difference < (1e-5 if case.dtype == "float32" else TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * (i > 2), id=c.id)
        for i, c in enumerate(INTERPRETED)
    ],  # fmt: skip
)
def test_equals_the_plain_form(case):
    """The kernel's results are those of the definition, two runs give the same bits, and there are no races."""
    arrays = make(case)
    got = run(case, arrays, gpu_interpreter())
    assert not races_found()
    check(case, got, arrays)
    for a, b in zip(got, run(case, arrays, gpu_interpreter()), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_large_gate_is_finite():
    """The sigmoid of a gate far below 0 is 0, and far above 1."""
    case = Case(1, 256, (8,), "", "swiglu")
    matrix = jnp.ones((8, 256), jnp.bfloat16)
    for sign in (-1, 1):
        arrays = dict(x=jnp.full((1, 256), sign, jnp.bfloat16), matrix=matrix, added=None)
        (got,) = run(case, arrays, gpu_interpreter())
        np.testing.assert_array_equal(got, jnp.full((1, 4), 65536 * (sign > 0), jnp.bfloat16))


def test_names_what_is_not_accepted():
    x, matrix = jnp.zeros((1, 512), jnp.bfloat16), jnp.zeros((24, 512), jnp.bfloat16)
    assert unsupported(x, matrix) is None
    assert "float32 and bfloat16" in str(unsupported(x.astype(jnp.float32), matrix))
    assert "not 384 channels" in str(unsupported(x[:, :384], matrix[:, :384]))
    gated = GatedNorm(x, jnp.zeros(128), EPS)
    assert "heads of 128" in str(unsupported(x, matrix, gated))
    assert "not widths (2, 22)" in str(unsupported(x, matrix, None, (2, 22)))
    assert "at most 8 rows, not 9" in str(unsupported(jnp.zeros((9, 512), jnp.bfloat16), matrix))
    with pytest.raises(NotImplementedError, match="row_product: the kernel requires x and the"):
        row_product(x.astype(jnp.float32), matrix)
    for wrong in (dict(widths=(8, 8)), dict(widths=(8, 16), swiglu=True), dict(swiglu=True, added=x[:, :24])):  # fmt: skip
        with pytest.raises(ValueError, match="accepted are widths whose sum is 24, and one width"):
            row_product(x, matrix, **wrong)
