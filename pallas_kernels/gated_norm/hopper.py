"""The gated root-mean-square norm on Mosaic GPU (Hopper): one kernel forward and one backward, which read and write every array
once.

A thread block computes consecutive tokens, and of each the same channels: whole heads of at most 256 channels, each in one warp, or
one wider group in up to four warpgroups, which exchange sums through shared memory. All values of a token are in registers; the next
tokens are loaded while the current ones are computed. The gradients of scale and skip are sums over the block's tokens in registers;
XLA adds those of the blocks.

With t what is normalised, n = t r, r = 1 / sqrt(mean(t²) + eps) and dn the gradient of n, that of t is `r (dn - n mean(dn n))`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import PROCESSORS, channel_rows, pl, plgpu
from pallas_kernels.hopper.launch import launch
from pallas_kernels.requirements import Requirement, first_unmet

_F32 = jnp.float32
_WARPS = 4  # of a warpgroup
_THREADS = 32 * _WARPS
_AHEAD = 2  # tokens of a step at most, which are loaded one step ahead


class Tile(NamedTuple):
    """The channels of one token that a thread block computes.

    Attributes:
        rows: rows of a warpgroup's tile, a multiple of its 4 warps.
        width: channels of a row: a head or a group, or a warp's part of a wide group.
        warpgroups: that compute one group together; 1 if every row is a group.
        wide: whether a group consists of all rows of the thread block.
    """

    rows: int
    width: int
    warpgroups: int
    wide: bool

    @property
    def channels(self) -> int:
        """The number of channels of a token that a thread block computes."""
        return self.rows * self.width * self.warpgroups


def tile_of(total: int, group: int) -> Tile | None:
    """Return the tile for tokens of `total` channels in groups of `group` channels, or None if no tile is possible."""
    for size in (8, 4, 2):  # channels of a thread
        if total % (_THREADS * size) == 0 and group % size == 0 and 32 * size % group == 0:
            return Tile(_THREADS * size // group, group, 1, False)
    for size in (8, 4, 2):
        warpgroups, rest = divmod(group, _THREADS * size)
        if not rest and 1 <= warpgroups <= 4:
            return Tile(_WARPS, 32 * size, warpgroups, True)
    return None


def _tokens(x) -> int:
    return x.shape[0] * x.shape[1]


_SIXTEEN = jnp.dtype(jnp.bfloat16)
REQUIREMENTS = (
    Requirement(
        "x and skip_input in bfloat16",
        lambda c: all(a is None or a.dtype == _SIXTEEN for a in (c.x, c.skip_input)),
        lambda c: ", ".join(jnp.dtype(a.dtype).name for a in (c.x, c.skip_input) if a is not None),
    ),
    Requirement(
        "a gate in bfloat16 or float32",
        lambda c: c.gate.dtype in (_SIXTEEN, jnp.dtype(_F32)),
        lambda c: jnp.dtype(c.gate.dtype).name,
    ),
    Requirement(
        f"a multiple of {_AHEAD} tokens in all rows",
        lambda c: _tokens(c.x) % _AHEAD == 0,
        lambda c: str(_tokens(c.x)),
    ),
    Requirement(
        "groups of 2 to 64 channels, a power of 2, in a multiple of 256 channels; groups of 128 channels in a multiple of 512; or groups of 256, 512 or 1,024 channels times 1 to 4",
        lambda c: tile_of(c.x.shape[2] * c.x.shape[3], c.group * c.x.shape[3]) is not None,
        lambda c: f"groups of {c.group * c.x.shape[3]} of {c.x.shape[2] * c.x.shape[3]} channels",
    ),
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Hopper kernels that a call of `gated_rms_norm` does not meet, or None if they support
    it.
    """
    return first_unmet(REQUIREMENTS, call)


