"""Tests of the Hopper kernels of residual streams, their norms and their gradients, in Mosaic GPU's interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.ops.backends.registry import Backend
from lsm_jax.ops.backends.select import Selection
from lsm_jax.ops.normalization import branches
from pallas_kernels import residual_norm
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.residual_norm import (
    residual_norm_forward,
    residual_norm_gradients,
    unsupported,
    unsupported_forward,
)
from pallas_kernels.residual_norm.cases import (
    FORWARD_INTERPRETED,
    INTERPRETED,
    TOLERANCES,
    Case,
    ForwardCase,
)
from tests.kernels.test_linear_attention_gpu import error


def make(case: Case) -> dict[str, Any]:
    """Return random arrays of a call, by name."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    shape = case[:3]
    return dict(
        x=normal(*shape),
        scale=normal(case.channels, dtype=jnp.float32),
        d_stream=normal(*shape) if case.stream else None,
        d_norms=tuple(normal(*shape) for _ in range(case.norms)),
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * bool(i), id=c.id)
        for i, c in enumerate(INTERPRETED)
    ],
)
def test_equals_the_plain_form(case):
    """The kernel's gradients are those that JAX derives from the definition in float32, and there are no races."""
    arrays = make(case)
    got = residual_norm_gradients(**arrays, eps=1e-5, interpret=gpu_interpreter())
    assert not races_found()
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)

    def branched(x, scale):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale
        return (x if case.stream else None, (y,) * case.norms)

    _, pull = jax.vjp(branched, wide["x"], wide["scale"])
    wanted = pull((wide["d_stream"], wide["d_norms"]))
    plain = branches.gradients(1e-5, **wide)
    for a, b, c, dtype in zip(got, wanted, plain, (jnp.bfloat16, jnp.float32), strict=True):
        assert a.dtype == dtype
        assert error(a, b) < TOLERANCES["interpreted"]
        assert error(c, b) < 1e-5


def test_names_the_requirement_that_is_not_met():
    arrays = make(Case(1, 64, 256, 2))
    x, d_norms = arrays["x"], arrays["d_norms"]
    assert unsupported(x, d_norms) is None
    assert unsupported(x, d_norms * 4) == "1 to 6 gradients of the norm, not 8"
    assert unsupported(x[..., :128], d_norms) == "256, 512 or 1,024 channels times 1 to 4, not 128"
    with pytest.raises(
        NotImplementedError, match="requires a multiple of 2 tokens in all rows, not 63"
    ):
        residual_norm_gradients(x[:, :63], arrays["scale"], None, d_norms, eps=1e-5)
    with pytest.raises(NotImplementedError, match="x and its gradients in bfloat16, not float32"):
        residual_norm_gradients(x.astype(jnp.float32), arrays["scale"], None, d_norms, eps=1e-5)


def make_sum(case: ForwardCase) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return random x, y and scale of a call of `residual_norm_forward`."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=case[:3]), case.dtype) for _ in range(2))
    return x, y, jnp.asarray(rng.normal(size=case.channels), jnp.float32)


def check_sum(got, x, y, scale) -> None:
    """Check a sum, its norm and the root [B, T]: the sum is exact, the others those of the rounded sum, the norm rounded once."""
    stream, normed, root = got
    np.testing.assert_array_equal(stream, x + y)
    assert stream.dtype == normed.dtype == x.dtype and root.dtype == jnp.float32
    wide = np.asarray(stream, np.float64)
    wanted = (np.mean(wide**2, axis=-1) + 1e-5) ** -0.5
    np.testing.assert_allclose(root, wanted, rtol=1e-6)
    wanted = wide * wanted[..., None] * np.asarray(scale, np.float64)
    # In bfloat16 half a unit in the last place, and what float32 adds to it.
    rtol = 2**-8 + 1e-5 if x.dtype == jnp.bfloat16 else 2e-6
    np.testing.assert_allclose(np.asarray(normed, np.float64), wanted, rtol=rtol, atol=1e-30)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * bool(i), id=c.id)
        for i, c in enumerate(FORWARD_INTERPRETED)
    ],
)
def test_a_sum_and_its_norm_equal_the_plain_form(case):
    """The kernel's sum is XLA's to the bit, root and norm are those of the rounded sum, and there are no races."""
    arrays = make_sum(case)
    check_sum(residual_norm_forward(*arrays, eps=1e-5, interpret=gpu_interpreter()), *arrays)
    assert not races_found()
    stream, normed, root = branches.sum_and_norm(1e-5, *arrays)
    check_sum((stream, normed, root[..., 0]), *arrays)


