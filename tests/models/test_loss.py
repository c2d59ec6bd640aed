"""Tests of the next-token loss computed in chunks: it equals the loss from all logits, gradients included,
and never stores all logits.
"""

from __future__ import annotations

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import models
from lsm_jax.models.loss import log_sum_exp_in_one_pass
from tests.mixers.test_mixers import close

B, T, D, V = 2, 13, 8, 37


def inputs(width=D, vocabulary=V):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (B, T, width))
    head = jax.random.normal(keys[1], (width, vocabulary))
    labels = jax.random.randint(keys[2], (B, T), 0, vocabulary)
    mask = (jax.random.uniform(keys[3], (B, T)) < 0.7).astype(jnp.float32)
    return hidden, head, labels, mask


def naive(hidden, head, labels, mask, cap=None):
    logits = jnp.einsum("btd,dv->btv", hidden, head, precision="highest")
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    return -own * mask


@pytest.mark.parametrize(("chunk_size", "cap"), [(1, None), (8, None), (1000, None), (8, 2.5)])
def test_equals_the_plain_loss_and_its_gradients(chunk_size, cap):
    hidden, head, labels, mask = inputs()
    weight = jnp.cos(jnp.arange(T))

    def run(loss):
        def total(hidden, head):
            nll = loss(hidden, head)
            return jnp.sum(nll * weight), nll

        (_, nll), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(
            hidden, head
        )
        return nll, grads

    options = dict(chunk_size=chunk_size, cap=cap)
    chunked = run(lambda h, w: models.next_token_loss(h, w, labels, mask, **options))
    close(chunked, run(lambda h, w: naive(h, w, labels, mask, cap)))
    unmasked = models.next_token_loss(hidden, head, labels, **options)
    close(unmasked, naive(hidden, head, labels, jnp.ones((B, T)), cap))


@pytest.mark.parametrize("chunk_size", [1, 8, 1000])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (-2.5, None), (1.0, 2.5)])
def test_the_mean_equals_the_plain_loss_and_its_gradients(chunk_size, scale, cap):
    hidden, head, labels, mask = inputs()
    hidden = jnp.where(mask[..., None] != 0, hidden, jnp.nan)
    plain = jnp.where(mask[..., None] != 0, hidden, 0)

    def run(loss, hidden):
        def scaled(hidden, head, mask):
            return scale * loss(hidden, head, mask)

        return jax.jit(jax.value_and_grad(scaled, argnums=(0, 1, 2)))(hidden, head, mask)

    loss, grads = run(
        lambda h, w, m: models.mean_next_token_loss(
            h, w, labels, m, 7.0, chunk_size=chunk_size, cap=cap
        ),
        hidden,
    )
    expected, expected_grads = run(lambda h, w, m: naive(h, w, labels, m, cap).sum() / 7, plain)
    close((loss, grads[:2]), (expected, expected_grads[:2]))
    close(grads[2] * mask, expected_grads[2] * mask)  # masked tokens were replaced


def products(compiled) -> int:
    """Return the number of products in a compiled program, those of its loops included once."""
    return len(re.findall(r"= \S+ (?:dot|custom-call)\(", compiled.as_text()))


