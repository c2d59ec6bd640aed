"""Selective memories: `h_t[c, n] = exp(Δ_t[c] A[c, n]) h_{t-1}[c, n] + w_t[c, n]`, `y_t[c] = Re Σ_n C[n]
h_t[c, n] + D[c] u_t[c]`.

Every entry of the memory is independent of the others: Mamba (arXiv 2312.00752), S4D (arXiv 2206.11893) and
GateLoop (arXiv 2311.01927) with one head per channel.
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
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T D"], SelectiveState]:
    """Write each channel of `u` into N decaying entries of the memory, and read their sum with the weights
    `C`.

    The memory is complex if delta, A or B is. For a model with conjugate pairs, pass one of each pair and
    double C.

    Args:
        u: [B, T, D], real.
        delta: [B, T, D], or [D] if constant. The real part of `delta * A` is the log of the decay, at most
            0.
        A: [D, N], constant in time.
        B: [B, T, N] (the same for all channels), [D, N] (constant in time) or [B, T, D, N].
        C: one of the shapes of B.
        D: [D]; `D u` is added to the output.
        discretization: the write of a token: "euler" `delta B u` (Mamba), "zoh" `(exp(delta A) - 1) / A B
            u` (S4D), "none" `B u`.
        initial_state: the state to continue from; None is an empty one. With memory [B, S, ...] there is
            one state per segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that do not change the memory (they still read it, and `D u` is
            still added).
        form: "recurrent" (token by token), "chunk" (an associative scan in each chunk, and a scan over
            chunks; the backward pass recomputes each chunk, so that only the memory at the start of each
            chunk is stored) or "associative" (an associative scan over tokens, which stores [B, T, D, N].
            With one state per segment and a complex memory, later tokens may change the rounding of earlier
            outputs: XLA rounds a complex product by its index in the array).
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a
            backend's name ("xla", "mosaic_gpu", ...), or a tuple of names in order of preference. The fused
            kernels support Mamba's and GateLoop's arguments, convert GateLoop's C to u's dtype, and are
            differentiable once, in reverse mode.
        chunk_size: tokens in a chunk of the XLA form, a power of two; None is 64.

    Returns:
        The output in u's dtype, and the final state in float32 or complex64 (float64 or complex128 if an
        input is).

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the
            requirement.
        ValueError: a shape, dtype, discretization, form, implementation or chunk size is not accepted.
    """
    op = "selective_memory"
    checks.check_form(op, form)
    check_implementation(op, implementation)
    if discretization not in DISCRETIZATIONS:
        listed = ", ".join(map(repr, DISCRETIZATIONS))
        raise ValueError(f"{op}: discretization={discretization!r}; accepted are {listed}")
    channels, state_size = _check_arrays(op, u, delta, A, B, C, D)
    batch, length, _ = u.shape
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    size = checks.check_chunk_size(op, chunk_size, length)
    dtype = checks.compute_dtype(u, delta, A, B, C, D)
    is_complex = any(jnp.iscomplexobj(x) for x in (delta, A, B))
    empty = functools.partial(
        selective_state, batch, channels, state_size, is_complex=is_complex, dtype=dtype
    )
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)

    parameters = dict(delta=delta, b=B, c=C)
    constant = {n: x for n, x in parameters.items() if jnp.ndim(x) == (1 if n == "delta" else 2)}
    batched = dict(u=u, state=state, segment_ids=segment_ids, update_mask=update_mask)
    batched |= {n: x for n, x in parameters.items() if n not in constant}
    options = SelectiveOptions(discretization, form, size, dtype, is_complex)
    shared = dict(a=A, d=D, constant=constant)
    # A mesh splits channels as it splits heads.
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS) | dict.fromkeys(shared, ("heads",))
    axes |= {n: TOKENS[:2] for n, x in parameters.items() if n in ("b", "c") and jnp.ndim(x) == 3}
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
    """Compute `selective_memory` on one of several devices that have consecutive parts of each row: the outputs of its
    tokens, and the state after the whole row.
    """
    update = _update_of_device(function, static, arguments)
    return resume(axis, function, (static,), arguments, update, _advance)


def _update_of_device(function, static, arguments: dict[str, Any]) -> Update:
    """Return the effect of this device's tokens on the memory of `selective_memory`, as one update, whose
    transition is the log decay over all of these tokens: [B, D, N], or [B, S, D, N] with one state per
    segment.
    """
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
    delta = delta.astype(jnp.result_type(delta, options.dtype))
    total = total_of(select(tokens.written, delta), tokens, num_segments, batch)
    exponent = total[..., None] * arguments["a"]
    in_chunks = static._replace(options=options._replace(form="chunk"))
    _, written = function(in_chunks, **(arguments | {"state": empty}))
    return Update(exponent.astype(written.memory.dtype), written, restarts, first_id)


def _advance(state: SelectiveState, update: Update) -> SelectiveState:
    """Return the state of `selective_memory` after the tokens of one device: the memory before them times the
    exponential of their summed log transitions, plus what they write.

    Where a document begins among these tokens, nothing of the memory before is left.
    """
    state = emptied_by(state, update)
    decayed = unless_restarted(update, jnp.exp(update.transition) * state.memory)
    return SelectiveState(decayed + update.written.memory, newer_id(state, update))


def check_real(op: str, **arrays: Array | None) -> None:
    """Raise ValueError if one of the named arguments of the op called `op` has a complex dtype; None is accepted."""
    for name, array in arrays.items():
        if array is not None and jnp.iscomplexobj(array):
            raise ValueError(f"{op}: {name} has dtype {array.dtype}; accepted are real dtypes")


def _check_arrays(op, u, delta, A, B, C, D) -> tuple[int, int]:
    """Raise ValueError unless the arrays of an op over independent channels have matching shapes and real inputs;
    return D, the number of channels, and N, the memory's numbers per channel.
    """
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
