"""Tests of layers: which arrays they save for the backward pass, the gradients of products in bfloat16 whose
results are float32, and which methods call their op so that a fused kernel supports it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import feedforward, mixers, ops
from lsm_jax.mixers.base import Context
from lsm_jax.mixers.layers import HeadNorm, RMSNorm, matmul_to_float32, narrow_gradient
from lsm_jax.models.periods import rematerialized
from lsm_jax.ops.backends import select

BATCH, LENGTH, HEADS, WIDTH = 2, 32, 2, 16
X = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, WIDTH), jnp.bfloat16)


def saved(function, *arrays):
    """Return those arrays [B, T, ...] that `jax.vjp` of `function` stores between its forward and its
    backward pass.
    """
    leaves = jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(function, *x)[1], *arrays))
    return [x for x in leaves if x.shape[:2] == (BATCH, LENGTH)]


@pytest.mark.parametrize(
    ("layer", "arrays"),
    [
        (RMSNorm(WIDTH, eps=1e-5), [X]),
        (RMSNorm(WIDTH, eps=1e-5), [X, X]),
        (HeadNorm(HEADS, WIDTH, eps=1e-5), [X]),
    ],
    ids=["norm", "gated norm", "norm of heads"],
)
def test_norms_save_only_their_arguments(layer, arrays):
    """Norms save their arguments, and at most one number beside them for each vector that they normalise."""
    residuals = saved(lambda *x: layer(*x), *arrays)
    squares = [x for x in residuals if x.shape[-1] == 1]
    assert len(squares) == (type(layer) is RMSNorm and len(arrays) == 1)
    residuals = [x for x in residuals if x.shape[-1] != 1]
    assert 0 < len(residuals) <= len(arrays)
    assert all((x.shape, x.dtype) == (X.shape, X.dtype) for x in residuals)


def test_swiglu_saves_two_arrays_of_its_width():
    config = feedforward.SwiGLUConfig(intermediate_size=48)
    layer = feedforward.build(config, WIDTH, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16)
    residuals = saved(lambda x: layer(x)[0], x)
    assert all(x.dtype == jnp.bfloat16 for x in residuals)
    assert sorted(x.shape[-1] for x in residuals)[-3:] in ([WIDTH, 48, 48], [48, 48])


def test_a_widened_product_has_a_narrow_one_s_gradients():
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((BATCH, LENGTH, 24), (24, 8)))
    d = rng.normal(size=(BATCH, LENGTH, 8)).astype(np.float32)
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in (x, w)]
    y, pull = jax.vjp(matmul_to_float32, *narrow)
    assert y.dtype == jnp.float32
    wide = [np.float64(a) for a in narrow]
    np.testing.assert_allclose(y, wide[0] @ wide[1], rtol=0, atol=1e-5)
    expected = d @ wide[1].T, np.einsum("btk,btn->kn", wide[0], d)
    for got, wanted in zip(pull(jnp.asarray(d)), expected, strict=True):
        assert got.dtype == jnp.bfloat16
        error = np.sqrt(np.mean((np.float64(got) - wanted) ** 2) / np.mean(wanted**2))
        assert error < 5e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_widened_product_under_vmap(dtype):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), dtype) for s in ((3, 4, 8), (3, 8, 5)))

    def loss(x, w):
        return jnp.sum(jnp.sin(matmul_to_float32(x, w)))

    apart = [jax.grad(loss, argnums=(0, 1))(a, b) for a, b in zip(x, w, strict=True)]
    together = jax.vmap(jax.grad(loss, argnums=(0, 1)))(x, w)
    for own, all_of_them in zip(zip(*apart, strict=True), together, strict=True):
        got, wanted = (np.asarray(a, np.float32) for a in (all_of_them, jnp.stack(own)))
        np.testing.assert_allclose(
            got, wanted, rtol=1e-2, atol=1e-2 if dtype == "bfloat16" else 1e-5
        )


WITH_KERNEL = (
    "linear_attention", "retnet", "lightning", "gated_retention", "gla", "hgrn2", "rwkv6", "mamba2", "deltanet",
    "gated_deltanet", "kda", "rwkv7", "fox", "precond_gated_deltanet", "precond_kda",
)  # fmt: skip


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_a_layer_in_bfloat16_runs_on_its_ops_kernel(name):
    """A bfloat16 layer of each method passes its op arrays that the op's fused kernel supports; otherwise
    XLA would run without any message.
    """
    select.clear_choices()
    jax.clear_caches()
    method = mixers.METHODS[name]
    build = lambda: mixers.build(method.config.for_width(1024), 1024, rngs=nnx.Rngs(0))  # noqa: E731
    graph, params = nnx.split(nnx.eval_shape(build))
    x = jax.ShapeDtypeStruct((1, 256, 1024), jnp.bfloat16)
    jax.eval_shape(lambda params, x: nnx.merge(graph, params)(x)[0], params, x)
    chosen = ops.choices()
    energies = ["selective_memory"] if name.startswith("precond_") else []
    for op in (method.op, *energies):
        assert chosen[op].startswith("mosaic_gpu on "), op


def test_a_context_is_read_only():
    context = Context(shared={"first": 1})
    added = context.add(shared={"second": 2}, aux={"loss": 3})
    assert dict(context.shared) == {"first": 1} and not context.aux
    assert dict(added.shared) == {"first": 1, "second": 2} and dict(added.aux) == {"loss": 3}
    with pytest.raises(TypeError):
        context.shared["first"] = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.layer = 1


@pytest.mark.parametrize("policy", ["dots", "full"])
def test_the_backward_pass_computes_no_angles_again_where_it_saves_kernels(policy):
    mixer = mixers.build(
        mixers.SoftmaxConfig(num_heads=HEADS, rope_base=1e4), HEADS * WIDTH, rngs=nnx.Rngs(0)
    )
    graphdef, params = nnx.split(mixer)
    layer = rematerialized(lambda x, params: nnx.merge(graphdef, params).run(x)[0], policy)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS * WIDTH), jnp.bfloat16)
    text = str(
        jax.make_jaxpr(jax.grad(lambda x, p: jnp.sum(layer(x, p)).astype(jnp.float32)))(x, params)
    )
    of_queries_and_keys = 2
    assert text.count("= cos ") == of_queries_and_keys * (1 if policy == "dots" else 2)
    assert text.count("= sin ") == text.count("= cos ")


def test_attention_saves_rotated_queries_and_keys_instead_of_what_is_rotated():
    """With `remat="dots"`: two arrays of heads are saved in place of two products, and a norm before the rotation requires these."""

    def of_heads(**fields):
        mixer = mixers.build(
            mixers.SoftmaxConfig(num_heads=HEADS, **fields), HEADS * WIDTH, rngs=nnx.Rngs(0)
        )
        graphdef, params = nnx.split(mixer)
        layer = rematerialized(lambda x, params: nnx.merge(graphdef, params).run(x)[0], "dots")
        x = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS * WIDTH), jnp.bfloat16)
        shapes = [x.shape for x in saved(layer, x, params)]
        return shapes.count(X.shape), shapes.count(x.shape)

    assert of_heads(rope_base=None) == (0, 4) and of_heads(rope_base=1e4) == (2, 2)
    assert of_heads(rope_base=1e4, qk_norm=True) == (0, 4)


def test_a_narrow_gradient_is_rounded():
    """The value is unchanged, and the gradient, by either mode, is rounded to the given dtype."""
    x = jax.random.normal(jax.random.key(0), (64,))
    narrow = functools.partial(narrow_gradient, dtype=jnp.bfloat16)
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    for derivative in (jax.vjp(narrow, x)[1](x)[0], jax.jvp(narrow, (x,), (x,))[1]):
        np.testing.assert_array_equal(derivative, rounded)
    np.testing.assert_array_equal(narrow(x), x)
