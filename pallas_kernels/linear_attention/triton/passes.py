"""The launches of the Triton kernels of linear attention: shapes of results, and what each kernel reads."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.triton.tilings import TABLES, TILINGS, Tiling
from pallas_kernels.memory_calls import MemoryCall, key_dims, value_dims
from pallas_kernels.requirements import Requirement
from pallas_kernels.triton import launch

CHUNK = row_layout.CHUNK
_F32 = jnp.float32
LEVELS = CHUNK.bit_length() - 1


class Decays(NamedTuple):
    """The decays and documents of the tokens and chunks of one call, as the kernels read them; None where they are not read.

    `by_channel` says which kind of decay it is. With G memories and N chunks:

    Attributes:
        cum: [B, T, G] float32, the sums of a scalar log decay from each chunk's start; None with no decay.
        head_cum: [B, N, G, C] float32, the same sums by head.
        read_decay: [B, T, G], the factor of the memory before the chunk in what a token reads.
        erase_decay: [B, T, G], that factor in what a token's key reads ahead of the token's decay; None if keys read the decayed memory.
        write_decay: [B, T, G], the factor of a token's write in the memory after the chunk.
        chunk_decay: [B, N, G], the decay of the memory over each chunk.
        sums: [B, T, G, K] float32, the sums of the log decay of key channels from each chunk's start.
        enters: [B, T] float32, 1 where a token's document is that of the last token before its chunk.
        stays: [B, T] float32, 1 where a token's document is that of its chunk's last token.
        run: [B, T] int32, the number of each token's document.
        bounds: [B, S + 1] int32, the chunks at which a row's S memories begin and end.
    """

    cum: Any = None
    head_cum: Any = None
    read_decay: Any = None
    erase_decay: Any = None
    write_decay: Any = None
    chunk_decay: Any = None
    sums: Any = None
    enters: Any = None
    stays: Any = None
    run: Any = None
    bounds: Any = None

    @property
    def plain(self) -> bool:
        """Whether all factors are 1, since there is no decay and one document."""
        return self.cum is None and self.sums is None and self.run is None

    @property
    def by_channel(self) -> bool:
        """Whether the decay has a value for every key channel."""
        return self.sums is not None

    @property
    def undecayed(self) -> bool:
        """Whether the keys of the delta rule read the memory ahead of their token's decay."""
        return self.erase_decay is not None

    @property
    def heads(self) -> int:
        """The number of memories, G, that have a decay."""
        return (self.read_decay if self.sums is None else self.sums).shape[2]


def _dtypes(call: MemoryCall) -> set[str]:
    return {jnp.dtype(x.dtype).name for x in (call.q, call.k, call.v)}


def _accepted_dtypes() -> set[str]:
    """Return the names of the dtypes of q, k and v that the kernels support here; float32 only if the caller allows products in tf32."""
    allowed = jax.config.jax_default_matmul_precision == "tensorfloat32"
    return {"bfloat16", "float16"} | ({"float32"} if allowed else set())


_KEY_DIMS, _VALUE_DIMS = (64, 128, 256), (64, 128, 256, 512)
REQUIREMENTS = (
    Requirement(
        "q, k and v all in bfloat16, all in float16, or, with jax.default_matmul_precision('tensorfloat32'), all in float32",
        lambda call: len(_dtypes(call)) == 1 and _dtypes(call) <= _accepted_dtypes(),
        lambda call: ", ".join(sorted(_dtypes(call))),
    ),
    key_dims(*_KEY_DIMS),
    value_dims(*_VALUE_DIMS),
    launch.INSTALLED,
)
"""The requirements of every Triton kernel of linear attention. The packages are last, so that their absence is the reason only for calls
that the kernels support."""


