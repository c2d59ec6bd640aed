"""Compute `momentum_memory` by XLA in three forms: recurrent (token by token), by chunks, and by an associative scan over
chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.backends.registry import Backend, register
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import (
    associate_chunks,
    per_chunk,
    run_masks,
    scan_chunks,
    scan_tokens,
)
from lsm_jax.ops.core.decays import forget, halve, inverse_unit_lower, pairwise_decay
from lsm_jax.ops.core.segments import Chunks, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.momentum.state import MomentumState


class Options(NamedTuple):
    """The options of `momentum_memory` that are constant when a program is compiled.

    Attributes:
        scale: multiplies the queries.
        form: "recurrent", "chunk" or "associative", how the op is computed.
        size: tokens in a chunk.
        dtype: the dtype of the state and of all sums.
        precision: the precision of matrix products.
    """

    scale: float
    form: str
    size: int
    dtype: Any
    precision: jax.lax.Precision


class _Inputs(NamedTuple):
    """The arrays of `momentum_memory`, split by head: queries q [..., G, R, K], keys k and p [..., G, K], values v
    [..., G, V], step sizes beta and eta [..., G], and log decays of memory and momentum [..., G].
    """

    q: Array
    k: Array
    p: Array
    v: Array
    beta: Array
    eta: Array
    decay: Array
    momentum: Array


def run_xla(
    options: Options,
    q,
    k,
    v,
    p,
    beta,
    eta,
    log_decay,
    log_momentum,
    state: MomentumState,
    segment_ids,
    update_mask,
) -> tuple[Array, MomentumState]:
    """Compute `momentum_memory` by XLA on one device: return the output [B, T, H, V] in v's dtype and the state after the
    last token.

    Memory and momentum are one array [2, K, V] here.
    """
    batch, length, heads, _ = v.shape
    dtype = options.dtype
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)

    def prepare(x) -> Any:
        return select(tokens.written, jnp.asarray(x).astype(dtype))

    inputs = _Inputs(
        q=checks.group_queries(select(tokens.real, q).astype(dtype) * options.scale, heads),
        k=prepare(checks.spread_keys(k, heads)),
        p=prepare(checks.spread_keys(p, heads)),
        v=prepare(v),
        beta=prepare(beta),
        eta=prepare(eta),
        decay=prepare(log_decay),
        momentum=prepare(log_momentum),
    )
    both = jnp.stack([state.memory, state.momentum], axis=-3).astype(dtype)
    if options.form == "recurrent":
        output, both = scan_tokens(_step, inputs, both, tokens.run, tokens.slot)
    else:
        chunks = cut_into_chunks(tokens, length, options.size, num_segments)
        output, both = _chunked(inputs, both, chunks, options)
        output = chunks.join(output, length)
    output = output.reshape(batch, length, -1, output.shape[-1])
    after = MomentumState(both[..., 0, :, :], both[..., 1, :, :], tokens.last_id)
    return finish_output(tokens, output).astype(v.dtype), after


def _step(both: Array, x: _Inputs) -> tuple[Array, Array]:
    memory, momentum = both[..., 0, :, :], both[..., 1, :, :]
    error = x.v - jnp.sum(x.p[..., None] * memory, axis=-2)
    gradient = x.k[..., None] * (x.eta[..., None] * error)[..., None, :]
    momentum = forget(momentum, x.momentum[..., None, None]) - gradient
    memory = forget(memory, x.decay[..., None, None]) - x.beta[..., None, None] * momentum
    output = jnp.sum(x.q[..., None] * memory[:, :, None], axis=-2)
    return jnp.stack([memory, momentum], axis=-3), output


class _Decays(NamedTuple):
    """How memory and momentum depend on what was before a chunk [..., C] and on its gradients [..., C, C], per token.

    With A and m the products of α and of μ, and u the negative gradients' values (η times the errors):
    `M_t = A_t M_0 + c_t N_0 + Σ_s w_ts k_sᵀ u_s` and `N_t = m_t N_0 - Σ_s m_ts k_sᵀ u_s`, where
    `w_ts = Σ_{r=s..t} A_tr β_r m_rs` and `c_t = -Σ_{r≤t} A_tr β_r m_r`: sums of products of numbers of one sign.
    """

    kept: Array  # A_t
    crossed: Array  # c_t
    weights: Array  # w_ts
    momentum: Array  # m_t
    momentum_weights: Array  # m_ts


def _decays(x: _Inputs) -> _Decays:
    """Return the decays of each chunk [B, N, G, ...]."""
    highest = jax.lax.Precision.HIGHEST
    decay, momentum = halve(x.decay[..., None]), halve(x.momentum[..., None])
    steps = pairwise_decay(decay) * x.beta[..., None, :]
    between = pairwise_decay(momentum)
    before = jnp.exp(momentum.prefix)
    return _Decays(
        jnp.exp(decay.prefix)[..., 0],
        -jnp.matmul(steps, before, precision=highest)[..., 0],
        jnp.matmul(steps, between, precision=highest),
        before[..., 0],
        between,
    )


def _chunked(inputs: _Inputs, both, chunks: Chunks, options: Options):
    """Return the output [B, N, C, G, R, V] and the final memory and momentum [B, G, 2, K, V], computed by chunks, from
    inputs [B, T, ...].

    Inside a chunk `u = η (v - p M)` solves `(I + L) u = η (v - p A' M_0 - p c' N_0)`, with L the products of p with
    earlier keys, weighted by η w, and primes for the token before.
    """
    precision = options.precision

    def by_head(x):  # [B, N, C, G, ..., *] -> [B, N, G, ..., C, *]
        x = jnp.moveaxis(chunks.split(x), 2, 3)
        return x if x.ndim < 6 else jnp.moveaxis(x, 3, -2)

    def shifted(y, first):
        """Return what y [B, N, G, C, ...] is for the token before, `first` for a chunk's first."""
        return jnp.concatenate([jnp.full_like(y[:, :, :, :1], first), y[:, :, :, :-1]], axis=3)

    x = jax.tree.map(by_head, inputs)
    same, enters, stays = run_masks(chunks)
    d = _decays(x)
    keys = jnp.swapaxes(x.k, -1, -2)
    eta = x.eta[..., None]
    # Products with later keys may overflow, and their weight of 0 would make them NaN.
    scores = jnp.tril(jnp.matmul(x.q, keys[:, :, :, None], precision=precision))
    scores = d.weights[:, :, :, None] * scores
    lower = eta * shifted(d.weights, 0.0) * jnp.matmul(x.p, keys, precision=precision)
    read = jnp.concatenate([y[:, :, :, None, :, None] * x.q for y in (d.kept, d.crossed)], axis=-1)
    before = shifted(d.kept, 1.0), shifted(d.crossed, 0.0)
    erased = jnp.concatenate([y[..., None] * x.p for y in before], axis=-1)
    writes = d.weights[..., -1, :], -d.momentum_weights[..., -1, :]
    written = jnp.concatenate([y[..., None] * x.k for y in writes], axis=-1)  # [B, N, G, C, 2K]
    zero = jnp.zeros_like(d.kept[..., -1])
    mixed = jnp.stack([d.kept[..., -1], d.crossed[..., -1], zero, d.momentum[..., -1]], axis=-1)
    if same is not None:
        scores = jnp.where(same[:, :, None, None], scores, 0)
        lower = jnp.where(same[:, :, None], lower, 0)
        read = jnp.where(enters[:, :, None, None, :, None], read, 0)
        erased = jnp.where(enters[:, :, None, :, None], erased, 0)
        written = jnp.where(stays[:, :, None, :, None], written, 0)
        mixed = jnp.where(per_chunk(enters[:, :, -1], mixed), mixed, 0)
    mixed = mixed.reshape(*mixed.shape[:-1], 2, 2)
    inverse = inverse_unit_lower(jnp.tril(lower, -1))
    erase = jnp.matmul(inverse, eta * erased, precision=precision)
    new = jnp.matmul(inverse, eta * x.v, precision=precision)

    shape = both.shape
    both = both.reshape(*shape[:-3], -1, shape[-1])  # [B, G, 2K, V]
    if options.form == "chunk":

        def update(m, chunk):
            mixed, written, new, erase = chunk
            u = new - jnp.matmul(erase, m, precision=precision)
            pair = m.reshape(*m.shape[:-2], 2, -1, m.shape[-1])
            kept = jnp.sum(mixed[..., None, None] * pair[:, :, None], axis=3).reshape(m.shape)
            return kept + jnp.einsum("bgck,bgcv->bgkv", written, u, precision=precision)

        entering, both = scan_chunks(update, (mixed, written, new, erase), both, chunks)
    else:
        identity = jnp.eye(x.k.shape[-1], dtype=x.k.dtype)
        kept = jnp.einsum("bngxy,kl->bngxkyl", mixed, identity)
        kept = kept.reshape(*mixed.shape[:3], both.shape[-2], both.shape[-2])
        transition = kept - jnp.einsum("bngck,bngcl->bngkl", written, erase, precision=precision)
        write = jnp.einsum("bngck,bngcv->bngkv", written, new, precision=precision)

        def product(a, b):
            return jnp.matmul(a, b, precision=precision)

        entering, both = associate_chunks(product, product, transition, write, both, chunks)

    u = new - jnp.matmul(erase, entering, precision=precision)
    output = jnp.matmul(read, entering[:, :, :, None], precision=precision)
    output = output + jnp.matmul(scores, u[:, :, :, None], precision=precision)
    return jnp.moveaxis(output, -2, 2), both.reshape(shape)


register(
    "momentum_memory",
    Backend(name="xla", run=lambda call: run_xla(call.options, **call.arguments)),
)
