"""Cross-entropy over the vocabulary, computed for one chunk of tokens after another, so that the logits of
all tokens never exist at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.mixers import fp8
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


def training_losses(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    loss_mask: jax.Array,
    count: jax.Array | float,
    *,
    chunk_size: int = 2048,
    cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    matmul: str = "default",
) -> tuple[jax.Array, jax.Array]:
    """Return the loss of a training step, and the part of it that is `next_token_loss`: the sums over all tokens, divided by
    `count`.

    With logits z [V] of a token, its label y, s = `label_smoothing`, c = `z_loss` and Z = log sum exp(z), the loss of a
    token is

        Z - (1 - s) z_y - s mean(z) + c Z^2

    Smoothing makes the target (1 - s) of the label and s / V of every token (arXiv 1512.00567, section 7). The z-loss keeps Z
    near 0 (arXiv 2204.02311, section 5, with 1e-4). Without both, the two results are equal.

    Where a gradient is computed, the forward pass computes it, chunk by chunk, from the logits that it has: three
    products with the head instead of the four of `next_token_loss`, whose backward pass computes the logits again.
    The gradients of `hidden` and `head` exist from then on.

    Args:
        hidden, head, labels, chunk_size, cap: as for `next_token_loss`.
        loss_mask: [B, T], as for `next_token_loss`.
        count: the number by which the sum is divided, such as the number of predicted tokens in the whole batch.
        label_smoothing: the share of the target that is spread evenly over the vocabulary, in [0, 1).
        z_loss: the weight of the square of the log-sum-exp, at least 0.
        matmul: how the head multiplies: "default", in hidden's dtype, or "fp8" (`lsm_jax.mixers.fp8`), with one scale for the head
            and one for each chunk's hidden states, and their gradient's, on a device.

    Returns:
        The mean loss, and the mean negative log-likelihood in nats, float32 scalars; NaN if a label that the mask counts is
        outside the vocabulary. Only the first has a gradient.

    Raises:
        ValueError: the shapes do not fit, `chunk_size` is less than 1, `label_smoothing` or `z_loss` is out of range, or `matmul` is
            not accepted.
    """
    _check(hidden, head, labels, loss_mask, chunk_size)
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing}: it must be in [0, 1)")
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss={z_loss}: it must be at least 0, and finite")
    if matmul not in _PRODUCTS:
        raise ValueError(f"matmul={matmul!r}: accepted are {', '.join(_PRODUCTS)}")
    weight = loss_mask.astype(jnp.promote_types(hidden.dtype, jnp.float32)) / count
    loss, nll = _over_devices(
        _weighted_loss,
        (matmul, chunk_size, cap, float(label_smoothing), float(z_loss)),
        dict(hidden=hidden, labels=labels, weight=weight),
        dict(head=head),
    )
    return jnp.sum(loss), jax.lax.stop_gradient(jnp.sum(nll))


def mean_next_token_loss(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    loss_mask: jax.Array,
    count: jax.Array | float,
    *,
    chunk_size: int = 2048,
    cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    matmul: str = "default",
) -> jax.Array:
    """Return the loss of a training step alone, the first result of `training_losses`, whose arguments and errors it has."""
    options: dict[str, Any] = dict(
        cap=cap, label_smoothing=label_smoothing, z_loss=z_loss, matmul=matmul
    )
    losses = training_losses(
        hidden, head, labels, loss_mask, count, chunk_size=chunk_size, **options
    )
    return losses[0]


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


def _over_devices(function: Callable[..., Any], static: tuple, batched: dict, shared: dict) -> Any:
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


def _weighted_loss(matmul, chunk_size, cap, label_smoothing, z_loss, hidden, labels, weight, head):
    """Return the weighted sums of the losses and of the negative log-likelihoods of one device's tokens, [1, 1] each."""
    hidden, labels = _without_masked(hidden, labels, weight)
    cut = functools.partial(_cut, chunk_size)
    extra = (cap, label_smoothing, z_loss)
    sums = _weighted_sums(matmul, extra, cut(hidden), head, cut(labels), cut(weight))
    return tuple(x.reshape(1, 1) for x in sums)


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


class _Products:
    """The products of one chunk's hidden states, or of their gradient, with the head [D, V], which has their dtype."""

    def __init__(self, head: jax.Array):
        self.head = head

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits [B, C, V] of hidden states x [B, C, D], in float32."""
        return matmul_to_float32(x, self.head)

    def gradients(self, x: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of the head, in float32, and of x [B, C, D], from that of the logits, `error` [B, C, V]."""
        x_grad = matmul_to_float32(error, self.head.T).astype(x.dtype)
        return matmul_to_float32(_rows(x).T, _rows(error)), x_grad

    def unit(self, weight: jax.Array) -> jax.Array | None:
        """Return the number by which the weights of `_weighted_sums` are divided before they multiply errors; None is 1."""
        return None