@pytest.mark.parametrize(
    "case",
    [
        ForwardCase(1, 6, 768),
        *(
            pytest.param(c, marks=pytest.mark.slow)
            for c in (
                ForwardCase(1, 8, 1024),
                ForwardCase(2, 5, 2048),
                ForwardCase(1, 7, 1024),
                ForwardCase(1, 5, 768, "float32"),
                ForwardCase(1, 4, 2048, "float32"),
            )
        ),
    ],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_values_and_gradients_of_the_op_by_its_kernels(case, remat, monkeypatch):
    """The op with its kernels, the gradient's where it supports the call, has the values of the op by XLA, and all its gradients. With
    `remat` the plain forms stand in the kernels' places, since jax.checkpoint refuses the interpreter's ordered effects: then values and
    gradients of the op have to pass through both.
    """
    x, added, scale = make_sum(case)

    def op(x, added, scale):
        stream, norms = branches.residual_norm(x, scale, eps=1e-5, count=2, added=added)
        # Each of the norms is a residual of what reads it.
        return stream, (norms[0] * norms[1], jnp.sin(norms[1]))

    def both():
        policy = jax.checkpoint_policies.save_only_these_names("kernel_residuals")
        # A function of its own for each call: jax.checkpoint keeps the trace of one that it has seen.
        function = jax.checkpoint(lambda *arrays: op(*arrays), policy=policy) if remat else op
        values, pull = jax.vjp(function, x, added, scale)
        return values, pull(jax.tree.map(jnp.cos, values))

    wanted = both()
    interpret = gpu_interpreter()
    calls = []

    def forward(*arrays, eps):
        calls.append("forward")
        if remat:
            stream, normed, root = branches.sum_and_norm(eps, *arrays)
            return stream, normed, root[..., 0]
        return residual_norm_forward(*arrays, eps=eps, interpret=interpret)

    def backward(*, eps, **arrays):
        calls.append("backward")
        if remat:
            return branches.gradients(eps, **arrays)
        return residual_norm_gradients(**arrays, eps=eps, interpret=interpret)

    monkeypatch.setattr(residual_norm, "residual_norm_forward", forward)
    monkeypatch.setattr(residual_norm, "residual_norm_gradients", backward)
    by_kernel = remat or unsupported(x, (x,)) is None

    def select(call):
        run = branches.run_kernel if by_kernel else branches.run_xla
        run = branches.run_sum_kernel if call.op == "residual_norm_forward" else run
        return Selection((Backend(name="interpreted", run=run),))

    monkeypatch.setattr(branches, "select", select)
    got = both()
    assert set(calls) == ({"forward", "backward"} if by_kernel else {"forward"})
    tolerance = 1e-5 if case.dtype == "float32" else 2**-7
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert error(a, b) < tolerance


def test_names_the_requirement_of_a_sum_that_is_not_met():
    x, y, scale = make_sum(ForwardCase(1, 3, 256))
    assert unsupported_forward(x, y) is None
    with pytest.raises(
        NotImplementedError,
        match="x and y in bfloat16 or in float32, both in the same, not bfloat16, float32",
    ):
        residual_norm_forward(x, y.astype(jnp.float32), scale, eps=1e-5)
    with pytest.raises(
        NotImplementedError, match="256, 512 or 1,024 channels times 1 to 4, not 640"
    ):
        residual_norm_forward(*(jnp.zeros((1, 3, 640), jnp.bfloat16),) * 2, scale, eps=1e-5)
