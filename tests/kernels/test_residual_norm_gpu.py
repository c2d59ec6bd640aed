"""Tests of the Hopper kernel of residual streams' gradients, in Mosaic GPU's interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.ops.normalization import branches
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.residual_norm import residual_norm_gradients, unsupported
from pallas_kernels.residual_norm.cases import INTERPRETED, TOLERANCES, Case
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
