"""Diagonal-plus-low-rank memories (RWKV7) by the Triton kernels in `bodies` and those of linear attention and of the delta rule.

Forward: the decayed products and tokens of all chunks and the inverses of their triangular systems are computed in parallel, a scan
computes the memory before every chunk and what the vectors a read, and then all outputs are computed in parallel. Backward: a reversed scan computes
the gradients of the memory after every chunk and of the systems' right sides, and then all other gradients are computed in parallel. Long
rows of few memories are scanned in parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.triton import passes as delta
from pallas_kernels.delta_rule.triton.scalar_decay import length_multiple
from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.triton import channel_passes
from pallas_kernels.linear_attention.triton import passes as linear
from pallas_kernels.linear_attention.triton.passes import CHUNK, Decays
from pallas_kernels.linear_attention.triton.tilings import Tiling
from pallas_kernels.memory_calls import FLOAT32_DECAY
from pallas_kernels.requirements import Requirement
from pallas_kernels.triton import launch

__all__ = ["CHUNK", "REQUIREMENTS", "Residuals", "backward", "forward", "length_multiple"]

_F32 = jnp.float32
_LEVELS = CHUNK.bit_length() - 1
REQUIREMENTS = (
    Requirement(
        "a and b in v's dtype",
        lambda call: call.a.dtype == call.b.dtype == call.v.dtype,
        lambda call: f"{jnp.dtype(call.a.dtype).name} and {jnp.dtype(call.b.dtype).name}",
    ),
    FLOAT32_DECAY,
    *linear.REQUIREMENTS,
)
TILINGS = {
    "dplr_scores": Tiling(64, 0, 4, 1),
    "score_products": Tiling(0, 64, 4, 1),
    "dplr_outputs": Tiling(64, 64, 4, 2),
    "dplr_value_gradients": Tiling(64, 64, 4, 2),
    "pair_gradients": Tiling(0, 64, 4, 2),
    "dplr_gradients": Tiling(32, 32, 4, 1),
}
"""The tiling of each kernel for bfloat16, by the name of the kernel."""
WIDE_TILINGS = {name: tiling._replace(warps=8, stages=1) for name, tiling in TILINGS.items()}
WIDE_TILINGS["dplr_gradients"] = Tiling(16, 64, 8, 1)
"""The tilings for products in tf32, of float16 and float32 inputs."""


class Scores(NamedTuple):
    """The products of the tokens of each chunk times the decay between them, 0 above the diagonal, float32.

    Attributes:
        qb: [B, N, heads, C, C], A_qb, of queries with b, times the scale.
        qk: [B, N, heads, C, C], A_qk, of queries with keys, times the scale.
        ak: [B, N, G, C, C], A_ak, of a with keys, 0 on the diagonal.
    """

    qb: jax.Array
    qk: jax.Array
    ak: jax.Array


class Residuals(NamedTuple):
    """The arrays that `forward` saves for `backward`.

    Attributes:
        decays: the sums of the log decays of all tokens, and the tokens' documents.
        scores: the decayed products of all chunks.
        inverse: [B, N, G, C, C], the inverses of the triangular systems of all chunks.
        states: [B, N, G, K, V], the memories before all chunks.
        writes: [B, T, G, V], U, what the vectors a read and the vectors b write.
        transitions: [B * P, G, K, K] float32, the transitions of the P parts in which rows are scanned; None of one part.
    """

    decays: Decays
    scores: Scores
    inverse: jax.Array
    states: jax.Array
    writes: jax.Array
    transitions: jax.Array | None


def forward(
    q, k, v, a, b, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute diagonal-plus-low-rank memories, and what their backward pass requires.

    Return the output [B, T, max(H, G), V], the final memories, shaped as `initial`, and the residuals. The arguments are those of
    `dplr`, with T a multiple of `CHUNK`; `interpret` has no effect.
    """
    del save, interpret
    memories = v.shape[2]
    heads = max(q.shape[2], memories)
    decays = channel_passes.channel_decays(log_decay, run, initial)
    tokens, written_k, scores, system = _tokens(q, k, a, b, decays, heads=heads, scale=scale)
    inverse = delta.solve(a, system, None, decays)
    right = _score_products(scores.ak, v, transposed=False)
    states, writes, final, transitions = delta.scan(
        tokens, right, inverse, decays, initial, written_k, v, heads=heads
    )
    results = _launch(
        "dplr_outputs",
        (tokens.read, scores.qb, scores.qk, writes, v, states),
        dict(out=_struct((*q.shape[:2], heads, v.shape[3]), v.dtype)),
        v,
        "values",
        dict(MEMORIES=memories, HEADS=heads, K=q.shape[3], V=v.shape[3]),
    )
    residuals = Residuals(decays, scores, inverse, states, writes, transitions)
    return results["out"], final, residuals


