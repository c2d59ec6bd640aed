"""Tests of log-linear attention: it is compared with the authors' code, values, states and all gradients, and with the
parents that it equals if all levels have the same weight.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import mixers, ops
from tests.mixers import goldens
from tests.mixers.goldens import SLOW
from tests.mixers.test_mixers import close
from tests.mixers.test_new_delta_rules import random_inputs


@pytest.mark.parametrize("form", ["chunk", SLOW[0]])
@pytest.mark.parametrize("name", ["mamba2", "gdn", "mamba2_recurrent", "gdn_recurrent"])
def test_log_linear_attention_is_the_published_recurrence(name, form):
    """The golden's recurrent code also stores the memories of all levels after the last token."""

    def run(g):
        golden = goldens.load(f"log_linear_{name}")
        given = {n: g.get(n, golden.get(n)) for n in ("q", "k", "v", "level_scales", "beta", "g")}
        given["log_decay"] = given.pop("g")
        o, state = ops.log_linear_memory(**given, scale=1.0, form=form, chunk_size=4)
        return dict(o=o, final_states=state.memory)

    if name.endswith("recurrent"):
        with jax.enable_x64(True):
            results = run({})
        golden = goldens.load(f"log_linear_{name}")
        for n, actual in results.items():
            np.testing.assert_allclose(actual, golden[n], rtol=0, atol=1e-10)
    else:
        goldens.check(f"log_linear_{name}", run)


@pytest.mark.parametrize("rule", ["delta", "linear"])
def test_equal_weights_are_the_parent(rule):
    """The levels' final memories add up to the parent's, and their outputs too."""
    q, k, v, beta, log_decay = random_inputs()
    scales = jnp.ones((*v.shape[:3], 6))
    if rule == "delta":
        o, state = ops.log_linear_memory(q, k, v, scales, beta, log_decay, chunk_size=4)
        expected, parent = ops.delta_memory(q, k, v, beta, log_decay)
    else:
        o, state = ops.log_linear_memory(q, k, v, scales, None, log_decay, chunk_size=4)
        expected, parent = ops.linear_memory(q, k, v, log_decay)
    close(o, expected, 1e-6)
    close(jnp.sum(state.memory, axis=2), parent.memory, 1e-6)
    assert (state.position == 13).all()


def test_level_zero_is_the_token_itself():
    q, k, v, _, log_decay = random_inputs()
    scales = jnp.zeros((*v.shape[:3], 6)).at[..., 0].set(1.0)
    o, _ = ops.log_linear_memory(q, k, v, scales, None, log_decay, scale=1.0, chunk_size=4)
    close(o, jnp.sum(q * k, axis=-1, keepdims=True) * v, 1e-6)


def test_levels_contain_powers_of_two_of_tokens():
    """After 2^l + 1 tokens one level contains the whole past; after 13 tokens the levels contain 1, 4 and 8."""
    _, k, _, _, _ = random_inputs()
    ones = jnp.ones((*k.shape[:3], 1))

    def contents(tokens):
        count = ones[:, :tokens]
        scales = jnp.ones((*count.shape[:3], 6))
        state = ops.log_linear_memory(count, count, count, scales, chunk_size=4)[1]
        return np.asarray(state.memory[0, 0, :, 0, 0])

    np.testing.assert_array_equal(contents(9), [1, 0, 0, 0, 8, 0])
    np.testing.assert_array_equal(contents(13), [1, 0, 0, 4, 8, 0])
    np.testing.assert_array_equal(contents(12), [1, 1, 2, 0, 8, 0])


def test_memories_of_levels_grow_with_the_logarithm_of_the_row():
    """A memory for each of 15 levels serves 16,384 tokens; one level more serves twice as many."""
    config = mixers.LogLinearGatedDeltaNetConfig(num_heads=2, head_dim=8)
    mixer = mixers.build(config, 32)
    state = mixer.init_state(1, 16384, jnp.float32)
    assert state.memory.memory.shape == (1, 2, 15, 8, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(level_scales=jnp.ones((2, 13, 3, 6))), "level_scales has shape (2, 13, 3, 6)"),
        (dict(level_scales=jnp.ones((2, 13, 2, 0))), "no axis may be empty"),
        (dict(beta=jnp.ones((2, 13, 1))), "beta has shape (2, 13, 1); accepted is [B, T, G]"),
        (dict(log_decay=jnp.ones((2, 13, 2))), "log_decay has values up to 1"),
        (dict(form="associative"), "form='associative'; accepted are 'recurrent', 'chunk'"),
        (dict(initial_state=ops.delta_state(2, 2, 8, 6)), "is a DeltaState; accepted are LogLinearState"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, message):
    q, k, v, beta, log_decay = random_inputs()
    given = dict(level_scales=jnp.ones((*v.shape[:3], 6)), beta=beta, log_decay=log_decay)
    with pytest.raises(ValueError) as error:
        functools.partial(ops.log_linear_memory, q, k, v)(**given | change)
    assert message in str(error.value)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(4, 8), (8, 4)])
