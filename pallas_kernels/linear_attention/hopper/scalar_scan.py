"""The kernel of linear attention with a scalar decay, on Mosaic GPU (Hopper): a scan over chunks that reads and updates memories.

For one chunk after another, and for j <= i, it computes

    out_i = read_decay_i x_i S + sum_j exp(cum_i - cum_j) (x_i . y_j) z_j  (j <= i),        S <- chunk_decay S + sum_j (write_decay_j y_j)ᵀ z_j

where x read the memory S [D, V], y and z are the keys and values of the writes, and cum are sums of the log decay from the chunk's start.
Where tokens write with factors of their own, cum_j is that of the writes, with a skip, skip z_i is added to out_i, and where a token is
several rows, j <= i compares tokens. Each warpgroup has 64 columns of S (`scalar_columns`), or warpgroups divide a chunk's work among them
(`scalar_roles`). If D is more than 128, each slice of 128 rows of S is computed by itself, and the outputs of the slices are added at the
end.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import row_layout
from pallas_kernels.hopper.row_layout import CHUNK
from pallas_kernels.linear_attention.hopper import scalar_columns, scalar_roles
from pallas_kernels.linear_attention.hopper.decay_sums import HEADS
from pallas_kernels.linear_attention.hopper.scalar_plan import (
    BLOCK,
    Call,
    Decays,
    chunks_of_interval,
    count_groups,
    pairs,
)
from pallas_kernels.linear_attention.hopper.scalar_roles_plan import Scan, fit_together

ROLES: bool | None = None
"""Whether the warpgroups of a thread block do different parts of a chunk (`scalar_roles`), where that scan supports the call; None: as
`_ran_by_roles` says."""
_DEPTH = 128  # rows of the memory that a warpgroup has, at most
_F32 = jnp.float32


def scalar_scan(x, y, z, decay: Decays, **options: Any) -> list[Any]:
    """Carry memories through all chunks of a row: compute a scan that `scan_of` describes; return its results."""
    (results,) = run_scans(scan_of(x, y, z, decay, **options))
    return results


def run_scans(*scans: Scan, together: bool = False) -> list[list[Any]]:
    """Compute scans that `scan_of` describes; return the results of each. If `together`, they have one launch where processors are left over
    for the thread blocks of all of them.
    """
    if together and all(x.by_roles for x in scans) and fit_together(scans):
        results = scalar_roles.roles_scans(*scans)
    else:
        results = [
            scalar_roles.roles_scans(scan)[0]
            if scan.by_roles
            else scalar_columns.columns_scan(scan)
            for scan in scans
        ]
    for scan, arrays in zip(scans, results, strict=True):
        if "out" in arrays:
            arrays["out"] = row_layout.sum_heads(arrays["out"], scan.call.heads)
    return [_in_order(arrays) for arrays in results]


def _in_order(arrays: dict[str, jax.Array]) -> list[Any]:
    """Return a scan's results, both terms of saved memories as one pair."""
    low = arrays.pop("saved_low", None)
    return [(x, low) if name == "saved" and low is not None else x for name, x in arrays.items()]


