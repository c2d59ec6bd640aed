"""Tests of PaTH attention: it is compared with the authors' code, values and all gradients, and with the kinds of attention
that it equals in special cases.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import mixers, ops
from tests.mixers import goldens
from tests.mixers.conftest import Small
from tests.mixers.goldens import SLOW
from tests.mixers.test_mixers import close


def random_inputs():
    """Return queries, keys, values, unit directions [B, T, H, K] and strengths in (0, 2) [B, T, H], B 2 and T 13."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, w = (jax.random.normal(key, (2, 13, 2, 8)) for key in keys[:4])
    beta = 2 * jax.random.uniform(keys[4], (2, 13, 2))
    return q, k, v, w / jnp.linalg.norm(w, axis=-1, keepdims=True), beta


@pytest.mark.parametrize("form", ["chunk", SLOW[0]])
@pytest.mark.parametrize("name", ["path_attention", "path_attention_forget"])
def test_path_attention_is_the_published_one(name, form):
    """The scale of the golden's scores multiplies the log gates too."""

    def run(g):
        gates = 8**-0.5 * g["g"] if "g" in g else None
        arrays = (g[n] for n in ("q", "k", "v", "w", "beta"))
        o, _ = ops.path_attention(*arrays, log_forget=gates, form=form, chunk_size=4)
        return dict(o=o)

    goldens.check(name, run)


def test_without_strength_it_is_softmax_or_forgetting_attention():
    q, k, v, w, beta = random_inputs()
    gates = -jax.random.uniform(jax.random.key(7), (2, 13, 2))
    for log_forget in (None, gates):
        o, _ = ops.path_attention(q, k, v, w, 0 * beta, log_forget=log_forget, chunk_size=4)
        close(o, ops.attention(q, k, v, log_forget=log_forget)[0], 1e-6)


def test_reflections_in_one_direction_depend_on_the_parity_of_the_distance():
    """β = 2 with one w for all tokens reflects keys once for each token between: twice is not at all."""
    q, k, v, w, beta = random_inputs()
    one = jnp.broadcast_to(w[:, :1], w.shape)
    o, _ = ops.path_attention(q, k, v, one, 2 + 0 * beta, chunk_size=4)
    reflected = k - 2 * jnp.sum(k * one, axis=-1, keepdims=True) * one
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    odd = jnp.einsum("bthk,bshk->bhts", q, reflected)
    t = jnp.arange(13)
    distance = t[:, None] - t
    scores = jnp.where(distance % 2 == 1, odd, scores) * 8**-0.5
    weights = jax.nn.softmax(jnp.where(distance >= 0, scores, -jnp.inf), axis=-1)
    close(o, jnp.einsum("bhts,bshv->bthv", weights, v))


def test_the_chunk_size_changes_nothing():
    arguments = random_inputs()
    expected = ops.path_attention(*arguments, form="recurrent")
    for size in (1, 2, 16):
        close(ops.path_attention(*arguments, chunk_size=size), expected, 1e-6)


def test_a_layer_with_gates_decodes_what_it_was_trained_on():
    """The table of methods tests the layer without gates, with as many heads of keys as of queries."""
    small = Small(
        mixers.get_method("path"), stirred=True,
        forget_gate=True, qk_norm=True, num_kv_heads=2, rank=None,
    )  # fmt: skip
    whole, final = small(state=small.state())
    state, outputs = small.state(), []
    for part in (slice(0, 5), slice(5, 6), slice(6, 10)):
        y, state = small(small.x[:, part], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), whole)
    close(state, final)
    close(small()[0], whole)
    keys = final.memory.keys
    assert keys.dtype == jnp.float32 and keys.shape == (2, 10, 2, 8)


def test_tokens_beyond_the_capacity_give_nan():
    q, k, v, w, beta = random_inputs()
    state = ops.path_attention_state(2, 9, 2, 8, 8)
    o, _ = ops.path_attention(q, k, v, w, beta, initial_state=state, chunk_size=4)
    assert np.isfinite(o[:, :9]).all() and np.isnan(o[:, 9:]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(w=jnp.ones((2, 13, 1, 8))), "w has shape (2, 13, 1, 8); accepted is [B, T, Hk, K]"),
        (dict(beta=jnp.ones((2, 13))), "beta has shape (2, 13); accepted is [B, T, G]"),
        (dict(log_forget=jnp.ones(2)), "log_forget has values up to 1"),
        (dict(form="associative"), "form='associative'; accepted are 'recurrent', 'chunk'"),
        (dict(initial_state=ops.attention_state(2, 9, 2, 8, 7)), "initial_state.values has shape"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, message):
    q, k, v, w, beta = random_inputs()
    with pytest.raises(ValueError) as error:
        functools.partial(ops.path_attention, q, k, v)(**dict(w=w, beta=beta) | change)
    assert message in str(error.value)
