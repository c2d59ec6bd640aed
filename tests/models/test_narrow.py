"""Tests of the cast of stacked parameters before the layers: it changes no value and no gradient, and leaves parameters
that layers use in float32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import feedforward, mixers, models
from lsm_jax.models import decoder, narrow, unstack
from lsm_jax.training.memory_plan import plan
from lsm_jax.training.partition import split
from lsm_jax.training.step import params_of
from tests.marks import slow_after
from tests.models.conftest import derivatives, small_config
from tests.training import tiny

TOKENS = jnp.arange(20).reshape(2, 10)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(narrow, "LEAST_SIZE", 1)
    monkeypatch.setattr(unstack, "LEAST_SIZE", 1)


def config_of(method: str, experts: bool = False, **fields) -> models.ModelConfig:
    config = small_config(method, "L", remat="dots", unroll_layers=True, **fields)
    config.dtype = "bfloat16"
    if experts:
        config.layers["L"].feedforward = feedforward.MoEConfig(
            num_experts=4, top_k=2, expert_size=16, shared_size=16
        )
    return config


def cast_paths(monkeypatch, config: models.ModelConfig) -> dict[str, bool]:
    """Return for each parameter of the layers whether it is cast before them."""
    found = {}

    def cast_stacks(stacks, dtype, layers):
        cast = narrow.cast_stacks(stacks, dtype, layers)
        for (path, old), new in zip(
            jax.tree.leaves_with_path(stacks), jax.tree.leaves(cast), strict=True
        ):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            found[name.removeprefix("blocks.0.").removesuffix(".value")] = new.dtype != old.dtype
        return cast

    monkeypatch.setattr(decoder, "cast_stacks", cast_stacks)
    graphdef, params = nnx.split(models.abstract(config))
    jax.eval_shape(lambda p: nnx.merge(graphdef, p).hidden(TOKENS)[0], params)
    return found


def test_which_parameters_are_cast(monkeypatch):
    found = cast_paths(monkeypatch, config_of("gla", experts=True))
    narrowed = {name for name, cast in found.items() if cast}
    assert {
        "mixer.q_proj.kernel",
        "mixer.o_proj.kernel",
        "feedforward.up_proj",
        "feedforward.shared.down_proj.kernel",
    } <= narrowed
    assert (
        not {
            "feedforward.router.kernel",
            "mixer.norm.scale",
            "mixer.decay_up.bias",
            "mixer_norm.scale",
        }
        & narrowed
    )
    assert len(found) > len(narrowed)
    monkeypatch.setattr(narrow, "LEAST_SIZE", 10**6)
    assert not any(cast_paths(monkeypatch, config_of("gla")).values())


@pytest.mark.parametrize(
    "changes", [dict(remat="full"), dict(unroll_layers=False), dict(dtype="float32")]
)
def test_other_models_cast_nothing_before_their_layers(monkeypatch, changes):
    config = dataclasses.replace(config_of("gla"), **changes)
    assert cast_paths(monkeypatch, config) == {}


@pytest.mark.parametrize(
    ("kind", "experts"),
    slow_after(3, [("gla", False), ("gla", True), ("rwkv7", False), *((m, False) for m in mixers.METHODS if m not in ("gla", "rwkv7"))]),
)  # fmt: skip
def test_a_cast_before_the_layers_changes_no_gradient(monkeypatch, kind, experts):
    graphdef, shapes = nnx.split(models.abstract(config_of(kind, experts)))
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda p: jnp.asarray(0.2 * draw(p.shape), jnp.float32), shapes)

    def value_and_gradients():
        def loss(params):
            hidden, _, _ = nnx.merge(graphdef, params).hidden(TOKENS)
            return jnp.mean(hidden.astype(jnp.float32) ** 3)

        # Otherwise XLA leaves out roundings where it can, in one program and not in the other.
        lowered = jax.jit(jax.value_and_grad(loss)).lower(params)
        return lowered.compile({"xla_allow_excess_precision": False})(params)

    found = value_and_gradients()
    monkeypatch.setattr(decoder, "cast_stacks", lambda stacks, dtype, layers: stacks)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(value_and_gradients()), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_cast_before_the_layers_has_all_derivatives(monkeypatch):
    """Forward-mode and second derivatives, and `vmap`, of a model whose layers have them: with softmax attention."""
    found = derivatives(config_of("softmax"), TOKENS)
    monkeypatch.setattr(decoder, "cast_stacks", lambda stacks, dtype, layers: stacks)
    wanted = derivatives(config_of("softmax"), TOKENS)
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2 * float(jnp.abs(y).max()))


def test_the_plan_counts_copies_of_frozen_matrices_in_float32(tmp_path):
    """Those in 16 bits have no copy."""
    config = tiny.config(tmp_path, trainable=("lora",), init_from=str(tmp_path))
    config.model = dataclasses.replace(
        config.model, dtype="bfloat16", remat="dots", unroll_layers=True, lora=mixers.LoRAConfig()
    )
    saved = {}
    for config.frozen_dtype in ("bfloat16", "float32"):
        saved[config.frozen_dtype] = plan(config, 1).saved
    _, frozen = split(params_of(models.abstract(config.model)), config.trainable)
    stacks = [x for x in jax.tree.leaves(frozen["periods"]) if x.ndim == 3]
    copies = sum(2 * x.size for x in stacks)
    assert copies > 0 and saved["float32"] - saved["bfloat16"] == copies


def test_a_parameter_that_is_used_twice_or_otherwise_is_not_cast():
    stacks = {
        name: jnp.ones((3, 4, 4))
        for name in ("once", "twice", "wide", "returned", "unused", "scanned", "nested")
    }
    x = jnp.ones(4, jnp.bfloat16)

    @jax.checkpoint
    def nested(kernel):
        return x @ jax.jit(lambda k: k.astype(jnp.bfloat16))(kernel)

    def layers(p):
        y = x @ p["once"].astype(jnp.bfloat16) + nested(p["nested"])
        y = y + x @ p["twice"].astype(jnp.bfloat16) @ p["twice"].astype(jnp.bfloat16)
        y = y + x @ p["wide"].astype(jnp.bfloat16) + jnp.sum(p["wide"])
        y, _ = jax.lax.scan(
            lambda y, _: (y @ p["scanned"].astype(jnp.bfloat16), None), y, None, length=2
        )
        return y, p["returned"].astype(jnp.bfloat16), p["returned"]

    cast = narrow.cast_stacks(stacks, jnp.bfloat16, layers)
    assert {name for name, value in cast.items() if value.dtype == jnp.bfloat16} == {
        "once",
        "nested",
    }


def test_no_parameter_is_cast_to_a_wider_dtype():
    """A function that multiplies in float32 reads a matrix of bfloat16 as it is stored."""
    x = jnp.ones((2, 4), jnp.float32)
    for stored, product, expected in (
        (jnp.float32, jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, jnp.float32, jnp.bfloat16),
    ):
        matrix = jnp.ones((4, 3), stored)
        function = lambda m, dtype=product: x.astype(dtype) @ m.astype(dtype)  # noqa: E731
        assert narrow.cast_in_advance(matrix, product, function).dtype == expected