def scan_of(
    x, y, z, decay: Decays, *, heads: int, initial=None, read_scale: float = 1.0,
    write_scale: float = 1.0, reverse: bool = False, partner=None, save_states: bool = False,
    states=None, chunk_bounds=None, skip=None, rank: int = 1, paired: bool = False, each_chunk: bool = False,
    return_sums: bool = False, terms: int = 1, interpret: Any = False,
) -> Scan:  # fmt: skip
    """Return a scan that carries memories S [D, V] with a scalar decay through all chunks of a row. Its results are what tokens read from
    them and the last memories.

    For token i and the tokens j <= i of its chunk, out_i = read_decay_i x_i S + sum_j exp(cum_i - cum_j) (x_i . y_j) z_j; then S <-
    chunk_decay S + sum_j (write_decay_j y_j)ᵀ z_j. So x are queries, y keys and z values, or, in the backward pass, other arrays in
    their place.

    Args:
        x: [B, T, *, D], what reads the memory; None computes no output, only the memories.
        y: [B, T, *, D], the keys of what is written.
        z: [B, T, *, V], the values of what is written.
        decay: the decays of G heads, and the tokens' documents.
        heads: number of heads of the output; a multiple of G and of the numbers of heads of x, y and z.
        initial: [B * S, heads, D, V] float32, S before the first chunk (if `reverse`, after the last); None is 0.
        read_scale: the factor by which the output is multiplied.
        write_scale: the factor by which the writes are multiplied, also those that the same chunk reads.
        reverse: whether to compute the last chunk first; a token then reads its own and later tokens.
        partner: [B, T, *, V], an array whose inner product with the unrounded output is returned for each token: [B, heads, D /
            128 * V / 64, T], with terms that the caller adds over the third axis. None returns none.
        save_states: whether to return also the memory at the start of each interval of `chunks_of_interval(N)` chunks, [B, heads,
            intervals, D, V].
        states: S saved by another scan, [B, heads, intervals, D, V]; also return the inner products of its rows with those of
            this scan's S at the start of each interval, [B, heads, V / 64, intervals, D]. This scan must then be `reverse`, in
            which S at the start of an interval is S after the interval's first chunk.
        chunk_bounds: [B, S + 1], the chunks at which a row's S memories begin and end, of `row_layout.split_runs`; None for one
            memory per row. With them every chunk is an interval.
        skip: [heads] float32; each head's number times z is added to its output. With `partner`, also return each token's inner product
            of z with it, in the layout of the other inner products: the sum of the first V / 64 terms. Each slice of D repeats these
            terms. None adds nothing.
        rank: number of consecutive rows of x, y and z that are one token, each of which reads all of them; a divisor of 64.
        paired: whether a thread block computes two consecutive heads that share x and y, if V is 64 and there are such.
        each_chunk: whether every chunk is an interval.
        return_sums: whether to return also the sums that this scan computes from log decays: [B, heads, T], up to each token of its chunk,
            and the exponential of the sum after it. It must not be `reverse`.
        terms: number of terms of bfloat16, 1 to 3, whose sum each of the weights, memories and decayed writes is. With 2 or 3 the scan is exact:
            each is within 2^-16 or 2^-24 of its float32, and the output is float32. Saved memories and `states` are then pairs of arrays, of two
            terms. Scans of 3 terms have one warpgroup a thread block, for whose buffers there is room.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.

    Returns:
        A scan whose results are the output [B, T, heads, V] if x is given; S after the last chunk that is computed, [B * S, heads, D, V] float32; then the
        inner products with `partner`, the saved memories, the inner products with `states`, those of z with `partner`, and the two arrays of
        sums, if they are requested.
    """
    batch, length, _, all_rows = y.shape
    width, count = z.shape[-1], length // CHUNK
    depth = min(all_rows, _DEPTH)
    slices, blocks = all_rows // depth, width // BLOCK
    interval = 1 if each_chunk or chunk_bounds is not None else chunks_of_interval(count)
    intervals = count // interval
    runs = 1 if chunk_bounds is None else chunk_bounds.shape[1] - 1
    read, write = ("write_decay", "read_decay") if reverse else ("read_decay", "write_decay")
    vectors: dict[str, Any] = dict(write_decay=getattr(decay, write))
    if x is not None:
        vectors |= dict(read_decay=getattr(decay, read), cum=decay.cum, run=decay.run)
        vectors |= dict(write_cum=decay.write_cum)
        vectors |= dict(cum_low=decay.cum_low, write_cum_low=decay.write_cum_low)
    chunk_decay = decay.chunk_decay
    if decay.run is None and decay.cum is not None and decay.cum_low is None:
        # The kernel computes these from the sums, so that XLA does not store them.
        vectors |= {"cum": decay.cum, "write_decay" if reverse else "read_decay": None}
        chunk_decay = None
    sums: tuple[str, ...] = ()
    if decay.log_decay is not None:
        sums = "cum", "read_decay" if reverse else "write_decay"
    streams = {n: a for n, a in (dict(x=x, y=y, z=z) | vectors).items() if a is not None}
    paired = (
        paired
        and terms < 3
        and x is not None
        and decay.read_decay is not None
        and decay.read_decay.shape[1] == heads
        and pairs(x, y, z, heads)
    )
    states, states_low = states if terms > 1 and states is not None else (states, None)
    others = dict(
        log_decay=decay.log_decay, chunk_decay=chunk_decay, initial=initial, partner=partner, states=states,
        states_low=states_low, chunk_bounds=chunk_bounds, skip=skip,
    )  # fmt: skip
    groups = 2 if paired else count_groups(blocks, batch * runs * heads * slices)
    groups = 1 if terms > 2 else groups
    call = Call(
        shapes={n: a.shape for n, a in (streams | others).items() if a is not None}, streams=(*streams, *sums), sums=sums,
        heads=heads, depth=depth, slices=slices, blocks=blocks, count=count, interval=interval, groups=groups, paired=paired, reverse=reverse,
        save_states=save_states, read_scale=read_scale, write_scale=write_scale, rank=rank, terms=terms, interpret=interpret,
    )  # fmt: skip
    struct: Any = jax.ShapeDtypeStruct
    saved = struct((batch, heads, intervals, all_rows, width), z.dtype)
    if paired:
        streams["z"] = z.reshape(batch, length, heads // 2, 2 * width)
    outputs = dict(
        out=None if x is None else struct((batch, length, heads * slices, width), _F32 if terms > 1 else z.dtype),
        last=struct((batch * runs, heads, all_rows, width), _F32),
        dots=None if partner is None else struct((batch, heads, slices * blocks, length), _F32),
        saved=saved if save_states else None,
        saved_low=saved if save_states and terms > 1 else None,
        products=None if states is None else struct((batch, heads, blocks, intervals, all_rows), _F32),
        skip_dots=None if skip is None or partner is None else struct((batch, heads, slices * blocks, length), _F32),
        stored_cum=struct((batch, heads, length), _F32) if return_sums else None,
        stored_decay=struct((batch, heads, length), _F32) if return_sums else None,
    )  # fmt: skip
    roles = _ran_by_roles(call, decay) if ROLES is None else ROLES
    roles |= bool(sums) or (x is None and save_states)  # the scan by columns does neither
    roles &= terms == 1
    return Scan(call, streams | others, outputs, roles and scalar_roles.supports(call))


def adds_decays(q, k, v, log_decay) -> bool:
    """Return whether scans of these arrays (or their shapes), with one document and one memory a row, can compute the sums of their decays
    themselves: as many heads of each array, as many key as value channels, 64 or 128, and a multiple of 8 heads.
    """
    sizes = {x.shape[2:] for x in (q, k, v)}
    plain = log_decay is not None and log_decay.dtype == _F32 and ROLES is not False
    return plain and len(sizes) == 1 and v.shape[3] in (64, 128) and v.shape[2] % HEADS == 0


def _ran_by_roles(call: Call, decay: Decays) -> bool:
    """Return whether a card has run such a call by roles: with a decay, one row a token, and either as many heads of each array and as many key as
    value channels, 64 or 128 (128 with several memories a row; docs/kernels.jsonl), or, with factors of writes and one memory, Mamba2's sizes: keys
    and queries of 128 channels that all heads share, and values of 64 (docs/writes.jsonl). Several documents with one memory have not run.
    """
    if decay.cum is None or decay.run is not None or call.rank > 1:
        return False
    sizes = {call.shapes[name][2:] for name in ("x", "y", "z") if name in call.shapes}
    documents = "chunk_bounds" in call.shapes
    if decay.write_cum is not None or "skip" in call.shapes or call.paired:
        return not documents and sizes == {(1, 128), (call.heads, 64)}
    return len(sizes) == 1 and sizes <= {
        (call.heads, 128),
        *([] if documents else [(call.heads, 64)]),
    }
