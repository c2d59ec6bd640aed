"""The forward and the backward pass of attention with forget gates by the Triton kernels in `forward_bodies` and `bodies`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.forgetting_attention.bounds import Bounds, Rows, key_arrays
from pallas_kernels.forgetting_attention.triton.requirements import TILE
from pallas_kernels.triton import launch

_F32 = jnp.float32


class Tiling(NamedTuple):
    """The size of the tiles of a program of one kernel, and how it is compiled; both sizes divide `TILE`.

    Attributes:
        queries: number of queries of a tile.
        keys: number of keys of a tile.
        warps: number of warps of a program.
        stages: number of iterations of the kernel's loop whose loads are in flight.
        registers: largest number of registers of a thread, or 0 for the compiler's choice.
        parts: number of equal parts of a head's channels that `attend` multiplies one after another.
        columns: number of sums of weights that `attend` keeps for each query in its loop.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0
    parts: int = 1
    columns: int = 1


TILINGS = {
    ("attend", 64): Tiling(128, 32, 4, 3),
    ("attend", 128): Tiling(128, 64, 8, 3),
    ("attend_limited", 128): Tiling(128, 32, 8, 3),
    ("attend", 256): Tiling(64, 32, 8, 2),
    ("query_gradients", 64): Tiling(64, 64, 4, 3),
    ("query_gradients", 128): Tiling(128, 32, 8, 3),
    ("query_gradients", 256): Tiling(64, 32, 8, 1),
    ("key_gradients", 64): Tiling(64, 64, 4, 3),
    ("key_gradients", 128): Tiling(16, 128, 8, 3),
    ("key_gradients", 256): Tiling(32, 32, 8, 1),
}
"""The tiling of each kernel for bfloat16 and float16, by the kernel's name and the channels of a head; none spills more than 64 bytes
on 8.x. With documents or a window, "attend_limited" replaces "attend" where it has a tiling."""
TILINGS_8_0 = {
    ("attend", 64): Tiling(128, 64, 4, 3),
    ("attend_limited", 64): Tiling(128, 32, 4, 3),
}
"""Tilings of `TILINGS` that differ in code for 8.0."""
EQUAL_HEADS_8_0 = {
    ("attend", 128): Tiling(128, 32, 4, 3, parts=2, columns=8),
    ("attend_limited", 128): Tiling(128, 32, 8, 3, 128),
}
"""Tilings that differ besides in code for 8.0 with as many key heads as query heads, a power of two: then the strides of the tokens of queries
and of keys are one number, and a shift. Two programs share a processor, which has 164 KiB of shared memory on these cards. "attend" has four
warps, whose loop has fewer reads of shared memory than that of eight; without `parts` and `columns` they would spill 250 bytes. For
"attend_limited" 128 registers suffice (with other heads 100 to 150 bytes would spill); without documents and a window that is slower than one
program of 64 keys (2.23 and 2.06 ms at 8 x 4096 x 16 x 128 on an H200)."""
WIDE_TILINGS = {
    ("attend", 64): Tiling(64, 32, 4, 1),
    ("attend", 128): Tiling(64, 32, 8, 1),
    ("attend", 256): Tiling(32, 32, 8, 1),
    ("query_gradients", 64): Tiling(64, 32, 4, 1),
    ("query_gradients", 128): Tiling(32, 32, 4, 1),
    ("query_gradients", 256): Tiling(16, 16, 4, 1),
    ("key_gradients", 64): Tiling(32, 32, 4, 1),
    ("key_gradients", 128): Tiling(32, 32, 8, 1),
    ("key_gradients", 256): Tiling(16, 16, 4, 1),
}
"""The tilings for float32, whose products are in tf32."""


def tiling_of(kernel: str, q, k, *, limited: bool, pruned: bool) -> Tiling:
    """Return the tiling of a kernel for queries q [B, Q, H, D] and keys k [B, T, G, D], and for the capability for which `launch`
    compiles; `limited` says whether documents or a window limit what the queries see, and `pruned` whether tiles of keys are pruned.
    """
    table: Any = WIDE_TILINGS if q.dtype == _F32 else TILINGS
    heads, key_heads = q.shape[2], k.shape[2]
    if q.dtype != _F32 and launch.capability() == 80:
        table = TILINGS | TILINGS_8_0
        if heads == key_heads and heads & (heads - 1) == 0:
            # Nobody has timed the four warps of "attend" where tiles are pruned.
            table |= {
                key: x for key, x in EQUAL_HEADS_8_0.items() if not (pruned and key[0] == "attend")
            }
    kinds = ["_limited"] * limited + [""]
    found = (table.get((kernel + kind, q.shape[-1])) for kind in kinds)
    return next(tiling for tiling in found if tiling is not None)