def test_the_mean_has_three_products_and_two_for_a_frozen_head():
    hidden, head, labels, mask = inputs()

    def loss(hidden, head):
        return models.mean_next_token_loss(hidden, head, labels, mask, 7.0, chunk_size=8)

    def separate(hidden, head):
        return models.next_token_loss(hidden, head, labels, mask, chunk_size=8).sum()

    def count(function, argnums):
        return products(jax.jit(jax.grad(function, argnums)).lower(hidden, head).compile())

    assert (count(loss, (0, 1)), count(loss, 0), count(separate, (0, 1))) == (3, 2, 4)
    value = jax.jit(loss).lower(hidden, head).compile()
    assert products(value) == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_log_sum_exp_in_one_pass_equals_that_in_two(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        logits = 5 * jax.random.normal(jax.random.key(0), (3, 8, 1000), dtype)
        logits = logits.at[0].set(
            jnp.array([1e30, -3e38, 90.0, -90.0, 0.0, -1e4, 3e38, 1.0], dtype)[:, None]
        )
        logits = logits.at[1, :3, 7].set(jnp.array([-3e38, -jnp.inf, 3e38], dtype))
        special = [
            [-np.inf, -np.inf],
            [np.inf, np.inf],
            [np.inf, -np.inf],
            [np.nan, 1],
            [1, -np.inf],
        ]
        special += [
            [x] * 8 + y
            for x, y in [*itertools.product((np.inf, -np.inf, np.nan), ([], [1])), (0, [np.inf])]
        ]
        for both in (logits, logits[..., :13], *(jnp.array(x, dtype) for x in special)):
            expected = jax.nn.logsumexp(both, axis=-1)
            found = log_sum_exp_in_one_pass(both)
            assert found.dtype == dtype
            np.testing.assert_allclose(found, expected, rtol=4 * jnp.finfo(dtype).eps)  # fmt: skip


def test_the_loss_has_second_derivatives():
    """The Hessian of one token's loss by its hidden state x is W (diag(p) - p pᵀ) Wᵀ, with the head W and p = softmax(x W)."""
    hidden, head, labels, _ = inputs()
    x, head, label = hidden[:1, :1], head, labels[:1, :1]
    found = jax.hessian(lambda x: models.next_token_loss(x, head, label)[0, 0])(x)
    p = jax.nn.softmax((x @ head)[0, 0])
    expected = head @ (jnp.diag(p) - jnp.outer(p, p)) @ head.T
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-4, atol=1e-6)


def test_masked_tokens_may_be_anything():
    hidden, head, labels, mask = inputs()
    broken = jnp.where(mask[..., None] != 0, hidden, jnp.nan)
    wrong = jnp.where(mask != 0, labels, -1)

    def loss(hidden, head, labels):
        return models.next_token_loss(hidden, head, labels, mask, chunk_size=8).sum()

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    close(gradient(broken, head, wrong), gradient(hidden, head, labels))


def test_label_outside_the_vocabulary_is_not_hidden():
    hidden, head, labels, _ = inputs()
    nll = models.next_token_loss(hidden, head, labels.at[0, 2].set(V), chunk_size=8)
    assert jnp.isnan(nll[0, 2]) and jnp.isfinite(nll[1]).all()


def test_bfloat16_keeps_a_float32_loss():
    hidden, head, labels, _ = inputs()
    nll = models.next_token_loss(hidden.astype(jnp.bfloat16), head, labels, chunk_size=8)
    assert nll.dtype == jnp.float32
    close(nll, naive(hidden, head, labels, jnp.ones((B, T))), 0.02)


