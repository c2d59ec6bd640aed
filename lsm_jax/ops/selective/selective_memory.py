"""Selective memories: `h_t[c, n] = exp(Δ_t[c] A[c, n]) h_{t-1}[c, n] + w_t[c, n]`, `y_t[c] = Re Σ_n C[n] h_t[c, n] + D[c] u_t[c]`.

Every entry of the memory stands alone: Mamba (arXiv 2312.00752), S4D (arXiv 2206.11893) and GateLoop (arXiv 2311.01927) with
one head a channel.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from lsm_jax.ops.backends import chosen
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.segments import Tokens, cut_into_chunks, finish_output, read_tokens, select
from lsm_jax.ops.core.shared_rows import (
    Update,
    emptied_by,
    ends_of_documents,
    newer_id,
    resume,
    state_axes,
    unless_restarted,
)
from lsm_jax.ops.core.states import associate_chunks, associative_scan, per_chunk, scan_tokens
from lsm_jax.ops.linear.shared_rows import total_of
from lsm_jax.ops.selective import kernels as selective_kernels
from lsm_jax.parallel import TOKENS, over_mesh

DISCRETIZATIONS = ("euler", "zoh", "none")


class SelectiveState(NamedTuple):
    """State of `selective_memory`.

    Attributes:
        memory: [B, D, N], or [B, S, D, N] with one state a segment; float32, or complex64 where the memory is complex.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    memory: Inexact[Array, ...]
    segment_id: Int[Array, " B"]


def selective_state(
    batch_size: int,
    channels: int,
    state_size: int,
    *,
    is_complex: bool = False,
    num_segments: int | None = None,
    dtype=jnp.float32,
) -> SelectiveState:
    """An empty `SelectiveState`, complex with parts of `dtype` if asked; `num_segments` gives each row that many states."""
    rows = (batch_size,) if num_segments is None else (batch_size, num_segments)
    dtype = jnp.result_type(dtype, jnp.complex64) if is_complex else dtype
    memory = jnp.zeros((*rows, channels, state_size), dtype)
    return SelectiveState(memory, jnp.zeros(batch_size, jnp.int32))


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
    checks.check_form(op, form, implementation, selective_kernels.KERNELS)
    if discretization not in DISCRETIZATIONS:
        listed = ", ".join(map(repr, DISCRETIZATIONS))
        raise ValueError(f"{op}: discretization={discretization!r}; accepted are {listed}")
    channels, state_size = _check(op, u, delta, A, B, C, D)
    batch, length, _ = u.shape
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    size = checks.check_chunk_size(op, chunk_size, length)
    form = chosen.form_of(form, implementation, length)
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
    kernel = selective_kernels.AUTOMATIC if implementation in (None, "xla") else implementation
    options = _Options(discretization, form, size, dtype, is_complex, kernel)
    why = _why_not(options, state, u, delta, A, B, C, D)
    fused = chosen.choose(op, form, implementation, kernel, why)
    options = options._replace(fused=fused)
    shared = dict(a=A, d=D, constant=constant)
    # Channels take the place of heads.
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS) | dict.fromkeys(shared, ("heads",))
    axes |= {n: TOKENS[:2] for n, x in given.items() if n in ("b", "c") and jnp.ndim(x) == 3}
    axes["state"] = state_axes(state, segments=state.memory.ndim == 4)
    return over_mesh(
        _selective_memory, batched, shared, options,
        axes=axes, out_axes=(TOKENS, "state"), in_sequence=_in_sequence,
    )  # fmt: skip


def _in_sequence(axis, function, options, **arguments):
    """The op on one of the devices that share a row."""
    update = _update_of_all(options, arguments)
    return resume(axis, function, (options,), arguments, update, _advance)


def _update_of_all(options, arguments: dict[str, Any]) -> Update:
    """This device's tokens as one update; its transition is a logarithm, [B, D, N] or [B, S, D, N]."""
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
    in_chunks = options._replace(form="chunk")
    _, written = _selective_memory(in_chunks, **(arguments | {"state": empty}))
    return Update(exponent.astype(written.memory.dtype), written, restarts, first_id)


