"""Tests of `gated_rms_norm`: XLA's passes equal the definition, values and gradients, and bad arguments are named."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from lsm_jax.mixers import fp8
from lsm_jax.ops.normalization.gated_product import PLAIN, fuses_product, gated_norm_product
from lsm_jax.ops.normalization.xla import NormOptions, in_few_passes, reference


def make(dtype, *, heads=6, group=3, skip=True):
    """Return random arrays of a gated norm by name, and a gradient of its output."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    shape = (2, 5, heads, 8)
    x, gate, inner, dy = (normal(*shape, dtype=dtype) for _ in range(4))
    arrays: dict[str, Any] = dict(
        x=x, gate=gate, scale=normal(*shape[2:] if group > 1 else shape[3:])
    )
    return arrays | (dict(skip=normal(heads), skip_input=inner) if skip else {}), dy


def in_numpy(x, gate, scale, skip, skip_input, group):
    """Return the norm of Mamba2, gate first, in float64."""
    x, gate, scale, skip, skip_input = (
        np.asarray(a, np.float64) for a in (x, gate, scale, skip, skip_input)
    )
    y = (x + skip[:, None] * skip_input) * gate / (1 + np.exp(-gate))
    wide = y.reshape(*x.shape[:2], -1, group * x.shape[3])
    wide = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return wide.reshape(x.shape) * scale


def test_equals_numpy():
    arrays, _ = make(jnp.float32)
    got = ops.gated_rms_norm(**arrays, eps=1e-5, group=3, gate_first=True)
    np.testing.assert_allclose(got, in_numpy(**arrays, group=3), rtol=1e-5, atol=1e-5)


def both(function, options, arrays, dy):
    """Return the output and the gradients of a gated norm that `function` computes."""
    output, pull = jax.vjp(lambda given: function(options, **given), arrays)
    return output, pull(dy)[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("gate_first", "skip", "activation"),
    [(True, True, "silu"), (False, True, "sigmoid"), (True, False, "silu")],
)
def test_passes_equal_the_definition(dtype, gate_first, skip, activation):
    """Values and gradients of XLA's separate passes are those of the definition to rounding."""
    arrays, dy = make(dtype, skip=skip)
    options = NormOptions(1e-5, 3, activation, gate_first)
    run = jax.jit(both, static_argnums=(0, 1))
    got, wanted = (run(f, options, arrays, dy) for f in (in_few_passes, reference))
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize(
    ("product", "multiply"),
    [(PLAIN, jnp.matmul), (fp8.PRODUCT, fp8.project)],
    ids=["plain", "fp8"],
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_product_behind_it_is_the_same_function(dtype, bias, product, multiply):
    """Norm and product as one op have the value and gradients of one after the other, with a bias of the gate and without."""
    arrays, _ = make(dtype, skip=False)
    biases = [jnp.linspace(-1.0, 2.0, 48).reshape(6, 8)] if bias else []
    arrays["gate"] = arrays["gate"].astype(jnp.float32) if bias else arrays["gate"]
    kernel = jax.random.normal(jax.random.key(0), (48, 16)).astype(dtype)
    d_output = jax.random.normal(jax.random.key(1), (2, 5, 16)).astype(dtype)
    options = NormOptions(1e-5, 3, "silu", True)

    def apart(x, gate, scale, kernel, *biases):
        y = ops.gated_rms_norm(x, sum(biases, gate), scale, eps=1e-5, group=3, gate_first=True)
        return multiply(y.reshape(2, 5, 48), kernel)

    def both(function):
        y, pull = jax.vjp(function, *arrays.values(), kernel, *biases)
        return y, pull(d_output)

    got, wanted = both(functools.partial(gated_norm_product, options, product)), both(apart)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize(
    ("shape", "dtype", "fused"),
    [
        ((1, 64, 64, 64), jnp.bfloat16, True),
        ((1, 63, 64, 64), jnp.bfloat16, False),
        ((1, 64, 64, 64), jnp.float32, False),
        ((1, 64, 20, 64), jnp.bfloat16, False),
    ],
)
def test_which_products_the_kernel_serves(shape, dtype, fused):
    x = jax.ShapeDtypeStruct(shape, dtype)
    zeros = jnp.zeros(shape, dtype)
    assert not fuses_product(zeros, zeros, shape[2])  # no Hopper card
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")

    def found(*axes: int) -> bool:
        names = ("data",) * len(axes)
        results = []
        with use_abstract_mesh(AbstractMesh(axes, names, abstract_device=device)):
            jax.eval_shape(lambda x: results.append(fuses_product(x, x, shape[2])), x)
        return results[0]

    assert found() == found(1) == fused
    assert not found(2)  # of several devices each has a part of the product


def test_names_what_is_not_accepted():
    arrays, _ = make(jnp.float32)
    call: Any = arrays | dict(eps=1e-5, group=3)
    for changed, message in (
        (dict(x=call["x"][0]), "x has shape"),
        (dict(gate=call["gate"][:, :, :2]), "gate has shape"),
        (dict(scale=jnp.ones(3)), "scale has shape"),
        (dict(skip=None), "only one of skip and skip_input"),
        (dict(group=4), "group=4; accepted are divisors of the 6 heads"),
        (dict(activation="relu"), "activation='relu'; accepted are"),
        (dict(implementation="cutile"), "implementation='cutile'"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.gated_rms_norm(**call | changed)
