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
from pallas_kernels.grouped_product.pipeline import HALF, ROWS, SLOTS, Loop, Tile, depth_of
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
    scale: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[Any, ...]:
    """Return the inner values of a grouped SwiGLU layer, the products [N, 2 F] or None, and with `scale` the largest inner values; the
    arguments are those of `api.gated_product`.
    """
    rows, depth = x.shape
    step, narrow = depth_of(x), scale is not None
    size = kernels.shape[1 if narrow else 2] // 2
    tiles = size // ACROSS

    def multiply(totals, half, a, *matrices):
        for total, matrix in zip(totals, matrices, strict=True):
            plgpu.wgmma(total, a.at[half], matrix.transpose((1, 0)) if narrow else matrix)

    def kernel(refs, smem):
        factor = refs["scale"][0] if narrow else None

        def tile(index) -> Tile:
            block, column = lax.div(index, tiles), lax.rem(index, tiles)
            matrix = refs["kernels"].at[refs["groups"][block]]

            def operands(k):
                at = pl.ds(k * step, step)
                columns = (_columns(column, i * size) for i in range(2))
                matrices = (matrix.at[c, at] if narrow else matrix.at[at, c] for c in columns)
                return refs["x"].at[pl.ds(block * ROWS, ROWS), at], *matrices

            def begin(group):
                return _row_weight(refs, _rows(block, group))

            def store(group, totals, weight):
                gate, up = totals if factor is None else (total * factor for total in totals)
                stored, most = [], None
                for i in range(ACROSS // _CHUNK):
                    chunk = slice(i * _CHUNK, (i + 1) * _CHUNK)
                    inner = _silu(gate[:, chunk])[1] * up[:, chunk]
                    inner = inner if weight is None else inner * _spread(weight)
                    most = _most(most, inner, inner_dtype) if narrow else None
                    start = column * ACROSS + i * _CHUNK
                    stored.append((inner, "inner", start))
                    if with_products:
                        stored.append((gate[:, chunk], "products", start))
                        stored.append((up[:, chunk], "products", start + size))
                if narrow:
                    refs["most"].at[column, _rows(block, group)][...] = most
                _store(refs, smem["out"].at[group], _rows(block, group), stored)

            return Tile(depth // step, operands, store, begin)

        loop.run(tile, refs["count"][0] * tiles, smem)

    inner_dtype = jnp.bfloat16 if narrow else x.dtype
    right = (ACROSS, step) if narrow else (step, ACROSS)
    dtypes = (x.dtype, kernels.dtype, kernels.dtype)
    loop = Loop(multiply, ((ROWS, step), right, right), (ACROSS, ACROSS), dtypes)
    outputs = dict(inner=jax.ShapeDtypeStruct((rows, size), inner_dtype))
    if with_products:
        outputs["products"] = jax.ShapeDtypeStruct((rows, 2 * size), inner_dtype)
    if narrow:
        outputs["most"] = jax.ShapeDtypeStruct((tiles, rows), _F32)
    inputs = dict(groups=groups, count=count, scale=scale, x=x, kernels=kernels)
    inputs |= dict(row_weight=row_weight)
    out = _launch(kernel, loop, inputs, outputs, {}, "gated_product", interpret)
    results = out["inner"], out.get("products")
    return (*results, out["most"]) if narrow else results


def gated_gradients(
    dy: jax.Array,
    down: jax.Array,
    groups: jax.Array,
    count: jax.Array,
    products: jax.Array,
    row_weight: jax.Array | None,
    *,
    scale: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[Any, ...]:
    """Return the inner values, the gradient of the products, and that of the rows' weights in parts, of a grouped SwiGLU
    layer, and with `scale` the largest gradients; the arguments are those of `api.gated_gradients`.
    """
    rows, depth = dy.shape
    step, narrow = depth_of(dy), scale is not None
    size = down.shape[1]
    tiles = size // ACROSS

    def multiply(totals, half, a, b):
        plgpu.wgmma(totals[0], a.at[half], b.transpose((1, 0)))

    def kernel(refs, smem):
        factor = refs["scale"][0] if narrow else None

        def tile(index) -> Tile:
            block, column = lax.div(index, tiles), lax.rem(index, tiles)
            matrix = refs["down"].at[refs["groups"][block]]

            def operands(k):
                at = pl.ds(k * step, step)
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
                d_inner = totals[0] if factor is None else totals[0] * factor
                d_weight, most = _pair_gradients(d_inner, pair, buffers, weight, narrow)
                if narrow:
                    refs["most"].at[column, here][...] = most
                if weight is not None:
                    refs["d_weight"].at[column, here][...] = d_weight
                plgpu.commit_smem()
                for i, x in enumerate(pair):
                    d_products = refs["d_products"].at[here, _columns(column, i * size)]
                    plgpu.copy_smem_to_gmem(x, d_products)
                for i, x in enumerate(buffers):
                    columns = pl.ds(column * ACROSS + i * _CHUNK, _CHUNK)
                    plgpu.copy_smem_to_gmem(x, refs["inner"].at[here, columns])

            return Tile(depth // step, operands, store, begin)

        loop.run(tile, refs["count"][0] * tiles, smem)

    loop = Loop(multiply, ((ROWS, step), (ACROSS, step)), (ACROSS,), (dy.dtype, down.dtype))
    dtype = products.dtype
    smem: Any = plgpu.SMEM
    scratch = dict(
        pair=smem((2, 2, HALF, ACROSS), dtype=dtype, transforms=wg.TILED),
        pair_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=2),
    )
    outputs = {
        name: jax.ShapeDtypeStruct((rows, width), dtype)
        for name, width in (("inner", size), ("d_products", 2 * size))
    }
    if row_weight is not None:
        outputs["d_weight"] = jax.ShapeDtypeStruct((tiles, rows), _F32)
    if narrow:
        outputs["most"] = jax.ShapeDtypeStruct((tiles, rows), _F32)
    inputs = dict(groups=groups, count=count, scale=scale, dy=dy, down=down, products=products)
    inputs |= dict(row_weight=row_weight)
    out = _launch(kernel, loop, inputs, outputs, scratch, "gated_gradients", interpret)
    results = out["inner"], out["d_products"], out.get("d_weight")
    return (*results, out["most"]) if narrow else results


def _pair_gradients(d_inner, pair, buffers, weight, narrow: bool):
    """Replace a warpgroup's tiles of gate and up, `pair` in shared memory, by their gradients, and store the inner values to
    `buffers`, 64 columns each.

    Args:
        d_inner: the gradient of the inner values, in float32.
        pair: references to gate and up [64, 128].
        buffers: references to the inner values [64, 64].
        weight: the rows' weights [64], or None.
        narrow: whether the rows' largest gradients are returned.

    Returns:
        The sums over the columns [64] of the gradient of the rows' weights, None without weights; and the rows' largest absolute
        values [64] of the stored gradients, None unless `narrow`.
    """
    d_weight = most = None
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
        d_gate = dy * up * (sigmoid + silu * (1 - sigmoid))
        gate_ref[...] = d_gate.astype(gate_ref.dtype)
        d_up = dy * silu
        up_ref[...] = d_up.astype(up_ref.dtype)
        if narrow:
            for gradient in (d_gate, d_up):
                most = _most(most, gradient, gate_ref.dtype)
        buffer[...] = inner.astype(buffer.dtype)
    return d_weight, most


def _most(most, x, dtype):
    """Return the largest absolute values [64] of a tile's rows as they are stored in `dtype`, and of `most` unless it is None."""
    rows = jnp.max(jnp.abs(x.astype(dtype).astype(_F32)), axis=1)
    return rows if most is None else jnp.maximum(most, rows)


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
        scratch=loop.scratch() | scratch | dict(out=out),
        approx_math=True,
        name=name,
        interpret=interpret,
    )
