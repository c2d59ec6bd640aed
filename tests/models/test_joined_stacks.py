"""Tests of SwiGLU's gate and up matrices side by side in the layers' stacks: which layers they are for, values and gradients, and the
program for an H200.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from lsm_jax import feedforward, mixers, models, ops
from lsm_jax.models import joined_stacks, narrow, unstack
from lsm_jax.models.periods import rematerialized
from lsm_jax.ops.backends.select import clear_choices
from lsm_jax.ops.core.saved import stored_gradient
from tests.models.conftest import derivatives, small_config

TOKENS = jnp.arange(24).reshape(2, 12)
WIDTH = small_config("softmax", "L").layers["L"].feedforward.width(32)


@pytest.fixture
def hopper(monkeypatch):
    """Let models join matrices as on a Hopper card, also small ones."""
    monkeypatch.setattr(joined_stacks, "compute_capabilities", lambda: {"9.0"})
    monkeypatch.setattr(narrow, "LEAST_SIZE", 1)
    monkeypatch.setattr(unstack, "LEAST_SIZE", 1)


def config_of(method: str = "softmax", **fields: Any) -> models.ModelConfig:
    fields = dict(remat="dots_and_states", unroll_layers=True, dtype="bfloat16") | fields
    return small_config(method, "L", **fields)


def with_swiglu(config: models.ModelConfig, **options: Any) -> models.ModelConfig:
    options = dict(intermediate_size=WIDTH) | options
    config.layers["L"].feedforward = feedforward.SwiGLUConfig(**options)
    return config


def shapes_of(config: models.ModelConfig) -> Any:
    return nnx.split(models.abstract(config))


def sizes_of_products(config: models.ModelConfig, dtype: Any = jnp.float32) -> set[tuple[int, ...]]:
    """Return the shapes of the matrices that the model's forward pass multiplies by."""
    graphdef, params = shapes_of(config)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), params)
    jaxpr = jax.make_jaxpr(lambda p: nnx.merge(graphdef, p).hidden(TOKENS)[0])(params)
    return {eqn.invars[1].aval.shape for eqn in dots(jaxpr.jaxpr)}