def scalar_decays(log_decay, run, initial, v, *, undecayed: bool = False) -> Decays:
    """Return the decays of tokens and chunks for a scalar log decay [B, T, G] or None, with documents included in the factors.

    `run` [B, T] are document numbers or None, `initial` the memories before the rows, and v [B, T, G, V]. With `undecayed`, for the delta
    rule whose keys read the memory ahead of their token's decay, `erase_decay` is computed too.
    """
    from pallas_kernels.linear_attention.triton import sums

    batch, length, heads, _ = v.shape
    known, count = documents(run, initial, batch), length // CHUNK
    result = Decays(run=known.run, bounds=known.bounds)
    by_token, by_chunk = (batch, length, heads), (batch, count, heads)
    if log_decay is None:
        marks = (
            jnp.ones((batch, length), _F32) if x is None else x for x in (known.enters, known.stays)
        )
        read, write = (jnp.broadcast_to(x[..., None], by_token) for x in marks)
        ends = read.reshape(batch, count, CHUNK, heads)[:, :, -1]
        erase = read if undecayed else None
        return result._replace(
            read_decay=read, erase_decay=erase, write_decay=write, chunk_decay=ends
        )
    tiling = TILINGS["scalar_sums"]
    factors = launch.call(
        sums.scalar_sums,
        (log_decay, known.enters, known.stays),
        dict(
            cum=_struct(by_token, _F32),
            head_cum=_struct((batch, count, heads, CHUNK), _F32),
            read_decay=_struct(by_token, _F32),
            write_decay=_struct(by_token, _F32),
            chunk_decay=_struct(by_chunk, _F32),
            erase_decay=_struct(by_token if undecayed else (1,), _F32),
        ),
        programs=batch * count * -(-heads // tiling.keys),
        **options_of(tiling),
        **dict(
            HEADS=heads, C=CHUNK, BH=tiling.keys, DOCUMENTS=known.run is not None, UNDECAYED=undecayed,
        ),
    )  # fmt: skip
    erase = factors.pop("erase_decay")
    return result._replace(erase_decay=erase if undecayed else None, **factors)


def documents(run, initial, batch: int) -> Decays:
    """Return the documents of tokens with a log decay of key channels, without its sums, for document numbers
    `run` [B, T] or None, and the memories `initial` before the rows.
    """
    run, bounds = row_layout.split_runs(run, initial, batch)
    known = row_layout.documents_of(run, 1)
    enters, stays = (None, None) if known is None else known[1:]
    return Decays(enters=enters, stays=stays, run=run, bounds=bounds)


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def low(x) -> tuple[Any, Any]:
    """Return the dtype of the operands of products for an array of tokens x, for Triton and for arrays that are stored.

    It is bfloat16 for bfloat16, and float32 (products in tf32) for float16, which has as many bits as tf32 but a smaller range, in
    which the memory would overflow.
    """
    import triton.language as tl

    return (tl.bfloat16, jnp.bfloat16) if x.dtype == jnp.bfloat16 else (tl.float32, _F32)


def tiling_of(name: str, decays: Decays, x, keys: int = 0, values: int = 0) -> Tiling:
    """Return the tiling of a kernel by its name, for decays and an array of tokens x, in tiles that divide `keys` and `values` channels."""
    table = TABLES[jnp.dtype(x.dtype).name]
    kind = "channel_" if decays.by_channel else "narrow_" if keys == 64 else ""
    return fitted(table.get(kind + name, table[name]), keys, values)


def fitted(tiling: Tiling, keys: int = 0, values: int = 0) -> Tiling:
    """Return a tiling whose sizes divide the numbers of key and value channels; 0 leaves a size as it is."""
    return tiling._replace(keys=math.gcd(tiling.keys, keys), values=math.gcd(tiling.values, values))


def options_of(tiling: Tiling) -> dict[str, int]:
    """Return the arguments of `launch.call` with which a kernel of a tiling is compiled."""
    return dict(warps=tiling.warps, stages=tiling.stages, registers=tiling.registers)


def scan(
    x, y, decays: Decays, initial, *, heads: int, scale: float = 1.0, reverse: bool = False,
    exclusive: bool = False, save: bool = True, decayed: bool = False,
) -> tuple[Any, jax.Array]:  # fmt: skip
    """Carry memories, or with `reverse` their gradients, through all chunks; long rows of few memories in parts.

    Args:
        x: [B, T, *, K], the keys, or with `reverse` the queries; may be float32 with any y, and is then rounded where it is written.
        y: [B, T, *, V], the values, or with `reverse` the gradient of the output.
        decays: the decays and documents.
        initial: [B * S, heads, K, V] float32, the memories before the rows, or with `reverse` their gradients after them.
        heads: number of memories that are computed for each row.
        scale: the factor of x.
        reverse: whether the last chunk is computed first.
        exclusive: whether a token reads before its decay and its write.
        save: whether the memories at the chunks' boundaries are returned.
        decayed: whether x is decayed up to the end of its chunk, of a decay per key channel: then x is [B, T, G, K].

    Returns:
        The memories before all chunks (with `reverse` their gradients after them), [B, N, heads, K, V], or None; and the memories
        after the rows (with `reverse` the gradients of those before them), shaped as `initial`.
    """
    batch, length, _, keys = x.shape
    values = y.shape[3]
    tiling = tiling_of("decayed_scan" if decayed else "scan", decays, y, keys, values)
    programs = batch * heads * (keys // tiling.keys) * (values // tiling.values)
    parts = 1 if decays.bounds is not None else row_layout.count_parts(programs, length)
    run = functools.partial(
        _scan, heads=heads, scale=scale, reverse=reverse, exclusive=exclusive, decayed=decayed
    )
    if parts == 1:
        return run(x, y, decays, initial, save=save)
    # All parts of a row at the same time: the writes of each part, from which the memories before all parts follow.
    chunk_decay = _chunk_decays(decays, parts)
    x, y = row_layout.split_parts(x, parts), row_layout.split_parts(y, parts)
    decays = Decays(*(None if z is None else row_layout.split_parts(z, parts) for z in decays))
    empty = jnp.zeros((batch * parts, *initial.shape[1:]), _F32)
    _, written = run(x, y, decays, empty, save=False)
    starts = row_layout.memories_before_parts(written, chunk_decay, initial, reverse=reverse)
    states, ends = run(x, y, decays, starts, save=save)
    final = ends.reshape(batch, parts, *ends.shape[1:])[:, 0 if reverse else -1]
    if states is not None:
        states = states.reshape(batch, -1, *states.shape[2:])
    return states, final


def _chunk_decays(decays: Decays, parts: int) -> jax.Array:
    """Return the decay of each memory over each chunk, [B * P, G, N / P], or of each of its key channels, [B * P, G, K, N / P], for rows
    of N chunks that are split into P = `parts` parts.
    """
    if not decays.by_channel:
        by_chunk = decays.chunk_decay
    else:
        batch, length, heads, channels = decays.sums.shape
        sums = decays.sums.reshape(batch, length // CHUNK, CHUNK, heads, channels)[:, :, -1]
        by_chunk = jnp.exp(sums)
        if decays.enters is not None:
            by_chunk *= decays.enters.reshape(batch, -1, CHUNK)[:, :, -1, None, None]
    return jnp.moveaxis(row_layout.split_parts(by_chunk, parts), 1, -1)


def _scan(
    x, y, decays: Decays, initial, *, heads: int, scale: float, reverse: bool, exclusive: bool,
    save: bool, decayed: bool,
) -> tuple[Any, jax.Array]:  # fmt: skip
    """Run the kernel `scan` on whole rows; arguments and results are those of the function `scan`."""
    from pallas_kernels.linear_attention.triton import bodies

    batch, length, x_heads, keys = x.shape
    values, count = y.shape[3], length // CHUNK
    segments = initial.shape[0] // batch
    tiling = tiling_of("decayed_scan" if decayed else "scan", decays, y, keys, values)
    operands, stored = low(y)
    row_decay, marks = (
        (decays.read_decay, decays.enters) if reverse else (decays.write_decay, decays.stays)
    )
    chunk_decay = decays.chunk_decay
    if decays.plain:  # not read, so that XLA does not compute them
        row_decay = chunk_decay = None
    results = launch.call(
        bodies.scan,
        (x, y, row_decay, chunk_decay, decays.sums, marks, decays.enters, decays.bounds, initial, count, float(scale)),
        dict(
            states=_struct((batch, count, heads, keys, values) if save else (1,), stored),
            final=_struct(initial.shape, _F32),
        ),
        programs=batch * segments * heads * (keys // tiling.keys) * (values // tiling.values),
        **options_of(tiling),
        **dict(
            X_HEADS=x_heads, Y_HEADS=y.shape[2], D_HEADS=decays.heads, HEADS=heads, SEGMENTS=segments, K=keys, V=values,
            C=CHUNK, BK=tiling.keys, BV=tiling.values, LOW=operands, CHANNELS=decays.by_channel, DOCUMENTS=decays.enters is not None,
            EXCLUSIVE=exclusive, REVERSE=reverse, SAVE=save, PLAIN=decays.plain,
            DECAYED=decayed,
        ),
    )  # fmt: skip
    return results["states"] if save else None, results["final"]


def outputs(
    q, k, v, scores, decays: Decays, states, *, heads: int, scale: float, exclusive: bool = False,
    exact: bool = False, decayed: bool = False,
) -> jax.Array:  # fmt: skip
    """Return the outputs [B, T, heads, V] in v's dtype from the memories before all chunks, and, with a decay per key channel, from the
    scores P of `channel_scores` (else None). With `exact` P is not rounded. With `decayed`, q are the queries times
    the scale and the decay from the chunk's start, of a decay per key channel.
    """
    from pallas_kernels.linear_attention.triton import bodies

    batch, length, _, keys = q.shape
    memories, values = v.shape[2:]
    tiling = tiling_of("decayed_outputs" if decayed else "outputs", decays, q, keys, values)
    return launch.call(
        bodies.outputs,
        (q, k, v, scores, decays.head_cum, None if decays.plain else decays.read_decay, decays.sums, decays.run, decays.enters, states, float(scale)),
        dict(out=_struct((batch, length, heads, values), v.dtype)),
        programs=batch * (length // CHUNK) * heads * (values // tiling.values),
        **options_of(tiling),
        **dict(
            Q_HEADS=q.shape[2], K_HEADS=k.shape[2], V_HEADS=memories, D_HEADS=decays.heads, HEADS=heads, K=keys, V=values,
            C=CHUNK, BK=tiling.keys, BV=tiling.values, LOW=low(q)[0], CHANNELS=decays.by_channel, DECAY=decays.cum is not None,
            DOCUMENTS=decays.run is not None, EXCLUSIVE=exclusive, EXACT=exact and q.dtype == jnp.bfloat16, DECAYED=decayed,
            PLAIN=decays.plain,
        ),
    )["out"]  # fmt: skip


def score_gradients(
    d_out, v, decays: Decays, *, scale: float, undecayed: bool = False
) -> jax.Array:
    """Return the gradient of the products q kᵀ of all chunks, [B, N, heads, C, C]: scale dO vᵀ on and below the diagonal, times the decay
    between the two tokens if it is a scalar. With `undecayed` the decay of the later token is left out, and the diagonal is 0.
    """
    from pallas_kernels.linear_attention.triton import gradients

    batch, length, heads, values = d_out.shape
    tiling = tiling_of("score_gradients", decays, d_out)
    operands, stored = low(d_out)
    return launch.call(
        gradients.score_gradients,
        (d_out, v, decays.cum, decays.run, float(scale)),
        dict(d_scores=_struct((batch, length // CHUNK, heads, CHUNK, CHUNK), stored)),
        programs=batch * (length // CHUNK) * heads,
        **options_of(tiling),
        **dict(
            V_HEADS=v.shape[2], D_HEADS=decays.heads, HEADS=heads, V=values, C=CHUNK, BV=tiling.values, LOW=operands,
            DECAY=decays.cum is not None, DOCUMENTS=decays.run is not None, UNDECAYED=undecayed,
        ),
    )["d_scores"]  # fmt: skip


def value_gradients(
    q, k, d_out, scores, decays: Decays, d_states, *, scale: float, dtype: Any
) -> jax.Array:
    """Return the gradients of the values for each head of the output, [B, T, heads, V], from the gradients of the memories after all
    chunks, and, with a decay per key channel, from the scores P (else None).
    """
    from pallas_kernels.linear_attention.triton import gradients

    batch, length, heads, values = d_out.shape
    tiling = tiling_of("value_gradients", decays, q, q.shape[3], values)
    return launch.call(
        gradients.value_gradients,
        (q, k, d_out, scores, decays.cum, decays.write_decay, decays.sums, decays.run, decays.stays, d_states, float(scale)),
        dict(dv=_struct(d_out.shape, dtype)),
        programs=batch * (length // CHUNK) * heads * (values // tiling.values),
        **options_of(tiling),
        **dict(
            Q_HEADS=q.shape[2], K_HEADS=k.shape[2], D_HEADS=decays.heads, HEADS=heads, K=q.shape[3], V=values, C=CHUNK,
            BK=tiling.keys, BV=tiling.values, LOW=low(q)[0], CHANNELS=decays.by_channel, DECAY=decays.cum is not None,
            DOCUMENTS=decays.run is not None,
        ),
    )["dv"]  # fmt: skip


def scalar_gradients(
    q, k, v, d_out, d_scores, decays: Decays, states, d_states, *, scale: float, decay: bool
) -> tuple[jax.Array, jax.Array, Any]:
    """Return the gradients of the queries and keys for each head of the output, [B, T, heads, K], and that of a scalar log decay, [B, T,
    heads] float32 (None unless `decay`).
    """
    from pallas_kernels.linear_attention.triton import gradients

    batch, length, heads, values = d_out.shape
    keys = q.shape[3]
    tiling = tiling_of("scalar_gradients", decays, q, keys, values)
    tiles = keys // tiling.keys
    results = launch.call(
        gradients.scalar_gradients,
        (
            q, k, v, d_out, d_scores, decays.read_decay, decays.write_decay, decays.chunk_decay, decays.run, states, d_states,
            float(scale),
        ),
        dict(
            dq=_struct((batch, length, heads, keys), q.dtype),
            dk=_struct((batch, length, heads, keys), k.dtype),
            dg=_struct((batch, length, heads, tiles) if decay else (1,), _F32),
        ),
        programs=batch * (length // CHUNK) * heads * tiles,
        shared_loads=True,
        **options_of(tiling),
        **dict(
            Q_HEADS=q.shape[2], K_HEADS=k.shape[2], V_HEADS=v.shape[2], D_HEADS=decays.heads, HEADS=heads, K=keys, V=values,
            C=CHUNK, BK=tiling.keys, BV=tiling.values, LOW=low(q)[0], DECAY=decay, DOCUMENTS=decays.run is not None,
        ),
    )  # fmt: skip
    return results["dq"], results["dk"], jnp.sum(results["dg"], -1) if decay else None


def joined_gradients(
    q, k, v, d_out, decays: Decays, states, d_states, *, scale: float, decay: bool
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """Return the gradients of the queries, keys and values for each head of the output, [B, T, heads, K or V], and that of a scalar log
    decay, [B, T, heads] float32 (None unless `decay`), by one kernel in place of `value_gradients`, `score_gradients` and
    `scalar_gradients`.
    """
    from pallas_kernels.linear_attention.triton import joined

    batch, length, heads, values = d_out.shape
    keys = q.shape[3]
    kind = "plain_" if decays.plain else "" if decay or decays.cum is None else "constant_"
    tiling = tiling_of(f"{kind}joined_gradients", decays, q, keys, values)
    factors = decays.read_decay, decays.write_decay, decays.chunk_decay
    if decays.plain:  # not read, so that XLA does not compute them
        factors = (None,) * 3
    results = launch.call(
        joined.joined_gradients,
        (
            q, k, v, d_out, decays.head_cum, *factors, decays.run, states, d_states, float(scale),
        ),
        dict(
            dq=_struct((batch, length, heads, keys), q.dtype),
            dk=_struct((batch, length, heads, keys), k.dtype),
            dv=_struct(d_out.shape, v.dtype),
            dg=_struct((batch, length, heads) if decay else (1,), _F32),
        ),
        programs=batch * (length // CHUNK) * heads,
        shared_loads=True,
        **options_of(tiling),
        **dict(
            Q_HEADS=q.shape[2], K_HEADS=k.shape[2], V_HEADS=v.shape[2], D_HEADS=decays.heads, HEADS=heads, K=keys, V=values,
            C=CHUNK, BK=tiling.keys, BV=tiling.values, LOW=low(q)[0], DECAY=decays.cum is not None, GRADIENT=decay,
            DOCUMENTS=decays.run is not None, PLAIN=decays.plain,
        ),
    )  # fmt: skip
    return results["dq"], results["dk"], results["dv"], results["dg"] if decay else None


def channel_gradients(
    q, k, v, d_out, d_scores, decays: Decays, states, d_states, *, scale: float, bonus=None,
    only_query: bool = False, exact: bool = False,
) -> dict[str, jax.Array]:  # fmt: skip
    """Return the gradients of the queries, keys and log decay of key channels for each head of the output, "dq", "dk" and "dg" [B, T,
    heads, K], and with a bonus the term of each chunk in its gradient, "d_bonus" [B, N, heads, K].

    With `only_query` only "dq", for which q and `d_states` are not read, and may be None. With `exact` too, "dq" is float32, k may be
    float32 with any dtype of the others, and bfloat16 products have k decayed in two terms.
    """
    from pallas_kernels.linear_attention.triton import gradients

    batch, length, heads, values = d_out.shape
    keys = k.shape[3]
    operands, stored = low(d_out)
    exact_keys = exact and stored == jnp.bfloat16
    kind = "query" if only_query else "channel" if bonus is None else "bonus"
    kind = "exact_query" if exact_keys else kind
    tiling = tiling_of(f"{kind}_gradients", decays, d_out, keys, values)
    shape = (batch, length, heads, keys)
    types = dict(
        dq=_struct(shape, _F32 if exact else k.dtype),
        dk=_struct((1,) if only_query else shape, k.dtype),
        dg=_struct((1,) if only_query else shape, _F32),
        d_bonus=_struct((1,) if bonus is None else (batch, length // CHUNK, heads, keys), _F32),
    )
    results = launch.call(
        gradients.channel_gradients,
        (
            k if q is None else q, k, v, d_out, d_scores, decays.sums, bonus, decays.run, decays.enters, decays.stays, states,
            d_states, float(scale),
        ),
        types,
        programs=batch * (length // CHUNK) * heads * (keys // tiling.keys),
        shared_loads=True,
        **options_of(tiling),
        **dict(
            Q_HEADS=(k if q is None else q).shape[2], K_HEADS=k.shape[2], V_HEADS=v.shape[2], D_HEADS=decays.heads, HEADS=heads,
            K=keys, V=values, C=CHUNK, BK=tiling.keys, BV=tiling.values, LEVELS=LEVELS, LOW=operands,
            DOCUMENTS=decays.run is not None, EXCLUSIVE=bonus is not None, ONLY_QUERY=only_query, EXACT=exact_keys,
        ),
    )  # fmt: skip
    return {n: x for n, x in results.items() if types[n].shape != (1,)}
