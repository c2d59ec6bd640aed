"""Complete mixers are compared with numpy, token by token; and options that no other test covers.

The norm of each head has an epsilon of 1, since a norm with a small one would hide a wrong factor of a head's
output.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.mixers import METHODS
from tests.mixers.conftest import LENGTH, WIDTH, Small
from tests.mixers.test_linear_memories import sigmoid, softmax, wide
from tests.mixers.test_mixers import close
from tests.mixers.test_variants import convolved, dense, silu


def build(name: str, **fields) -> tuple[Small, np.ndarray]:
    """Return a small mixer of the method `name`, as the second of two layers, and the first row [T, D] of
    its input.
    """
    small = Small(METHODS[name], stirred=True, norm_eps=1.0, **fields)
    return small, np.asarray(small.x[0], np.float64)


def heads(y, count):
    return y.reshape(LENGTH, count, -1)


def projected(mixer, x, count):
    return (heads(dense(getattr(mixer, f"{n}_proj"), x), count) for n in "qkv")


def memory(q, k, v, log_decay):
    """Compute a linear memory, `M = e^w M + kᵀ v`, `o = q M / √K`, token by token in numpy; the log decay
    w, `log_decay`, broadcasts to [T, H, K].
    """
    log_decay = np.broadcast_to(log_decay, k.shape)
    m, o = np.zeros((*k.shape[1:], v.shape[-1])), np.zeros(v.shape)
    for t in range(LENGTH):
        m = np.exp(log_decay[t])[..., None] * m + k[t][..., None] * v[t][:, None]
        o[t] = np.einsum("hk,hkv->hv", q[t], m) * k.shape[-1] ** -0.5
    return o


def rotated(y):
    half = y.shape[-1] // 2
    turn = np.arange(LENGTH)[:, None] * 10000.0 ** (-np.arange(half) / half)
    z = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * turn)[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def finished(mixer, o, x, gated=True):
    """Return the layer's output y from the heads' reads o: the norm of each head, times silu(x W_g) if
    gated, and the output projection.
    """
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1.0) * wide(mixer.norm.scale)
    if gated:
        o = o * silu(heads(dense(mixer.g_proj, x), o.shape[1]))
    return dense(mixer.o_proj, o.reshape(LENGTH, -1))


def log_sigmoid(x):
    return np.log(sigmoid(x))


def test_gla():
    small, x = build("gla")
    mixer = small.mixer
    gate = dense(mixer.decay_up, dense(mixer.decay_down, x)) + wide(mixer.decay_up.bias)
    o = memory(*projected(mixer, x, 4), log_sigmoid(heads(gate, 4)) / 16)
    close(small()[0][0], finished(mixer, o, x))


def test_retnet():
    small, x = build("retnet", num_heads=4)
    q, k, v = projected(small.mixer, x, 4)
    decay = np.log(1 - 2.0 ** (-5 - np.arange(4)))[:, None]
    close(small()[0][0], finished(small.mixer, memory(rotated(q), rotated(k), v, decay), x))


def test_gated_retention():
    small, x = build("gated_retention", num_heads=4)
    q, k, v = projected(small.mixer, x, 4)
    decay = log_sigmoid(dense(small.mixer.decay_proj, x))[..., None] / 16
    close(small()[0][0], finished(small.mixer, memory(rotated(q), rotated(k), v, decay), x))


def test_lightning():
    small, x = build("lightning", num_heads=4)
    q, k, v = projected(small.mixer, x, 4)
    decay = -(8 / 4) * (1 - 1 / 2) * np.arange(4)[:, None]
    close(small()[0][0], finished(small.mixer, memory(silu(q), silu(k), v, decay), x))


@pytest.mark.parametrize("sums", ["none", "q", "k", "all"])
def test_linear_attention(sums):
    options = dict(
        sum_normalize_q=sums in ("q", "all"),
        sum_normalize_k=sums in ("k", "all"),
        normalize=sums == "all",
    )
    small, x = build("linear_attention", num_heads=2, **options)
    q, k, v = projected(small.mixer, x, 2)
    q, k = (np.where(a > 0, a + 1, np.exp(np.minimum(a, 0))) for a in (q, k))
    if options["sum_normalize_q"]:
        q = q / (q.sum(-1, keepdims=True) + 1e-4)
    if options["sum_normalize_k"]:
        k = k / (k.sum(-1, keepdims=True) + 1e-4)
    o = memory(q, k, v, 0.0)
    if options["normalize"]:
        o = o / (memory(q, k, np.ones((LENGTH, 2, 1)), 0.0) + 1e-10)
    close(small()[0][0], finished(small.mixer, o, x, gated=False))


@pytest.mark.parametrize("negative", [False, True])
def test_deltanet(negative):
    fields = dict(num_heads=2, num_value_heads=4, output_gate=True)
    small, x = build("deltanet", allow_negative_eigenvalues=negative, **fields)
    mixer = small.mixer
    q, k, v = (
        heads(convolved(getattr(mixer, f"{n}_conv"), dense(getattr(mixer, f"{n}_proj"), x)), count)
        for n, count in (("q", 2), ("k", 2), ("v", 4))
    )
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    q, k = (np.repeat(a, 2, axis=1) for a in (q, k))
    beta = sigmoid(dense(mixer.beta_proj, x)) * (2 if negative else 1)
    m, o = np.zeros((4, k.shape[-1], v.shape[-1])), np.zeros(v.shape)
    for t in range(LENGTH):
        error = v[t] - np.einsum("hk,hkv->hv", k[t], m)
        m = m + k[t][..., None] * (beta[t][:, None] * error)[:, None]
        o[t] = np.einsum("hk,hkv->hv", q[t], m) * k.shape[-1] ** -0.5
    close(small()[0][0], finished(mixer, o, x))


def test_gated_deltanet2():
    """With erase gates in (0, 2), and two heads of values for each head of keys."""
    fields = dict(num_heads=2, num_value_heads=4, head_dim=8, allow_negative_eigenvalues=True)
    small, x = build("gated_deltanet2", **fields)
    mixer = small.mixer
    q, k, v = (
        heads(convolved(getattr(mixer, f"{n}_conv"), dense(getattr(mixer, f"{n}_proj"), x)), count)
        for n, count in (("q", 2), ("k", 2), ("v", 4))
    )
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    f = dense(mixer.decay_up, dense(mixer.decay_down, x)) + wide(mixer.dt_bias)
    decay = np.exp(-np.exp(wide(mixer.a_log))[:, None] * np.logaddexp(0, heads(f, 2)))
    erase = 2 * sigmoid(heads(dense(mixer.erase_proj, x), 2))
    q, k, decay, erase = (np.repeat(a, 2, axis=1) for a in (q, k, decay, erase))
    write = sigmoid(heads(dense(mixer.write_proj, x), 4))
    m, o = np.zeros((4, 8, v.shape[-1])), np.zeros(v.shape)
    for t in range(LENGTH):
        m = decay[t][..., None] * m
        error = write[t] * v[t] - np.einsum("hk,hkv->hv", erase[t] * k[t], m)
        m = m + k[t][..., None] * error[:, None]
        o[t] = np.einsum("hk,hkv->hv", q[t], m) * 8**-0.5
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1.0) * wide(mixer.norm.scale)
    gate = dense(mixer.gate_up, dense(mixer.gate_down, x)) + wide(mixer.gate_up.bias)
    y = dense(mixer.o_proj, (o * silu(heads(gate, 4))).reshape(LENGTH, -1))
    close(small()[0][0], y)


def test_based():
    small = Small(METHODS["based"], num_heads=2, feature_dim=4)
    x = np.asarray(small.x[0], np.float64)
    q, k, v = projected(small.mixer, x, 2)
    score = np.einsum("thd,shd->hts", q, k) / 2
    weight = np.tril(1 + score + score**2 / 2)
    o = np.einsum("hts,shv->thv", weight / (weight.sum(-1, keepdims=True) + 1e-6), v)
    close(small()[0][0], dense(small.mixer.o_proj, o.reshape(LENGTH, -1)))


def test_softmax_without_rotation():
    small = Small(METHODS["softmax"], num_heads=4, rope_base=None)
    x = np.asarray(small.x[0], np.float64)
    q, k, v = projected(small.mixer, x, 4)
    scores = np.einsum("thk,shk->hts", q, k) * 8**-0.5
    weights = softmax(np.where(np.tri(LENGTH), scores, -np.inf), -1)
    o = np.einsum("hts,shv->thv", weights, v)
    close(small()[0][0], dense(small.mixer.o_proj, o.reshape(LENGTH, -1)))


def test_heads_that_are_not_rotated_may_be_odd():
    with pytest.raises(ValueError, match="heads of 3 channels; rotation needs an even number"):
        mixers.SoftmaxConfig(num_heads=2, head_dim=3).validate(WIDTH)
    mixers.SoftmaxConfig(num_heads=2, head_dim=3, rope_base=None).validate(WIDTH)
    with pytest.raises(ValueError, match="rope_base=0: it must be greater than 0"):
        mixers.SoftmaxConfig(rope_base=0).validate(WIDTH)


# ------------------------------------------------------------------------------- options that change a single
# part of a mixer


def op_arguments(mixer, x, **shared):
    """Return the arguments that the mixer's method `write` computes from x for its op."""
    context = mixers.Context(1, shared, positions=jnp.zeros(x.shape[:2], jnp.int32))
    _, context = mixer.read(x, context)
    return mixer.write(x, context)[0]