def dots(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from dots(inner)


def joins(config: models.ModelConfig, dtype: Any = jnp.float32) -> bool:
    """Return whether the model multiplies by both matrices at once; it multiplies by one of the two forms in any case."""
    found = sizes_of_products(config, dtype)
    width = config.layers["L"].feedforward.width(32)
    both = (32, 2 * width) in found
    assert both != ((32, width) in found)
    return both


@pytest.mark.parametrize("remat", ["none", "dots_and_inputs", "dots_and_states"])
def test_policies_that_save_the_hidden_layer_join(remat, hopper):
    clear_choices()
    assert joins(config_of(remat=remat))
    assert ops.choices()["swiglu"] == "one product with gate and up"


@pytest.mark.parametrize("remat", ["dots", "dots_and_convolutions"])
def test_policies_that_compute_the_hidden_layer_again_keep_two_products(remat, hopper):
    clear_choices()
    assert not joins(config_of(remat=remat))
    reason = f"one requires remat of none, dots_and_inputs, dots_and_states, not {remat}"
    assert ops.choices()["swiglu"] == f"two products with gate and up ({reason})"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(lora=mixers.LoRAConfig(targets=("up_proj",))), "without adapters and FP8)"),
        (dict(remat="full"), None),
        (dict(unroll_layers=False), None),
        (dict(dtype="float32"), None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_models_keep_two_products(fields, reason, hopper):
    clear_choices()
    assert not joins(config_of(**fields))
    chosen = ops.choices().get("swiglu")
    assert chosen is None if reason is None else chosen.endswith(reason)


def test_other_cards_matrices_and_dtypes_keep_two_products(monkeypatch, hopper):
    """Small matrices and frozen ones in 16 bits do, other cards, and layers whose products are in FP8."""
    assert joins(config_of())
    assert not joins(config_of(), jnp.bfloat16)
    with monkeypatch.context() as changed:
        changed.setattr(narrow, "LEAST_SIZE", 32 * WIDTH + 1)
        assert not joins(config_of())
    with monkeypatch.context() as changed:
        changed.setattr(joined_stacks, "compute_capabilities", lambda: {"10.0"})
        clear_choices()
        assert not joins(config_of())
        assert "compute capability 9.0, not 10.0" in ops.choices()["swiglu"]
    config = dataclasses.replace(config_of(), matmul="fp8", hidden_size=128)
    config.layers["L"].mixer = mixers.METHODS["softmax"].config.for_width(128)
    periods = models.abstract(config).periods
    assert joined_stacks.join_stacks(periods, "none") is periods


def test_a_layer_and_its_shared_expert_are_joined_and_the_given_module_is_not_changed(hopper):
    """The shared expert of a mixture is a SwiGLU; the other experts are grouped products."""
    config = config_of()
    config.layers["L"].feedforward = feedforward.MoEConfig(
        num_experts=4, top_k=2, expert_size=16, shared_size=48
    )
    periods = models.Decoder(config, rngs=nnx.Rngs(0)).periods
    shared = periods.blocks[0].feedforward.shared
    kernels = [p.kernel[...] for p in (shared.gate_proj, shared.up_proj)]
    joined = joined_stacks.join_stacks(periods, "none").blocks[0].feedforward
    np.testing.assert_array_equal(joined.shared.gate_up[...], jnp.concatenate(kernels, axis=-1))
    assert joined.gate_proj.shape == (2, 4, 32, 16)
    assert periods.blocks[0].feedforward.shared is shared and shared.gate_up is None


def value_and_gradients(config: models.ModelConfig) -> Any:
    """Return a loss, hidden states and all gradients of a model, by one compiled program."""
    graphdef, shapes = shapes_of(config)
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda p: jnp.asarray(0.2 * draw(p.shape), jnp.float32), shapes)

    def loss(params):
        hidden, _, _ = nnx.merge(graphdef, params).hidden(TOKENS)
        return jnp.mean(hidden.astype(jnp.float32) ** 3), hidden

    # Otherwise XLA leaves out roundings where it can, in one program and not in the other.
    lowered = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params)
    return lowered.compile({"xla_allow_excess_precision": False})(params)


@pytest.mark.parametrize(
    ("name", "fields", "options"),
    [
        ("gla", {}, {}),
        ("softmax", dict(remat="none"), dict(gate_scale=0.5, output_scale=2.0)),
        pytest.param("gated_deltanet", dict(residual_scale=0.5), {}, marks=pytest.mark.slow),
        pytest.param("mamba2", dict(remat="dots_and_inputs"), {}, marks=pytest.mark.slow),
    ],
)
def test_it_is_the_same_function(name, fields, options, monkeypatch, hopper):
    """Hidden states have the same bits, since no sum is another; gradients are as far from float32's as those of two products."""
    config = with_swiglu(config_of(name, **fields), **options)
    assert joins(config)
    (_, hidden), got = value_and_gradients(config)
    monkeypatch.setattr(joined_stacks, "compute_capabilities", lambda: set())
    assert not joins(config)
    (_, expected), plain = value_and_gradients(config)
    np.testing.assert_array_equal(hidden, expected)
    _, exact = value_and_gradients(dataclasses.replace(config, dtype="float32"))
    differ = False
    for x in zip(*map(jax.tree.leaves, (got, plain, exact)), strict=True):
        a, b, c = (np.asarray(v, np.float64) for v in x)
        assert a.shape == c.shape
        error, allowed = (np.sqrt(np.mean((v - c) ** 2)) for v in (a, b))
        assert error <= 1.2 * allowed + 1e-3 * np.sqrt(np.mean(c**2))
        differ |= np.any(a != b)
    assert differ  # the gradient of the tokens is rounded once instead of three times


