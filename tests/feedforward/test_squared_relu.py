"""Tests of the squared ReLU, whose derivative is computed from its result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax.feedforward.squared_relu import squared_relu


def defined(x):
    return jnp.square(jax.nn.relu(x))


def arguments(dtype):
    x, d_x = (np.random.default_rng(seed).normal(size=(4, 64)) for seed in range(2))
    x[0, :3] = 0, -0.0, 1e-3
    return jnp.asarray(x, dtype), jnp.asarray(d_x, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_values_and_derivatives_equal_the_definition(dtype, tolerance):
    """Values to the bit, both derivatives, forward and reverse, to rounding."""
    x, d_x = arguments(dtype)
    y, d_y = jax.jvp(squared_relu, (x,), (d_x,))
    wanted, d_wanted = jax.jvp(defined, (x,), (d_x,))
    np.testing.assert_array_equal(y, wanted)
    assert d_y.dtype == x.dtype
    (reverse,) = jax.vjp(squared_relu, x)[1](d_x)
    for got in (d_y, reverse):
        np.testing.assert_allclose(
            *(np.asarray(a, np.float32) for a in (got, d_wanted)), rtol=tolerance, atol=0
        )


def test_second_derivatives_equal_the_definition():
    x, d_x = arguments("float32")

    def second(function):
        return jax.grad(lambda x: jnp.sum(d_x * jax.grad(lambda x: jnp.sum(function(x)))(x)))(x)

    inside = np.asarray(x) != 0
    got = np.asarray(second(squared_relu))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[inside], np.asarray(second(defined))[inside], rtol=1e-5)


def test_its_argument_is_not_saved():
    """Between two products the backward pass reads one array of the inner width, the result."""
    x, up = jnp.ones((4, 8)), jnp.ones((8, 32))
    _, pull = jax.vjp(lambda x, up, down: squared_relu(x @ up) @ down, x, up, up.T)
    inner = {id(a): a for a in jax.tree.leaves(pull) if a.shape == (4, 32)}
    assert len(inner) == 1
    np.testing.assert_array_equal(*inner.values(), squared_relu(x @ up))
