"""Memories under the delta rule: each token decays the memory, erases the value stored at its key, and writes its own
value there.

`M_t = (I - β_t k_tᵀ k_t) diag(a_t) M_{t-1} + β_t k_tᵀ v_t`, `o_t = q_t M_t`: DeltaNet (arXiv 2406.06484),
Gated DeltaNet (arXiv 2412.06464, scalar decay), KDA (arXiv 2510.26692, a decay a key channel).

With `erase="undecayed"` the key reads the memory before its token's decay, `M_t = diag(a_t) M_{t-1} - β_t k_tᵀ (k_t
M_{t-1}) + β_t k_tᵀ v_t`: Comba (arXiv 2506.02475) with one direction for both its keys.
"""

from __future__ import annotations

import functools

from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends import one_token
from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.decays import split_constant
from lsm_jax.ops.core.shared_rows import memory_axes
from lsm_jax.ops.core.states import DeltaState, delta_state, store_layer, unwrap_layer
from lsm_jax.ops.delta import (
    backends,  # noqa: F401  (registers them)
    shared_rows,
)
from lsm_jax.ops.delta.delta_xla import by_xla
from lsm_jax.ops.delta.options import MatrixOptions
from lsm_jax.parallel import TOKENS, over_mesh

ERASES = ("decayed", "undecayed")


def delta_memory(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    beta: Float[Array, "B T G"],
    log_decay: Float[Array, ...] | None = None,
    *,
    erase: str = "decayed",
    scale: float | None = None,
    initial_state: DeltaState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T max(H,G) V"], DeltaState]:
    """Move the value that the memory returns for `k` towards `v` by the fraction `beta`, and read the memory
    with `q`.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys of L2 norm at most 1 (with beta <= 2 the memory then stays bounded); Hk divides
            G.
        v: [B, T, G, V] values; one memory for each of the G heads.
        beta: [B, T, G], from 0 to 2.
        log_decay: natural logarithm, at most 0: [G] for a constant, [B, T, G] for one value per token, or
            [B, T, G, K] for one per token and key channel.
        erase: which memory a key reads to erase its value: "decayed", after its token's decay, or "undecayed", before
            it. Without a log decay both are the same.
        scale: multiplies q; None is `K ** -0.5`.
        initial_state: the state to continue from; None is an empty one. With memory [B, S, ...] there is one
            state per segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that do not change the memory (they still read it).
        form: "recurrent" (token by token), "chunk" (one triangular solve a chunk, scan over chunks) or
            "associative" (associative scan over chunks).
        implementation: None (the first automatic backend that supports the call; docs/kernels.md lists what
            each requires), a backend's name ("xla", "mosaic_gpu" on Hopper, "mosaic_tpu" or, on other
            NVIDIA cards, "triton"), or a tuple of names in order of preference.
        chunk_size: tokens in a chunk of the XLA form, a power of two; None is 64.

    Returns:
        The output in v's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        NotImplementedError: the backend that is asked for by name does not support the call; the message
            names the requirement.
        ValueError: shapes, heads, erase, form, implementation or chunk size that are not accepted.
    """
    op = "delta_memory"
    checks.check_form(op, form)
    check_implementation(op, implementation)
    if erase not in ERASES:
        raise ValueError(f"{op}: erase={erase!r}; accepted are {', '.join(map(repr, ERASES))}")
    batch, length, _, _, heads, key_dim, value_dim = checks.check_qkv(op, q, k, v)
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    initial_state, layer = unwrap_layer(initial_state)
    checks.check_shape(op, "beta", beta, (batch, length, heads), "B, T, G")
    checks.check_log_decay(op, log_decay, (batch, length, heads, key_dim))
    size = checks.check_chunk_size(op, chunk_size, length)
    dtype = checks.compute_dtype(q, k, v, beta, log_decay)
    empty = functools.partial(delta_state, batch, heads, key_dim, value_dim, dtype=dtype)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
    by_token, constant = split_constant(log_decay)
    batched = dict(
        q=q,
        k=k,
        v=v,
        beta=beta,
        log_decay=by_token,
        state=state,
        segment_ids=segment_ids,
        update_mask=update_mask,
    )
    shared = dict(constant_log_decay=constant)
    options = MatrixOptions(
        scale=checks.scale_or_default(op, scale, key_dim),
        form=form,
        size=size,
        dtype=dtype,
        precision=checks.matmul_precision(q, k, v),
        erase="decayed" if log_decay is None else erase,
        fresh=initial_state is None and layer is None,
    )
    in_place = one_token.in_place(layer, q)
    result = over_mesh(
        run,
        batched,
        shared if in_place is None else shared | {"layer": in_place},
        static_of(op, options, implementation),
        axes=memory_axes(batched, shared),
        out_axes=(TOKENS, "state"),
        in_sequence=_in_sequence,
    )
    return result if in_place is not None else store_layer(layer, result)


def _in_sequence(axis, function, static, **arguments):
    """Compute `delta_memory` on one of several devices that have consecutive parts of each row: the outputs of its
    tokens, and the state after the whole row.
    """
    static = static._replace(options=static.options._replace(fresh=False))
    return shared_rows.in_sequence(axis, function, static, by_xla, arguments)