def mixer_and_input(name, **fields):
    """Return a small mixer of the method `name` and its input; if called under `jax.jit`, results that a
    test does not use are not computed.
    """
    config = dataclasses.replace(METHODS[name].config.for_width(WIDTH), **fields)
    mixer = mixers.build(config, WIDTH, rngs=nnx.Rngs(0), init_std=0.2, layer=1, num_layers=2)
    return mixer, jax.random.normal(jax.random.key(1), (2, LENGTH, WIDTH))


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "kda"])
def test_negative_eigenvalues_double_beta(name):
    def beta(negative):
        return op_arguments(*mixer_and_input(name, allow_negative_eigenvalues=negative))["beta"]

    plain, doubled = (jax.jit(lambda n=n: beta(n))() for n in (False, True))
    np.testing.assert_allclose(doubled, 2 * plain, rtol=1e-6)
    assert doubled.max() > 1 > plain.max()


def test_gateloops_gate_gets_its_share_of_the_gradient():
    """GateLoop's option `gate_gradient` multiplies the gate's gradient and does not change the gate."""

    def of_gate(share):
        mixer, x = mixer_and_input("gateloop", gate_gradient=share)

        def loss(mixer):
            gates = op_arguments(mixer, x)
            return jnp.sum(jnp.sin(gates["log_decay"]) + gates["angle"])

        value, gradients = jax.value_and_grad(loss)(mixer)
        return value, gradients.a_proj.kernel[...]

    value, slope = jax.jit(lambda: of_gate(1.0))()
    lower_value, lower_slope = jax.jit(lambda: of_gate(0.25))()
    close(lower_value, value)
    close(lower_slope, 0.25 * slope)
    assert jnp.abs(slope).max() > 0.1


