"""Cross-entropy over the vocabulary, computed for one chunk of tokens after another, so that the logits of
all tokens never exist at once.
"""

from __future__ import annotations

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

    Returns:
        [B, T] float32, in nats, multiplied by the mask. The loss of a label outside the vocabulary is NaN.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: it must be at least 1")
    if hidden.ndim != 3 or labels.shape != hidden.shape[:2] or head.shape[:1] != hidden.shape[2:]:
        raise ValueError(
            f"hidden {hidden.shape}, head {head.shape} and labels {labels.shape} do not fit: "
            "accepted are [B, T, D], [D, V] and [B, T]"
        )
    if loss_mask is not None and loss_mask.shape != labels.shape:
        raise ValueError(f"loss_mask has shape {loss_mask.shape}; labels have {labels.shape}")
    batched = dict(hidden=hidden, labels=labels, loss_mask=loss_mask)
    if (
        shards_of("heads") > 1
    ):  # otherwise devices that split heads would all compute the same logits
        axes = ("batch", "tokens")
        given = dict(axes=dict.fromkeys(batched, axes), out_axes=axes)
        return over_mesh(_loss, batched, dict(head=head), chunk_size, **given)
    return over_tokens(_loss, batched, dict(head=head), chunk_size)


def _loss(chunk_size, hidden, labels, loss_mask, head):
    batch, length, _ = hidden.shape
    size = min(length, max(1, chunk_size // batch))
    count = -(-length // size)
    if loss_mask is not None:
        hidden = jnp.where(loss_mask[..., None] != 0, hidden, 0)
        labels = jnp.where(loss_mask != 0, labels, 0)

    def cut(x):  # [B, T, ...] -> [N, B, C, ...]
        x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    nll = _chunked_nll(cut(hidden), head, cut(labels))
    nll = jnp.moveaxis(nll, 0, 1).reshape(batch, count * size)[:, :length]
    return nll if loss_mask is None else nll * loss_mask


@jax.custom_vjp
def _chunked_nll(hidden, head, labels):
    """Return the negative log-likelihoods, [N, B, C] float32, of the labels [N, B, C] in N chunks of C
    tokens, given the hidden states [N, B, C, D] and the head [D, V].
    """
    return _forward(hidden, head, labels)[0]


def _forward(hidden, head, labels):
    narrow = head.astype(hidden.dtype)

    def step(_, chunk):
        x, y = chunk
        logits = matmul_to_float32(x, narrow)
        lse = jax.nn.logsumexp(logits, axis=-1)
        own = jnp.take_along_axis(logits, y[..., None], axis=-1, mode="fill")[..., 0]
        return None, (lse - own, lse)

    _, (nll, lse) = jax.lax.scan(step, None, (hidden, labels))
    return nll, (hidden, head, labels, lse)


def _backward(saved, grad):
    hidden, head, labels, lse = saved
    narrow = head.astype(hidden.dtype)

    def step(head_grad, chunk):
        x, y, z, g = chunk
        probability = jnp.exp(matmul_to_float32(x, narrow) - z[..., None])
        hit = y[..., None] == jnp.arange(head.shape[1])
        error = (g[..., None] * (probability - hit)).astype(x.dtype)
        x_grad = matmul_to_float32(error, narrow.T).astype(x.dtype)
        rows, errors = (z.reshape(-1, z.shape[-1]) for z in (x, error))
        return head_grad + matmul_to_float32(rows.T, errors), x_grad

    start = jnp.zeros_like(head, jnp.float32)
    head_grad, hidden_grad = jax.lax.scan(step, start, (hidden, labels, lse, grad))
    return hidden_grad, head_grad.astype(head.dtype), None


_chunked_nll.defvjp(_forward, _backward)