class _ProductsInFP8(_Products):
    """The same products in FP8; the head's 8-bit floats are those of all chunks."""

    def __init__(self, head: jax.Array):
        super().__init__(head)
        self.narrow = fp8.quantize(head, fp8.FORWARD)

    def logits(self, x: jax.Array) -> jax.Array:
        narrow = fp8.quantize(x, fp8.FORWARD)
        return fp8.scaled_product(narrow, self.narrow, (x.ndim - 1, 0), _wide(x))

    def gradients(self, x: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
        (narrow_x, x_scale), (narrow, scale) = (
            fp8.quantize(x, fp8.FORWARD),
            fp8.quantize(error, fp8.BACKWARD),
        )
        x_grad = fp8.scaled_product((narrow, scale), self.narrow, (error.ndim - 1, 1), x.dtype)
        rows, errors = (_rows(narrow_x), x_scale), (_rows(narrow), scale)
        return fp8.scaled_product(rows, errors, (0, 0), _wide(x)), x_grad

    def unit(self, weight: jax.Array) -> jax.Array:
        # Errors of labels are nearly their weight, the same for all tokens: a weight that e5m2 rounds by 6 % would make all
        # gradients 6 % smaller. In this unit they are nearly 1.
        largest = jnp.max(weight)
        return jnp.where(largest == 0, 1, largest)


_PRODUCTS = {"default": _Products, "fp8": _ProductsInFP8}  # by `matmul`


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_nll(cap, hidden, head, labels):
    """Return the negative log-likelihoods, [N, B, C] float32, of the labels [N, B, C] in N chunks of C
    tokens, given the hidden states [N, B, C, D] and the head [D, V].
    """
    return _forward(cap, hidden, head, labels)[0]


def _forward(cap, hidden, head, labels):
    products = _Products(head.astype(hidden.dtype))

    def step(_, chunk):
        x, y = chunk
        nll, lse = _log_likelihood(capped(products.logits(x), cap), y)
        return None, (nll, lse)

    _, (nll, lse) = jax.lax.scan(step, None, (hidden, labels))
    return nll, (hidden, head, labels, lse)


def _backward(cap, saved, grad):
    hidden, head, labels, lse = saved
    products = _Products(head.astype(hidden.dtype))

    def step(head_grad, chunk):
        x, y, z, g = chunk
        logits = capped(products.logits(x), cap)
        more, x_grad = _gradients(x, products, y, logits, z, g, cap)
        return head_grad + more, x_grad

    start = jnp.zeros_like(head, jnp.promote_types(head.dtype, jnp.float32))
    head_grad, hidden_grad = jax.lax.scan(step, start, (hidden, labels, lse, grad))
    return hidden_grad, head_grad.astype(head.dtype), None


_chunked_nll.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weighted_sums(matmul, extra, hidden, head, labels, weight):
    """Return the sums of the losses and of the negative log-likelihoods of the labels [N, B, C] in N chunks of C tokens, each
    multiplied by its weight [N, B, C]. The second sum has no gradient.

    Args:
        matmul: how the head multiplies, a key of `_PRODUCTS`.
        extra: the cap of the logits or None, the label smoothing, and the weight of the z-loss.
        hidden: [N, B, C, D].
        head: [D, V].
        labels, weight: [N, B, C].
    """
    products = _PRODUCTS[matmul](head.astype(hidden.dtype))

    def step(_, chunk):
        x, y = chunk
        logits = capped(products.logits(x), extra[0])
        return None, _losses(extra, logits, y)[:2]

    _, (loss, nll) = jax.lax.scan(step, None, (hidden, labels))
    return jnp.sum(weight * loss), jnp.sum(weight * nll)


def _weighted_forward(matmul, extra, hidden, head, labels, weight):
    products = _PRODUCTS[matmul](head.astype(hidden.dtype))
    unit = products.unit(weight)
    relative = weight if unit is None else weight / unit

    def step(head_grad, chunk):
        x, y, w = chunk
        logits = capped(products.logits(x), extra[0])
        loss, nll, lse = _losses(extra, logits, y)
        more, x_grad = _gradients(x, products, y, logits, lse, w, *extra)
        return head_grad + more, (loss, nll, x_grad)

    start = jnp.zeros_like(head, jnp.promote_types(head.dtype, jnp.float32))
    head_grad, (loss, nll, hidden_grad) = jax.lax.scan(step, start, (hidden, labels, relative))
    # The gradients of the sum itself, divided by `unit`. The backward pass multiplies them by the gradient of the sum, 1 in a
    # training step.
    sums = jnp.sum(weight * loss), jnp.sum(weight * nll)
    return sums, (hidden_grad, head_grad.astype(head.dtype), loss, unit)


def _weighted_backward(matmul, extra, saved, grads):
    del matmul, extra
    hidden_grad, head_grad, loss, unit = saved
    factor = grads[0] if unit is None else grads[0] * unit
    scaled = [(factor * x).astype(x.dtype) for x in (hidden_grad, head_grad)]
    return *scaled, None, grads[0] * loss


_weighted_sums.defvjp(_weighted_forward, _weighted_backward)


def _losses(
    extra: tuple[float | None, float, float], logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the losses and the negative log-likelihoods of labels [B, C], and the log-sum-exps of logits [B, C, V], all
    [B, C]. The logits are capped; `extra` is that of `_weighted_sums`."""
    _, label_smoothing, z_loss = extra
    nll, lse = _log_likelihood(logits, labels)
    loss = nll
    if label_smoothing:  # lse - nll is the label's logit
        loss = loss + label_smoothing * (lse - nll - jnp.mean(logits, axis=-1))
    if z_loss:
        loss = loss + z_loss * lse**2
    return loss, nll, lse


def _log_likelihood(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the negative log-likelihoods of labels [B, C], and the log-sum-exps of logits [B, C, V]; both [B, C]."""
    lse = _log_sum_exp(logits)
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="fill")[..., 0]
    return lse - own, lse


@jax.custom_jvp
def _log_sum_exp(logits: jax.Array) -> jax.Array:
    """Return the log-sum-exps of logits [B, C, V] over the vocabulary, [B, C]."""

    def in_two_passes(logits: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(logits, axis=-1)

    return jax.lax.platform_dependent(logits, cuda=log_sum_exp_in_one_pass, default=in_two_passes)


@_log_sum_exp.defjvp
def _log_sum_exp_tangent(primals, tangents):
    # For second derivatives: JAX has none of a reduction of pairs.
    lse = _log_sum_exp(*primals)
    share = jnp.exp(primals[0] - lse[..., None])
    return lse, jnp.sum(share * tangents[0], axis=-1)


def log_sum_exp_in_one_pass(logits: jax.Array) -> jax.Array:
    """Return the log-sum-exps of logits [..., V] over the last axis by one reduction to the maximum and the sum relative to it.

    `jax.nn.logsumexp` loads logits from a GPU's memory once for the maximum and once for the sum. CPUs do not compute a
    reduction like this one in vectors.
    """

    def combine(x, y):
        (most_x, sum_x), (most_y, sum_y) = x, y
        # Equal infinities would be NaN apart.
        apart = jnp.where(most_x == most_y, 0, most_x - most_y)
        lower = jnp.exp(-jnp.abs(apart))
        total = jnp.where(apart > 0, sum_x + sum_y * lower, sum_x * lower + sum_y)
        return jnp.maximum(most_x, most_y), total

    kind = logits.dtype.type
    # Eighths of the vocabulary side by side: eight logits become a pair by fewer instructions than eight pairs.
    eighths = logits.shape[-1] // 8
    parts = [logits[..., i * eighths : (i + 1) * eighths] for i in range(8)]
    rest = logits[..., 8 * eighths :]
    most = functools.reduce(jnp.maximum, parts)
    finite = jnp.where(jnp.isinf(most), 0, most)  # infinities apart would be NaN
    pairs = most, sum(jnp.exp(x - finite) for x in parts)
    if rest.shape[-1]:
        pairs = [
            jnp.concatenate(x, axis=-1)
            for x in zip(pairs, (rest, jnp.ones_like(rest)), strict=True)
        ]
    most, total = jax.lax.reduce(
        tuple(pairs), (kind(-jnp.inf), kind(0)), combine, (logits.ndim - 1,)
    )
    return most + jnp.log(total)


def _gradients(
    x: jax.Array,
    products: _Products,
    labels: jax.Array,
    logits: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
    cap: float | None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the head [D, V], in float32, and of the hidden states x [B, C, D] of one chunk.

    Args:
        x: the hidden states.
        products: the products with the head.
        labels: [B, C].
        logits, lse: [B, C, V] and [B, C], their log-sum-exps.
        grad: [B, C], the gradients of the losses, which are negative log-likelihoods without the last two arguments.
        cap: the cap of the logits, or None; `logits` are capped.
        label_smoothing, z_loss: as for `training_losses`.
    """
    hit = labels[..., None] == jnp.arange(logits.shape[-1])
    error = jnp.exp(logits - lse[..., None])
    if z_loss:
        error = error * (1 + 2 * z_loss * lse[..., None])
    target = hit
    if label_smoothing:
        target = (1 - label_smoothing) * hit + label_smoothing / logits.shape[-1]
    error = grad[..., None] * (error - target)
    error = error if cap is None else error * (1 - jnp.square(logits / cap))
    return products.gradients(x, error.astype(x.dtype))
