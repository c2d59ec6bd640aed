"""The inverse of a chunk's triangular system by blocks [16, 16] that single warps multiply (`warp_products`).

Each warp inverts the block on the diagonal in its rows, by doubling, without waiting for another warp. Then the blocks below the diagonal follow
from the rows above: with M the system's negative strictly lower triangle and X its inverse, `X_wj = X_ww Σ_s M_ws X_sj` (j <= s < w). A warp
publishes its blocks of X, transposed, as left operands of the products of later warps. All products have operands of 10 bits of mantissa and
sums in float32: 8 times as exact as those of bfloat16, so that no Newton step follows.
"""

from __future__ import annotations

import functools
from typing import Any

from pallas_kernels.hopper.warp_products import (
    VALUES,
    WARPS,
    Block,
    Operations,
    on_registers,
    product,
)

_DIAGONAL = (0, 0), (1, 1)
_UPPER = (0, 0), (0, 1), (1, 1)  # the right matrix is upper triangular
_LOWER = (0, 0), (1, 0), (1, 1)


def block_inverse(strict: Any, exchange: Any, interpret: Any, *, upper: bool = False) -> Any:
    """Return the inverse `(I + strict)⁻¹` of a chunk's triangular system, a tile [64, 64] float32 in registers.

    Args:
        strict: the strictly lower triangular tile [64, 64] float32, 0 on and above its diagonal.
        exchange: [64, 64] bfloat16, a buffer in shared memory with the transforms `warpgroups.TILED`.
        interpret: parameters of the interpreter, or False.
        upper: whether `strict` is upper triangular instead.
    """
    compute = functools.partial(inverse_of_blocks, upper=upper)
    return on_registers(compute, -strict, exchange, interpret)


def inverse_of_blocks(ops: Operations, blocks: list[Block], *, upper: bool = False) -> list[Block]:
    """Return a warp's blocks of the inverse from its blocks of the negative system, which is lower triangular or, with `upper`, upper
    triangular.
    """
    # The order of the warps: each requires the rows of those before it.
    order = range(WARPS)[:: -1 if upper else 1]
    blocks = [[ops.rounded(x) for x in block] for block in blocks]
    own = blocks[WARPS - 1]
    for warp in range(WARPS - 1):
        own = _select(ops, ops.warp_is(warp), blocks[warp], own)
    # The transposed block: the identity times the right matrix whose transposed block it is.
    other = product(ops, _identity(ops), own, _LOWER if upper else _UPPER)
    # The inverse of the lower triangular one of the two blocks, and its transpose.
    inverses = _diagonal_inverse(ops, *((other, own) if upper else (own, other)))
    inverse, transposed = reversed(inverses) if upper else inverses
    x, y = ([ops.rounded(v) for v in block] for block in (inverse, transposed))
    ops.publish(y)
    slots = {(s, s): s for s in range(WARPS)}
    slots |= {(order[1], order[0]): 4, (order[2], order[0]): 5, (order[2], order[1]): 6}
    zeros = [ops.zero] * VALUES
    sums = [zeros] * WARPS  # transposed: those of M_ws X_sj, by j
    for place, s in enumerate(order[:-1]):
        ops.synchronize()
        later = ops.warp_below(s) if upper else ops.warp_above(s)
        for j in order[: place + 1]:
            found = product(ops, ops.receive(slots[s, j]), blocks[s], start=sums[j])
            # Chosen rather than multiplied by 0: what overflows in a row is in no row before it.
            sums[j] = _select(ops, later, found, sums[j])
        if place + 2 < WARPS:

            def publish_row(row=order[place + 1], columns=order[: place + 1]):
                for j in columns:
                    left = [ops.rounded(v) for v in sums[j]]
                    found = product(ops, left, x, _LOWER if upper else _UPPER)
                    ops.publish([ops.rounded(v) for v in found], slots[row, j])

            ops.only(order[place + 1], publish_row)
    rows = [
        zeros if j == order[-1] else product(ops, x, [ops.rounded(v) for v in sums[j]])
        for j in range(WARPS)
    ]
    return [_select(ops, ops.warp_is(j), inverse, row) for j, row in enumerate(rows)]


def _select(ops: Operations, condition: Any, a: Block, b: Block) -> Block:
    return [ops.select(condition, x, y) for x, y in zip(a, b, strict=True)]


def _identity(ops: Operations) -> Block:
    unit = [ops.select(condition, ops.one, ops.zero) for condition in ops.row_is(0, 0)]
    return [*unit, *[ops.zero] * 4, *unit]


def _diagonal_inverse(
    ops: Operations, system: Block, system_transposed: Block
) -> tuple[Block, Block]:
    """Return the inverse of a block on the diagonal, and its transpose, from the block of the negative system, which is lower triangular, and
    its transpose.

    Blocks on the diagonal of 1, 2, 4, 8 rows are inverted, one size after another (`tiles.delta.unit_inverse`).
    """
    zero, one = ops.zero, ops.one
    diagonal = ops.row_is(0, 0)

    def corners(block: Block, between: tuple[Any, Any]) -> Block:
        """Return the block's entries in the pairs of columns where the condition holds, in the two blocks of 8 rows on its diagonal."""
        chosen = [zero] * VALUES
        for start in (0, 6):
            for e in (0, 1):
                chosen[start + e] = ops.select(between[e], block[start + e], zero)
        return chosen

    def doubled(x: Block, x_transposed: Block, s: Block, s_transposed: Block) -> tuple[Block, Block]:  # fmt: skip
        """Return `x + x s x` and its transpose, of blocks that are 0 outside of the two blocks of 8 rows on the diagonal."""
        a, b = ([ops.rounded(v) for v in block] for block in (x, x_transposed))
        left, left_transposed = product(ops, a, s_transposed, _DIAGONAL), product(ops, b, s, _DIAGONAL)  # fmt: skip
        left, left_transposed = ([ops.rounded(v) for v in block] for block in (left, left_transposed))  # fmt: skip
        return (
            product(ops, left, b, _DIAGONAL, x),
            product(ops, left_transposed, a, _DIAGONAL, x_transposed),
        )

    pairs = ops.row_is(1, 1)
    x, y = (corners(block, pairs) for block in (system, system_transposed))
    for start in (0, 6):
        for e in (0, 1):
            for block in (x, y):
                block[start + e] = ops.select(diagonal[e], one, block[start + e])
    for size in (2, 4):
        between = ops.row_is(size, 2 * size - 1)
        x, y = doubled(x, y, corners(system, between), corners(system_transposed, between))
    # Between the halves of 16 rows is a quarter of the block: rows 8 to 15 and columns 0 to 7.
    a, b = ([ops.rounded(v) for v in block] for block in (x, y))
    left = product(ops, a, system_transposed, ((1, 0),))
    left = [ops.rounded(v) for v in left]
    x = product(ops, left, b, ((0, 0),), x)
    left = product(ops, b, system, ((0, 1),))
    left = [ops.rounded(v) for v in left]
    return x, product(ops, left, a, ((1, 1),), y)
