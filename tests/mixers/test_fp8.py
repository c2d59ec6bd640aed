"""Tests of dense layers that multiply in 8-bit floats: their definition, which layers change, and a model that learns."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import lm, mom
from lsm_jax import mixers, models
from lsm_jax.mixers import fp8


def rounded(x, dtype):
    """Return x as numbers that its FP8 form stands for, by numpy in float64, with a power of two as scale."""
    x, largest = np.asarray(x, np.float64), float(jnp.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / largest))
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 8e-3)])
def test_products_and_gradients_are_those_of_rounded_numbers(dtype, tolerance):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (3, 5, 64)).astype(dtype)
    kernel = 0.02 * jax.random.normal(keys[1], (64, 48))
    cotangent = jax.random.normal(keys[2], (3, 5, 48)).astype(dtype)
    y, pull = jax.vjp(fp8.project, x, kernel)
    x_grad, kernel_grad = pull(cotangent)
    assert (y.dtype, x_grad.dtype, kernel_grad.dtype) == (x.dtype, x.dtype, jnp.float32)

    # A kernel is first cast to the dtype of x, as by other products.
    narrow_x, narrow_kernel = (rounded(z, fp8.FORWARD) for z in (x, kernel.astype(dtype)))
    narrow = rounded(cotangent, fp8.BACKWARD)
    expected = (
        narrow_x @ narrow_kernel,
        narrow @ narrow_kernel.T,
        np.einsum("btd,btf->df", narrow_x, narrow),
    )
    for found, wanted in zip((y, x_grad, kernel_grad), expected, strict=True):
        error = np.asarray(found, np.float64) - wanted
        assert np.abs(error).max() < tolerance * np.abs(wanted).max()
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    relative = np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)
    assert 1e-3 < relative < 5e-2  # it is FP8, and no worse


def test_zeros_and_numbers_that_are_not_finite():
    kernel = jnp.ones((64, 16))
    assert (fp8.project(jnp.zeros((2, 64)), kernel) == 0).all()
    for bad in (jnp.nan, jnp.inf):
        assert not jnp.isfinite(fp8.project(jnp.ones((2, 64)).at[0, 0].set(bad), kernel)).any()


@pytest.mark.parametrize("most", [1e-38, 1e-30, 448.0, 449.0, 3e38])
@pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.BACKWARD])
def test_scales_are_powers_of_two_that_bfloat16_represents(most, dtype):
    x = jnp.array([most, -most / 3, 0.0], jnp.float32)
    narrow, scale = fp8.quantize(x, dtype)
    assert np.frexp(float(scale))[0] == 0.5 and scale == scale.astype(jnp.bfloat16)
    largest = float(jnp.finfo(dtype).max)
    assert jnp.isfinite(narrow.astype(jnp.float32)).all()
    if most > 1e-35:  # smaller numbers are subnormal
        assert largest / 2.2 < abs(narrow.astype(jnp.float32)).max() <= largest
        np.testing.assert_allclose(narrow.astype(jnp.float32) * scale, x, rtol=0.13)


def small(matmul="default", **fields):
    config = lm.get_config("gated_deltanet-tiny").model
    return dataclasses.replace(config, matmul=matmul, dtype="float32", **fields)


def test_layers_that_change(monkeypatch):
    monkeypatch.setattr(fp8, "LEAST_SIZE", 48)
    block = models.Decoder(small("fp8"), rngs=nnx.Rngs(0)).periods.blocks[0]
    dense = {
        ".".join(map(str, path)): layer
        for path, layer in nnx.iter_graph(block)
        if isinstance(layer, mixers.layers.Dense)
    }
    changed = {name for name, layer in dense.items() if layer.product is fp8.project}
    sizes = {name: layer.kernel.shape[-2:] for name, layer in dense.items()}
    assert changed == {name for name, size in sizes.items() if min(size) >= fp8.LEAST_SIZE}
    assert {"mixer.q_proj", "mixer.o_proj", "feedforward.down_proj"} <= changed < set(dense)


@pytest.mark.slow
def test_a_model_learns_as_without_and_is_evaluated_without(monkeypatch):
    monkeypatch.setattr(fp8, "LEAST_SIZE", 48)
    tokens = jnp.asarray(
        np.frombuffer(b"a memory of fixed size. " * 40, np.uint8)[None, :640], jnp.int32
    )
    tokens = tokens.reshape(2, 320)

    def losses(config, steps=12):
        graph, params = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))

        def loss(params):
            model = nnx.merge(graph, params)
            hidden, _, _ = model.hidden(tokens[:, :-1])
            return models.next_token_loss(hidden, model.head(), tokens[:, 1:]).mean()

        @jax.jit
        def step(params):
            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.03 * g, params, grads), value

        curve = []
        for _ in range(steps):
            params, value = step(params)
            curve.append(float(value))
        return np.array(curve)

    plain, narrow = losses(small()), losses(small("fp8"))
    assert plain[-1] < plain[0] - 1
    assert 0 < np.abs(narrow / plain - 1).max() < 2e-2
    assert small("fp8").for_inference() == small().for_inference()


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match="model.matmul='fp16': accepted are default, fp8"):
        small("fp16").validate()
    config = mom.get_config("tiny").model
    with pytest.raises(ValueError, match="no product in FP8; accepted with MoM is 'default'"):
        dataclasses.replace(config, matmul="fp8").validate()
    with pytest.raises(ValueError, match="no dense layer of this model of width 64 has at least 128"):  # fmt: skip
        nnx.eval_shape(lambda: models.Decoder(small("fp8"), rngs=nnx.Rngs(0)))
