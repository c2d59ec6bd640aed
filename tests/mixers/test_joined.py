"""Tests of narrow dense layers that are one product, and of Mamba2's step size and skip inside its op."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, ops
from lsm_jax.mixers import joined, mamba2
from lsm_jax.mixers.joined import project_together
from lsm_jax.mixers.layers import Dense
from lsm_jax.ops.backends import select
from tests.mixers.test_mixers import close


def products_of(function, *arguments) -> int:
    return str(jax.make_jaxpr(function)(*arguments)).count("dot_general")


@pytest.mark.parametrize(
    ("tokens", "barrier"), [(joined.LEAST_TOKENS, False), (joined.LEAST_TOKENS, True), (8, True)]
)
def test_layers_together_return_what_they_return_apart(tokens, barrier):
    """One product of several layers has their outputs in their dtypes, and gradients that equal float32's to bfloat16's rounding, also where
    XLA joins these to no others; few tokens and other layers are multiplied apart.
    """
    rngs = nnx.Rngs(0)
    layers = [Dense(32, n, axes=("embed", "heads"), rngs=rngs) for n in (24, 40, 3)]
    dtypes = None, None, jnp.float32
    x = jax.random.normal(jax.random.key(1), (2, tokens // 2, 32), jnp.bfloat16)

    def together(x, layers):
        return project_together(x, *zip(layers, dtypes, strict=True), apart=barrier)

    def apart(x, layers):
        return tuple(layer(x, dtype=d) for layer, d in zip(layers, dtypes, strict=True))

    joins = tokens == joined.LEAST_TOKENS
    single = products_of(lambda x: layers[2](x, dtype=jnp.float32), x)
    assert (products_of(lambda x: together(x, layers), x) == single) is joins
    graph, params = nnx.split(layers)

    def both(function, x):
        y, pull = jax.vjp(lambda x, p: function(x, nnx.merge(graph, p)), x, params)
        return y, pull(
            tuple(jnp.cos(jnp.arange(v.size).reshape(v.shape)).astype(v.dtype) for v in y)
        )

    (y, grads), (wanted, wanted_grads) = both(together, x), both(apart, x)
    assert [v.dtype for v in y] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for a, b in zip(jax.tree.leaves((y, grads)), jax.tree.leaves((wanted, wanted_grads)), strict=True):  # fmt: skip
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) < 1e-2
    text = jax.jit(lambda x: both(together, x)).lower(x).as_text()
    assert ("optimization_barrier" in text) is (joins and barrier)
    assert ("LayoutConstraint" in text) is (joins and barrier)
    biased = [*layers[:2], Dense(32, 3, axes=("embed", "heads"), rngs=rngs, bias=True)]
    assert products_of(lambda x: together(x, biased), x) == products_of(lambda x: apart(x, biased), x)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "gated_deltanet"])
def test_a_mixer_with_joined_layers_has_the_same_output(name, monkeypatch):
    layer = mixers.build(name, 64, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 40, 64), jnp.bfloat16)
    apart = layer(x).y
    monkeypatch.setattr(joined, "LEAST_TOKENS", 1)
    together = layer(x).y
    difference = np.asarray(together - apart, np.float64)
    assert np.sqrt(np.mean(difference**2)) < 1e-2 * np.std(np.asarray(apart, np.float64))


def test_mamba2_with_norm_and_product_together_is_the_same_function(monkeypatch):
    """Mamba2 whose last product computes the norm before it has the outputs and gradients of the layer with both apart."""
    layer = mixers.build(mixers.Mamba2Config(head_dim=8, state_size=16, num_groups=2), 32, rngs=nnx.Rngs(0))  # fmt: skip
    graph, params = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (2, 12, 32))
    monkeypatch.setattr(mamba2.Mamba2, "_in_kernel", lambda self: True)

    def both():
        y, pull = jax.vjp(lambda x, p: nnx.merge(graph, p)(x).y, x, params)
        return y, pull(jnp.cos(jnp.arange(y.size)).reshape(y.shape))

    wanted, calls = both(), []
    monkeypatch.setattr(mamba2, "fuses_product", lambda *a: calls.append(a) is None)
    for a, b in zip(jax.tree.leaves(both()), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))
    assert len(calls) == 1


@pytest.mark.parametrize("norm", ["none", pytest.param("after_gate", marks=pytest.mark.slow)])
def test_mamba2_with_step_and_skip_in_its_op_is_the_same_function(norm, monkeypatch):
    """Mamba2 whose op multiplies the writes by Δ and adds D x has the outputs, states and gradients of Mamba2 that does so itself, also
    with steps so small that softplus is 0.
    """
    layer = mixers.build(mixers.Mamba2Config(head_dim=8, state_size=16, norm=norm), 32, rngs=nnx.Rngs(0))  # fmt: skip
    layer.dt_bias[...] = layer.dt_bias[...].at[:2].set(jnp.array([-120.0, -16.0]))
    layer.skip[...] = jnp.linspace(-1, 2, layer.num_heads)
    x = jax.random.normal(jax.random.key(1), (2, 20, 32))
    ids = jnp.array([[1] * 20, [1] * 7 + [2] * 9 + [0] * 4])
    graph, params = nnx.split(layer)

    def both():
        def run(x, p):
            y, state, _ = nnx.merge(graph, p)(x, segment_ids=ids)
            return jnp.where((ids > 0)[..., None], y, 0), state.memory

        result, pull = jax.vjp(run, x, params)
        return result, pull(jax.tree.map(lambda v: jnp.cos(v * 3) if jnp.issubdtype(v.dtype, jnp.floating) else np.zeros(v.shape, jax.dtypes.float0), result))  # fmt: skip

    apart = both()
    monkeypatch.setattr(mixers.Mamba2, "_in_kernel", lambda self: True)
    inside = both()
    assert "log_write" in layer.op_arguments(x)
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(apart), strict=True):
        assert np.isfinite(np.asarray(a, np.float64)).all()
        close(a, b)


def test_mamba2_asks_for_the_kernel_of_its_norm_where_it_was_timed(monkeypatch):
    asked = []
    norm_of = ops.gated_rms_norm

    def gated_rms_norm(*arguments, implementation, **options):
        asked.append((implementation, options["skip"] is None))
        return norm_of(*arguments, **options)

    monkeypatch.setattr(ops, "gated_rms_norm", gated_rms_norm)
    monkeypatch.setattr(mixers.Mamba2, "_in_kernel", lambda self: True)
    for norm, length in (("after_gate", 4), ("before_gate", 4), ("after_gate", 1)):
        config = mixers.Mamba2Config(head_dim=8, state_size=16, norm=norm)
        layer = mixers.build(config, 32, rngs=nnx.Rngs(0))
        jax.eval_shape(lambda x, layer=layer: layer(x).y, jnp.zeros((1, length, 32)))
    assert asked == [(("mosaic_gpu", "xla"), True), (None, True), (None, False)]


@pytest.mark.parametrize(("memories", "implementation"), [(1, None), (2, "mosaic_gpu")])
def test_mamba2_with_step_and_skip_in_its_op_decodes_on_hopper(
    memories, implementation, monkeypatch
):
    """A prompt runs the op's kernel, and the token after it, for which the kernel has no step, the passes outside of it."""
    config = mixers.Mamba2Config(head_dim=64, state_size=64)
    config.op = dataclasses.replace(config.op, implementation=implementation)
    if memories > 1:
        config = mixers.MoMConfig(mixer=config, num_memories=memories, top_k=1)
    graph, params = nnx.split(nnx.eval_shape(lambda: mixers.build(config, 64, rngs=nnx.Rngs(0))))
    for module in (select, mamba2):
        monkeypatch.setattr(module, "compute_capabilities", lambda: frozenset(["9.0"]))
    select.clear_choices()

    def run(params, x):
        layer = nnx.merge(graph, params)
        if memories == 1:
            assert "log_write" in layer.op_arguments(x) and "log_write" not in layer.op_arguments(
                x[:, :1]
            )
        _, state, _ = layer(x, state=layer.init_state(2, 129, x.dtype))
        return layer(x[:, :1], state=state).y

    x = jax.ShapeDtypeStruct((2, 128, 64), jnp.bfloat16)
    traced = jax.jit(run).trace(params, x)
    assert traced.out_info.shape == (2, 1, 64)
    assert "mosaic_gpu" in ops.choices()["linear_memory"]
