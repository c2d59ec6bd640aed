"""Tests of the Hopper kernel for the gradient of SwiGLU and its hidden layer, in Mosaic GPU's interpreter, and of the op that it serves."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax.ops.swiglu import product
from lsm_jax.ops.swiglu.product import swiglu_product
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.swiglu import swiglu_gradients, unsupported
from pallas_kernels.swiglu.cases import INTERPRETED, TOLERANCES, Case


def make(case: Case) -> tuple[jax.Array, jax.Array]:
    """Return random gate and up, side by side, and the gradient of the hidden layer."""
    draw = np.random.default_rng(0).normal
    gate_up = 2 * draw(size=(*case[:2], 2 * case.channels))
    return jnp.asarray(gate_up, jnp.bfloat16), jnp.asarray(draw(size=case[:3]), jnp.bfloat16)


def hidden_of(scale: float, gate_up: jax.Array) -> jax.Array:
    """Return SwiGLU's hidden layer as it is defined."""
    gate, up = gate_up[..., : gate_up.shape[2] // 2], gate_up[..., gate_up.shape[2] // 2 :]
    return scale * gate / (1 + jnp.exp(-scale * gate)) * up


def check(results, case: Case, gate_up, d_hidden, device: str) -> None:
    """Check the results of `swiglu_gradients` against those of the definition in float32."""
    wide = gate_up.astype(jnp.float32), d_hidden.astype(jnp.float32)
    hidden, pull = jax.vjp(functools.partial(hidden_of, case.scale), wide[0])
    for got, wanted in zip(results, (*pull(wide[1]), hidden), strict=True):
        assert got.dtype == jnp.bfloat16 and got.shape == wanted.shape
        a, b = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        assert np.abs(a - b).max() < TOLERANCES[device] * np.abs(b).max()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * bool(i), id=c.id)
        for i, c in enumerate(INTERPRETED)
    ],
)
def test_equals_the_definition(case):
    """The kernel's gradients and hidden layer are those of the definition in float32, and there are no races."""
    arrays = make(case)
    results = swiglu_gradients(*arrays, scale=case.scale, interpret=gpu_interpreter())
    assert not races_found()
    check(results, case, *arrays, "interpreted")


def test_large_gates_are_finite():
    """A gate so far below 0 that its exponential overflows has a gradient of 0, one far above 0 that of a product."""
    gate_up, d_hidden = make(Case(1, 8, 256))
    gate_up = gate_up.at[..., :128].set(-300).at[..., 128:256].set(300)
    got, hidden = swiglu_gradients(gate_up, d_hidden, interpret=gpu_interpreter())
    assert not np.any(np.asarray(got[..., :128], np.float32))
    assert not np.any(np.asarray(hidden[..., :128], np.float32))
    np.testing.assert_array_equal(got[..., 128:256], d_hidden[..., 128:] * gate_up[..., 384:])
    np.testing.assert_array_equal(hidden[..., 128:], 300 * gate_up[..., 384:])


def test_names_the_requirement_that_is_not_met():
    gate_up, d_hidden = make(Case(1, 8, 256))
    assert unsupported(gate_up) is None
    with pytest.raises(NotImplementedError, match="requires gate and up in bfloat16, not float32"):
        swiglu_gradients(*(x.astype(jnp.float32) for x in (gate_up, d_hidden)))
    with pytest.raises(NotImplementedError, match="a multiple of 8 tokens in all rows, not 7"):
        swiglu_gradients(gate_up[:, :7], d_hidden[:, :7])
    with pytest.raises(NotImplementedError, match="256 channels of gate and of up, not half of 256"):  # fmt: skip
        swiglu_gradients(gate_up[..., :256], d_hidden[..., :128])
    for wrong in (d_hidden[:, :4], d_hidden.astype(jnp.float32)):
        with pytest.raises(ValueError, match=r"accepted are \(1, 8, 256\) and bfloat16"):
            swiglu_gradients(gate_up, wrong)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_op_is_hidden_layer_and_product(scale, by_kernel, monkeypatch):
    """The op has the value and gradients of one after the other in float32, by the kernel and by XLA; the value's bits are XLA's."""
    gate_up, _ = make(Case(1, 16, 256))
    draw = np.random.default_rng(1).normal
    kernel, dy = (jnp.asarray(draw(size=s), jnp.bfloat16) for s in ((256, 32), (1, 16, 32)))
    if by_kernel:
        interpreted: Any = functools.partial(swiglu_gradients, interpret=gpu_interpreter())
        monkeypatch.setattr(product, "by_platform", lambda *a, **_: interpreted(*a, scale=scale))

    def apart(gate_up, kernel):
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return (jax.nn.silu(gate if scale == 1 else scale * gate) * up) @ kernel

    y, pull = jax.vjp(functools.partial(swiglu_product, scale), gate_up, kernel)
    np.testing.assert_array_equal(y, apart(gate_up, kernel))
    wide = (x.astype(jnp.float32) for x in (gate_up, kernel))
    _, exact = jax.vjp(lambda g, k: hidden_of(scale, g) @ k, *wide)
    for a, b in zip(pull(dy), exact(dy.astype(jnp.float32)), strict=True):
        assert a.dtype == jnp.bfloat16
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() < 1e-2 * np.abs(b).max()


def test_the_kernel_is_for_nvidia_cards_only():
    gate_up, kernel = jax.ShapeDtypeStruct((1, 64, 512), jnp.bfloat16), jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)  # fmt: skip

    def both(gate_up, kernel):
        y, pull = jax.vjp(functools.partial(swiglu_product, 1.0), gate_up, kernel)
        return pull(y)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(both).trace(gate_up, kernel)
    for platform, count in (("cuda", 1), ("cpu", 0)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert len(re.findall("custom_call @mosaic_gpu", text)) == count


def test_which_tokens_the_kernel_serves():
    x = jnp.zeros((2, 12, 64), jnp.bfloat16)
    assert product.unsupported(x, 512) is None
    assert "256 channels" in str(product.unsupported(x, 384))
    assert "8 tokens" in str(product.unsupported(x[:, :11], 512))
    assert "bfloat16" in str(product.unsupported(x.astype(jnp.float16), 512))
