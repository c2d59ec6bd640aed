"""Linear attention with a scalar decay on Mosaic GPU (Hopper): one scan, run once in the forward pass and three times in the backward, after
`decay_sums`, a kernel of the sums of the decays.

The scan (`scalar_scan`) computes, chunk by chunk and for j <= i,

    out_i = read_decay_i x_i S + sum_j exp(cum_i - cum_j) (x_i . y_j) z_j,    S <- chunk_decay S + sum_j (write_decay_j y_j)ᵀ z_j

(x, y, z) = (q, k, v) gives the output, and (dO, v, k) the gradient of q. From the last chunk to the first (for j >= i, with cum_j -
cum_i, `read_decay` and `write_decay` exchanged) S is the gradient of the memory, or its transpose; (v, dO, q) gives the gradient of
k, and (k, q, dO) that of v. The gradient of the decay requires no further product: it is `q . dq - k . dk` summed from each token
to the end of its chunk, plus the inner product of the memory with its gradient there. Mamba2 (arXiv 2405.21060) section 6 has the
chunks, GLA (2312.06635) appendix C the gradient.

If a batch has few rows and they are long, each row is split into parts that are computed at the same time: a first scan adds up the
writes of each part, from which the memories before all parts follow.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.compat import PROCESSORS
from pallas_kernels.hopper import row_layout
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper import pair_gradients, scalar_chunks
from pallas_kernels.linear_attention.hopper.decay_gradient import (
    decay_gradient as sum_decay_gradient,
)
from pallas_kernels.linear_attention.hopper.decay_sums import LEAST, ROWS, decay_sums
from pallas_kernels.linear_attention.hopper.scalar_plan import BLOCK, Decays, pairs
from pallas_kernels.linear_attention.hopper.scalar_scan import (
    adds_decays,
    run_scans,
    scalar_scan,
    scan_of,
)
from pallas_kernels.memory_calls import NO_BONUS, in_bfloat16, key_dims, value_dims

__all__ = [
    "CHUNK", "FROM_ZERO", "REQUIREMENTS", "SIZES", "Residuals", "backward", "chunk_decays", "forward", "interval_ends", "rows_decay_gradient",
]  # fmt: skip

FROM_ZERO = True
"""Whether `forward` accepts an `initial` of None, and `backward` a `d_final` of None, which are zeros that nobody stores."""

SIZES = 64, 128, 256, 512
"""The accepted numbers of key and of value channels."""
_F32 = jnp.float32
PAIRED = True
"""Whether two heads of 64 value channels that share q and k are computed by one thread block, where there are factors of writes and skips."""
GRADIENTS_OF_PAIRS = True
"""Whether the gradients of two heads that share q and k are computed by the scans of `pair_gradients`, where there are factors of writes and
skips."""
SUMS_BY_PRODUCTS = True
"""Whether sums of decays are computed by products of a kernel (`decay_sums`) in place of XLA's masked sums."""
FEW_LAUNCHES = "automatic"
"""Where the scan adds the decays of its chunks itself, which saves two launches, if it can; the gradients of q and v have one launch, if
processors are left over, and that of the decays another one. "short" is where the card has a processor for each thread block of a scan, "always" also
elsewhere, "never" nowhere; "automatic" is where a card has run it and it was faster (`_few_launches`): where the card has room for the thread blocks
of two scans, or with no derivative of one, and rows begin with an empty memory. Then the gradients of 64 channels are computed of all chunks at once
(`scalar_chunks`); "chunks" does so with an initial memory, too."""
REQUIREMENTS = (
    NO_BONUS,
    in_bfloat16("q", "k", "v"),
    key_dims(*SIZES),
    value_dims(*SIZES),
)


class Residuals(NamedTuple):
    """The arrays that `forward` of linear attention with a scalar decay saves for `backward`, for rows split into P
    parts.

    Attributes:
        decay: the decays of all tokens and chunks, and the tokens' documents.
        starts: [B * P, *, K, V] float32, the memory of each of * heads before each part of a row; None is 0.
        ends: [B * P, *, K, V] float32, the memory of each of * heads after each part of a row.
    """

    decay: Decays
    starts: jax.Array | None
    ends: jax.Array