def _advance(state: SelectiveState, update: Update) -> SelectiveState:
    """The state after an update."""
    state = emptied_by(state, update)
    kept = unless_restarted(update, jnp.exp(update.transition) * state.memory)
    return SelectiveState(kept + update.written.memory, newer_id(state, update))


class _Options(NamedTuple):
    discretization: str
    form: str
    size: int
    dtype: Any
    is_complex: bool
    kernel: str
    fused: chosen.Fused = "never"


class _Inputs(NamedTuple):
    """Arrays by token: u, delta [B, T, D]; b, c [B, T, N] or [B, T, D, N], None where constant; begin [B, T] or None."""

    u: Array
    delta: Array
    b: Array | None
    c: Array | None
    begin: Array | None


# Compiled as a whole also when called outside `jax.jit`, as in a notebook.
@functools.partial(jax.jit, static_argnums=0)
def _selective_memory(options, **arrays):
    def xla(arrays):
        return _by_xla(options, **arrays)

    def kernel(arrays):
        return _by_kernel(options.kernel, arrays)

    if options.fused == "never":
        return xla(arrays)
    given = arrays["constant"] | arrays
    names = ("state", "u", "delta", "a", "b", "c", "d")
    why = _why_not(options, *(given[name] for name in names))  # a mesh may share channels out
    if options.fused == "always":
        if why is not None:
            raise NotImplementedError(
                f"selective_memory: on a device {options.kernel!r} takes {why}"
            )
        return kernel(arrays)
    return xla(arrays) if why else chosen.by_platform(arrays, cuda=kernel, default=xla)


def _why_not(options, state, u, delta, a, b, c, d) -> str | None:
    """What the kernel takes in place of these arrays, a device's or all, or None."""
    return selective_kernels.why_not(
        options.kernel, options.form, options.discretization, u, delta, a, b, c, d, state.memory,
        is_complex=options.is_complex,
    )  # fmt: skip


def _by_kernel(kernel: str, arrays: dict[str, Any]) -> tuple[Array, SelectiveState]:
    state, given = arrays["state"], dict(arrays)
    del given["state"]
    tokens = read_tokens(given.pop("segment_ids"), given.pop("update_mask"), state.segment_id, None)
    given = dict(b=None) | given
    output, memory = selective_kernels.run_kernel(
        kernel, tokens, _beginnings(tokens), memory=state.memory, **given
    )
    return output, SelectiveState(memory, tokens.last_id)


