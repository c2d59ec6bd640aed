"""The inverses of the triangular systems of all chunks of diagonal-plus-low-rank memories (RWKV7), on Mosaic GPU (Hopper)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.blocks import row_and_head
from pallas_kernels.hopper.halving import BLOCK, CHUNK, SQUARE
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.unit_inverse import unit_inverse

_F32, _BF16 = jnp.float32, jnp.bfloat16


class SolvedChunks(NamedTuple):
    """The inverses X of the triangular systems of all chunks of a diagonal-plus-low-rank memory, and their
    products, in bfloat16.

    A token reads the memory with the vector `a`, and writes the result back with b. A_ab and A_ak are the
    products of `a` with b and with k between tokens of a chunk, times the decay between the tokens; d' are
    the exclusive sums of the log decays.

    Attributes:
        inverse: [B, h, T, C], the rows of each chunk's X = (I - A_ab)⁻¹.
        solved_a: [B, T, h, K], X (a e^d'): its product with the memory before the chunk is what `a` reads of
            that memory.
        values: [B, h, T, C], the rows of each chunk's X A_ak: its product with v is what `a` reads of the
            chunk's values.
    """

    inverse: jax.Array
    solved_a: jax.Array
    values: jax.Array


class _SolveSmem(NamedTuple):
    """Buffers in shared memory of a warpgroup that inverts the triangular system of one chunk (`solve_chunks`), in bfloat16.

    C is the number of tokens of a chunk, d' are the exclusive sums of its log decays.

    Attributes:
        right: [C, C], the right operand of the inverse's products.
        inverse: [C, C], the inverse X.
        values: [C, C], the transposed decayed products A_akᵀ of a with k, then X A_ak.
        a: [C, K], a decayed from the chunk's start, a e^d', then X (a e^d').
        loaded: the barrier at which the loads of `values` and `a` are complete.
        left: two [C, C] for the interpreter, which reads left operands from shared memory; else empty.
    """

    right: Any
    inverse: Any
    values: Any
    a: Any
    loaded: Any
    left: list[Any]


def solve_chunks(upper, upper_values, decayed_a, *, interpret: Any = False) -> SolvedChunks:
    """Invert the triangular systems of all chunks of a diagonal-plus-low-rank memory in parallel: compute
    X = (I - A_ab)⁻¹, X A_ak and X (a e^d'), as `SolvedChunks`.

    Args:
        upper: [B, h, T, C] float32, the rows of each chunk's A_abᵀ, the transposed decayed products of `a`
            with b.
        upper_values: [B, h, T, C] bfloat16, the rows of each chunk's A_akᵀ, the transposed decayed products
            of `a` with k.
        decayed_a: [B, T, h, K] bfloat16, `a` times the decay from the chunk's start, a e^d'.
        interpret: parameters of the Pallas interpreter, or False to compile the kernel.
    """
    batch, heads, length, _ = upper.shape
    depth = decayed_a.shape[-1]
    struct = jax.ShapeDtypeStruct
    square = struct(upper.shape, _BF16)
    smem: Any = plgpu.SMEM
    tile = functools.partial(smem, dtype=_BF16, transforms=wg.TILED)
    buffers = _SolveSmem(
        right=tile(SQUARE),
        inverse=tile(SQUARE),
        values=tile(SQUARE),
        a=tile((CHUNK, depth)),
        loaded=plgpu.Barrier(num_arrivals=2),
        left=[tile(SQUARE)] * 2 if interpret else [],
    )

    def kernel(refs):
        b, h = row_and_head(heads)
        tokens = pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)
        chunk = {name: ref.at[b, h, tokens] for name, ref in refs.items()}
        chunk |= {name: refs[name].at[b, tokens, h] for name in ("decayed_a", "solved_a")}
        pl.run_scoped(lambda buffers: _solve_chunk(chunk, buffers, interpret), buffers)

    result = launch(
        kernel,
        inputs=dict(upper=upper, upper_values=upper_values, decayed_a=decayed_a),
        outputs=dict(inverse=square, solved_a=struct(decayed_a.shape, _BF16), values=square),
        grid=dict(row=batch * heads, chunk=length // CHUNK),
        name="dplr_solve_chunks",
        interpret=interpret,
    )
    return SolvedChunks(*result.values())


def _solve_chunk(refs: dict[str, Any], buffers: _SolveSmem, interpret) -> None:
    """Invert the triangular system of one chunk of a diagonal-plus-low-rank memory: compute and store
    X = (I - A_ab)⁻¹, X A_ak and X (a e^d').

    A_ab and A_ak are the decayed products of `a` with b and with k, and a e^d' is `a` decayed from the
    chunk's start. `refs` are the chunk's inputs and outputs in global memory, by name.
    """
    plgpu.copy_gmem_to_smem(refs["upper_values"], buffers.values, buffers.loaded)
    plgpu.copy_gmem_to_smem(refs["decayed_a"], buffers.a, buffers.loaded)
    i = plgpu.broadcasted_iota(jnp.int32, SQUARE, 0, layout=wg.LAYOUT)
    j = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=wg.LAYOUT)
    strict = -wg.load_global(refs["upper"])
    inverse = unit_inverse(
        strict, i ^ j, buffers.right, buffers.left, interpret, upper=True, method="blocks"
    )
    buffers.inverse.transpose((1, 0))[...] = inverse.astype(_BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers.inverse, refs["inverse"])
    plgpu.barrier_wait(buffers.loaded)
    zeros = jnp.zeros(SQUARE, _F32)

    def apply_inverse(x):
        add = lambda out: plgpu.wgmma(out, buffers.inverse, x)  # noqa: E731
        return wg.accumulate(add, zeros, interpret=interpret)[0].astype(_BF16)

    for column in range(buffers.a.shape[1] // BLOCK):
        columns = buffers.a.at[:, pl.ds(column * BLOCK, BLOCK)]
        columns[...] = apply_inverse(columns)
    buffers.values[...] = apply_inverse(buffers.values.transpose((1, 0)))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers.a, refs["solved_a"])
    plgpu.copy_smem_to_gmem(buffers.values, refs["values"])
    plgpu.wait_smem_to_gmem(0)