def test_ttts_learned_coefficients_never_turn_negative():
    def coefficients(learned):
        mixer, x = mixer_and_input("ttt_linear", mini_batch=4)
        mixer.coefficients[...] = learned
        return op_arguments(mixer, x)["coefficients"]

    found = jax.jit(coefficients)(jnp.array([0.5, -0.7, 0.25, -0.25]))
    np.testing.assert_allclose(found, [1.5, 0, 1 / 3 + 0.25, 0], atol=1e-6)


def test_rwkv7_moves_its_values_towards_the_first_layers():
    """RWKV7's layer moves its values towards the first layer's by a learned share. The share is small here
    because of a bias, so that the test would fail with one minus the share.
    """

    @jax.jit
    def values():
        mixer, x = mixer_and_input("rwkv7")
        mixer.first.up.bias[...] -= 2.0
        first = jax.random.normal(jax.random.key(3), x.shape)
        down = mixer.first.down.kernel  # starts at zero
        down[...] = 0.1 * jax.random.normal(jax.random.key(4), down[...].shape)
        moved = op_arguments(mixer, x, v_first=first, v_first_layer=0)["v"].reshape(x.shape)
        return mixer, x, first, op_arguments(mixer, x)["v"].reshape(x.shape), moved

    mixer, x, first, own, moved = values()
    x = np.asarray(x, np.float64)
    before = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
    x = x + (before - x) * wide(mixer.mix)[3]
    up, down = mixer.first.up, mixer.first.down
    share = sigmoid(dense(up, dense(down, x)) + wide(up.bias))
    assert share.max() < 0.5
    close(moved, own + (first - own) * share)
