"""Selective memories: `h_t[c, n] = exp(Δ_t[c] A[c, n]) h_{t-1}[c, n] + w_t[c, n]`, `y_t[c] = Re Σ_n C[n] h_t[c, n] + D[c] u_t[c]`.

Every entry of the memory stands alone: Mamba (arXiv 2312.00752), S4D (arXiv 2206.11893) and GateLoop (arXiv 2311.01927) with
one head a channel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.segments import read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    resume,
    state_axes,
    total_of,
    unless_restarted,
)
from lsm_jax.ops.selective import backends  # noqa: F401  (registers them)
from lsm_jax.ops.selective.state import SelectiveState, selective_state
from lsm_jax.ops.selective.xla import SelectiveOptions
from lsm_jax.parallel import TOKENS, over_mesh

DISCRETIZATIONS = ("euler", "zoh", "none")


def selective_memory(
    u: Float[Array, "B T D"],
    delta: Inexact[Array, ...],
    A: Inexact[Array, "D N"],
    B: Inexact[Array, ...],
    C: Inexact[Array, ...],
    *,
    D: Float[Array, " D"] | None = None,
    discretization: str = "euler",
    initial_state: SelectiveState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    form: str = "chunk",
    implementation: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T D"], SelectiveState]:
    """Write each channel of `u` into N numbers of its own that decay, and read their sum under `C`.

    The memory is complex where delta, A or B is. Of conjugate pairs keep one half and double C.

    Args:
        u: [B, T, D], real.
        delta: [B, T, D], or [D] for one that is constant. The real part of `delta * A` is the log of the decay, at most 0.
        A: [D, N], constant.
        B: [B, T, N] shared by the channels, [D, N] constant, or [B, T, D, N].
        C: shaped as one of those.
        D: [D], adds `D u` to the output.
        discretization: what a token writes: "euler" `delta B u` (Mamba), "zoh" `(exp(delta A) - 1) / A B u` (S4D), "none"
            `B u`.
        initial_state: the state to go on from; with memory [B, S, ...], segment id s has state s - 1. None is empty.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 where a token must not change the memory (it still reads it, and has its `D u`).
        form: "recurrent" (token by token), "chunk" (associative scan in a chunk, scan over chunks; the backward pass computes
            each chunk again, so that only the memories chunks start from are kept) or "associative" (associative scan over
            tokens, holding [B, T, D, N]; with one state a segment, a complex memory's is causal up to the rounding of complex
            products alone, which XLA does by their place).
        implementation: None picks, "xla", or a fused kernel for Mamba's arguments or those of one complex number a channel,
            GateLoop's, which takes C in u's dtype: "mosaic_gpu" (NVIDIA Hopper; u of bfloat16) or "mosaic_tpu" (u of bfloat16
            or float32, D a multiple of 128; no TPU has run it, so None doesn't pick it). Kernels are differentiable once, in
            reverse.
        chunk_size: tokens in a chunk of the XLA form, a power of two; None is 64.

    Returns:
        The output in u's dtype, and the final state in float32 or complex64 (float64 or complex128 if an input is).

    Raises:
        NotImplementedError: a kernel is named that does not serve these arguments; the message says why.
        ValueError: shapes, dtypes, discretization, form, implementation or chunk size that are not accepted.
    """
    op = "selective_memory"
    checks.check_form(op, form)
    check_implementation(op, implementation)
    if discretization not in DISCRETIZATIONS:
        listed = ", ".join(map(repr, DISCRETIZATIONS))
        raise ValueError(f"{op}: discretization={discretization!r}; accepted are {listed}")
    channels, state_size = _check(op, u, delta, A, B, C, D)
    batch, length, _ = u.shape
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    size = checks.check_chunk_size(op, chunk_size, length)
    dtype = checks.compute_dtype(u, delta, A, B, C, D)
    is_complex = any(jnp.iscomplexobj(x) for x in (delta, A, B))
    empty = functools.partial(
        selective_state, batch, channels, state_size, is_complex=is_complex, dtype=dtype
    )
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)

    given = dict(delta=delta, b=B, c=C)
    constant = {n: x for n, x in given.items() if jnp.ndim(x) == (1 if n == "delta" else 2)}
    batched = dict(u=u, state=state, segment_ids=segment_ids, update_mask=update_mask)
    batched |= {n: x for n, x in given.items() if n not in constant}
    options = SelectiveOptions(discretization, form, size, dtype, is_complex)
    shared = dict(a=A, d=D, constant=constant)
    # Channels take the place of heads.
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS) | dict.fromkeys(shared, ("heads",))
    axes |= {n: TOKENS[:2] for n, x in given.items() if n in ("b", "c") and jnp.ndim(x) == 3}
    axes["state"] = state_axes(state, segments=state.memory.ndim == 4)
    return over_mesh(
        run,
        batched,
        shared,
        static_of(op, options, implementation),
        axes=axes,
        out_axes=(TOKENS, "state"),
        in_sequence=_in_sequence,
    )


def _in_sequence(axis, function, static, **arguments):
    """The op on one of the devices that share a row."""
    update = _update_of_all(function, static, arguments)
    return resume(axis, function, (static,), arguments, update, _advance)


def _update_of_all(function, static, arguments: dict[str, Any]) -> Update:
    """The tokens of this device as one update; its transition is a logarithm, [B, D, N] or [B, S, D, N]."""
    options = static.options
    u, state, segment_ids = (arguments[name] for name in ("u", "state", "segment_ids"))
    batch, length, channels = u.shape
    num_segments = state.memory.shape[1] if state.memory.ndim == 4 else None
    empty = jax.tree.map(jnp.zeros_like, state)
    tokens = read_tokens(segment_ids, arguments["update_mask"], empty.segment_id, num_segments)
    restarts, first_id = ends_of_documents(segment_ids, tokens.run)
    delta = arguments["constant"].get("delta")
    if delta is None:
        delta = arguments["delta"]
    else:
        rows = 1 if tokens.written is None else batch
        delta = jnp.broadcast_to(delta, (rows, length, channels))
    wide = jnp.result_type(delta, options.dtype)
    total = total_of(select(tokens.written, delta.astype(wide)), tokens, num_segments, batch)
    exponent = total[..., None] * arguments["a"]
    in_chunks = static._replace(options=options._replace(form="chunk"))
    _, written = function(in_chunks, **(arguments | {"state": empty}))
    return Update(exponent.astype(written.memory.dtype), written, restarts, first_id)


def _advance(state: SelectiveState, update: Update) -> SelectiveState:
    """The state after an update."""
    state = emptied_by(state, update)
    kept = unless_restarted(update, jnp.exp(update.transition) * state.memory)
    return SelectiveState(kept + update.written.memory, newer_id(state, update))


def check_real(op: str, **arrays: Array | None) -> None:
    """ValueError for complex ones."""
    for name, array in arrays.items():
        if array is not None and jnp.iscomplexobj(array):
            raise ValueError(f"{op}: {name} has dtype {array.dtype}; accepted are real ones")


def _check(op, u, delta, A, B, C, D) -> tuple[int, int]:
    batch, length, channels = checks.check_row_channels(op, "u", u)
    checks.check_shape(op, "A", A, (channels, None), "D, N")
    checks.check_filled(op, "A", A)
    state_size = A.shape[1]
    if jnp.shape(delta) != (channels,):
        checks.check_shape(op, "delta", delta, (batch, length, channels), "B, T, D")
    accepted = (
        (batch, length, state_size),
        (channels, state_size),
        (batch, length, channels, state_size),
    )
    for name, array in (("B", B), ("C", C)):
        if jnp.shape(array) not in accepted:
            raise ValueError(
                f"{op}: {name} has shape {jnp.shape(array)}; accepted are "
                f"[B, T, N], [D, N] and [B, T, D, N] = {', '.join(map(str, accepted))}"
            )
    if D is not None:
        checks.check_shape(op, "D", D, (channels,), "D")
    check_real(op, u=u, D=D)
    return channels, state_size
