"""The gated root-mean-square norm on Mosaic GPU (Hopper): one kernel forward and one backward, which read and write every array
once.

The gradients of scale and skip are sums over a thread block's tokens in registers; XLA adds those of the blocks.
`pallas_kernels.hopper.token_norm` says how the work is divided.

With t what is normalised, n = t r, r = 1 / sqrt(mean(t²) + eps) and dn the gradient of n, that of t is `r (dn - n mean(dn n))`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.token_norm import AHEAD, Block, Layout, tile_of
from pallas_kernels.requirements import Requirement, first_unmet

_F32 = jnp.float32


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
        f"a multiple of {AHEAD} tokens in all rows",
        lambda c: _tokens(c.x) % AHEAD == 0,
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


class _Gated(Block):
    """One warpgroup's part of a kernel of the gated norm, with the mathematics of one token."""

    def __init__(self, layout: Layout, options, refs: dict[str, Any], smem: dict[str, Any] | None):
        super().__init__(layout, refs, smem)
        self.options = options

    def gate(self, gate) -> tuple[Any, Any]:
        """Return the activation of a gate and the derivative of the activation, in float32."""
        root = lax.rsqrt(1.0 + jnp.exp(-gate))  # the sigmoid without a division
        sigmoid = root * root
        if self.options.activation == "sigmoid":
            return sigmoid, sigmoid * (1.0 - sigmoid)
        value = gate * sigmoid
        return value, sigmoid + value * (1.0 - sigmoid)

    def combine(self, arrays: dict[str, Any], skip, bias) -> tuple[Any, Any, Any, Any]:
        """Return of one token, in float32: y, the gate's activation and its derivative, and what is normalised."""
        y = arrays["x"].astype(_F32)
        if skip is not None:
            y = y + skip * arrays["skip_input"].astype(_F32)
        gate = arrays["gate"].astype(_F32)
        factor, slope = self.gate(gate if bias is None else gate + bias)
        return y, factor, slope, y * factor if self.options.gate_first else y


def forward(options, x, gate, skip_input, scale, skip, bias=None) -> jax.Array:
    """Compute a gated norm on a Hopper GPU; return the output, [B, T, H, V] bfloat16.

    Args:
        options: eps, group, activation, gate_first and interpret, as the arguments of `api.gated_rms_norm`.
        x: [B, T, H, V] bfloat16.
        gate: [B, T, H, V].
        skip_input: [B, T, H, V] bfloat16, or None.
        scale: [H, V] float32.
        skip: [H, V] float32, or None.
        bias: [H, V] float32, which is added to the gate before its activation, or None.
    """
    layout = Layout.of(x, options.group)
    names = ["x", "gate", *["skip_input"] * (skip is not None)]

    def kernel(refs, smem=None):
        block = _Gated(layout, options, refs, smem)
        scale = block.load(refs["scale"])
        skip, bias = (block.load(refs[n]) if n in refs else None for n in ("skip", "bias"))

        def step(token, slot, arrays, carry):
            values = [block.combine(dict(zip(names, a, strict=True)), skip, bias) for a in arrays]
            means = block.means(slot, [v[3] * v[3] for v in values])
            for i, ((_, factor, _, normed), mean) in enumerate(zip(values, means, strict=True)):
                out = normed * lax.rsqrt(mean + options.eps) * scale
                block.store(out if options.gate_first else out * factor, "y", token + i)
            return carry

        block.for_steps(names, step, 0)

    arrays = dict(x=x, gate=gate, skip_input=skip_input, scale=scale, skip=skip, bias=bias)
    inputs = {name: layout.cut(a) for name, a in arrays.items()}
    outputs = dict(y=_like(inputs["x"]))
    name = "gated_rms_norm_forward"
    results = layout.launch(kernel, inputs, outputs, 1, name, options.interpret)
    return results["y"].reshape(x.shape)


def backward(options, x, gate, skip_input, scale, skip, bias=None, *, dy, again: bool = False):
    """Return the gradients of a gated norm's x, gate, skip_input, scale [H, V], skip [H, V] and bias [H, V] from that of the output, dy
    [B, T, H, V], and with `again` the output, else None. The other arguments are those of `forward`.

    With `again`, the gradient of a float32 gate is bfloat16: the product that computed the gate would round it.
    """
    layout = Layout.of(x, options.group, ahead_of_four=1)
    names = ["x", "gate", *["skip_input"] * (skip is not None), "dy"]
    parameters = dict(d_scale=scale, d_bias=bias, d_skip=skip)
    summed = [name for name, x in parameters.items() if x is not None]

    def kernel(refs, smem=None):
        block = _Gated(layout, options, refs, smem)
        scale = block.load(refs["scale"])
        skip, bias = (block.load(refs[n]) if n in refs else None for n in ("skip", "bias"))
        zero = scale * 0.0

        def step(token, slot, arrays, carry):
            named = [dict(zip(names, a, strict=True)) for a in arrays]
            values = [block.combine(a, skip, bias) for a in named]
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
            if again:
                out = normed * scale
                block.store(out if options.gate_first else out * factor, "y", token)
            if options.gate_first:
                d_values = root * (dy * scale - normed * (root * product))
                d_scale, d_y, d_factor = dy * normed, d_values * factor, d_values * y
            else:
                d_y = root * (dy * (scale * factor) - normed * (root * product))
                d_factor = dy * normed
                d_scale, d_factor = d_factor * factor, d_factor * scale
            block.store(d_y, "dx", token)
            d_gate = d_factor * slope
            block.store(d_gate, "d_gate", token)
            sums = [carry[0] + d_scale]
            if bias is not None:
                sums.append(carry[len(sums)] + d_gate)
            if skip is not None:
                block.store(d_y * skip, "d_skip_input", token)
                sums.append(carry[len(sums)] + d_y * arrays["skip_input"].astype(_F32))
            return sums

        sums = block.for_steps(names, step, [zero] * len(summed))
        for name, total in zip(summed, sums, strict=True):
            block.store(total, name, block.index)

    arrays = dict(x=x, gate=gate, skip_input=skip_input, scale=scale, skip=skip, bias=bias, dy=dy)
    inputs = {name: layout.cut(a) for name, a in arrays.items()}
    rows = scale.size // layout.tile.width
    totals = jax.ShapeDtypeStruct((layout.grid["block"], rows, layout.tile.width), _F32)
    d_gate = _like(inputs["x"] if again else inputs["gate"])
    outputs = dict(dx=_like(inputs["x"]), d_gate=d_gate) | dict.fromkeys(summed, totals)
    if skip is not None:
        outputs["d_skip_input"] = _like(inputs["skip_input"])
    if again:
        outputs["y"] = _like(inputs["x"])
    name = "gated_rms_norm_backward"
    results = layout.launch(kernel, inputs, outputs, 2, name, options.interpret)
    d_scale, d_bias, d_skip = (
        None if n not in results else jnp.sum(results[n], axis=0).reshape(x.shape[2:])
        for n in parameters
    )
    d_input = None if skip is None else results["d_skip_input"].reshape(x.shape)
    d_gate = results["d_gate"].reshape(x.shape)
    y = results["y"].reshape(x.shape) if again else None
    return results["dx"].reshape(x.shape), d_gate, d_input, d_scale, d_skip, d_bias, y


def _like(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
