"""The Hopper kernels (Mosaic GPU) of grouped SwiGLU layers: the product with the gate and up matrices that ends with
`inner = w silu(gate) ⊙ up`, and the product with the transposed down matrices that ends with the gradients of gate, up and w.

Both store 128 columns of gate, of up and of `inner` for each 128 rows, and compute SwiGLU from sums in float32, where
separate kernels would round them to bfloat16 before. The loop over tiles is that of `pallas_kernels.grouped_product.pipeline`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, pl, plgpu
from pallas_kernels.grouped_product.pipeline import DEPTH, HALF, ROWS, SLOTS, Loop, Tile
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.launch import launch

ACROSS = 128
"""Columns of gate, and of up, in a tile."""
_CHUNK = 64  # columns that a warpgroup computes at a time
_F32 = jnp.float32


def gated_product(
    x: jax.Array,
    kernels: jax.Array,
    groups: jax.Array,
    count: jax.Array,
    row_weight: jax.Array | None,
    *,
    with_products: bool = True,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the inner values of a grouped SwiGLU layer, and the products [N, 2 F] or None; the arguments are those of
    `api.gated_product`.
    """
    rows, depth = x.shape
    size = kernels.shape[2] // 2
    tiles = size // ACROSS

    def multiply(totals, half, a, *matrices):
        for total, matrix in zip(totals, matrices, strict=True):
            plgpu.wgmma(total, a.at[half], matrix)

    def kernel(refs, smem):
        def tile(index) -> Tile:
            block, column = lax.div(index, tiles), lax.rem(index, tiles)
            matrix = refs["kernels"].at[refs["groups"][block]]

            def operands(k):
                at = pl.ds(k * DEPTH, DEPTH)
                matrices = (matrix.at[at, _columns(column, i * size)] for i in range(2))
                return refs["x"].at[pl.ds(block * ROWS, ROWS), at], *matrices

            def begin(group):
                return _row_weight(refs, _rows(block, group))

            def store(group, totals, weight):
                gate, up = totals
                stored = []
                for i in range(ACROSS // _CHUNK):
                    chunk = slice(i * _CHUNK, (i + 1) * _CHUNK)
                    inner = _silu(gate[:, chunk])[1] * up[:, chunk]
                    inner = inner if weight is None else inner * _spread(weight)
                    start = column * ACROSS + i * _CHUNK
                    stored.append((inner, "inner", start))
                    if with_products:
                        stored.append((gate[:, chunk], "products", start))
                        stored.append((up[:, chunk], "products", start + size))
                _store(refs, smem["out"].at[group], _rows(block, group), stored)

            return Tile(depth // DEPTH, operands, store, begin)

        loop.run(tile, refs["count"][0] * tiles, smem)

    loop = Loop(multiply, ((ROWS, DEPTH), (DEPTH, ACROSS), (DEPTH, ACROSS)), (ACROSS, ACROSS))
    outputs = dict(inner=jax.ShapeDtypeStruct((rows, size), x.dtype))
    if with_products:
        outputs["products"] = jax.ShapeDtypeStruct((rows, 2 * size), x.dtype)
    inputs = dict(groups=groups, count=count, x=x, kernels=kernels, row_weight=row_weight)
    out = _launch(kernel, loop, inputs, outputs, {}, "gated_product", interpret)
    return out["inner"], out.get("products")


def gated_gradients(
    dy: jax.Array,
    down: jax.Array,
    groups: jax.Array,
    count: jax.Array,
    products: jax.Array,
    row_weight: jax.Array | None,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the inner values, the gradient of the products, and that of the rows' weights in parts, of a grouped SwiGLU
    layer; the arguments are those of `api.gated_gradients`.
    """
    rows, depth = dy.shape
    size = down.shape[1]
    tiles = size // ACROSS

    def multiply(totals, half, a, b):
        plgpu.wgmma(totals[0], a.at[half], b.transpose((1, 0)))

    def kernel(refs, smem):
        def tile(index) -> Tile:
            block, column = lax.div(index, tiles), lax.rem(index, tiles)
            matrix = refs["down"].at[refs["groups"][block]]

            def operands(k):
                at = pl.ds(k * DEPTH, DEPTH)
                tokens = pl.ds(block * ROWS, ROWS)
                return refs["dy"].at[tokens, at], matrix.at[_columns(column), at]

            def begin(group):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # `pair` is stored
                for i in range(2):
                    source = refs["products"].at[_rows(block, group), _columns(column, i * size)]
                    pair = smem["pair"].at[group, i]
                    plgpu.copy_gmem_to_smem(source, pair, smem["pair_loaded"].at[group])
                return _row_weight(refs, _rows(block, group))

            def store(group, totals, weight):
                here = _rows(block, group)
                plgpu.barrier_wait(smem["pair_loaded"].at[group])
                pair = [smem["pair"].at[group, i] for i in range(2)]
                buffers = [smem["out"].at[group, i] for i in range(ACROSS // _CHUNK)]
                d_weight = _pair_gradients(totals[0], pair, buffers, weight)
                if weight is not None:
                    refs["d_weight"].at[column, here][...] = d_weight
                plgpu.commit_smem()
                for i, x in enumerate(pair):
                    d_products = refs["d_products"].at[here, _columns(column, i * size)]
                    plgpu.copy_smem_to_gmem(x, d_products)
                for i, x in enumerate(buffers):
                    columns = pl.ds(column * ACROSS + i * _CHUNK, _CHUNK)
                    plgpu.copy_smem_to_gmem(x, refs["inner"].at[here, columns])

            return Tile(depth // DEPTH, operands, store, begin)

        loop.run(tile, refs["count"][0] * tiles, smem)

    loop = Loop(multiply, ((ROWS, DEPTH), (ACROSS, DEPTH)), (ACROSS,))
    smem: Any = plgpu.SMEM
    scratch = dict(
        pair=smem((2, 2, HALF, ACROSS), dtype=dy.dtype, transforms=wg.TILED),
        pair_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=2),
    )
    outputs = {
        name: jax.ShapeDtypeStruct((rows, width), dy.dtype)
        for name, width in (("inner", size), ("d_products", 2 * size))
    }
    if row_weight is not None:
        outputs["d_weight"] = jax.ShapeDtypeStruct((tiles, rows), _F32)
    inputs = dict(groups=groups, count=count, dy=dy, down=down, products=products)
    inputs |= dict(row_weight=row_weight)
    out = _launch(kernel, loop, inputs, outputs, scratch, "gated_gradients", interpret)
    return out["inner"], out["d_products"], out.get("d_weight")


def _pair_gradients(d_inner, pair, buffers, weight):
    """Replace a warpgroup's tiles of gate and up, `pair` in shared memory, by their gradients, and store the inner values to
    `buffers`, 64 columns each.

    Args:
        d_inner: the gradient of the inner values, in float32.
        pair: references to gate and up [64, 128].
        buffers: references to the inner values [64, 64].
        weight: the rows' weights [64], or None.

    Returns:
        The sums over the columns [64] of the gradient of the rows' weights; None without weights.
    """
    d_weight = None
    for i, buffer in enumerate(buffers):
        columns = pl.ds(i * _CHUNK, _CHUNK)
        gate_ref, up_ref = (x.at[:, columns] for x in pair)
        gate, up = (plgpu.load(x, layout=wg.LAYOUT).astype(_F32) for x in (gate_ref, up_ref))
        dy = d_inner[:, i * _CHUNK : (i + 1) * _CHUNK]
        sigmoid, silu = _silu(gate)
        inner = silu * up
        if weight is not None:
            part = jnp.sum(dy * inner, axis=1)
            d_weight = part if d_weight is None else d_weight + part
            inner, dy = inner * _spread(weight), dy * _spread(weight)
        gate_ref[...] = (dy * up * (sigmoid + silu * (1 - sigmoid))).astype(gate_ref.dtype)
        up_ref[...] = (dy * silu).astype(up_ref.dtype)
        buffer[...] = inner.astype(buffer.dtype)
    return d_weight


def _silu(gate) -> tuple[Any, Any]:
    """Return the sigmoid of a tile, and its SiLU."""
    root = lax.rsqrt(1.0 + jnp.exp(-gate))  # without a division
    sigmoid = root * root
    return sigmoid, gate * sigmoid


def _spread(weight):
    return wg.spread_rows(weight, (HALF, _CHUNK))


def _rows(block, group):
    return pl.ds(block * ROWS + group * HALF, HALF)


def _columns(column, start: int = 0):
    return pl.ds(start + column * ACROSS, ACROSS)


def _row_weight(refs, rows):
    if "row_weight" not in refs:
        return None
    return wg.load_global(refs["row_weight"].at[rows], wg.LAYOUT.reduce(1))


def _store(refs, buffers, rows, tiles) -> None:
    """Store tiles [64, 64] of a warpgroup by way of its buffers; each is given as (values, name of the output, first
    column).
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, (values, name, start) in enumerate(tiles):
        buffer = buffers.at[i % SLOTS]
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        buffer[...] = values.astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, refs[name].at[rows, pl.ds(start, _CHUNK)])


def _launch(kernel, loop: Loop, inputs, outputs, scratch, name: str, interpret: Any):
    dtype = outputs["inner"].dtype
    out: Any = plgpu.SMEM((2, SLOTS, HALF, _CHUNK), dtype=dtype, transforms=wg.TILED)
    return launch(
        kernel,
        inputs=inputs,
        outputs=outputs,
        grid=dict(processor=PROCESSORS),
        num_threads=3,
        scratch=loop.scratch(dtype) | scratch | dict(out=out),
        approx_math=True,
        name=name,
        interpret=interpret,
    )
