"""Cross-entropy over the vocabulary, computed for one chunk of tokens after another, so that the logits of
all tokens never exist at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.mixers.layers import matmul_to_float32
from lsm_jax.parallel import over_mesh, over_tokens, shards_of


def next_token_loss(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    loss_mask: jax.Array | None = None,
    *,
    chunk_size: int = 2048,
    cap: float | None = None,
) -> jax.Array:
    """Return the exact negative log-likelihood of each label, the next token, in float32, from hidden states and the
    model's head.

    The backward pass computes each chunk's logits again from the saved log-sum-exp, so that neither pass
    stores logits of more than `chunk_size` tokens on a device.

    Args:
        hidden: [B, T, D], any float dtype.
        head: [D, V] float32; cast to hidden's dtype for the products, which accumulate in float32.
        labels: int [B, T].
        loss_mask: [B, T]; None is all ones. Where it is 0 the loss and every gradient are 0, even if hidden
            is not finite.
        chunk_size: number of tokens whose logits exist at a time on one device; at least one token of each of
            its rows is computed at a time.
        cap: the model's `logits_cap`; None is none.

    Returns:
        [B, T] float32, in nats, multiplied by the mask. The loss of a label outside the vocabulary is NaN.
    """
    _check(hidden, head, labels, loss_mask, chunk_size)
    return _over_devices(
        _loss,
        (chunk_size, cap),
        dict(hidden=hidden, labels=labels, loss_mask=loss_mask),
        dict(head=head),
    )


def mean_next_token_loss(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    loss_mask: jax.Array,
    count: jax.Array | float,
    *,
    chunk_size: int = 2048,
    cap: float | None = None,
) -> jax.Array:
    """Return the sum of `next_token_loss` over all tokens, divided by `count`: the loss of a training step.

    Where a gradient is computed, the forward pass computes it, chunk by chunk, from the logits that it has: three
    products with the head instead of the four of `next_token_loss`, whose backward pass computes the logits again.
    The gradients of `hidden` and `head` exist from then on.

    Args:
        hidden, head, labels, chunk_size, cap: as for `next_token_loss`.
        loss_mask: [B, T], as for `next_token_loss`.
        count: the number by which the sum is divided, such as the number of predicted tokens in the whole batch.

    Returns:
        The mean loss in nats, a float32 scalar; NaN if a label that the mask counts is outside the vocabulary.

    Raises:
        ValueError: the shapes do not fit, or `chunk_size` is less than 1.
    """
    _check(hidden, head, labels, loss_mask, chunk_size)
    weight = loss_mask.astype(jnp.promote_types(hidden.dtype, jnp.float32)) / count
    sums = _over_devices(
        _weighted_loss,
        (chunk_size, cap),
        dict(hidden=hidden, labels=labels, weight=weight),
        dict(head=head),
    )
    return jnp.sum(sums)


def _check(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    loss_mask: jax.Array | None,
    chunk_size: int,
) -> None:
    """Raise ValueError unless the arguments of a loss have shapes that fit."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: it must be at least 1")
    if hidden.ndim != 3 or labels.shape != hidden.shape[:2] or head.shape[:1] != hidden.shape[2:]:
        raise ValueError(
            f"hidden {hidden.shape}, head {head.shape} and labels {labels.shape} do not fit: "
            "accepted are [B, T, D], [D, V] and [B, T]"
        )
    if loss_mask is not None and loss_mask.shape != labels.shape:
        raise ValueError(f"loss_mask has shape {loss_mask.shape}; labels have {labels.shape}")


def _over_devices(
    function: Callable[..., jax.Array], static: tuple[Any, ...], batched: dict, shared: dict
) -> jax.Array:
    """Call `function(*static, **batched, **shared)` on each device with that device's rows and tokens."""
    # Otherwise devices that split heads would all compute the same logits.
    if shards_of("heads") > 1:
        axes = ("batch", "tokens")
        given = dict(axes=dict.fromkeys(batched, axes), out_axes=axes)
        return over_mesh(function, batched, shared, *static, **given)
    return over_tokens(function, batched, shared, *static)


def _loss(chunk_size, cap, hidden, labels, loss_mask, head):
    if loss_mask is not None:
        hidden, labels = _without_masked(hidden, labels, loss_mask)
    nll = _chunked_nll(cap, _cut(chunk_size, hidden), head, _cut(chunk_size, labels))
    nll = jnp.moveaxis(nll, 0, 1).reshape(hidden.shape[0], -1)[:, : hidden.shape[1]]
    return nll if loss_mask is None else nll * loss_mask


def _weighted_loss(chunk_size, cap, hidden, labels, weight, head):
    """Return the weighted sum of the negative log-likelihoods of one device's tokens, [1, 1]."""
    hidden, labels = _without_masked(hidden, labels, weight)
    cut = functools.partial(_cut, chunk_size)
    return _weighted_nll(cap, cut(hidden), head, cut(labels), cut(weight)).reshape(1, 1)


