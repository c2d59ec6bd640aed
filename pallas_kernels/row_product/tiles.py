"""Products of many tokens, of 64 rows or more, with one matrix on the tensor cores of a Hopper GPU (Mosaic GPU), with a norm in front and
SwiGLU or a residual sum behind.

A thread block computes 64 or 128 rows of some columns of the result. One warpgroup loads steps of some channels of the tokens and of the
matrix, of which the thread blocks of a cluster may each load a part for all; each of the others computes 64 rows. The root of a norm is the same for all channels of a token, so that products are those of
the tokens as they are, whose squares are added up beside them or given by the kernel that wrote the tokens, and the sums are multiplied by it; the matrix contains the norm's scale.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl, plgpu
from pallas_kernels.hopper import warpgroups as wg
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.row_product.hopper import IN_BFLOAT16

_F32 = jnp.float32
ROWS = 64
"""The rows of a warpgroup, of which the number of tokens is a multiple."""
_DEPTH = 64  # channels, of which a step has a multiple
_ENOUGH = 80  # thread blocks, of a card with 132 processors
_PARTS = 8  # of which a token has a multiple of sums of squares, as registers have columns


class Tiling(NamedTuple):
    """How the work is divided.

    Attributes:
        columns: the columns of the result that a thread block computes.
        depth: the channels of a step.
        stages: the steps whose operands are being loaded or are in use.
        row_peers: the thread blocks of a cluster with the same columns, each of which loads a part of the matrix for all.
        column_peers: those with the same rows, each of which loads a part of the tokens for all.
    """

    columns: int
    depth: int = _DEPTH
    stages: int = 5
    row_peers: int = 1
    column_peers: int = 1

    def divides(self, rows: int, channels: int, results: int) -> bool:
        """Return whether this divides a product [rows, results] of so many channels."""
        of_cluster = ROWS * _warpgroups(rows) * self.row_peers, self.columns * self.column_peers
        rest = rows % of_cluster[0], results % of_cluster[1], channels % self.depth
        return rest == (0, 0, 0) and self.depth % _DEPTH == 0


class _Options(NamedTuple):
    eps: float | None
    swiglu: bool
    with_squares: bool


class _Call(NamedTuple):
    x: Any
    matrix: Any
    swiglu: bool


def columns_of_block(rows: int, size: int, swiglu: bool) -> int | None:
    """Return the columns of the result that a thread block computes: the most that leave enough blocks, or the fewest; None if no number
    is possible.

    Args:
        rows: B, the number of tokens.
        size: the number of columns of the result.
        swiglu: whether each is computed from two products.
    """
    sizes = [n for n in (64, 32) if size % n == 0]
    blocks = rows // (ROWS * _warpgroups(rows))
    enough = [n for n in sizes if size // n * blocks >= _ENOUGH]
    return (enough or sizes[-1:] or [None])[0]


def _warpgroups(rows: int) -> int:
    return 2 if rows % (2 * ROWS) == 0 else 1


REQUIREMENTS = (
    IN_BFLOAT16,
    Requirement(
        f"a multiple of {ROWS} rows",
        lambda c: c.x.shape[0] > 0 and c.x.shape[0] % ROWS == 0,
        lambda c: f"{c.x.shape[0]}",
    ),
    Requirement(
        f"a multiple of {_DEPTH} channels and a multiple of 32 results",
        lambda c: (
            c.x.shape[1] % _DEPTH == 0
            and c.matrix.shape[0] % (64 if c.swiglu else 32) == 0
        ),
        lambda c: f"{c.x.shape[1]:,} and {c.matrix.shape[0] // (2 if c.swiglu else 1):,}",
    ),
)  # fmt: skip


def tile_unsupported(x: Any, matrix: Any, *, swiglu: bool = False) -> str | None:
    """Return the first requirement that a call of `tile_product` with these arrays (or their shapes and dtypes) does not meet, or None if
    the kernel supports it.
    """
    return first_unmet(REQUIREMENTS, _Call(x, matrix, swiglu))


def tile_product(
    x: jax.Array,
    matrix: jax.Array,
    *,
    eps: float | None = None,
    squares: jax.Array | None = None,
    added: jax.Array | None = None,
    swiglu: bool = False,
    with_squares: bool = False,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> Any:
    """Return the product [B, F] of tokens with a matrix, or [B, F / 2] with `swiglu`. It has no derivative. Sums are float32.

    Args:
        x: [B, I] bfloat16, one token of each row; `REQUIREMENTS` lists what the kernel requires.
        matrix: [F, I] bfloat16, the transpose of a dense layer's kernel.
        eps: if given, the tokens are `x / sqrt(mean(x²) + eps)`; the norm's scale belongs in the matrix.
        squares: [B, P] float32, P a multiple of 8, the sums of the squares of some of each token's channels, whose sum over P is that of all; None
            computes them from x. Only with `eps`. If [H, P, B], the channels are those of H heads side by side, each of which is divided by
            the root of its own mean square. They need not be those of x, which may contain a gate behind the norm.
        added: [B, F], in x's dtype, added to the product after it is rounded to this dtype; None adds nothing.
        swiglu: whether the product is a gate followed by as many values, both rounded to x's dtype, and the result silu(gate) ⊙ values;
            without `added`.
        with_squares: whether to return also the squares of the result, as `squares` of another product of it: of the columns of each thread
            block, and zeros up to a multiple of 8.
        tiling: how the work is divided; None is by `columns_of_block`.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.

    Raises:
        NotImplementedError: the arrays do not meet a requirement of the kernel; the message says which.
        ValueError: arrays do not have these shapes, `added` is given with `swiglu`, `squares` without `eps`, or the tiling does not divide the
            product, or with its steps the heads.
    """
    if swiglu and added is not None:
        raise ValueError("tile_product: accepted is either `added` or `swiglu`")
    results = matrix.shape[0] // (1 + swiglu)
    if x.shape[1:] != matrix.shape[1:] or x.ndim != 2:
        raise ValueError(
            f"tile_product: x {x.shape} and the matrix {matrix.shape} are not [B, I] and [F, I]"
        )
    if added is not None and added.shape != (x.shape[0], results):
        raise ValueError(
            f"tile_product: `added` is {added.shape}, accepted is {(x.shape[0], results)}"
        )
    if squares is not None and not (eps is not None and _are_squares(squares.shape, x.shape)):
        raise ValueError(f"tile_product: `squares` of {squares.shape} are not those of a norm")
    if (requirement := tile_unsupported(x, matrix, swiglu=swiglu)) is not None:
        raise NotImplementedError(f"tile_product: the kernel requires {requirement}")
    if tiling is None:
        columns: Any = columns_of_block(x.shape[0], results, swiglu)
        tiling = Tiling(columns)
    elif not tiling.divides(x.shape[0], x.shape[1], results):
        raise ValueError(
            f"tile_product: {tiling} does not divide {x.shape} by [{results}, {x.shape[1]}]"
        )
    if squares is not None and squares.ndim == 3 and x.shape[1] // squares.shape[0] % tiling.depth:
        raise ValueError(f"tile_product: steps of {tiling.depth} channels do not divide the heads")
    options = _Options(eps, swiglu, with_squares)
    y, sums = _product(options, tiling, interpret, x, matrix, squares, added)
    return (y, sums) if with_squares else y


def _are_squares(shape: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """Return whether an array of this shape may have the sums of squares of tokens [B, I]."""
    if len(shape) == 3:
        return shape[2] == tokens[0] and shape[1] > 0 and tokens[1] % shape[0] == 0
    return len(shape) == 2 and shape[0] == tokens[0] and shape[1] > 0 and shape[1] % _PARTS == 0


def _store(ref, x) -> None:
    ref[...] = x


# Traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _product(
    options: _Options, tiling: Tiling, interpret: Any, x, matrix, squares, added
) -> tuple[jax.Array, jax.Array | None]:
    eps, swiglu, with_squares = options
    summed = eps is not None and squares is None  # beside the products
    heads = squares.shape[0] if squares is not None and squares.ndim == 3 else None
    (rows, channels), parts = x.shape, 2 if swiglu else 1
    size = matrix.shape[0] // parts
    groups = _warpgroups(rows)
    across, depth, stages, *peers = tiling
    cluster = dict(zip(("peer_row", "peer_column"), peers, strict=True))
    clustered = peers != [1, 1]
    grid = dict(column=size // across, row=rows // (groups * ROWS))
    steps = channels // depth
    padded = grid["column"] + -grid["column"] % _PARTS
    dtype = x.dtype

    def kernel(refs, smem):
        group = lax.axis_index("group")
        row, column = lax.axis_index("row"), lax.axis_index("column")
        if clustered:
            row = row * peers[0] + lax.axis_index("peer_row")
            column = column * peers[1] + lax.axis_index("peer_column")
        first = row * groups * ROWS
        columns = [column * across + part * size for part in range(parts)]

        @pl.when(group == groups)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def load(k, _):
                slot, at = lax.rem(k, stages), pl.ds(k * depth, depth)
                pl.when(k >= stages)(lambda: plgpu.barrier_wait(smem["used"].at[slot]))
                sources = [refs["x"].at[pl.ds(first, groups * ROWS), at]]
                sources += [refs["matrix"].at[pl.ds(start, across), at] for start in columns]
                for i, source in enumerate(sources):
                    to = smem[f"operand {i}"].at[slot]
                    axis = "peer_row" if i else "peer_column"
                    shared: Any = axis if cluster[axis] > 1 else None
                    plgpu.copy_gmem_to_smem(
                        source, to, smem["loaded"].at[slot], collective_axes=shared
                    )

            lax.fori_loop(0, steps, load, None)

            def wait(k, _):
                plgpu.barrier_wait(smem["used"].at[lax.rem(k, stages)])

            lax.fori_loop(max(steps - stages, 0), steps, wait, None)

        @pl.when(group < groups)
        def _():
            plgpu.set_max_registers(232 if groups == 2 else 240, action="increase")
            half = pl.ds(group * ROWS, ROWS)
            here = pl.ds(first + group * ROWS, ROWS)

            def sum_steps(start, count, *totals):
                def step(k, squares):
                    k = start + k
                    slot = lax.rem(k, stages)
                    plgpu.barrier_wait(smem["loaded"].at[slot])
                    tokens = smem["operand 0"].at[slot, half]
                    for i, total in enumerate(totals):
                        weights = smem[f"operand {i + 1}"].at[slot]
                        plgpu.wgmma(total, tokens, weights.transpose((1, 0)))
                    if summed:
                        tile = plgpu.load(tokens, layout=wg.LAYOUT).astype(_F32)
                        squares += tile * tile
                        plgpu.commit_smem()  # all threads have read the buffer before it is loaded anew
                    plgpu.wgmma_wait(parts)  # the products of the step before have finished
                    before = lax.rem(k + stages - 1, stages)
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(smem["used"].at[before]))
                    return squares

                squares = jnp.zeros((ROWS, depth), _F32) if summed else None
                if summed:
                    squares = plgpu.layout_cast(squares, wg.LAYOUT)
                squares = lax.fori_loop(0, count, step, squares)
                return [total[...] for total in totals], squares

            def multiply(start, count):
                accumulators = (plgpu.ACC((ROWS, across), _F32) for _ in range(parts))
                return pl.run_scoped(functools.partial(sum_steps, start, count), *accumulators)

            def divide(sums, squares, count):
                root = lax.rsqrt(squares * (1 / count) + eps)
                root = wg.spread_rows(root, (ROWS, across))
                return [total * root for total in sums]

            def add_head(head, totals):
                load = functools.partial(wg.load_global, layout=wg.LAYOUT.reduce(1))
                known = [load(refs["squares"].at[head, i, here]) for i in range(squares.shape[1])]
                sums, _ = multiply(head * (steps // heads), steps // heads)
                sums = divide(sums, sum(known[1:], known[0]), channels // heads)
                return [total + more for total, more in zip(totals, sums, strict=True)]

            # On their way while the products are computed.
            to = pl.ds(columns[0], across)
            more = wg.load_global(refs["added"].at[here, to]) if "added" in refs else None
            if heads is not None:
                zeros = plgpu.layout_cast(jnp.zeros((ROWS, across), _F32), wg.LAYOUT)
                sums = lax.fori_loop(0, heads, add_head, [zeros] * parts)
            else:
                known = wg.load_global(refs["squares"].at[here]) if "squares" in refs else None
                sums, own_squares = multiply(0, steps)
                if eps is not None:
                    of_tokens = jnp.sum(own_squares if known is None else known, axis=1)
                    sums = divide(sums, of_tokens, channels)
            plgpu.barrier_arrive(smem["used"].at[(steps - 1) % stages])
            y = sums[0]
            if swiglu:
                gate, up = (total.astype(dtype).astype(_F32) for total in sums)
                root = lax.rsqrt(1.0 + jnp.exp(-gate))  # the sigmoid without a division
                y = gate * (root * root) * up
            if more is not None:
                y = y.astype(dtype).astype(_F32) + more.astype(_F32)
            y = y.astype(dtype)
            refs["out"].at[here, to][...] = y
            if with_squares:
                of_block = jnp.sum(y.astype(_F32) * y.astype(_F32), axis=1)
                refs["squares of out"].at[here, column][...] = of_block
                none = plgpu.layout_cast(jnp.zeros(ROWS, _F32), wg.LAYOUT.reduce(1))
                for empty in range(grid["column"], padded):
                    to = refs["squares of out"].at[here, empty]
                    pl.when(column == 0)(functools.partial(_store, to, none))

    shapes = [(groups * ROWS, depth), *[(across, depth)] * parts]
    smem: Any = plgpu.SMEM
    scratch = {
        f"operand {i}": smem((stages, *shape), dtype=dtype, transforms=wg.TILED)
        for i, shape in enumerate(shapes)
    }
    scratch |= dict(
        loaded=plgpu.Barrier(num_arrivals=len(shapes), num_barriers=stages),
        used=plgpu.ClusterBarrier(
            collective_axes=tuple(a for a in cluster if cluster[a] > 1),
            num_arrivals=groups,
            num_barriers=stages,
        )
        if clustered
        else plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    )
    outputs = {
        "out": jax.ShapeDtypeStruct((rows, size), dtype),
        "squares of out": jax.ShapeDtypeStruct((rows, padded), _F32) if with_squares else None,
    }
    results = launch(
        kernel,
        inputs=dict(x=x, matrix=matrix, squares=squares, added=added),
        outputs=outputs,
        # Blocks of the same columns run at the same time, so that the matrix is read once.
        grid=dict(column=grid["column"] // peers[1], row=grid["row"] // peers[0]),
        cluster=cluster if clustered else None,
        num_threads=groups + 1,
        scratch=scratch,
        approx_math=False,
        name="tile_product",
        interpret=interpret,
    )
    return results["out"], results.get("squares of out")