def forward(
    q, k, v, log_decay, run, initial, *, scale: float, log_write=None, skip=None, rank: int = 1,
    save: bool = True, interpret: Any = False,
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute linear attention with a scalar decay or none, and what its backward pass requires.

    Return the output [B, T, max(H, G), V], the final memories, shaped as `initial`, and the residuals, which are complete whether
    or not `save` is set. The arguments are those of `linear_attention`, with T a multiple of `CHUNK`; an `initial` of None is one empty
    memory per row. `log_write` and `skip` are given both, with a decay, or neither.
    """
    batch, length, memories, _ = v.shape
    heads = max(q.shape[2], memories)
    run, chunk_bounds = row_layout.split_runs(run, initial, batch)
    paired = PAIRED and skip is not None
    programs = batch * heads // (2 if paired and pairs(q, k, v, heads) else 1)
    parts = 1 if chunk_bounds is not None else row_layout.count_parts(programs, length)
    decay = Decays(None, None, None, None, None, None, log_decay)
    plain = run is None and chunk_bounds is None and parts == rank == 1 and log_write is None
    few = _few_launches(batch * heads * (v.shape[3] // BLOCK), save, initial)
    few = few and plain and adds_decays(q, k, v, log_decay)
    at_once = FEW_LAUNCHES in ("automatic", "chunks") and v.shape[3] == scalar_chunks.CHANNELS
    by_chunks = few and save and at_once
    if not few:
        decay = chunk_decays(log_decay, run, v.shape, parts, log_write, interpret)
    q, k, v = (row_layout.split_parts(x, parts) for x in (q, k, v))
    scan = functools.partial(
        scalar_scan, decay=decay, heads=heads, chunk_bounds=chunk_bounds, rank=rank, interpret=interpret, paired=paired,
    )  # fmt: skip
    # Each of several query heads that read one memory computes that memory.
    starts = None if initial is None else jnp.repeat(initial, heads // memories, axis=1)
    if parts > 1:
        (written,) = scan(None, k, v)
        if starts is None:
            starts = jnp.zeros((batch, *written.shape[1:]), _F32)
        starts = row_layout.memories_before_parts(written, decay.chunk_decay, starts)
    skip = _by_head(skip, heads)
    output, ends, *sums = scan(
        q, k, v, initial=starts, read_scale=scale, skip=skip, return_sums=by_chunks
    )
    if by_chunks:
        decay = Decays(sums[0], None, sums[1], None, None)
    final = ends.reshape(-1, parts, heads, *ends.shape[2:])[:, -1, :: heads // memories]
    return output.reshape(batch, length, heads, -1), final, Residuals(decay, starts, ends)


def _few_launches(blocks: int, save: bool, initial: jax.Array | None) -> bool:
    """Return whether scans of so many thread blocks have few launches, as `FEW_LAUNCHES` says. Rows that begin with an empty memory were
    timed: 128 blocks were faster forward and slower with a derivative, 64 were faster in both (docs/kernels.jsonl).
    """
    if FEW_LAUNCHES in ("never", "always"):
        return FEW_LAUNCHES == "always"
    if FEW_LAUNCHES == "short":
        return blocks <= PROCESSORS
    fits = blocks * (2 if save else 1) <= PROCESSORS
    return fits and (initial is None or FEW_LAUNCHES == "chunks")


def backward(
    q, k, v, log_decay, run, initial, residuals: Residuals, d_output, d_final, *, scale: float,
    log_write=None, skip=None, rank: int = 1, decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, log_decay and initial of linear attention with a scalar decay or none; with `log_write` and `skip`,
    their gradients are after that of v.

    The gradient of log_decay is None if there is no decay or `decay_gradient` is False, and that of an `initial` of None, too. The arguments
    are those of `forward`, the residuals that it returned, and the gradients of its output and of its final memories; None is 0 for the
    latter.
    """
    batch, length, memories, _ = v.shape
    heads = d_output.shape[2]
    decay, starts, ends = residuals
    _, chunk_bounds = row_layout.split_runs(run, initial, batch)
    parts = ends.shape[0] // (batch if initial is None else initial.shape[0])
    query_heads, key_heads = q.shape[2], k.shape[2]
    q, k, v, d_output = (row_layout.split_parts(x, parts) for x in (q, k, v, d_output))
    options: dict[str, Any] = dict(
        decay=decay, heads=heads, chunk_bounds=chunk_bounds, rank=rank, interpret=interpret,
        paired=PAIRED and skip is not None,
    )  # fmt: skip
    scan = functools.partial(scalar_scan, **options)
    d_ends = None if d_final is None else row_layout.gradient_by_head(d_final, heads)
    if parts > 1:
        (read,) = scan(None, q, d_output, write_scale=scale, reverse=True)
        if d_ends is None:
            d_ends = jnp.zeros((batch, *read.shape[1:]), _F32)
        d_ends = row_layout.memories_before_parts(read, decay.chunk_decay, d_ends, reverse=True)

    def join(x, heads):  # the parts, and the heads that share an input
        return row_layout.sum_heads(x.reshape(batch, length, *x.shape[2:]), heads)

    def first(memory):  # of a row's parts
        return memory.reshape(-1, parts, *memory.shape[1:])[:, 0]

    def products_at_end():  # of the memory and its gradient, [B * P, heads, 1]
        if d_ends is None:
            return jnp.zeros((*ends.shape[:2], 1), _F32)
        return jnp.sum(ends * d_ends, (-1, -2))[:, :, None]

    if GRADIENTS_OF_PAIRS and skip is not None and pair_gradients.supports(q, k, v, heads):
        arrays, options = (
            (q, k, v, d_output, decay),
            dict(chunk_bounds=chunk_bounds, interpret=interpret),
        )
        dq, q_dots, states = pair_gradients.query_gradient(*arrays, starts, scale=scale, **options)
        dk, dv, d_starts, k_dots, skip_dots, products = pair_gradients.key_gradients(
            *arrays, d_ends, states, _by_head(skip, heads), scale=scale, **options
        )
        d_decay = None
        if decay_gradient:
            at_end = interval_ends(products_at_end(), products, chunk_bounds)
            d_decay = rows_decay_gradient(q_dots - k_dots, at_end, decay.run)
            d_decay = d_decay.reshape(batch, length, memories)
        d_writes = _write_gradients(k_dots, skip_dots, (batch, parts, length))
        return (
            join(dq, query_heads),
            join(dk, key_heads),
            join(dv, memories),
            *d_writes,
            d_decay,
            None if initial is None else first(d_starts),
        )

    if decay.stored_by_scan:
        saves: dict[str, Any] = dict(save_states=True, each_chunk=True, **options)
        (_, states), (d_starts, d_states) = run_scans(
            scan_of(None, k, v, initial=starts, **saves),
            scan_of(None, q, d_output, initial=d_ends, write_scale=scale, reverse=True, **saves),
            together=True,
        )
        gradients = scalar_chunks.chunk_gradients(
            q, k, v, d_output, decay.cum, decay.write_decay, states, d_states, scale=scale,
            decay_gradient=decay_gradient, interpret=interpret,
        )  # fmt: skip
        d_initial = None if initial is None else d_starts
        return (
            *(gradients[x] for x in ("dq", "dk", "dv")),
            gradients.get("d_decay"),
            d_initial,
        )

    forward_options = dict(initial=_transposed(starts), read_scale=scale)
    reverse_options = dict(write_scale=scale, reverse=True)
    d_ends_transposed = _transposed(d_ends)
    with_decay = log_decay is not None and decay_gradient
    saved: dict[str, Any] = dict(partner=q, save_states=True) if with_decay else {}
    skipped: dict[str, Any] = {} if skip is None else dict(partner=v, skip=_by_head(skip, heads))
    (dq, _, *of_q), (dv, d_starts, *of_v) = run_scans(
        scan_of(d_output, v, k, **saved, **forward_options, **options),
        scan_of(k, q, d_output, initial=d_ends, **skipped, **reverse_options, **options),
        together=decay.log_decay is not None,
    )
    if not with_decay:
        d_decay = None
        dk, _ = scan(v, d_output, q, initial=d_ends_transposed, **reverse_options)
    else:
        q_dots, states = of_q
        dk, _, k_dots, products = scan(
            v, d_output, q, initial=d_ends_transposed, partner=k, states=states, **reverse_options
        )
        if decay.log_decay is not None and d_ends is None:
            d_decay = sum_decay_gradient(q_dots, k_dots, products, interpret=interpret)
        else:
            at_end = interval_ends(products_at_end(), jnp.sum(products, (2, -1)), chunk_bounds)
            rows = jnp.sum(q_dots - k_dots, axis=2)
            rows, at_end = (row_layout.sum_heads(x, memories, axis=1) for x in (rows, at_end))
            d_decay = rows_decay_gradient(rows, at_end, decay.run).reshape(batch, length, memories)
    d_writes: tuple[jax.Array, ...] = ()
    if skip is not None:
        v_dots, skip_dots = of_v
        skip_dots = skip_dots[:, :, : v.shape[-1] // 64]
        v_dots, skip_dots = (
            row_layout.sum_heads(jnp.sum(x, axis=2), memories, axis=1) for x in (v_dots, skip_dots)
        )
        d_writes = _write_gradients(v_dots, skip_dots, (batch, parts, length))
    d_initial = None
    if initial is not None:
        d_initial = row_layout.sum_heads(first(d_starts), memories, axis=1)
    return (
        join(dq, query_heads), join(dk, key_heads), join(dv, memories), *d_writes, d_decay, d_initial,
    )  # fmt: skip


def _transposed(memories):
    """Return memories [..., K, V] as [..., V, K]; None for None."""
    return None if memories is None else jnp.swapaxes(memories, -1, -2)


def _write_gradients(v_dots, skip_dots, shape):
    """Return the gradients of log_write [B, T, G] and of skip [G], from the inner products [B * P, G, T / P] of the values with their
    gradient without the skip and with the gradient of the output; `shape` is (B, P, T).
    """
    batch, parts, length = shape
    memories = v_dots.shape[1]
    d_write = jnp.moveaxis(v_dots.reshape(batch, parts, memories, -1), 2, 3)
    return d_write.reshape(batch, length, memories), jnp.sum(skip_dots, axis=(0, 2))


def _by_head(skip, heads: int):
    """Return the skip [G] of each of `heads` heads, of which several may read one memory; None for None."""
    return None if skip is None else jnp.repeat(skip.astype(_F32), heads // skip.shape[0])


def chunk_decays(log_decay, run, shape, parts: int, log_write, interpret: Any) -> Decays:
    """Return the decays that the scan multiplies by, of each token and each chunk, as `Decays`.

    They are computed from log_decay [B, T, G] (or None), the document numbers run [B, T] (or None) and the logarithms of the factors of
    writes log_write [B, T, G] (or None), for values of `shape` [B, T, G, V], and are split into `parts` parts of each row.
    """
    batch, length, heads, _ = shape
    count = length // CHUNK
    if log_decay is None and run is None:
        return Decays(None, None, None, None, None)
    if log_decay is None:
        cum = jnp.zeros((batch, heads, count, CHUNK), _F32)
        read_decay = write_decay = jnp.ones_like(cum)
        chunk_decay = jnp.ones((batch, heads, count), _F32)
    else:
        by_chunk = jnp.moveaxis(jnp.maximum(log_decay.astype(_F32), LEAST), 1, 2)
        sizes = batch, heads, count, CHUNK
        if SUMS_BY_PRODUCTS:
            chunks = by_chunk.reshape(-1, CHUNK)
            padded = jnp.pad(chunks, [(0, -len(chunks) % ROWS), (0, 0)])
            sums = decay_sums(padded, interpret=interpret)
            cum, write_decay = (x[: len(chunks)].reshape(sizes) for x in sums)
        else:
            by_chunk = by_chunk.reshape(batch, heads, count, 1, CHUNK)
            # Sums up to a token and after it, computed apart: their difference would lose precision. They are one kernel of XLA.
            later = jnp.arange(CHUNK) > jnp.arange(CHUNK)[:, None]
            cum, after = (jnp.sum(jnp.where(m, by_chunk, 0), axis=-1) for m in (~later, later))
            write_decay = jnp.exp(after)
        read_decay, chunk_decay = jnp.exp(cum), jnp.exp(cum[..., -1])
    if run is not None:
        of_chunk = run.reshape(batch, 1, count, CHUNK)
        last = of_chunk[..., -1]
        before = jnp.pad(last[..., :-1], [(0, 0), (0, 0), (1, 0)])
        read_decay = jnp.where(of_chunk == before[..., None], read_decay, 0)
        write_decay = jnp.where(of_chunk == last[..., None], write_decay, 0)
        chunk_decay = jnp.where(last == before, chunk_decay, 0)

    write_cum = None
    if log_write is not None:
        log_write = jnp.moveaxis(log_write.astype(_F32), 1, 2).reshape(batch, heads, count, CHUNK)
        write_decay, write_cum = write_decay * jnp.exp(log_write), cum - log_write

    def by_part(x):  # [B, G, N, ...] -> [B * P, G, *]
        x = jnp.moveaxis(x.reshape(batch, heads, parts, -1), 2, 1)
        return x.reshape(batch * parts, heads, -1)

    return Decays(
        None if log_decay is None else by_part(cum), by_part(read_decay), by_part(write_decay), by_part(chunk_decay),
        None if run is None else row_layout.split_parts(run, parts), None if write_cum is None else by_part(write_cum),
    )  # fmt: skip


def interval_ends(at_end, products, chunk_bounds):
    """Return, for each interval of a few consecutive chunks, the inner product of the memory after the interval with the gradient
    of that memory, [B, heads, intervals].

    The log decay's gradient is summed in each interval anew, from these products on: summed over all of T, the rounding errors of
    `q . dq - k . dk` would add up.

    Args:
        at_end: [B * S, heads, 1], the inner product of each memory after its last chunk with its gradient.
        products: [B, heads, intervals], the inner products of the memories before each interval with their gradients.
        chunk_bounds: [B, S + 1], the chunks at which a row's memories begin and end, or None for one memory per row. With them
            every chunk is an interval.
    """
    if chunk_bounds is None:
        return jnp.concatenate([products[..., 1:], at_end], axis=-1)
    heads = at_end.shape[1]
    last = jnp.arange(products.shape[2]) == chunk_bounds[:, 1:, None] - 1
    at_end = jnp.where(last[:, :, None], at_end.reshape(*last.shape[:2], heads, 1), 0)
    later = jnp.pad(products[..., 1:], [(0, 0), (0, 0), (0, 1)])
    return jnp.where(jnp.any(last, 1)[:, None], jnp.sum(at_end, 1), later)


def rows_decay_gradient(rows, at_end, run):
    """Return the gradient of the scalar log decay, [B, T, G], from inner products of inputs with their gradients.

    An interval is a few chunks. The gradient is the sum of `rows` from each token to the end of its interval and document, plus
    `at_end` if its document is the interval's last.

    Args:
        rows: [B, G, T], the inner product of each token's query with its gradient minus that of its key with its gradient, `q . dq
            - k . dk`.
        at_end: [B, G, intervals], the inner product of the memory with its gradient at the end of each interval.
        run: [B, T], the number of each token's document, or None for one document per row.
    """
    batch, heads, length = rows.shape
    rows = rows.reshape(*at_end.shape, -1)
    size = rows.shape[-1]
    later = (jnp.arange(size)[:, None] <= jnp.arange(size))[None, None]
    last = at_end[..., None]
    if run is not None:
        run = run.reshape(batch, -1, size)
        later &= run[..., :, None] == run[..., None, :]
        last = jnp.where((run == run[..., -1:])[:, None], last, 0)
    if run is None:
        sums = row_layout.exact_sums(rows, later[0, 0].T) + last
    else:
        later = jnp.broadcast_to(later, (batch, *later.shape[1:])).astype(_F32)
        sums = jnp.einsum("bgnj,bnij->bgni", rows, later, precision="highest") + last
    return jnp.moveaxis(sums.reshape(batch, heads, length), 1, 2)