def test_levels_are_read_from_the_smaller_side_with_equal_gradients(key_dim, value_dim):
    """The chunked form reads all levels by one product where keys have fewer channels than values."""
    rng = np.random.default_rng(5)
    q, k = (jnp.asarray(rng.normal(size=(2, 13, 2, key_dim))) for _ in range(2))
    arguments = dict(
        q=q,
        k=k / jnp.linalg.norm(k, axis=-1, keepdims=True),
        v=jnp.asarray(rng.normal(size=(2, 13, 2, value_dim))),
        level_scales=jnp.asarray(rng.uniform(size=(2, 13, 2, 5))),
        beta=jnp.asarray(rng.uniform(0, 2, size=(2, 13, 2))),
        log_decay=jnp.asarray(-rng.uniform(size=(2, 13, 2))),
    )  # fmt: skip

    def loss(arguments, form):
        o, state = ops.log_linear_memory(**arguments, form=form, chunk_size=4)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state.memory))

    with jax.enable_x64(True):
        arguments = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), arguments)
        actual, expected = (jax.value_and_grad(loss)(arguments, f) for f in ("chunk", "recurrent"))
    close(actual[0], expected[0], 1e-10)
    for name in arguments:
        close(actual[1][name], expected[1][name], 1e-10)


@pytest.mark.parametrize(("key_dim", "value_dim", "most"), [(16, 32, 6), (32, 16, 8)])
def test_the_backward_pass_stores_few_arrays_of_the_size_of_the_memories(key_dim, value_dim, most):
    """With the reads of each level and the intermediate arrays of updates they would be 17.2 and 14.3 times the memories of
    all levels, and with the memories of levels that no row of aligned chunks reads apart more than 8.8 and 10.5 times.
    """
    rows, length, heads, levels = 4, 1024, 2, 12

    def shape(*sizes):
        return jax.ShapeDtypeStruct((rows, length, heads, *sizes), jnp.float32)

    def loss(q, k, v, scales, beta):
        return jnp.sum(ops.log_linear_memory(q, k, v, scales, beta, chunk_size=32)[0] ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=range(5))).lower(
        shape(key_dim), shape(key_dim), shape(value_dim), shape(levels), shape()
    ).compile()  # fmt: skip
    memories = 4 * rows * (length // 32) * heads * levels * key_dim * value_dim
    assert compiled.memory_analysis().temp_size_in_bytes < most * memories


@pytest.mark.parametrize("levels", [2, 5, 9])
@pytest.mark.parametrize(("length", "chunk"), [(8, 8), (9, 8), (37, 4), (37, None)])
def test_rows_without_a_state_equal_rows_with_an_empty_one(length, chunk, levels):
    """Without a state only the levels that a row fills are computed, and chunks start at multiples of their size."""
    rng = np.random.default_rng(7)
    shape = (2, length, 2)
    unit = rng.normal(size=(*shape, 4))
    arguments = dict(
        q=rng.normal(size=(*shape, 4)),
        k=unit / np.linalg.norm(unit, axis=-1, keepdims=True),
        v=rng.normal(size=(*shape, 6)),
        level_scales=rng.uniform(size=(*shape, levels)),
        beta=rng.uniform(0, 2, size=shape),
        log_decay=-rng.uniform(size=shape),
    )

    def loss(arguments, state):
        o, state = ops.log_linear_memory(**arguments, initial_state=state, chunk_size=chunk)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state.memory + 1)), (o, state)

    with jax.enable_x64(True):
        arguments = {n: jnp.asarray(x) for n, x in arguments.items()}
        empty = ops.log_linear_state(2, 2, levels, 4, 6, dtype=jnp.float64)
        run = jax.jit(jax.grad(loss, has_aux=True))
        for x, y in zip(*(jax.tree.leaves(run(arguments, s)) for s in (None, empty)), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)
