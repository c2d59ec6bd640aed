"""Tests of Based, HGRN, RG-LRU, ABC and LightNet: each is compared with its authors' code or definition, values, states and
all gradients, and with the special cases that it has.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, ops
from lsm_jax.mixers.abc_attention import bounded_memory
from lsm_jax.mixers.based import taylor_features
from lsm_jax.mixers.elementwise import elementwise_memory
from lsm_jax.mixers.lightnet import mean_memory
from lsm_jax.mixers.rg_lru import gated_input, root_of_positive
from tests.mixers import goldens
from tests.mixers.test_mixers import close


def normal(index, *shape):
    return jax.random.normal(jax.random.key(index), shape)


def mean_so_far(v):
    """Return the mean of v [B, T, ...] over the tokens up to each token."""
    count = jnp.arange(1, v.shape[1] + 1).reshape(1, -1, *(1,) * (v.ndim - 2))
    return jnp.cumsum(v, axis=1) / count


# ------------------------------------------------------------------------------------------------------------- Based


def based(q, k, v):
    features = (taylor_features(x) for x in (q, k))
    return ops.linear_memory(*features, v, scale=1.0, normalize=1e-6, chunk_size=4)[0]


def test_based_is_the_published_recurrence():
    goldens.check("based", lambda g: dict(o=based(g["q"], g["k"], g["v"])))


def test_features_of_based_are_a_taylor_expansion():
    q, k = normal(0, 5, 8), normal(1, 5, 8)
    s = jnp.sum(q * k, axis=-1) * 8**-0.5
    close(jnp.sum(taylor_features(q) * taylor_features(k), axis=-1), 1 + s + s * s / 2)
    v = normal(2, 2, 9, 2, 6)
    q, k = normal(3, 2, 9, 2, 8), normal(4, 2, 9, 2, 8)
    close(based(0 * q, k, v), mean_so_far(v))
    close(based(q, k, jnp.ones_like(v)), jnp.ones_like(v))


# ---------------------------------------------------------------------------------------------------- HGRN and RG-LRU


def selective_state(memory):
    return ops.SelectiveState(memory[..., None], jnp.ones(memory.shape[0], jnp.int32))


def test_hgrn_is_the_published_recurrence():
    def run(g):
        state = selective_state(g["initial_state"])
        o, state = elementwise_memory(g["x"], g["g"], initial_state=state, chunk_size=4)
        return dict(o=o, final_state=state.memory[..., 0])

    goldens.check("hgrn", run)


def test_hgrn_with_a_forgetting_mean():
    v, count = normal(0, 2, 9, 6), jnp.arange(1.0, 10)[:, None]
    log_f = jnp.broadcast_to(jnp.log(jnp.maximum(1 - 1 / count, 1e-30)), v.shape)
    close(elementwise_memory(v / count, log_f, chunk_size=4)[0], mean_so_far(v))


def test_rg_lru_is_the_published_recurrence():
    """The row of the golden continues a document, and a second document begins at its token `begins_at`."""
    begins = int(goldens.load("rg_lru")["begins_at"])
    ids = jnp.tile(1 + (jnp.arange(19) >= begins), (2, 1)).astype(jnp.int32)
    first = (jnp.arange(19) == begins)[None, :, None]

    def run(g):
        x = g["x"].reshape(2, 19, 2, 4)

        def gate(name):
            y = jnp.einsum("bthk,hkf->bthf", x, g[f"{name}_w"]) + g[f"{name}_b"]
            return jax.nn.sigmoid(y.reshape(g["x"].shape))

        written = gated_input(g["x"], gate("a"), gate("input"), g["a_param"], first)
        state = selective_state(g["initial_state"])
        y, state = elementwise_memory(**written, segment_ids=ids, initial_state=state, chunk_size=4)
        return dict(y=y, final_state=state.memory[..., 0])

    goldens.check("rg_lru", run)


def test_gates_of_rg_lru_hold_or_replace_the_memory():
    x, one = normal(0, 2, 5, 6), jnp.ones((2, 5, 6))
    rate, later = jnp.full(6, 3.0), jnp.zeros((2, 5, 1), bool)
    start = selective_state(normal(1, 2, 6))
    kept, _ = elementwise_memory(**gated_input(x, 0 * one, one, rate, later), initial_state=start)
    close(kept, jnp.broadcast_to(start.memory[:, None, :, 0], x.shape))
    replaced = gated_input(x, 50 * one, one, rate, later)
    close(elementwise_memory(**replaced, initial_state=start)[0], x)
    slopes = jax.vmap(jax.grad(root_of_positive))(jnp.array([0.0, 1e-12, 0.25]))
    np.testing.assert_allclose(slopes, [1000, 1000, 1], rtol=1e-6)


def test_rg_lru_starts_between_its_radii():
    mixer = mixers.build(mixers.RGLRUConfig(num_heads=4), 64, rngs=nnx.Rngs(0))
    radius = jnp.exp(-jax.nn.softplus(mixer.rate[...]))
    assert 0.9 <= radius.min() < 0.93 and 0.98 < radius.max() <= 0.999


# ---------------------------------------------------------------------------------------------------- ABC and LightNet


def test_abc_is_the_published_recurrence():
    def run(g):
        o, state = bounded_memory(g["q"], g["k"], g["v"], g["s"], chunk_size=4)
        return dict(o=o, final_keys=state.keys, final_values=state.values)

    goldens.check("abc", run)


def test_lightnet_is_its_definition():
    def run(g):
        o, state = mean_memory(g["q"], g["k"], g["v"], chunk_size=4)
        return dict(o=o, final_state=state.memory, final_log_normalizer=state.weight)

    goldens.check("lightnet", run)


def test_equal_weights_are_running_means():
    q, k, v = normal(0, 2, 9, 2, 8), normal(1, 2, 9, 2, 8), normal(2, 2, 9, 2, 6)
    _, slots = bounded_memory(q, k, v, 0 * normal(3, 2, 9, 2, 5), chunk_size=4)
    close(slots.keys, jnp.repeat(jnp.mean(k, axis=1)[..., None], 5, axis=-1))
    o, _ = mean_memory(q, 0 * k + k[:, :1], v, chunk_size=4)
    close(o, jnp.sum(q, axis=-1, keepdims=True) * 8**-0.5 * mean_so_far(v))


def reference_logsumexp(x, ids, mask, begun):
    """Return z and z_{t-1} - z_t of one row x [T, D], and the last z, by the definition."""
    z, difference, total, last = x.copy(), np.zeros_like(x), begun, 1
    for t in range(len(x)):
        if ids[t] and ids[t] != last:
            total, last = None, ids[t]
        if ids[t] and mask[t]:
            z[t] = x[t] if total is None else np.logaddexp(total, x[t])
            difference[t] = 0 if total is None else total - z[t]
            total = z[t]
    return z, difference, total


def test_running_logsumexp():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 13, 3)) * 20
    ids = np.array([[1] * 5 + [0] + [2] * 7, [0, 1, 1] + [3] * 6 + [0] * 4])
    mask = rng.random((2, 13)) < 0.7
    begun = rng.normal(size=(2, 3))
    expected = [reference_logsumexp(*row) for row in zip(x, ids, mask, begun, strict=True)]
    real = (ids != 0) & mask
    with jax.enable_x64(True):
        state = ops.LogSumExpState(begun, np.ones((2, 3)), np.array([1, 1], np.int32))
        state = jax.tree.map(jnp.asarray, state)
        parts, rows = [], dict(segment_ids=ids, update_mask=mask)
        for part in (slice(0, 1), slice(1, 8), slice(8, 13)):
            given = {n: jnp.asarray(a[:, part]) for n, a in rows.items()}
            *out, state = ops.running_logsumexp(
                jnp.asarray(x[:, part]), initial_state=state, **given
            )
            parts.append(out)
    z, difference = (np.concatenate(p, axis=1) for p in zip(*parts, strict=True))
    for row, (a, b, last) in enumerate(expected):
        np.testing.assert_allclose(z[row][real[row]], a[real[row]], rtol=1e-12)
        np.testing.assert_allclose(difference[row][real[row]], b[real[row]], atol=1e-12)
        np.testing.assert_allclose(state.value[row], last, rtol=1e-12)
    assert np.isfinite(z).all() and (difference[~real] == 0).all()


def test_running_logsumexp_by_segment_and_of_nothing():
    x, ids = normal(0, 1, 6, 2), jnp.array([[2, 1, 2, 0, 1, 2]])
    state = ops.logsumexp_state(1, 2, num_segments=3)

    def run(x):
        return ops.running_logsumexp(x, initial_state=state, segment_ids=ids)

    z, _, after = run(x)
    for segment in (1, 2):
        tokens = x[0, ids[0] == segment]
        expected = jax.lax.associative_scan(jnp.logaddexp, tokens)
        close(z[0, ids[0] == segment], expected)
        close(after.value[0, segment - 1], expected[-1])
    assert not after.filled[0, 2].any() and not after.value[0, 2].any()
    slope = jax.grad(lambda x: jnp.sum(run(x)[0][:, :3]) + jnp.sum(run(x)[2].value))(x)
    assert jnp.isfinite(slope).all() and (slope != 0).any()


def test_running_logsumexp_names_the_argument():
    with pytest.raises(ValueError, match="running_logsumexp: x has shape"):
        ops.running_logsumexp(jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="running_logsumexp: initial_state.value has shape"):
        ops.running_logsumexp(jnp.zeros((2, 3, 4)), initial_state=ops.logsumexp_state(2, 5))
