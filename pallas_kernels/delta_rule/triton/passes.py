"""The launches of the Triton kernels of the delta rule: sizes of tiles, shapes of results, and what each kernel reads.

Long rows of few memories are scanned in parts (`count_parts`, `scans`): the updates of all parts are computed at the same time, then the
memories before the parts, and from these all parts at the same time. The backward pass has the same parts, and the forward pass saves their
transitions for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.triton import passes as linear
from pallas_kernels.linear_attention.triton.passes import CHUNK, Decays
from pallas_kernels.linear_attention.triton.tilings import Tiling
from pallas_kernels.triton import launch

_F32 = jnp.float32
_LEVELS = CHUNK.bit_length() - 1

TILINGS = {
    "delta_scores": Tiling(64, 0, 4, 1),
    "narrow_delta_scores": Tiling(64, 0, 4, 1, 128),
    "solve": Tiling(32, 0, 4, 2, 168),
    "delta_scan": Tiling(0, 64, 4, 3),
    "channel_delta_scan": Tiling(0, 32, 4, 2),
    "delta_scan_backward": Tiling(0, 32, 4, 2),
    "link_parts": Tiling(64, 32, 8, 1),
    "local_gradients": Tiling(64, 64, 4, 2),
    "delta_scalar_gradients": Tiling(64, 32, 4, 2),
    "delta_channel_gradients": Tiling(16, 64, 4, 1),
}
"""The tiling of each kernel for bfloat16, by the name of the kernel. The scans compute all key channels of a memory; of 64 of
them they compute 64 value channels, backward with an undecayed erase 32, and of more than 128 of them 16, with 8 warps.
"channel_delta_scan" is `delta_scan` of more than 64 key channels with a decay for each, and "narrow_delta_scores" `delta_scores` of 64."""
WIDE_TILINGS = {
    name: tiling._replace(warps=8, stages=1, registers=0) for name, tiling in TILINGS.items()
}
WIDE_TILINGS["delta_scan"] = Tiling(0, 32, 8, 1)
WIDE_TILINGS["delta_scalar_gradients"] = Tiling(32, 64, 8, 2)
WIDE_TILINGS["delta_channel_gradients"] = Tiling(16, 64, 8, 1)
"""The tilings for products in tf32, of float16 and float32 inputs."""


class Tokens(NamedTuple):
    """The tokens of one call, as the scans read them.

    With a scalar decay or none, `read` are the queries, and `erase` and `written` the keys; with a decay per key channel they are
    multiplied by the decays (`read` by the scale too), and have as many heads as there are outputs (`read`) or memories.

    Attributes:
        read: [B, T, *, K], the vectors with which tokens read the memory before their chunk.
        erase: [B, T, *, K], the vectors with which tokens read what they replace.
        written: [B, T, *, K], the vectors with which tokens write to the memory after their chunk.
        beta: [B, T, G] float32, the write strengths, not 0; None is 1, for the memory of `dplr`.
        chunk_decay: [B, N, G] or [B, N, G, K] float32, the decay of each memory over each chunk.
    """

    read: Any
    erase: Any
    written: Any
    beta: Any
    chunk_decay: Any


def tokens_of(q, k, beta, decays: Decays) -> Tokens:
    """Return the tokens of one call with a scalar decay or none as the scans read them."""
    return Tokens(q, k, k, strengths(beta), decays.chunk_decay)


def strengths(beta) -> jax.Array:
    """Return the write strengths beta with those below 1e-20 replaced by 1e-20, which changes no sum: dbeta is x · dv / beta."""
    return jnp.where(jnp.abs(beta) < 1e-20, 1e-20, beta)


def channel_tokens(
    q, k, beta, log_decay, run, initial, *, heads: int, scale: float
) -> tuple[Decays, Tokens, jax.Array, jax.Array]:
    """Return the decays of one call with a decay per key channel; its tokens as the scans read them, for `heads` heads of the output; and
    the decayed products in float32, of q with k [B, N, heads, C, C], defined on and below the diagonal, and of k with k [B, N, G, C,
    C], defined below it.
    """
    from pallas_kernels.delta_rule.triton import scores

    batch, length, memories, keys = log_decay.shape
    decays = linear.documents(run, initial, batch)
    name = "narrow_delta_scores" if keys == 64 else "delta_scores"
    tiling, count = _tiling(name, q), length // CHUNK
    operands, stored = low(q)
    by_memory = _struct((batch, length, memories, keys), stored)
    results = launch.call(
        scores.delta_scores,
        (q, k, log_decay, decays.run, decays.enters, decays.stays, float(scale)),
        dict(
            sums=_struct(log_decay.shape, _F32),
            read=_struct((batch, length, heads, keys), stored),
            erase=by_memory,
            written=by_memory,
            chunk_decay=_struct((batch, count, memories, keys), _F32),
            scores=_struct((batch, count, heads, CHUNK, CHUNK), _F32),
            alike=_struct((batch, count, memories, CHUNK, CHUNK), _F32),
        ),
        programs=batch * count * heads,
        **_options(tiling),
        **dict(
            Q_HEADS=q.shape[2], K_HEADS=k.shape[2], MEMORIES=memories, HEADS=heads, K=keys, C=CHUNK, BK=tiling.keys,
            LEVELS=_LEVELS, LOW=operands, DOCUMENTS=decays.run is not None,
        ),
    )  # fmt: skip
    tokens = Tokens(
        results["read"],
        results["erase"],
        results["written"],
        strengths(beta),
        results["chunk_decay"],
    )
    return decays._replace(sums=results["sums"]), tokens, results["scores"], results["alike"]


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def low(x) -> tuple[Any, Any]:
    """Return the dtype of the operands of products for an array of tokens x, for Triton and for arrays that are stored; float32 are
    products in tf32.
    """
    import triton.language as tl

    return (tl.bfloat16, jnp.bfloat16) if x.dtype == jnp.bfloat16 else (tl.float32, _F32)


def _tiling(name: str, x, keys: int = 0) -> Tiling:
    """Return the tiling of a kernel for tokens x. `keys` is the number of key channels if a program's tile contains all of them."""
    low = x.dtype == jnp.bfloat16
    tiling = (TILINGS if low else WIDE_TILINGS)[name]
    if keys > 128:
        return tiling._replace(values=16, warps=8, stages=1, registers=0)
    return tiling._replace(values=64) if keys == 64 and low else tiling


