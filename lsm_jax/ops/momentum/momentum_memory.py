"""The delta rule with momentum (momentum DeltaNet, arXiv 2605.05838): each token adds its gradient to a decaying momentum,
which changes the memory.

`N_t = μ_t N_{t-1} - η_t k_tᵀ (v_t - p_t M_{t-1})`, `M_t = α_t M_{t-1} - β_t N_t`, `o_t = scale q_t M_t`.

p reads the memory ahead of its decay; with μ = 0 and p = α k it is Gated DeltaNet of strengths β η.

Memory and momentum are one linear state, whose update is a 2 × 2 matrix of numbers plus a matrix of rank one: updates
compose. flash-linear-attention's chunk form takes the logarithm of β + 1e-6, and so is inexact where β is small; here no
logarithm of β is taken.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.segments import read_tokens
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    memory_axes,
    newer_id,
    resume,
)
from lsm_jax.ops.momentum.state import MomentumState, momentum_state
from lsm_jax.ops.momentum.xla import Options, run_xla
from lsm_jax.parallel import TOKENS, over_mesh


def momentum_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    p: Float[Array, "B T Hk K"],
    beta: Float[Array, "B T G"],
    eta: Float[Array, "B T G"],
    log_decay: Float[Array, "B T G"],
    log_momentum: Float[Array, "B T G"],
    *,
    scale: float | None = None,
    initial_state: MomentumState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], MomentumState]:
    """Move the value that the memory returns for `p` towards `v` by steps with momentum, and read the memory with `q`.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys that are written, of L2 norm at most 1; Hk divides G.
        v: [B, T, G, V] values; one memory for each of the G heads.
        p: [B, T, Hk or G, K] keys that read what is stored, of L2 norm at most 1.
        beta: [B, T, G], the step size of the memory, at least 0.
        eta: [B, T, G], the weight of the token's gradient in the momentum, at least 0.
        log_decay: [B, T, G], log α, natural logarithm, at most 0.
        log_momentum: [B, T, G], log μ, at most 0.
        scale: multiplies q; None is `K ** -0.5`.
        initial_state: the state to continue from; None is an empty one. With memory [B, S, ...] there is one
            state per segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that do not change the memory (they still read it).
        form: "recurrent" (token by token), "chunk" (one triangular solve a chunk, scan over chunks) or
            "associative" (associative scan over chunks).
        implementation: None or "xla"; there is no fused kernel.
        chunk_size: tokens in a chunk, a power of two; None is 64.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        ValueError: a shape, number of heads, form, implementation or chunk size is not accepted.
    """
    op = "momentum_memory"
    checks.check_form(op, form)
    check_implementation(op, implementation)
    batch, length, _, key_heads, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    shape = (batch, length, key_heads, key_dim)
    if jnp.shape(p) != (batch, length, heads, key_dim):
        checks.check_shape(op, "p", p, shape, "B, T, Hk, K")
    gates = dict(beta=beta, eta=eta, log_decay=log_decay, log_momentum=log_momentum)
    for name, gate in gates.items():
        checks.check_shape(op, name, gate, (batch, length, heads), "B, T, G")
        if name.startswith("log"):
            checks.check_logarithm(op, name, gate)
    size = checks.check_chunk_size(op, chunk_size, length)
    dtype = checks.compute_dtype(q, k, v, p, *gates.values())
    empty = functools.partial(momentum_state, batch, heads, key_dim, value_dim, dtype=dtype)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
    batched = dict(
        q=q, k=k, v=v, p=p, **gates, state=state, segment_ids=segment_ids, update_mask=update_mask
    )
    options = Options(
        scale=checks.scale_or_default(op, scale, key_dim),
        form=form,
        size=size,
        dtype=dtype,
        precision=checks.matmul_precision(q, k, v),
    )
    return over_mesh(
        run,
        batched,
        {},
        static_of(op, options, implementation),
        axes=memory_axes(batched, {}),
        out_axes=(TOKENS, "state"),
        in_sequence=_in_sequence,
    )


def _in_sequence(axis, function, static, **arguments):
    """Compute `momentum_memory` on one of several devices that have consecutive parts of each row: the outputs of its
    tokens, and the state after the whole row.

    The device's tokens are one update `Z -> Θ Z + W` of memory and momentum Z [2K, V]. Θ is computed by the op itself, as
    2K more value channels that start from the identity matrix and to which nothing is written.
    """
    v, state, ids = (arguments[n] for n in ("v", "state", "segment_ids"))
    options = static.options
    key_dim, value_dim = state.memory.shape[-2:]
    num_segments = state.memory.shape[1] if state.memory.ndim == 5 else None
    no_id = jnp.zeros_like(state.segment_id)
    _, first_id = ends_of_documents(ids, read_tokens(ids, None, no_id, num_segments).run)
    rows = state.memory.shape[:-1]
    identity = jnp.eye(2 * key_dim, dtype=options.dtype)
    wide = jnp.concatenate([v, jnp.zeros((*v.shape[:-1], 2 * key_dim), v.dtype)], axis=-1)

    def start(part: Any) -> jax.Array:
        zeros = jnp.zeros((*rows, value_dim), options.dtype)
        ones = jnp.broadcast_to(identity[part], (*rows, 2 * key_dim))
        return jnp.concatenate([zeros, ones], axis=-1)

    begin = MomentumState(start(slice(key_dim)), start(slice(key_dim, None)), no_id)
    _, after = run_xla(options._replace(form="chunk"), **(arguments | {"v": wide, "state": begin}))
    both = jnp.concatenate([after.memory, after.momentum], axis=-2)
    written = MomentumState(
        after.memory[..., :value_dim], after.momentum[..., :value_dim], after.segment_id
    )
    update = Update(both[..., value_dim:], written, None, first_id)
    return resume(axis, function, (static,), arguments, update, _advance)


def _advance(state: MomentumState, update: Update) -> MomentumState:
    """Return the state after the tokens of one device: Θ Z + W, with Z the memory and momentum before them, which are
    emptied first if a document begins with the first of these tokens.
    """
    state = emptied_by(state, update)
    both = jnp.concatenate([state.memory, state.momentum], axis=-2)
    both = jnp.matmul(update.transition, both, precision=jax.lax.Precision.HIGHEST)
    memory, momentum = jnp.split(both, 2, axis=-2)
    written = update.written
    return MomentumState(
        memory + written.memory, momentum + written.momentum, newer_id(state, update)
    )
