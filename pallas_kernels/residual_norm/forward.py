"""The sum of a residual stream and its root-mean-square norm on Mosaic GPU (Hopper): one kernel, which reads the two terms of the sum once
and writes the sum, its norm and one number for each token (`pallas_kernels.hopper.token_norm` says how the work is divided).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import pl
from pallas_kernels.hopper.token_norm import AHEAD, Block, Layout
from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.residual_norm.hopper import CHANNELS

_F32 = jnp.float32
_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(_F32))

TOKENS_AHEAD = 0
"""Tokens that are loaded ahead, 1 or 2; 0 leaves it to the rule in `forward`."""


class Call(NamedTuple):
    """The arrays of a call of `residual_norm_forward` (or their shapes and dtypes) by which the kernel decides whether it supports the
    call.
    """

    x: Any
    y: Any


REQUIREMENTS = (
    Requirement(
        "x and y in bfloat16 or in float32, both in the same",
        lambda c: c.x.dtype in _DTYPES and c.y.dtype == c.x.dtype,
        lambda c: ", ".join(dict.fromkeys(jnp.dtype(a.dtype).name for a in c)),
    ),
    CHANNELS,
)


def unsupported(call: Call) -> str | None:
    """Return the first requirement of the Hopper kernel that a call of `residual_norm_forward` does not meet, or None if it supports
    the call.
    """
    return first_unmet(REQUIREMENTS, call)


def forward(eps: float, interpret: Any, x, y, scale) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the sum of x and y, both [B, T, D], its norm with scale [D], and the root [B, T] on a Hopper GPU; arguments and results are
    those of `api.residual_norm_forward`.
    """
    ahead = TOKENS_AHEAD or AHEAD
    # The last step of a thread block has as many tokens as the others.
    ahead = ahead if x.shape[0] * x.shape[1] % ahead == 0 else 1
    layout = Layout.of(x[:, :, None], 1, ahead=ahead, ahead_of_four=ahead)

    def kernel(refs, smem=None):
        block = Block(layout, refs, smem)
        scale = block.load(refs["scale"])

        def step(token, slot, arrays, carry):
            # The norm is that of the sum as it is stored, which the backward pass reads.
            sums = [(a.astype(_F32) + b.astype(_F32)).astype(x.dtype) for a, b in arrays]
            wide = [s.astype(_F32) for s in sums]
            squares = block.group_means(slot, [s * s for s in wide])
            for i, square in enumerate(squares):
                root = lax.rsqrt(square + eps)
                block.store(sums[i], "sum", token + i)
                block.store(wide[i] * block.spread(root) * scale, "normed", token + i)

                @pl.when(block.warpgroup == 0)
                def _(i=i, root=root):
                    refs["root"][token + i] = root

            return carry

        block.for_steps(["x", "y"], step, 0)

    inputs: Any = dict(x=layout.cut(x[:, :, None]), y=layout.cut(y[:, :, None]))
    inputs["scale"] = layout.cut(scale.astype(_F32)[None])
    like = jax.ShapeDtypeStruct(inputs["x"].shape, x.dtype)
    root = jax.ShapeDtypeStruct((layout.tokens,), _F32)
    outputs = dict(sum=like, normed=like, root=root)
    name = "residual_norm_forward"
    results = layout.launch(kernel, inputs, outputs, 1, name, interpret)
    total, normed = (results[n].reshape(x.shape) for n in ("sum", "normed"))
    return total, normed, results["root"].reshape(x.shape[:2])