def _options(tiling: Tiling) -> dict[str, int]:
    return dict(warps=tiling.warps, stages=tiling.stages, registers=tiling.registers)


def solve(k, alike, beta, decays: Decays) -> jax.Array:
    """Return the inverses X of the triangular systems of all chunks, [B, N, G, C, C], in the products' dtype.

    Args:
        k: [B, T, *, K], the keys.
        alike: [B, N, G, C, C], the decayed products of keys with keys under a decay per key channel; else None.
        beta: [B, T, G], the write strengths; None is 1.
        decays: the decays and documents.
    """
    from pallas_kernels.delta_rule.triton import bodies

    batch, length, heads = k.shape[0], k.shape[1], decays.heads
    tiling = _tiling("solve", k)
    operands, stored = low(k)
    return launch.call(
        bodies.solve,
        (k, alike, beta, decays.cum, decays.run),
        dict(inverse=_struct((batch, length // CHUNK, heads, CHUNK, CHUNK), stored)),
        programs=batch * (length // CHUNK) * heads,
        **_options(tiling),
        **dict(
            K_HEADS=k.shape[2], HEADS=heads, K=k.shape[3], C=CHUNK, BK=tiling.keys, LEVELS=_LEVELS, LOW=operands,
            CHANNELS=decays.by_channel, DECAY=decays.cum is not None, DOCUMENTS=decays.run is not None, UNDECAYED=decays.undecayed,
            LOW_RANK=beta is None,
        ),
    )["inverse"]  # fmt: skip


def count_parts(tokens: Tokens, v, decays: Decays, *, heads: int) -> int:
    """Return the number of parts in which the scans compute each row of `heads` output heads, for values v [B, T, G, V]: a power of two.

    It is that of the kernels of linear attention for as many programs as the reversed scan has, and 1 if it is so small that parts cost more
    than they save: a part is scanned for K columns of its transition and V of its writes, and then for V columns again, in place of V. Rows
    of several memories have one part each.
    """
    batch, length, _, values = v.shape
    keys = tokens.erase.shape[3]
    programs = batch * heads * (values // _reversed_tiling(v, keys, decays).values)
    parts = 1 if decays.bounds is not None else row_layout.count_parts(programs, length)
    return parts if parts * values > 2 * values + keys else 1


def _scan_tiling(v, keys: int, decays: Decays) -> Tiling:
    wide = decays.by_channel and keys > 64
    return _tiling("channel_delta_scan" if wide else "delta_scan", v, keys)


def _reversed_tiling(v, keys: int, decays: Decays, update: bool = False) -> Tiling:
    # For 64 value channels and two decays of rows, or the updates with decays of key channels, the registers do not suffice.
    narrow = (decays.undecayed or (update and decays.by_channel)) and keys == 64
    return _tiling("delta_scan_backward", v, 0 if narrow else keys)


def _split(arrays: Any, parts: int) -> Any:
    """Return a tuple of arrays [B, ...] or None with each of the P = `parts` parts of a row as a row, [B * P, ...]."""
    split = (None if x is None else row_layout.split_parts(x, parts) for x in arrays)
    return type(arrays)(*split) if hasattr(arrays, "_fields") else tuple(split)


def _join(x, parts: int) -> jax.Array:
    """Return x [B * P, N, ...], whose rows are the P = `parts` parts of rows, as [B, P * N, ...]."""
    return x.reshape(x.shape[0] // parts, parts * x.shape[1], *x.shape[2:])


def _link(transitions, written, outside, *, reverse: bool = False) -> jax.Array:
    """Return the memories before all parts of the rows, or with `reverse` the gradients of those after them, shaped as `written`.

    Args:
        transitions: [B * P, G, K, K] float32, the transition of each part.
        written: [B * P, heads, K, V] float32, the memory after each part that begins with an empty one, or with `reverse` the gradient of the
            memory before each part if that of the memory after it is 0.
        outside: [B, heads, K, V] float32, the memories before the rows, or with `reverse` the gradients of those after them.
        reverse: whether gradients are computed, from the last part to the first.
    """
    from pallas_kernels.delta_rule.triton import scans

    batch, heads, keys, values = outside.shape
    tiling = TILINGS["link_parts"]
    if keys > 128:
        tiling = tiling._replace(keys=32)
    return launch.call(
        scans.link_parts,
        (transitions, written, outside, written.shape[0] // batch),
        dict(starts=_struct(written.shape, _F32)),
        programs=batch * heads * (values // tiling.values),
        **_options(tiling),
        **dict(
            MEMORIES=transitions.shape[1], HEADS=heads, K=keys, V=values, BK=tiling.keys, BV=tiling.values, REVERSE=reverse,
        ),
    )["starts"]  # fmt: skip


def scan(
    tokens: Tokens, v, inverse, decays: Decays, initial, other_written=None, other_v=None, *, heads: int
) -> tuple[Any, ...]:  # fmt: skip
    """Carry memories through all chunks; long rows of few memories in parts.

    Args:
        tokens: the tokens, of which erase, written, beta and chunk_decay are read.
        v: [B, T, G, V], the values.
        inverse: [B, N, G, C, C], the inverses of the chunks' triangular systems.
        decays: the decays and documents.
        initial: [B * S, G, K, V] float32, the memories before the rows.
        other_written: [B, T, G, K], the vectors of a second write, for a memory without beta; else None.
        other_v: [B, T, G, V], the values of the second write; else None.
        heads: number of heads of the output.

    Returns:
        The memories before all chunks [B, N, G, K, V] and what tokens write, u [B, T, G, V], in the products' dtype; the memories
        after the rows, shaped as `initial`; and the transitions of all P parts of the rows, [B * P, G, K, K] float32, or None of one part.
    """
    parts = count_parts(tokens, v, decays, heads=heads)
    arrays = v, inverse, other_written, other_v
    if parts == 1:
        return *_scan(tokens, decays, initial, *arrays), None
    tokens, decays, arrays = (_split(x, parts) for x in (tokens, decays, arrays))
    written, transitions = _scan(tokens, decays, None, *arrays)
    starts = _link(transitions, written, initial)
    states, writes, ends = _scan(tokens, decays, starts, *arrays)
    final = ends.reshape(-1, parts, *ends.shape[1:])[:, -1]
    return _join(states, parts), _join(writes, parts), final, transitions


def _scan(
    tokens: Tokens, decays: Decays, initial, v, inverse, other_written, other_v
) -> tuple[jax.Array, ...]:
    """Run the kernel `delta_scan` on whole rows; return memories, writes and final memories as `scan` does, or if `initial` is None the
    updates of the rows: W [B, G, K, V] and Θ [B, G, K, K], float32.
    """
    from pallas_kernels.delta_rule.triton import scans

    batch, length, heads, values = v.shape
    keys, count, update = tokens.erase.shape[3], length // CHUNK, initial is None
    segments = 1 if update else initial.shape[0] // batch
    tiling = _scan_tiling(v, keys, decays)
    operands, stored = low(v)
    erase_decay = decays.erase_decay if decays.undecayed else decays.read_decay
    # Without a decay nothing but the erase makes errors smaller with time.
    exact = decays.cum is None and not decays.by_channel and v.dtype == jnp.bfloat16
    results = launch.call(
        scans.delta_scan,
        (
            tokens.erase, tokens.written, v, other_written, other_v, inverse, tokens.beta, erase_decay, decays.write_decay,
            tokens.chunk_decay, decays.bounds, initial, count,
        ),
        dict(
            states=_struct((1,) if update else (batch, count, heads, keys, values), stored),
            writes=_struct((1,) if update else v.shape, stored),
            final=_struct((batch * segments, heads, keys, values), _F32),
            transitions=_struct((batch, heads, keys, keys) if update else (1,), _F32),
        ),
        programs=batch * segments * heads * ((values + keys * update) // tiling.values),
        **_options(tiling),
        **dict(
            K_HEADS=tokens.erase.shape[2], HEADS=heads, SEGMENTS=segments, K=keys, V=values, C=CHUNK, BV=tiling.values, LOW=operands,
            CHANNELS=decays.by_channel, LOW_RANK=tokens.beta is None, UPDATE=update, EXACT=exact,
        ),
    )  # fmt: skip
    return tuple(results.values())[2:] if update else tuple(results.values())[:3]


def local_gradients(q, k, d_out, scores, decays: Decays, *, scale: float) -> jax.Array:
    """Return the gradients of what tokens write through the outputs of their chunk, Pᵀ dO [B, T, heads, V], in the products' dtype.
    `scores` are P with a decay per key channel, else None.
    """
    from pallas_kernels.delta_rule.triton import bodies

    batch, length, heads, values = d_out.shape
    tiling = _tiling("local_gradients", q)
    operands, stored = low(q)
    return launch.call(
        bodies.local_gradients,
        (q, k, d_out, scores, decays.cum, decays.run, float(scale)),
        dict(gradient=_struct(d_out.shape, stored)),
        programs=batch * (length // CHUNK) * heads * (values // tiling.values),
        **_options(tiling),
        **dict(
            Q_HEADS=q.shape[2], K_HEADS=k.shape[2], D_HEADS=decays.heads, HEADS=heads, K=q.shape[3], V=values, C=CHUNK,
            BK=tiling.keys, BV=tiling.values, LOW=operands, CHANNELS=decays.by_channel, DECAY=decays.cum is not None,
            DOCUMENTS=decays.run is not None,
        ),
    )["gradient"]  # fmt: skip


def scan_backward(
    tokens: Tokens, d_out, local, writes, inverse, decays: Decays, d_final, transitions, *, scale: float
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Carry the gradients of memories from the last chunk to the first, in the parts of `scan`.

    Args:
        tokens: the tokens.
        d_out: [B, T, heads, V], the gradient of the output.
        local: [B, T, heads, V], Pᵀ dO, from `local_gradients`.
        writes: [B, T, G, V], what tokens write, u.
        inverse: [B, N, G, C, C], the inverses of the chunks' triangular systems.
        decays: the decays and documents.
        d_final: [B * S, heads, K, V] float32, the gradients of the memories after the rows.
        transitions: the transitions of the parts that `scan` returned, or None.
        scale: the factor of the queries.

    Returns:
        The gradients of the memories after all chunks [B, N, heads, K, V] and of the values [B, T, heads, V], in the products' dtype;
        those of beta [B, T, heads] float32, without meaning if beta is None; and those of the memories before the rows, shaped as `d_final`.
    """
    arrays = d_out, local, writes, inverse
    if transitions is None:
        return _scan_backward(tokens, decays, d_final, *arrays, scale=scale)
    parts = transitions.shape[0] // d_out.shape[0]
    tokens, decays, arrays = (_split(x, parts) for x in (tokens, decays, arrays))
    (read,) = _scan_backward(tokens, decays, None, *arrays, scale=scale)
    d_ends = _link(transitions, read, d_final, reverse=True)
    *results, d_starts = _scan_backward(tokens, decays, d_ends, *arrays, scale=scale)
    d_initial = d_starts.reshape(-1, parts, *d_starts.shape[1:])[:, 0]
    d_states, dv, d_beta = results
    d_beta = d_beta if tokens.beta is None else _join(d_beta, parts)
    return _join(d_states, parts), _join(dv, parts), d_beta, d_initial


def _scan_backward(
    tokens: Tokens, decays: Decays, d_final, d_out, local, writes, inverse, *, scale: float
) -> tuple[jax.Array, ...]:
    """Run the kernel `delta_scan_backward` on whole rows; return what `scan_backward` does, or if `d_final` is None the gradients of the
    memories before the rows alone, [B, heads, K, V], for 0 after them.
    """
    from pallas_kernels.delta_rule.triton import scans

    batch, length, heads, values = d_out.shape
    keys, count, update = tokens.erase.shape[3], length // CHUNK, d_final is None
    segments = 1 if update else d_final.shape[0] // batch
    tiling = _reversed_tiling(d_out, keys, decays, update)
    operands, stored = low(d_out)
    beta = (batch, length, heads, values // tiling.values)
    d_states, dv, d_beta, d_initial = launch.call(
        scans.delta_scan_backward,
        (
            tokens.read, tokens.erase, tokens.written, d_out, local, writes, inverse, tokens.beta, decays.read_decay,
            decays.erase_decay, decays.write_decay, tokens.chunk_decay, decays.bounds, d_final, count, float(scale),
        ),
        dict(
            d_states=_struct((1,) if update else (batch, count, heads, keys, values), stored),
            dv=_struct((1,) if update else d_out.shape, stored),
            d_beta=_struct((1,) if update or tokens.beta is None else beta, _F32),
            d_initial=_struct((batch * segments, heads, keys, values), _F32),
        ),
        programs=batch * segments * heads * (values // tiling.values),
        **_options(tiling),
        **dict(
            Q_HEADS=tokens.read.shape[2], K_HEADS=tokens.erase.shape[2], MEMORIES=writes.shape[2], HEADS=heads, SEGMENTS=segments,
            K=keys, V=values, C=CHUNK, BV=tiling.values, LOW=operands, CHANNELS=decays.by_channel, UNDECAYED=decays.undecayed,
            LOW_RANK=tokens.beta is None, UPDATE=update,
        ),
    ).values()  # fmt: skip
    if update:
        return (d_initial,)
    return d_states, dv, jnp.sum(d_beta, -1), d_initial


def gradients(
    q, k, writes, d_out, dv, decays: Decays, states, d_states, *, scale: float, decay: bool
) -> tuple[jax.Array, jax.Array, Any]:
    """Return the gradients of the queries and keys for each head of the output, [B, T, heads, K] in the dtypes of q and k, and of the
    log decay, [B, T, heads] or [B, T, heads, K] float32; that of a scalar log decay is None unless `decay`.

    Args:
        q: [B, T, *, K], the queries.
        k: [B, T, *, K], the keys.
        writes: [B, T, G, V], what tokens write, u.
        d_out: [B, T, heads, V], the gradient of the output.
        dv: [B, T, heads, V], the gradient of the values.
        decays: the decays and documents.
        states: [B, N, G, K, V], the memories before all chunks.
        d_states: [B, N, heads, K, V], the gradients of the memories after all chunks.
        scale: the factor of the queries.
        decay: whether the gradient of a scalar log decay is computed.
    """
    from pallas_kernels.delta_rule.triton import bodies

    batch, length, heads, values = d_out.shape
    keys, by_channel = q.shape[3], decays.by_channel
    tiling = _tiling("delta_channel_gradients" if by_channel else "delta_scalar_gradients", q)
    tiles, count, shape = keys // tiling.keys, length // CHUNK, (batch, length, heads, keys)
    d_scores = linear.score_gradients(d_out, writes, decays, scale=scale)
    d_alike = linear.score_gradients(dv, writes, decays, scale=-1.0, undecayed=decays.undecayed)
    arrays = (q, k, writes, d_out, dv, d_scores, d_alike)
    if by_channel:
        arrays += decays.sums, decays.run, decays.enters, decays.stays
        d_decay = shape
    else:
        arrays += decays.read_decay, decays.erase_decay, decays.write_decay, decays.chunk_decay
        arrays += (decays.run,)
        d_decay = (*shape[:3], tiles) if decay else (1,)
    results = launch.call(
        bodies.delta_channel_gradients if by_channel else bodies.delta_scalar_gradients,
        (*arrays, states, d_states, float(scale)),
        dict(dq=_struct(shape, q.dtype), dk=_struct(shape, k.dtype), dg=_struct(d_decay, _F32)),
        programs=batch * count * heads * tiles,
        shared_loads=True,
        **_options(tiling),
        **dict(
            Q_HEADS=q.shape[2], K_HEADS=k.shape[2], MEMORIES=writes.shape[2], HEADS=heads, K=keys, V=values, C=CHUNK,
            BK=tiling.keys, BV=tiling.values, LOW=low(q)[0], DOCUMENTS=decays.run is not None,
        ),
        **(dict(LEVELS=_LEVELS) if by_channel else dict(DECAY=decay, UNDECAYED=decays.undecayed)),
    )  # fmt: skip
    dq, dk, dg = results.values()
    if by_channel:
        return dq, dk, dg
    return dq, dk, jnp.sum(dg, -1) if decay else None