def backward(
    q, k, v, a, b, log_decay, run, initial, residuals: Residuals, d_output, d_final, *, scale: float,
    decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, a, b, log_decay and initial of diagonal-plus-low-rank memories.

    The arguments are those of `forward`, the residuals that it returned, and the gradients of its output and of its final memories. The
    gradient of log_decay is computed whether or not `decay_gradient` is set.
    """
    del log_decay, run, initial, decay_gradient, interpret
    decays, scores, inverse, states, writes, transitions = residuals
    heads, memories, keys, values = d_output.shape[2], v.shape[2], q.shape[3], v.shape[3]
    tokens, written_k, *_ = _tokens(q, k, a, b, decays, heads=heads, scale=scale, with_scores=False)
    local = _score_products(scores.qb, d_output, transposed=True)
    d_ends = row_layout.gradient_by_head(d_final, heads)
    d_states, d_right, _, d_initial = delta.scan_backward(
        tokens, d_output, local, writes, inverse, decays, d_ends, transitions, scale=scale
    )
    sizes = dict(MEMORIES=memories, HEADS=heads, K=keys, V=values)
    dv = _launch(
        "dplr_value_gradients",
        (written_k, scores.qk, scores.ak, d_output, d_right, d_states),
        dict(dv=_struct(d_output.shape, v.dtype)),
        v,
        "values",
        sizes,
    )["dv"]
    squares = (q.shape[0], q.shape[1] // CHUNK, heads, _LEVELS, CHUNK, CHUNK)
    documents = decays.run is not None
    products = _launch(
        "pair_gradients",
        (d_output, d_right, v, writes, decays.run, float(scale)),
        dict(
            pairs=_struct(squares, delta.low(v)[1]),
            diagonals=_struct((*squares[:3], 2, CHUNK), _F32),
        ),
        v,
        None,
        dict(MEMORIES=memories, HEADS=heads, V=values, LEVELS=_LEVELS, DOCUMENTS=documents),
    )
    shape = (*q.shape[:2], heads, keys)
    types = {f"d{n}": _struct(shape, x.dtype) for n, x in dict(q=q, k=k, a=a, b=b).items()}
    gradients = _launch(
        "dplr_gradients",
        (
            q, k, a, b, writes, v, d_output, d_right, products["pairs"], products["diagonals"], decays.sums, decays.run, decays.enters,
            decays.stays, states, d_states, float(scale),
        ),
        types | dict(dg=_struct(shape, _F32)),
        v,
        "keys",
        sizes
        | dict(Q_HEADS=q.shape[2], K_HEADS=k.shape[2], A_HEADS=a.shape[2], B_HEADS=b.shape[2])
        | dict(LEVELS=_LEVELS, DOCUMENTS=documents),
    )  # fmt: skip
    join = row_layout.sum_heads
    return (
        join(gradients["dq"], q.shape[2]),
        join(gradients["dk"], k.shape[2]),
        join(dv, memories),
        join(gradients["da"], a.shape[2]),
        join(gradients["db"], b.shape[2]),
        join(gradients["dg"], memories),
        join(d_initial, memories, axis=1),
    )


def _tokens(
    q, k, a, b, decays: Decays, *, heads: int, scale: float, with_scores: bool = True
) -> tuple[delta.Tokens, jax.Array, Scores, jax.Array]:
    """Return the tokens as the scans of the delta rule read them, with the vectors b as what is written and -a as what erases; the decayed
    keys [B, T, G, K] of the second write; the decayed products; and -A_ab [B, N, G, C, C], of which only the entries below the diagonal
    are defined. The last two have no meaning unless `with_scores`.
    """
    batch, length, memories, keys = decays.sums.shape
    count, stored = length // CHUNK, delta.low(q)[1]

    def matrices(heads):
        return _struct((batch, count, heads, CHUNK, CHUNK) if with_scores else (1,), _F32)

    by_memory = _struct((batch, length, memories, keys), stored)
    results = _launch(
        "dplr_scores",
        (q, k, a, b, decays.sums, decays.run, decays.enters, decays.stays, float(scale)),
        dict(
            read=_struct((batch, length, heads, keys), stored),
            erase=by_memory,
            written_b=by_memory,
            written_k=by_memory,
            chunk_decay=_struct((batch, count, memories, keys), _F32),
            qk=matrices(heads),
            qb=matrices(heads),
            ak=matrices(memories),
            system=matrices(memories),
        ),
        q,
        None,
        dict(Q_HEADS=q.shape[2], K_HEADS=k.shape[2], A_HEADS=a.shape[2], B_HEADS=b.shape[2])
        | dict(MEMORIES=memories, HEADS=heads, K=keys, LEVELS=_LEVELS)
        | dict(DOCUMENTS=decays.run is not None, SCORES=with_scores),
    )
    tokens = delta.Tokens(
        results["read"], results["erase"], results["written_b"], None, results["chunk_decay"]
    )
    scores = Scores(results["qb"], results["qk"], results["ak"])
    return tokens, results["written_k"], scores, results["system"]


def _score_products(scores, x, *, transposed: bool) -> jax.Array:
    """Return A x, or with `transposed` Aᵀ x, [B, T, heads, V] in the products' dtype, for `scores` A [B, N, heads, C, C] and x [B, T, *,
    V].
    """
    heads, values = scores.shape[2], x.shape[3]
    shape = (*x.shape[:2], heads, values)
    return _launch(
        "score_products",
        (scores, x),
        dict(out=_struct(shape, delta.low(x)[1])),
        x,
        "values",
        dict(X_HEADS=x.shape[2], HEADS=heads, V=values, TRANSPOSED=transposed),
    )["out"]


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _launch(
    name: str, inputs: tuple[Any, ...], outputs: dict[str, Any], v, tiled: str | None,
    sizes: dict[str, Any],
) -> dict[str, jax.Array]:  # fmt: skip
    """Run the kernel `name` on all chunks of rows of tokens v [B, T, *, V], and return its outputs.

    A program computes a tile of the channels that `tiled` names, "keys" or "values", or if it is None all of a chunk. `sizes` are the kernel's constants except C, BK, BV
    and LOW.
    """
    from pallas_kernels.dplr.triton import bodies

    tiling = (TILINGS if v.dtype == jnp.bfloat16 else WIDE_TILINGS)[name]
    tiles = 1
    if tiled is not None:
        tiles = sizes["K"] // tiling.keys if tiled == "keys" else sizes["V"] // tiling.values
    channels = dict(BK=tiling.keys) if "K" in sizes else {}
    channels |= dict(BV=tiling.values) if "V" in sizes else {}
    return launch.call(
        getattr(bodies, name),
        inputs,
        outputs,
        programs=v.shape[0] * (v.shape[1] // CHUNK) * sizes["HEADS"] * tiles,
        warps=tiling.warps,
        stages=tiling.stages,
        **sizes,
        **channels,
        **dict(C=CHUNK, LOW=delta.low(v)[0]),
    )