def lowest_keys(rows: Rows, batch: int, queries: int, keys: int, window: int | None) -> Any:
    """Return the position of the first key that documents and the window let each query see, [B, Q] int32; None without both."""
    if rows.run is None and window is None:
        return None
    position = jnp.arange(keys, dtype=jnp.int32)
    first = jnp.zeros((batch, keys), jnp.int32)
    if rows.run is not None:
        starts = rows.run[:, 1:] != rows.run[:, :-1]
        first = lax.cummax(first.at[:, 1:].set(jnp.where(starts, position[1:], 0)), axis=1)
    if window is not None:
        first = jnp.maximum(first, position - (min(window, keys) - 1))
    return rows.at_queries(first, queries, axis=1)


class _Launch:
    """A call's arrays that all kernels read, besides queries, keys and values, and the constants of their compilation."""

    def __init__(self, q, k, rows: Rows, bounds: Bounds, scale: float, window: int | None):
        batch, self.queries, self.heads, self.depth = q.shape
        self.keys, self.key_heads = k.shape[1:3]
        self.batch, self.scale, self.bounds, self.q, self.k = batch, float(scale), bounds, q, k
        self.lowest = lowest_keys(rows, batch, self.queries, self.keys, window)
        self.gates: tuple[Any, ...] = (None,) * 6
        if rows.gates is not None:
            at_queries = (rows.at_queries(x, self.queries) for x in rows.gates)
            at_keys = key_arrays(rows)
            self.gates = (*at_queries, at_keys["high"], at_keys["low"], *rows.gates)
        self.places = None if bounds.diagonal is None else bounds.diagonal[0, 0] * TILE
        everything = self.lowest is None and bounds.first_of_query is None
        self.first, self.last = (None, None) if everything else (bounds.first, bounds.last)

    def tiling(self, kernel: str) -> Tiling:
        """Return a kernel's tiling."""
        pruned = self.bounds.first_of_query is not None
        return tiling_of(kernel, self.q, self.k, limited=self.lowest is not None, pruned=pruned)

    def rows(self, kernel: str) -> tuple[Any, ...]:
        """Return what a kernel reads of each token: the gates, except in `key_gradients` their sums from each key to the end of its tile
        and in `attend` those of each tile, the first keys, the pruned tiles, and the places of the queries.
        """
        gates = self.gates
        if kernel != "key_gradients":
            gates = (*gates, *self._in_tiles(kernel)[: 2 if kernel == "attend" else 1])
        return (*gates, self.lowest, self.bounds.first_of_query, self.places)

    def _in_tiles(self, kernel: str) -> tuple[jax.Array | None, jax.Array | None]:
        """Return log2(e) (F_n - F_j) of every key j, with n the last key of its tile [B, H, T], and log2(e) (F_n - F_m) of every tile,
        with m the last key of the tile before it, or the first tile's own [B, H, tiles]; None and None without gates.
        """
        if self.gates[0] is None:
            return None, None
        size = self.tiling(kernel).keys
        k_high, k_low, high, low = (
            x.reshape(*x.shape[:2], self.keys // size, size) for x in self.gates[2:]
        )
        after = (high[..., -1:] - k_high) + (low[..., -1:] - k_low)
        step_high, step_low = (jnp.diff(x[..., -1], prepend=x[..., :1, -1]) for x in (high, low))
        factor = math.log2(math.e)
        return (after * factor).reshape(self.gates[2].shape), (step_high + step_low) * factor

    def run(self, kernel, inputs, outputs, tokens: int) -> dict[str, jax.Array]:
        """Run a kernel whose programs compute the `tokens` queries or keys of each row and head; return its outputs by name."""
        tiling = self.tiling(kernel.fn.__name__)
        own: dict[str, Any] = {}
        if kernel.fn.__name__ == "attend":
            own = dict(PARTS=tiling.parts, COLUMNS=tiling.columns)
        size = tiling.keys if kernel.fn.__name__ == "key_gradients" else tiling.queries
        return launch.call(
            kernel,
            inputs,
            outputs,
            programs=self.batch * self.heads * (tokens // size),
            warps=tiling.warps,
            stages=tiling.stages,
            registers=tiling.registers,
            HEADS=self.heads,
            KEY_HEADS=self.key_heads,
            QUERIES=self.queries,
            KEYS=self.keys,
            D=self.depth,
            TILE=TILE,
            BM=tiling.queries,
            BN=tiling.keys,
            GATED=self.gates[0] is not None,
            PRUNED=self.bounds.first_of_query is not None,
            LIMITED=self.lowest is not None,
            PLACES=self.places is not None,
            **own,
        )

    @property
    def factor(self) -> float:
        """The factor of the products of queries and keys in the base-2 logarithms of weights."""
        return self.scale * math.log2(math.e)


def _struct(shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def forward(
    q, k, v, rows: Rows, bounds: Bounds, *, scale: float, window: int | None, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Compute attention with forget gates; return its output for each query, and the logarithm of the sum of the query's weights,
    which the backward pass needs.

    Args:
        q: [B, Q, H, D] queries, Q a multiple of `TILE`.
        k: [B, T, G, D] keys, T a multiple of `TILE`.
        v: [B, T, G, D] values.
        rows: the forget gates and documents of the tokens, and which tokens are keys.
        bounds: which tiles of queries see which tiles of keys.
        scale: the factor by which the scores q . k are multiplied.
        window: the number of last tokens that a query sees, or None for all.
        interpret: has no effect.

    Returns:
        The output [B, Q, H, D], 0 where a query sees no key; and [B, H, Q] float32, the base-2 logarithm of the sum of each query's
        weights, 1e30 where it sees no key.
    """
    from pallas_kernels.forgetting_attention.triton import forward_bodies

    del interpret
    call = _Launch(q, k, rows, bounds, scale, window)
    results = call.run(
        forward_bodies.attend,
        (q, k, v, *call.rows("attend"), call.first, call.factor),
        dict(
            out=_struct(q.shape, q.dtype),
            sums=_struct((call.batch, call.heads, call.queries), _F32),
        ),
        call.queries,
    )
    return results["out"], results["sums"]


def backward(
    q, k, v, rows: Rows, bounds: Bounds, sums, d_out, delta, *, scale: float, window: int | None, interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """Return the gradients of the queries q [B, Q, H, D], of the keys k and the values v (both [B, T, H, D], one for each query head),
    and of F, the running sum of the log forget gates, as a bias of the keys ([B, H, T], or None without gates).

    The arguments are those of `forward`, and:

    Args:
        sums: [B, H, Q] float32, the second result of `forward`.
        d_out: [B, Q, H, D], the gradient of the output.
        delta: [B, H, Q] float32, the scalar product of each query's output and its gradient.
    """
    from pallas_kernels.forgetting_attention.triton import bodies

    del interpret
    call = _Launch(q, k, rows, bounds, scale, window)
    inputs = (q, k, v, d_out, sums)
    of_queries = call.run(
        bodies.query_gradients,
        (*inputs, delta, *call.rows("query_gradients"), call.first, call.factor, call.scale),
        dict(dq=_struct(q.shape, q.dtype), error=_struct(delta.shape, _F32)),
        call.queries,
    )
    # `delta` is computed from the rounded output, and differs a little from its exact value. A gate's gradient sums these
    # differences over all later tokens, and nearly everything else in that sum cancels.
    delta = delta + of_queries["error"]
    free = None
    if call.lowest is not None:
        tiling = call.tiling("key_gradients")
        latest = call.lowest[:, None, tiling.queries - 1 :: tiling.queries]
        first_keys = jnp.arange(0, call.keys, tiling.keys, dtype=jnp.int32)[:, None]
        free = jnp.sum(latest <= first_keys, axis=-1, dtype=jnp.int32)
    by_head = (call.batch, call.keys, call.heads, call.depth)
    gated = rows.gates is not None
    of_keys = call.run(
        bodies.key_gradients,
        (
            *inputs,
            delta,
            *call.rows("key_gradients"),
            bounds.begin,
            call.last,
            free,
            call.factor,
            call.scale,
        ),
        dict(
            dk=_struct(by_head, k.dtype),
            dv=_struct(by_head, v.dtype),
            d_sums=_struct((call.batch, call.heads, call.keys) if gated else (1,), _F32),
        ),
        call.keys,
    )
    return of_queries["dq"], of_keys["dk"], of_keys["dv"], of_keys["d_sums"] if gated else None
