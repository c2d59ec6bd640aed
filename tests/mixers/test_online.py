"""Tests of TTT and Titans: their outputs are compared with the published recurrences in numpy, the gradient
of their inner loss with complex steps, and a special case with DeltaNet, which they equal there.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from lsm_jax.mixers import METHODS
from lsm_jax.ops.online.inner_models import Layer, apply_layer, finish_inner, gradients
from tests.mixers.conftest import Small
from tests.mixers.test_mixers import close
from tests.mixers.test_variants import dense, rms, silu


def array(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def layer_norm(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def convolved(layer, x):
    """Return the short convolution of x by the layer's kernel, without the activation."""
    weight = array(layer.weight)
    padded = np.concatenate([np.zeros((len(weight) - 1, x.shape[1])), x])
    y = sum(weight[i] * padded[i : i + len(x)] for i in range(len(weight)))
    return y if layer.bias is None else y + array(layer.bias)


def slopes(loss, weights):
    """Return the gradient of `loss(weights)` for each array of a list `weights`, entry by entry, from steps
    along the imaginary axis.
    """
    found = []
    for i, w in enumerate(weights):
        slope = np.zeros(w.shape)
        for place in np.ndindex(*w.shape):
            moved = [x.astype(complex) for x in weights]
            moved[i][place] += 1e-30j
            slope[place] = loss(moved).imag / 1e-30
        found.append(slope)
    return found