def _without_masked(
    hidden: jax.Array, labels: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return hidden [B, T, D] and labels [B, T] with zeros where the mask [B, T] is 0."""
    return jnp.where(mask[..., None] != 0, hidden, 0), jnp.where(mask != 0, labels, 0)


def _cut(chunk_size: int, x: jax.Array) -> jax.Array:
    """Return x [B, T, ...] in chunks of about `chunk_size` tokens, [N, B, C, ...]; the last one is padded with zeros."""
    batch, length = x.shape[:2]
    size = min(length, max(1, chunk_size // batch))
    count = -(-length // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)


def capped(logits: jax.Array, cap: float | None) -> jax.Array:
    """Return cap · tanh(logits / cap), of which no absolute value is above the cap; the logits themselves if it is None."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_nll(cap, hidden, head, labels):
    """Return the negative log-likelihoods, [N, B, C] float32, of the labels [N, B, C] in N chunks of C
    tokens, given the hidden states [N, B, C, D] and the head [D, V].
    """
    return _forward(cap, hidden, head, labels)[0]


def _forward(cap, hidden, head, labels):
    narrow = head.astype(hidden.dtype)

    def step(_, chunk):
        x, y = chunk
        nll, lse = _log_likelihood(capped(matmul_to_float32(x, narrow), cap), y)
        return None, (nll, lse)

    _, (nll, lse) = jax.lax.scan(step, None, (hidden, labels))
    return nll, (hidden, head, labels, lse)


def _backward(cap, saved, grad):
    hidden, head, labels, lse = saved
    narrow = head.astype(hidden.dtype)

    def step(head_grad, chunk):
        x, y, z, g = chunk
        logits = capped(matmul_to_float32(x, narrow), cap)
        more, x_grad = _gradients(x, narrow, y, logits, z, g, cap)
        return head_grad + more, x_grad

    start = jnp.zeros_like(head, jnp.float32)
    head_grad, hidden_grad = jax.lax.scan(step, start, (hidden, labels, lse, grad))
    return hidden_grad, head_grad.astype(head.dtype), None


_chunked_nll.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_nll(cap, hidden, head, labels, weight):
    """Return the sum of the negative log-likelihoods of `_chunked_nll`, each multiplied by its weight [N, B, C]."""
    return jnp.sum(weight * _chunked_nll(cap, hidden, head, labels))


def _weighted_forward(cap, hidden, head, labels, weight):
    narrow = head.astype(hidden.dtype)

    def step(head_grad, chunk):
        x, y, w = chunk
        logits = capped(matmul_to_float32(x, narrow), cap)
        nll, lse = _log_likelihood(logits, y)
        more, x_grad = _gradients(x, narrow, y, logits, lse, w, cap)
        return head_grad + more, (nll, x_grad)

    start = jnp.zeros_like(head, jnp.float32)
    head_grad, (nll, hidden_grad) = jax.lax.scan(step, start, (hidden, labels, weight))
    # The gradients of the sum itself. The backward pass multiplies them by the gradient of the sum, 1 in a training step.
    return jnp.sum(weight * nll), (hidden_grad, head_grad.astype(head.dtype), nll)


def _weighted_backward(cap, saved, grad):
    hidden_grad, head_grad, nll = saved
    scaled = [(grad * x).astype(x.dtype) for x in (hidden_grad, head_grad)]
    return *scaled, None, grad * nll


_weighted_nll.defvjp(_weighted_forward, _weighted_backward)


def _log_likelihood(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the negative log-likelihoods of labels [B, C], and the log-sum-exps of logits [B, C, V]; both [B, C]."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="fill")[..., 0]
    return lse - own, lse


def _gradients(
    x: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    logits: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
    cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the head [D, V], in float32, and of the hidden states x [B, C, D] of one chunk.

    Args:
        x: the hidden states.
        head: [D, V], in x's dtype.
        labels: [B, C].
        logits, lse: [B, C, V] and [B, C], their log-sum-exps.
        grad: [B, C], the gradients of the negative log-likelihoods.
        cap: the cap of the logits, or None; `logits` are capped.
    """
    hit = labels[..., None] == jnp.arange(head.shape[1])
    error = grad[..., None] * (jnp.exp(logits - lse[..., None]) - hit)
    error = error if cap is None else error * (1 - jnp.square(logits / cap))
    error = error.astype(x.dtype)
    x_grad = matmul_to_float32(error, head.T).astype(x.dtype)
    rows, errors = (z.reshape(-1, z.shape[-1]) for z in (x, error))
    return matmul_to_float32(rows.T, errors), x_grad