@pytest.mark.parametrize("mean", [False, True])
def test_all_logits_never_exist(mean):
    """The loss in chunks never stores all logits: the largest array of its compiled forward and backward
    pass is smaller than the logits of 4096 tokens with a vocabulary of 5000.
    """
    tokens, vocabulary, chunk = 2048, 5000, 256
    shapes = (
        jax.ShapeDtypeStruct((2, tokens, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((D, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((2, tokens), jnp.int32),
    )

    def loss(hidden, head, labels):
        if mean:
            ones = jnp.ones(labels.shape)
            return models.mean_next_token_loss(hidden, head, labels, ones, 4, chunk_size=chunk)
        return models.next_token_loss(hidden, head, labels, chunk_size=chunk).mean()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    sizes = [
        math.prod(map(int, dims.split(",")))
        for dims in re.findall(r"(?:f32|bf16|s32|pred)\[([\d,]+)\]", compiled.as_text())
    ]
    assert max(sizes) == chunk * vocabulary
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * chunk * vocabulary


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(chunk_size=0), "chunk_size=0"),
        (dict(labels=jnp.zeros((B, T + 1), int)), "do not fit"),
        (dict(head=jnp.zeros((D + 1, V))), "do not fit"),
        (dict(loss_mask=jnp.zeros((B, 1))), "loss_mask has shape"),
    ],
)
def test_wrong_arguments_are_refused(change, words):
    hidden, head, labels, mask = inputs()
    call = dict(hidden=hidden, head=head, labels=labels, loss_mask=mask, chunk_size=8) | change
    with pytest.raises(ValueError, match=words):
        models.next_token_loss(
            call["hidden"], call["head"], call["labels"], call["loss_mask"],
            chunk_size=call["chunk_size"],
        )  # fmt: skip


@pytest.mark.parametrize("chunk_size", [1, 8, 1000])
@pytest.mark.parametrize("extra", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.2, 0.01)])
def test_smoothing_and_the_z_loss_equal_their_formulas_in_float64(chunk_size, extra):
    smoothing, z_loss = extra

    def plain(hidden, head, mask):
        logits = jnp.where(mask[..., None] != 0, hidden, 0) @ head
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        target = (1 - smoothing) * jax.nn.one_hot(labels, V) + smoothing / V
        cross_entropy = -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1)
        return jnp.sum((cross_entropy + z_loss * normaliser**2) * mask) / 7

    def ours(hidden, head, mask):
        return models.mean_next_token_loss(
            hidden, head, labels, mask, 7.0, chunk_size=chunk_size, label_smoothing=smoothing, z_loss=z_loss
        )  # fmt: skip

    with jax.enable_x64(True):
        hidden, head, labels, mask = inputs()
        hidden, head, mask = (x.astype(jnp.float64) for x in (3 * hidden, head, mask))
        (value, grads), (wanted, wanted_grads) = (
            jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, head, mask)
            for loss in (ours, plain)
        )
        assert value.dtype == grads[0].dtype == grads[1].dtype == jnp.float64
        for a, b in zip((value, *grads), (wanted, *wanted_grads), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(jax.jit(ours)(hidden, head, mask), wanted, rtol=1e-12)
        weights = jax.grad(ours, argnums=2)(hidden, head, mask) * mask
        np.testing.assert_allclose(weights, jax.grad(plain, argnums=2)(hidden, head, mask) * mask)


def test_the_reported_likelihood_has_no_extra_terms_and_no_gradient():
    hidden, head, labels, mask = inputs()

    def both(hidden):
        return models.training_losses(
            hidden, head, labels, mask, 7.0, chunk_size=8, label_smoothing=0.3, z_loss=0.1
        )

    close(both(hidden)[1], naive(hidden, head, labels, mask).sum() / 7)
    close(jax.value_and_grad(lambda h: both(h)[1])(hidden)[1], jnp.zeros_like(hidden))
    loss, gradient = jax.jit(jax.value_and_grad(lambda h: both(h)[0]))(hidden)
    assert loss > both(hidden)[1] and jnp.abs(gradient).max() > 0


def test_smoothing_and_the_z_loss_need_no_further_memory():
    tokens, vocabulary, chunk = 2048, 5000, 256
    shapes = (
        jax.ShapeDtypeStruct((2, tokens, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((D, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((2, tokens), jnp.int32),
    )

    def bytes_of(**extra):
        def loss(hidden, head, labels):
            ones = jnp.ones(labels.shape)
            return models.mean_next_token_loss(hidden, head, labels, ones, 4, chunk_size=chunk, **extra)  # fmt: skip

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_of(label_smoothing=0.1, z_loss=1e-4) < bytes_of() + 4 * chunk * vocabulary


@pytest.mark.parametrize("extra", [dict(label_smoothing=1.0), dict(z_loss=-1e-4)])
def test_wrong_extra_terms_are_refused(extra):
    hidden, head, labels, mask = inputs()
    (name,) = extra
    with pytest.raises(ValueError, match=f"{name}="):
        models.mean_next_token_loss(hidden, head, labels, mask, 1.0, **extra)
