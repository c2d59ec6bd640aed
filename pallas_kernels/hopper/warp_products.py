"""Matrix products of single warps of a warpgroup, on blocks [16, 16] in registers, on Mosaic GPU (Hopper).

A warpgroup has a tile [64, 64] in the layout of its products (`warpgroups.LAYOUT`): warp w has rows 16 w to 16 w + 15, and so four blocks
[16, 16]. A thread has 8 of a block's numbers: with `lane = 4 g + t`, number 4 n + 2 h + e is in row 8 h + g and column 8 n + 2 t + e. The
instruction `mma.m16n8k8` multiplies such blocks (operands of 10 bits of mantissa, sums in float32) without a barrier between warps. Its left
operand is the block itself, and its right operand is the block of the transposed matrix, if the products that it sums are taken in another order:
column 8 n + 2 t + e of the left block and the same row of the right one are the operand's index t + 4 e. So no number moves between threads.

`Compiled` has the operations on such blocks as instructions, `Emulated` the same on arrays, for the interpreter and for tests.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import compat
from pallas_kernels.compat import plgpu
from pallas_kernels.hopper import warpgroups as wg

WARPS, LANES, SIDE, VALUES = 4, 32, 16, 8
Block = list[Any]  # a thread's 8 numbers of a block [16, 16]
ALL = ((0, 0), (1, 0), (0, 1), (1, 1))
"""The parts of a product: pairs (half of the summed index, half of the result's columns)."""


class Operations(abc.ABC):
    """Operations on the numbers and blocks that each thread of a warpgroup has.

    Attributes:
        zero: the number 0.
        one: the number 1.
    """

    zero: Any
    one: Any

    @abc.abstractmethod
    def row_is(self, first: int, last: int) -> tuple[Any, Any]:
        """Return two conditions, for e = 0 and 1: whether `first <= g ^ (2 t + e) <= last`, with g and t of the thread."""

    @abc.abstractmethod
    def warp_is(self, warp: int) -> Any:
        """Return the condition that the thread is in this warp."""

    @abc.abstractmethod
    def warp_above(self, warp: int) -> Any:
        """Return the condition that the thread is in a later warp than this one."""

    @abc.abstractmethod
    def warp_below(self, warp: int) -> Any:
        """Return the condition that the thread is in an earlier warp than this one."""

    @abc.abstractmethod
    def select(self, condition: Any, x: Any, y: Any) -> Any:
        """Return x where the condition holds, else y."""

    @abc.abstractmethod
    def rounded(self, x: Any) -> Any:
        """Return the number x rounded to the 10 bits of mantissa that products read."""

    @abc.abstractmethod
    def multiply(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Any]:
        """Return the 4 numbers of `c` plus the product of the operands with the 4 numbers `a` and the 2 numbers `b`."""

    @abc.abstractmethod
    def publish(self, block: Block, slot: int | None = None) -> None:
        """Store a warp's block at the place `slot` of the exchange, from which other warps receive it after `synchronize`. None is the place
        with the warp's number.
        """

    @abc.abstractmethod
    def receive(self, slot: int) -> Block:
        """Return the block at the place `slot` of the exchange."""

    @abc.abstractmethod
    def only(self, warp: int, action: Callable[[], None]) -> None:
        """Run `action`, which returns nothing, in one warp."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for the warpgroup's other warps."""


def product(
    ops: Operations, left: Block, right: Block, parts=ALL, start: Block | None = None
) -> Block:
    """Return `start` plus the product of the block `left` and the matrix whose transposed block is `right`.

    Both must be rounded. `parts` are the parts of the product that are computed; those that are left out are known to be 0.
    """
    out = list(start) if start is not None else [ops.zero] * VALUES
    for half, columns in parts:
        x = left[4 * half : 4 * half + 4]
        y = right[4 * half + 2 * columns : 4 * half + 2 * columns + 2]
        place = slice(4 * columns, 4 * columns + 4)
        out[place] = ops.multiply((x[0], x[2], x[1], x[3]), y, out[place])
    return out


class Emulated(Operations):
    """The operations on arrays [4 warps, 32 lanes], one for each number that a thread has."""

    def __init__(self) -> None:
        """Make an empty exchange."""
        self.zero, self.one = jnp.zeros((WARPS, LANES)), jnp.ones((WARPS, LANES))
        self._exchange: dict[int, Block] = {}
        self._only: int | None = None
        shape = (WARPS, LANES)
        self._warp, self._lane = (jax.lax.broadcasted_iota(jnp.int32, shape, n) for n in (0, 1))

    @override
    def row_is(self, first: int, last: int) -> tuple[Any, Any]:
        row, pair = self._lane >> 2, self._lane & 3
        even, odd = (row ^ (2 * pair + e) for e in (0, 1))
        return (even >= first) & (even <= last), (odd >= first) & (odd <= last)

    @override
    def warp_is(self, warp: int) -> Any:
        return self._warp == warp

    @override
    def warp_above(self, warp: int) -> Any:
        return self._warp > warp

    @override
    def warp_below(self, warp: int) -> Any:
        return self._warp < warp

    @override
    def select(self, condition: Any, x: Any, y: Any) -> Any:
        return jnp.where(condition, x, y)

    @override
    def rounded(self, x: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jax.lax.bitcast_convert_type((bits + 0x1000) & ~0x1FFF, jnp.float32)

    @override
    def multiply(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Any]:
        a0, a1, a2, a3 = (x.reshape(WARPS, 8, 4) for x in a)
        top, low = (jnp.concatenate(x, axis=2) for x in ((a0, a2), (a1, a3)))
        left = jnp.concatenate((top, low), axis=1)  # [warp, row, summed index]
        right = jnp.concatenate([x.reshape(WARPS, 8, 4) for x in b], axis=2)  # [warp, column, summed index]  # fmt: skip
        out = jnp.einsum("wmk,wnk->wmn", left, right, precision="highest")
        out = out.reshape(WARPS, 2, 8, 4, 2)
        found = (out[:, h, :, :, e].reshape(WARPS, LANES) for h in (0, 1) for e in (0, 1))
        return [x + y for x, y in zip(c, found, strict=True)]

    @override
    def publish(self, block: Block, slot: int | None = None) -> None:
        if slot is None:
            self._exchange |= {warp: [x[warp] for x in block] for warp in range(WARPS)}
        else:
            self._exchange[slot] = [x[self._only] for x in block]

    @override
    def receive(self, slot: int) -> Block:
        return [jnp.broadcast_to(x, (WARPS, LANES)) for x in self._exchange[slot]]

    @override
    def only(self, warp: int, action: Callable[[], None]) -> None:
        self._only = warp
        action()
        self._only = None

    @override
    def synchronize(self) -> None:
        del self  # all warps are one array


def to_blocks(tile: jax.Array) -> list[Block]:
    """Return the four blocks of each warp of a tile [64, 64], for `Emulated`."""
    x = tile.reshape(WARPS, 2, 8, WARPS, 2, 4, 2)  # warp, h, g, block, n, t, e
    return [
        [x[:, h, :, block, n, :, e].reshape(WARPS, LANES) for n in (0, 1) for h in (0, 1) for e in (0, 1)]
        for block in range(WARPS)
    ]  # fmt: skip


def from_blocks(blocks: list[Block]) -> jax.Array:
    """Return the tile [64, 64] with these four blocks of each warp, of `Emulated`."""
    x = jnp.stack([jnp.stack(block) for block in blocks])  # block, value, warp, lane
    x = x.reshape(WARPS, 2, 2, 2, WARPS, 8, 4)  # block, n, h, e, warp, g, t
    return x.transpose(4, 2, 5, 0, 1, 6, 3).reshape(WARPS * SIDE, WARPS * SIDE)


class Compiled(Operations):
    """The operations as instructions of a thread, in code that `plgpu.inline_mgpu` puts into a kernel.

    The exchange is a buffer in shared memory: at each place, the first four numbers of all 32 threads of a warp, then the others.
    """

    def __init__(self, exchange: ir.Value) -> None:
        """Compute the thread's indices. `exchange` is a buffer of at least 1,024 bytes for each place that is used."""
        self._utils = compat.mosaic_gpu_utils()
        self._f32, self._i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        self.zero, self.one = (self._utils.c(float(x), self._f32) for x in (0, 1))
        thread = arith.remui(self._utils.thread_idx(), self._integer(WARPS * LANES))
        self._warp = arith.remui(self._utils.warp_idx(sync=True), self._integer(WARPS))
        self._lane = arith.remui(thread, self._integer(LANES))
        self._pointer = self._utils.memref_ptr(exchange)

    def _integer(self, x: int) -> ir.Value:
        return self._utils.c(x, self._i32)

    @override
    def row_is(self, first: int, last: int) -> tuple[Any, Any]:
        row = arith.shrui(self._lane, self._integer(2))
        column = arith.shli(arith.andi(self._lane, self._integer(3)), self._integer(1))
        found = []
        for e in (0, 1):
            apart = arith.xori(row, arith.ori(column, self._integer(e)))
            # One comparison without sign: the difference is large where it is negative.
            offset = arith.subi(apart, self._integer(first))
            limit = self._integer(last - first)
            found.append(arith.cmpi(arith.CmpIPredicate.ule, offset, limit))
        return found[0], found[1]

    @override
    def warp_is(self, warp: int) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, self._warp, self._integer(warp))

    @override
    def warp_above(self, warp: int) -> Any:
        return arith.cmpi(arith.CmpIPredicate.ugt, self._warp, self._integer(warp))

    @override
    def warp_below(self, warp: int) -> Any:
        return arith.cmpi(arith.CmpIPredicate.ult, self._warp, self._integer(warp))

    @override
    def select(self, condition: Any, x: Any, y: Any) -> Any:
        return arith.select(condition, x, y)

    @override
    def rounded(self, x: Any) -> Any:
        # The instruction reads the upper 19 bits of its operands.
        bits = arith.addi(arith.bitcast(self._i32, x), self._integer(0x1000))
        return arith.bitcast(self._f32, bits)

    @override
    def multiply(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Any]:
        operands = [arith.bitcast(self._i32, x) for x in (*a, *b)]
        instruction = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
        registers = "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13}"
        result: Any = llvm.inline_asm(
            llvm.StructType.get_literal([self._f32] * 4),
            [*operands, *c],
            f"{instruction} {registers};",
            ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
            has_side_effects=False,
        )
        return [llvm.extractvalue(self._f32, result, [n]) for n in range(4)]

    def _place(self, slot: int | None, part: int) -> ir.Value:
        """Return the address of four numbers of this thread at a place of the exchange."""
        place = self._warp if slot is None else self._integer(slot)
        offset = arith.addi(
            arith.muli(place, self._integer(1024)),
            arith.addi(arith.muli(self._lane, self._integer(16)), self._integer(512 * part)),
        )
        byte = ir.IntegerType.get_signless(8)
        return self._utils.getelementptr(self._pointer, [offset], byte)

    @override
    def publish(self, block: Block, slot: int | None = None) -> None:
        four = ir.VectorType.get([4], self._f32)
        for part in (0, 1):
            values = vector.from_elements(four, block[4 * part : 4 * part + 4])
            llvm.store(values, self._place(slot, part), alignment=16)

    @override
    def receive(self, slot: int) -> Block:
        four, out = ir.VectorType.get([4], self._f32), []
        for part in (0, 1):
            values = llvm.load(four, self._place(slot, part), alignment=16)
            out += [_entry(values, n) for n in range(4)]
        return out

    @override
    def only(self, warp: int, action: Callable[[], None]) -> None:
        with self._utils.when(self.warp_is(warp)):
            action()

    @override
    def synchronize(self) -> None:
        self._utils.warpgroup_barrier()


def _entry(values: ir.Value, index: int) -> ir.Value:
    place = ir.DenseI64ArrayAttr.get([index])
    return vector.extract(values, dynamic_position=[], static_position=place)


def on_registers(
    compute: Callable[[Operations, list[Block]], list[Block]], tile: Any, exchange: Any, interpret: Any
) -> Any:  # fmt: skip
    """Return the tile [64, 64] float32 that `compute` makes of the four blocks of each warp of such a tile.

    Args:
        compute: function of the operations and of a warp's blocks, which returns its blocks of the result.
        tile: [64, 64] float32 in registers.
        exchange: a buffer in shared memory for `publish`, which has the transforms `warpgroups.TILED`.
        interpret: parameters of the interpreter, or False.
    """
    if interpret:
        return from_blocks(compute(Emulated(), to_blocks(tile)))

    @plgpu.inline_mgpu(
        arg_types=(wg.LAYOUT, plgpu.RefType(wg.TILED)),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=wg.LAYOUT),
    )
    def run(context, x, buffer):
        del context
        pairs = x.registers.reshape(WARPS, 2, 2)  # block, n, h: of two columns each
        blocks = [[_entry(pair, e) for pair in block.flat for e in (0, 1)] for block in pairs]
        made = compute(Compiled(buffer), blocks)
        two = ir.VectorType.get([2], ir.F32Type.get())
        found = [
            vector.from_elements(two, block[n : n + 2]) for block in made for n in range(0, VALUES, 2)
        ]  # fmt: skip
        registers = np.array(found, dtype=object).reshape(x.registers.shape)
        return compat.fragmented_array(registers, x.layout)

    return run(plgpu.layout_cast(tile, wg.LAYOUT), exchange)