@pytest.mark.parametrize("name", ["ttt_linear", pytest.param("ttt_mlp", marks=pytest.mark.slow)])
def test_ttt_is_the_published_recurrence(name):
    small = Small(METHODS[name], stirred=True, mini_batch=4)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    heads, size, batch = small.config.num_heads, 32 // small.config.num_heads, 4
    turn = (np.arange(10) % batch)[:, None] * 10000.0 ** (-np.arange(size // 2) / (size // 2))

    def rotated(y):
        pairs = y.reshape(10, heads, 2, size // 2)
        z = (pairs[:, :, 0] + 1j * pairs[:, :, 1]) * np.exp(1j * turn)[:, None]
        return np.concatenate([z.real, z.imag], axis=-1)

    shared = dense(mixer.qk_proj, x)
    q, k = rotated(convolved(mixer.q_conv, shared)), rotated(convolved(mixer.k_conv, shared))
    v = dense(mixer.v_proj, x).reshape(10, heads, size)
    rate = sigmoid(dense(mixer.lr_proj, x) + array(mixer.lr_proj.bias))
    rate = small.config.base_lr * rate / size
    c = np.maximum(0, 1 / np.arange(1, batch + 1) + array(mixer.coefficients))
    scale, bias = array(mixer.inner_norm_scale), array(mixer.inner_norm_bias)
    o = np.zeros((10, heads, size))
    for h in range(heads):

        def answer(weights, x, h=h):
            for i in range(0, len(weights), 2):
                x = (gelu(x) if i else x) @ weights[i] + weights[i + 1]
            return layer_norm(x, scale[h], bias[h])

        weights = []
        for w, b in zip(mixer.inner_weights, mixer.inner_biases, strict=True):
            weights += [array(w)[h], array(b)[h]]
        for t in range(10):
            if t % batch == 0:
                start, total = weights, [np.zeros(w.shape) for w in weights]

            def loss(w, t=t, h=h, answer=answer):
                return 0.5 * ((answer(w, k[t, h]) - (v[t, h] - k[t, h])) ** 2).sum()

            steps = slopes(loss, start)
            total = [a + rate[t, h] * s for a, s in zip(total, steps, strict=True)]
            weights = [w - c[t % batch] * a for w, a in zip(start, total, strict=True)]
            o[t, h] = q[t, h] + answer(weights, q[t, h])
    normed = layer_norm(o.reshape(10, -1), array(mixer.norm.scale)[0], array(mixer.norm.bias)[0])
    y = dense(mixer.o_proj, normed * gelu(dense(mixer.g_proj, x)))
    close(small()[0][0], y)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_titans_is_the_published_recurrence(depth, norm):
    fields = dict(mini_batch=4, memory_depth=depth, inner_norm=norm)
    small = Small(METHODS["titans"], stirred=True, **fields)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    heads, size = small.config.num_heads, 32 // small.config.num_heads

    def projected(name):
        y = silu(
            convolved(getattr(mixer, f"{name}_conv"), dense(getattr(mixer, f"{name}_proj"), x))
        )
        return y.reshape(10, heads, size)

    q, k, v = map(projected, "qkv")
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    theta = sigmoid(dense(mixer.lr_proj, x) + array(mixer.lr_proj.bias))
    eta = sigmoid(dense(mixer.momentum_proj, x) + array(mixer.momentum_proj.bias))
    alpha = sigmoid(dense(mixer.decay_proj, x) + array(mixer.decay_bias))
    o = np.zeros((10, heads, size))
    for h in range(heads):

        def answer(weights, x, h=h):
            y = x
            for i, w in enumerate(weights):
                y = (gelu(y) if i else y) @ w
            if not norm:
                return y
            scale, bias = array(mixer.inner_norm.scale), array(mixer.inner_norm.bias)
            return x + layer_norm(y, scale[h], bias[h])

        memory = [array(w)[h] for w in mixer.inner_weights]
        surprise = [np.zeros(w.shape) for w in memory]
        for t in range(10):
            if t % 4 == 0:
                start = memory

            def loss(w, t=t, h=h, answer=answer):
                return ((answer(w, k[t, h]) - v[t, h]) ** 2).mean()

            for i, s in enumerate(slopes(loss, start)):
                surprise[i] = eta[t, h] * surprise[i] - theta[t, h] * s
            memory = [(1 - alpha[t, h]) * m + s for m, s in zip(memory, surprise, strict=True)]
            o[t, h] = answer(memory, q[t, h])
    gated = rms(o) * array(mixer.norm.scale)
    gated = gated * silu(dense(mixer.g_proj, x).reshape(10, heads, size))
    close(small()[0][0], dense(mixer.o_proj, gated.reshape(10, -1)))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("sizes", [(6, 5), (6, 7, 5)])
def test_the_inner_gradient_is_that_of_the_inner_loss(sizes, norm):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)

        def draw(*shape):
            return jnp.asarray(rng.normal(size=shape))

        layers = tuple(Layer(draw(3, 2, a, b), draw(3, 2, b)) for a, b in itertools.pairwise(sizes))
        inner = ops.Inner((), None, *((draw(2, 5), draw(2, 5)) if norm else (None, None)))
        k, target = draw(3, 2, 4, 6), draw(3, 2, 4, 5)
        highest = jax.lax.Precision.HIGHEST

        def loss(layers):
            x = k
            for i, layer in enumerate(layers):
                x = apply_layer(layer, x if i == 0 else jax.nn.gelu(x), highest)
            return 0.5 * jnp.sum((finish_inner(inner, x, 1e-6) - target) ** 2)

        inputs, found = jax.jit(lambda: gradients(inner, layers, k, target, 1e-6, highest))()
        expected = jax.jit(jax.grad(loss))(layers)
        for x, g, wanted in zip(inputs, found, expected, strict=True):
            weight = np.einsum("bgck,bgcv->bgkv", x, g)
            np.testing.assert_allclose(
                weight, wanted.weight, rtol=0, atol=1e-12 * np.abs(weight).max()
            )
            np.testing.assert_allclose(g.sum(axis=2), wanted.bias, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("rule", ["ttt", "titans"])
def test_a_matrix_without_norm_on_single_tokens_is_deltanet(form, rule):
    """TTT and Titans with one weight matrix, no norm and mini-batches of one token equal DeltaNet; Titans
    with a momentum of 0 and a decay of 1.
    """
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.normal(size=(2, 11, 3, 4))) for _ in range(3))
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        beta = jnp.asarray(rng.uniform(0, 1, size=(2, 11, 3)))
        inner = ops.Inner((jnp.zeros((3, 4, 4)),))
        gates = {}
        if rule == "titans":
            gates = dict(log_momentum=jnp.full_like(beta, -800.0), log_decay=jnp.zeros_like(beta))
        output, state = ops.online_memory(q, k, v, inner, beta, mini_batch=1, form=form, **gates)
        expected, after = ops.delta_memory(q, k, v, beta, scale=1.0)
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.start[0].weight, after.memory, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ttt_linear", "ttt_mlp", "titans"])
def test_calls_may_end_anywhere_in_a_mini_batch(name):
    deep = dict(memory_depth=2, inner_norm=True) if name == "titans" else {}
    small = Small(METHODS[name], stirred=True, mini_batch=4, **deep)
    whole, final = small(state=small.state())
    for cuts in ([0, 1, 2, 9, 10], [0, 3, 8, 10], [0, 6, 7, 10]):
        state, outputs = small.state(), []
        for a, b in itertools.pairwise(cuts):
            y, state = small(small.x[:, a:b], state=state)
            outputs.append(y)
        close(jnp.concatenate(outputs, axis=1), whole)
        close(state, final)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_masked_tokens_read_and_take_no_place(form):
    """In TTT and Titans a masked token takes no place in a mini-batch. A masked token between tokens 5 and 6
    of a document reads the same weights as token 5, or those at the start of the next mini-batch if token
    5 was the last of one.
    """
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.normal(size=(1, 9, 2, 4))) for _ in range(3))
        eta = jnp.full((1, 9, 2), 0.1)
        inner = ops.Inner((jnp.asarray(rng.normal(size=(2, 4, 4))),))
        options = dict(mini_batch=3, coefficients=jnp.array([1.0, 0.5, 0.25]), form=form)
        keep = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1])
        output, state = ops.online_memory(q, k, v, inner, eta, update_mask=keep[None], **options)
        for t in range(9):
            seen = [s for s in range(t + 1) if keep[s]]
            rows = np.array(seen + [t] if not keep[t] else seen)
            # If the reading token were appended with a step of 0 it would be a member of the mini-batch. It
            # continues from the state instead.
            before, own = None, rows
            if not keep[t]:
                own = np.array([t])
                if seen:
                    _, before = ops.online_memory(
                        *(x[:, np.array(seen)] for x in (q, k, v)),
                        inner,
                        eta[:, : len(seen)],
                        **options,
                    )
            one, _ = ops.online_memory(
                *(x[:, own] for x in (q, k, v)), inner, eta[:, : len(own)], initial_state=before,
                update_mask=None if keep[t] else np.zeros((1, 1)), **options,
            )  # fmt: skip
            np.testing.assert_allclose(output[:, t], one[:, -1], rtol=0, atol=1e-12)
        assert state.position.tolist() == [5 % 3]