def _by_xla(
    options, u, state, segment_ids, update_mask, a, d, constant, delta=None, b=None, c=None
):
    batch, length, channels = u.shape
    dtype = options.dtype
    num_segments = state.memory.shape[1] if state.memory.ndim == 4 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)

    def widen(x) -> Any:
        if x is None:
            return None
        return x.astype(jnp.result_type(dtype, jnp.complex64) if jnp.iscomplexobj(x) else dtype)

    if "delta" in constant:
        # One row is enough, unless some rows write where others do not.
        rows = 1 if tokens.written is None and tokens.slot is None else batch
        delta = jnp.broadcast_to(constant["delta"], (rows, length, channels))
    inputs = _Inputs(
        u=select(tokens.written, widen(u)),
        delta=select(tokens.written, widen(delta)),
        b=None if b is None else select(tokens.written, widen(b)),
        c=None if c is None else select(tokens.real, widen(c)),
        begin=_beginnings(tokens),
    )
    constant_b, constant_c = (widen(constant.get(name)) for name in ("b", "c"))
    update = functools.partial(
        _update, a=widen(a), constant_b=constant_b, discretization=options.discretization
    )
    read = functools.partial(_read, constant_c=constant_c)
    memory = widen(state.memory)

    if options.form == "associative":
        chunks = cut_into_chunks(tokens, length, 1, num_segments)

        def split(x):
            return chunks.split(jnp.broadcast_to(x, (batch, *x.shape[1:])))[:, :, 0]

        x = jax.tree.map(split, inputs)
        if options.is_complex:  # XLA rounds products by lane then
            transition, write = update(x)
        else:  # made where the tokens stand: in another lane XLA may round `exp` another way
            transition, write = map(split, update(inputs))
            taken = split(jnp.ones((batch, length), bool))
            transition = jnp.where(taken[:, :, None, None], transition, 1)
        entering, memory = associate_chunks(
            jnp.multiply, jnp.multiply, transition, write, memory, chunks
        )
        output = chunks.join(read(x, transition * entering + write)[:, :, None], length)
    elif options.form == "recurrent":

        def step(memory, x):
            transition, write = update(x)
            memory = transition * memory + write
            return memory, read(x, memory)

        output, memory = scan_tokens(step, inputs, memory, None, tokens.slot)
    else:
        chunks = cut_into_chunks(tokens, length, options.size, num_segments)

        def step(memory, x):
            held, after = associative_scan(_compose, update(x))
            held = held * memory[:, None] + after
            return held[:, -1], read(x, held)

        output, memory = scan_tokens(
            jax.checkpoint(step, prevent_cse=False),
            jax.tree.map(chunks.split, inputs),
            memory,
            None,
            chunks.slot,
        )
        output = chunks.join(output, length)

    if d is not None:
        output = output + widen(d) * select(tokens.real, widen(u))
    output = finish_output(tokens, output).astype(u.dtype)
    return output, SelectiveState(memory, tokens.last_id)


def _beginnings(tokens: Tokens) -> Array | None:
    """[B, T], True where a document begins, or None."""
    if tokens.run is None:
        return None
    return jnp.diff(tokens.run, axis=1, prepend=jnp.zeros_like(tokens.run[:, :1])) > 0


def _compose(earlier, later):
    return later[0] * earlier[0], later[0] * earlier[1] + later[1]


def _update(x: _Inputs, *, a, constant_b, discretization) -> tuple[Array, Array]:
    """Each token's update as what multiplies the memory and what is added, [..., D, N]."""
    exponent = x.delta[..., None] * a
    transition = jnp.exp(exponent)
    if x.begin is not None:
        transition = jnp.where(per_chunk(x.begin, transition), 0, transition)
    if discretization == "none":
        write = x.u[..., None]
    else:
        write = (x.delta * x.u)[..., None]
    if discretization == "zoh":
        write = write * expm1_ratio(exponent)
    write = write * _by_channel(x, x.b, constant_b)
    return transition, write.astype(jnp.result_type(write, transition))


def _read(x: _Inputs, memory: Array, *, constant_c) -> Array:
    """Re(sum of c h): memory [..., D, N] -> [..., D]."""
    c = _by_channel(x, x.c, constant_c)
    products = jnp.real(c) * jnp.real(memory)
    if jnp.iscomplexobj(c) and jnp.iscomplexobj(memory):
        products = products - jnp.imag(c) * jnp.imag(memory)
    return jnp.sum(products, axis=-1)


def _by_channel(x: _Inputs, given, constant) -> Array:
    """B or C with an axis of channels."""
    if given is None:
        return constant
    return given if given.ndim == x.u.ndim + 1 else given[..., None, :]


def expm1_ratio(z: Array) -> Array:
    """`(exp(z) - 1) / z`, 1 at 0; by its series near 0, where the quotient's derivative would cancel."""
    near = jnp.abs(jnp.real(z)) + jnp.abs(jnp.imag(z)) < 0.5
    safe = jnp.where(near, 1, z)
    small = jnp.where(near, z, 0)
    series = jnp.ones_like(z)
    for n in range(14, 1, -1):  # 0.5^14 / 15! is below float64's rounding
        series = 1 + series * small / n
    return jnp.where(near, series, jnp.expm1(safe) / safe)


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