def test_it_has_all_derivatives(monkeypatch, hopper):
    """Forward-mode and second derivatives, and `vmap`, are those of two products."""
    found = derivatives(config_of(), TOKENS)
    monkeypatch.setattr(joined_stacks, "compute_capabilities", lambda: set())
    wanted = derivatives(config_of(), TOKENS)
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2 * float(jnp.abs(y).max()))


def test_matrices_are_joined_once_before_the_layers_and_written_in_place(hopper):
    """The forward pass joins the stacks, no layer its own matrices; the gradient of each layer is written as one."""
    graphdef, params = shapes_of(config_of())

    def loss(params):
        return jnp.sum(nnx.merge(graphdef, params).hidden(TOKENS)[0].astype(jnp.float32))

    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    of_stacks = rf":f32\[2,32,{2 * WIDTH}\] = concatenate\[dimension=2\]"
    assert len(re.findall(of_stacks, text)) == 1
    assert not re.findall(rf":\w+\[32,{2 * WIDTH}\] = concatenate", text)
    written = re.findall(rf":bf16\[2,32,{2 * WIDTH}\] = dynamic_update_slice", text)
    assert len(written) == 2
    assert not re.findall(rf":\w+\[2,32,{WIDTH}\] = dynamic_update_slice", text)


def test_a_stored_gradient_is_behind_a_barrier():
    x = jnp.linspace(-1, 1, 5)
    value, tangent = jax.jvp(stored_gradient, (x,), (jnp.cos(x),))
    np.testing.assert_array_equal(value, x)
    np.testing.assert_array_equal(tangent, jnp.cos(x))
    gradient = jax.grad(lambda x: jnp.sum(stored_gradient(x) ** 2))
    np.testing.assert_array_equal(gradient(x), 2 * x)
    assert str(jax.make_jaxpr(gradient)(x)).count("optimization_barrier") == 1
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(gradient(x)))(x), jnp.full(5, 2.0))


@pytest.mark.aot
@pytest.mark.parametrize(("width", "tokens"), [(1024, 8192), (2048, 4096)])
def test_an_h200_computes_the_gradient_in_one_pass(width, tokens):
    """Compiled for an H200, one kernel reads gate, up and the gradient of the hidden layer and writes the gradients of gate and up into one
    array. Besides it only the hidden layer is written by a kernel that is no product, and the program copies nothing.
    """
    from tests.kernels.test_aot import H200

    def make():
        layer = feedforward.build(feedforward.SwiGLUConfig(), width, rngs=nnx.Rngs(0))
        layer.join()
        return layer

    layer = nnx.eval_shape(make)
    inner = layer.config.width(width)
    graphdef, params = nnx.split(layer)

    def both_passes(params, x, dy):
        def apply(params, x):
            return nnx.merge(graphdef, params).transform(x)

        y, pull = jax.vjp(rematerialized(apply, "dots_and_states", in_loop=False), params, x)
        return y, pull(dy)

    device = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]  # fmt: skip
    place = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((1, tokens, width), jnp.bfloat16, sharding=place)
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16, sharding=place), params
    )
    traced = jax.jit(both_passes).trace(params, x, x)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    entry = text[text.index("ENTRY") :].splitlines()
    kernels = [
        line.split(" fusion(")
        for line in entry
        if " fusion(" in line and "%gemm" not in line.split("=")[0]
    ]
    shape = rf"bf16\[1,{tokens},{{}}\]"
    both, hidden = ([rest for result, rest in kernels if re.search(shape.format(n), result)] for n in (2 * inner, inner))  # fmt: skip
    assert len(both) == 1 and "calls=%fused_concatenate" in both[0]
    assert both[0].partition(")")[0].count("%") == 2
    assert len(hidden) == 1 and len(kernels) == 2
    assert not [line for line in entry if " copy(" in line]