def test_wrong_arguments_are_named():
    x, eta = jnp.zeros((1, 4, 2, 4)), jnp.zeros((1, 4, 2))
    inner = ops.Inner((jnp.zeros((2, 4, 4)),))
    for change, words in (
        (dict(form="associative"), "form='associative'; accepted are 'recurrent', 'chunk'"),
        (dict(mini_batch=0), "mini_batch=0"),
        (dict(log_decay=eta), "log_momentum is missing"),
        (dict(coefficients=jnp.ones(3)), r"coefficients has shape \(3,\)"),
        (dict(coefficients=jnp.ones(16), log_decay=eta, log_momentum=eta), "coefficients are given with"),
        (dict(inner=ops.Inner((jnp.zeros((2, 4, 3)),))), r"inner.weights\[0\] has shape"),
        (dict(inner=inner._replace(norm_scale=jnp.ones((2, 4)))), "give both or neither"),
        (dict(initial_state=ops.online_state(1, 2, (4, 4), bias=True)), r"initial_state holds .*bias.*; accepted with"),
        (dict(initial_state=ops.online_state(1, 2, (4, 5))), "initial_state.start"),
    ):  # fmt: skip
        arguments = dict(inner=inner) | change
        with pytest.raises(ValueError, match=words):
            ops.online_memory(x, x, x, eta=eta, **arguments)