class _Layout(NamedTuple):
    """How a call is divided among thread blocks.

    Attributes:
        tokens: the number of tokens of all rows together.
        total: the number of channels of a token.
        group: the number of channels of a group.
        tile: the channels of a thread block.
        block: the number of consecutive tokens of a thread block; the last block may have fewer.
        ahead: the number of tokens of a step, which are loaded one step ahead.
    """

    tokens: int
    total: int
    group: int
    tile: Tile
    block: int
    ahead: int

    @classmethod
    def of(cls, x, group: int, *, backward: bool = False) -> _Layout:
        tokens, total = _tokens(x), x.shape[2] * x.shape[3]
        group *= x.shape[3]
        tile = tile_of(total, group)
        assert tile is not None
        columns = total // tile.channels
        enough = [s for s in (128, 64, 32) if -(-tokens // s) * columns >= 4 * PROCESSORS]
        # A thread of four warpgroups has 128 registers.
        ahead = 1 if backward and tile.warpgroups == 4 else _AHEAD
        return cls(tokens, total, group, tile, (enough or [16])[0], ahead)

    @property
    def grid(self) -> dict[str, int]:
        return dict(column=self.total // self.tile.channels, block=-(-self.tokens // self.block))

    def cut(self, x):
        """Reshape x [B, T, H, V] to [tokens, rows, width], or [H, V] to [rows, width]; return None for None."""
        if x is None:
            return None
        return x.reshape(*(self.tokens,) * (x.ndim == 4), -1, self.tile.width)

    def launch(self, kernel, inputs, outputs, sums: int, name: str, interpret: Any):
        """Run a kernel that computes `sums` sums over channels for each token of a step."""
        tile = self.tile
        several: dict[str, Any] = {}
        if tile.wide:
            slots = (2, self.ahead * sums, _WARPS * tile.warpgroups)
            barrier = plgpu.Barrier(num_arrivals=tile.warpgroups)
            several = dict(
                num_threads=tile.warpgroups,
                scratch=dict(sums=plgpu.SMEM(slots, _F32), stored=barrier),
            )
        return launch(
            kernel, inputs=inputs, outputs=outputs, grid=self.grid, name=name, interpret=interpret, **several
        )  # fmt: skip


class _Block:
    """One warpgroup's part of a kernel: the functions that load, store and sum its tiles, and the mathematics of one token."""

    def __init__(self, layout: _Layout, options, refs: dict[str, Any], smem: dict[str, Any] | None):
        self.layout, self.options, self.refs, self.smem = layout, options, refs, smem
        tile = layout.tile
        self.warpgroup = lax.axis_index("group") if tile.wide else 0
        first = (lax.axis_index("column") * tile.warpgroups + self.warpgroup) * tile.rows
        self.rows = pl.ds(first, tile.rows)
        self.registers = channel_rows(tile.rows, tile.width, _WARPS)
        self.shape = (tile.rows, tile.width)
        self.index = lax.axis_index("block")
        self.start = self.index * layout.block

    def load(self, ref):
        """Load this warpgroup's tile of one token, or of scale or skip, in its dtype."""
        return plgpu.load(ref.at[self.rows], layout=self.registers, optimized=False)

    def load_step(self, names, token) -> list[list[Any]]:
        """Load the arrays of these names at the tokens of the step that begins with `token`, or of the last step if it lies behind
        the end.
        """
        ahead = self.layout.ahead
        first = jnp.minimum(token, self.layout.tokens - ahead)
        return [[self.load(self.refs[n].at[first + i]) for n in names] for i in range(ahead)]

    def store(self, x, name: str, index) -> None:
        """Store this warpgroup's tile of one token, or of a block's sums, in the array `name`."""
        ref = self.refs[name].at[index, self.rows]
        ref[...] = plgpu.layout_cast(x.astype(ref.dtype), self.registers)

    def for_steps(self, names, step, carry):
        """Call `step(token, slot, arrays, carry)` for each step of `ahead` tokens, with the arrays of these names that were loaded
        one step before, and return the last carry. `slot` is 0 or 1 by turns.
        """
        ahead = self.layout.ahead
        count = jnp.minimum(self.layout.block, self.layout.tokens - self.start) // ahead

        def body(i, state):
            arrays, carry = state
            token = self.start + i * ahead
            following = self.load_step(names, token + ahead)
            return following, step(token, lax.rem(i, 2), arrays, carry)

        return lax.fori_loop(0, count, body, (self.load_step(names, self.start), carry))[1]

    def means(self, slot, tiles: list[Any]) -> list[Any]:
        """Return the mean of each tile over the channels of each group, broadcast to the tile's shape."""
        partial = [jnp.sum(x, axis=1) for x in tiles]
        factor = 1 / self.layout.group
        if self.smem is None:
            return [self._spread(x * factor) for x in partial]
        sums, stored = self.smem["sums"], self.smem["stored"]
        mine = pl.ds(self.warpgroup * _WARPS, _WARPS)
        for i, x in enumerate(partial):
            sums[slot, i, mine] = x
        # The sums of the step before are in the other slot, so that no warpgroup overwrites what another still reads.
        plgpu.barrier_arrive(stored)
        plgpu.barrier_wait(stored)
        means = []
        for i in range(len(tiles)):
            total = sums[slot, i, 0]
            for warp in range(1, _WARPS * self.layout.tile.warpgroups):
                total += sums[slot, i, warp]
            means.append(lax.broadcast(total * factor, self.shape))
        return means

    def _spread(self, x):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, [0]), self.registers)

    def gate(self, gate) -> tuple[Any, Any]:
        """Return the activation of a gate and the derivative of the activation, in float32."""
        root = lax.rsqrt(1.0 + jnp.exp(-gate))  # the sigmoid without a division
        sigmoid = root * root
        if self.options.activation == "sigmoid":
            return sigmoid, sigmoid * (1.0 - sigmoid)
        value = gate * sigmoid
        return value, sigmoid + value * (1.0 - sigmoid)

    def combine(self, arrays: dict[str, Any], skip) -> tuple[Any, Any, Any, Any]:
        """Return of one token, in float32: y, the gate's activation and its derivative, and what is normalised."""
        y = arrays["x"].astype(_F32)
        if skip is not None:
            y = y + skip * arrays["skip_input"].astype(_F32)
        factor, slope = self.gate(arrays["gate"].astype(_F32))
        return y, factor, slope, y * factor if self.options.gate_first else y


def forward(options, x, gate, skip_input, scale, skip) -> jax.Array:
    """Compute a gated norm on a Hopper GPU; return the output, [B, T, H, V] bfloat16.

    Args:
        options: eps, group, activation, gate_first and interpret, as the arguments of `api.gated_rms_norm`.
        x: [B, T, H, V] bfloat16.
        gate: [B, T, H, V].
        skip_input: [B, T, H, V] bfloat16, or None.
        scale: [H, V] float32.
        skip: [H, V] float32, or None.
    """
    layout = _Layout.of(x, options.group)
    names = ["x", "gate", *["skip_input"] * (skip is not None)]

    def kernel(refs, smem=None):
        block = _Block(layout, options, refs, smem)
        scale = block.load(refs["scale"])
        skip = block.load(refs["skip"]) if "skip" in refs else None

        def step(token, slot, arrays, carry):
            values = [block.combine(dict(zip(names, a, strict=True)), skip) for a in arrays]
            means = block.means(slot, [v[3] * v[3] for v in values])
            for i, ((_, factor, _, normed), mean) in enumerate(zip(values, means, strict=True)):
                out = normed * lax.rsqrt(mean + options.eps) * scale
                block.store(out if options.gate_first else out * factor, "y", token + i)
            return carry

        block.for_steps(names, step, 0)

    arrays = dict(x=x, gate=gate, skip_input=skip_input, scale=scale, skip=skip)
    inputs = {name: layout.cut(a) for name, a in arrays.items()}
    outputs = dict(y=_like(inputs["x"]))
    name = "gated_rms_norm_forward"
    results = layout.launch(kernel, inputs, outputs, 1, name, options.interpret)
    return results["y"].reshape(x.shape)


def backward(options, x, gate, skip_input, scale, skip, *, dy):
    """Return the gradients of a gated norm's x, gate, skip_input, scale [H, V] and skip [H, V] from that of the output, dy [B, T, H,
    V]; the arguments are those of `forward`.
    """
    layout = _Layout.of(x, options.group, backward=True)
    names = ["x", "gate", *["skip_input"] * (skip is not None), "dy"]

    def kernel(refs, smem=None):
        block = _Block(layout, options, refs, smem)
        scale = block.load(refs["scale"])
        skip = block.load(refs["skip"]) if "skip" in refs else None
        zero = scale * 0.0

        def step(token, slot, arrays, carry):
            named = [dict(zip(names, a, strict=True)) for a in arrays]
            values = [block.combine(a, skip) for a in named]
            to_sum = []
            for a, (_, factor, _, normed) in zip(named, values, strict=True):
                d_normed = a["dy"].astype(_F32) * scale
                d_normed = d_normed if options.gate_first else d_normed * factor
                to_sum += [normed * normed, d_normed * normed]
            means = block.means(slot, to_sum)
            for i in range(layout.ahead):
                square, product = means[2 * i : 2 * i + 2]
                carry = gradients(token + i, named[i], values[i], square, product, carry)
            return carry

        def gradients(token, arrays, values, square, product, carry):
            y, factor, slope, normed = values
            dy = arrays["dy"].astype(_F32)
            root = lax.rsqrt(square + options.eps)
            normed = normed * root
            if options.gate_first:
                d_values = root * (dy * scale - normed * (root * product))
                d_scale, d_y, d_factor = dy * normed, d_values * factor, d_values * y
            else:
                d_y = root * (dy * (scale * factor) - normed * (root * product))
                d_factor = dy * normed
                d_scale, d_factor = d_factor * factor, d_factor * scale
            block.store(d_y, "dx", token)
            block.store(d_factor * slope, "d_gate", token)
            sums = [carry[0] + d_scale]
            if skip is not None:
                block.store(d_y * skip, "d_skip_input", token)
                sums.append(carry[1] + d_y * arrays["skip_input"].astype(_F32))
            return sums

        sums = block.for_steps(names, step, [zero] * (1 if skip is None else 2))
        for name, total in zip(("d_scale", "d_skip"), sums, strict=False):
            block.store(total, name, block.index)

    arrays = dict(x=x, gate=gate, skip_input=skip_input, scale=scale, skip=skip, dy=dy)
    inputs = {name: layout.cut(a) for name, a in arrays.items()}
    rows = scale.size // layout.tile.width
    totals = jax.ShapeDtypeStruct((layout.grid["block"], rows, layout.tile.width), _F32)
    outputs = dict(dx=_like(inputs["x"]), d_gate=_like(inputs["gate"]), d_scale=totals)
    if skip is not None:
        outputs |= dict(d_skip_input=_like(inputs["skip_input"]), d_skip=totals)
    name = "gated_rms_norm_backward"
    results = layout.launch(kernel, inputs, outputs, 2, name, options.interpret)
    d_scale, d_skip = (
        None if n not in results else jnp.sum(results[n], axis=0).reshape(x.shape[2:])
        for n in ("d_scale", "d_skip")
    )
    d_input = None if skip is None else results["d_skip_input"].reshape(x.shape)
    return (
        results["dx"].reshape(x.shape), results["d_gate"].reshape(x.shape), d_input, d_scale, d_skip
    )  # fmt: skip


def _like(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
