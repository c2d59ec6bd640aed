"""The gradients of a residual stream and its root-mean-square norm on Mosaic GPU (Hopper): one kernel, in which a thread block computes
consecutive tokens (`pallas_kernels.hopper.token_norm`).

The gradients of the norm arrive one for each product that read it, and are added in registers: added by XLA, they would be one more array
to write and to read. The gradient of the scale is a sum over the thread block's tokens in registers; XLA adds those of the blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.token_norm import AHEAD, Block, Layout, tile_of
from pallas_kernels.requirements import Requirement, first_unmet

_F32 = jnp.float32
_SIXTEEN = jnp.dtype(jnp.bfloat16)
MOST = 6
"""The largest number of gradients of the norm that one kernel adds."""


TOKENS_AHEAD = 0
"""Tokens that are loaded ahead, 1 or 2; 0 leaves it to the rule in `gradients`."""


class Call(NamedTuple):
    """The arrays of a call of `residual_norm_gradients` (or their shapes and dtypes) by which the kernel decides whether it supports
    the call.
    """

    x: Any
    d_norms: tuple[Any, ...]


CHANNELS = Requirement(
    "256, 512 or 1,024 channels times 1 to 4",
    lambda c: c.x.shape[2] >= 256 and tile_of(c.x.shape[2], c.x.shape[2]) is not None,
    lambda c: str(c.x.shape[2]),
)

REQUIREMENTS = (
    Requirement(
        "x and its gradients in bfloat16",
        lambda c: all(a.dtype == _SIXTEEN for a in (c.x, *c.d_norms)),
        lambda c: ", ".join(dict.fromkeys(jnp.dtype(a.dtype).name for a in (c.x, *c.d_norms))),
    ),
    Requirement(
        f"1 to {MOST} gradients of the norm",
        lambda c: 1 <= len(c.d_norms) <= MOST,
        lambda c: str(len(c.d_norms)),
    ),
    Requirement(
        f"a multiple of {AHEAD} tokens in all rows",
        lambda c: c.x.shape[0] * c.x.shape[1] % AHEAD == 0,
        lambda c: str(c.x.shape[0] * c.x.shape[1]),
    ),
    CHANNELS,
)


def unsupported(call: Call) -> str | None:
    """Return the first requirement of the Hopper kernel that a call of `residual_norm_gradients` does not meet, or None if it supports
    the call.
    """
    return first_unmet(REQUIREMENTS, call)


def gradients(
    eps: float, interpret: Any, x, scale, d_stream, d_norms
) -> tuple[jax.Array, jax.Array]:
    """Compute the gradients of x [B, T, D] and scale [D] on a Hopper GPU; the arguments are those of
    `api.residual_norm_gradients`.
    """
    # Two tokens of many arrays would leave registers for one or two thread blocks, which wait for their sums together.
    few = x.shape[2] <= 1024 and len(d_norms) <= 3
    ahead = TOKENS_AHEAD or (AHEAD if few else 1)
    layout = Layout.of(x[:, :, None], 1, ahead=ahead, ahead_of_four=1, blocks=3)
    arrays = dict(x=x, d_stream=d_stream) | {f"d_norm_{i}": a for i, a in enumerate(d_norms)}
    names = [name for name, a in arrays.items() if a is not None]

    def kernel(refs, smem=None):
        block = Block(layout, refs, smem)
        scale = block.load(refs["scale"])

        def step(token, slot, arrays, carry):
            values, to_sum = [], []
            for loaded in arrays:
                x, *rest = (a.astype(_F32) for a in loaded)
                direct = None if d_stream is None else rest.pop(0)
                dy = rest[0]
                for more in rest[1:]:
                    dy = dy + more
                values.append((x, direct, dy))
                to_sum += [x * x, dy * scale * x]
            means = block.means(slot, to_sum)
            for i, (x, direct, dy) in enumerate(values):
                square, product = means[2 * i : 2 * i + 2]
                root = lax.rsqrt(square + eps)
                normed = x * root
                dx = root * (dy * scale - normed * (root * product))
                block.store(dx if direct is None else dx + direct, "dx", token + i)
                carry = carry + dy * normed
            return carry

        block.store(block.for_steps(names, step, scale * 0.0), "d_scale", block.index)

    inputs: Any = {n: layout.cut(arrays[n][:, :, None]) for n in names}
    inputs["scale"] = layout.cut(scale.astype(_F32)[None])
    dx = jax.ShapeDtypeStruct(inputs["x"].shape, x.dtype)
    totals = jax.ShapeDtypeStruct((layout.grid["block"], *inputs["scale"].shape), _F32)
    name = "residual_norm_backward"
    results = layout.launch(kernel, inputs, dict(dx=dx, d_scale=totals), 2, name, interpret)
    d_scale = jnp.sum(results["d_scale"], axis=0).reshape(scale.shape)
    return results["dx"].reshape(x.shape), d_scale.astype(scale.dtype)
