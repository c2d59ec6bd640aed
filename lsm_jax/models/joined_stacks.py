"""The two matrices of SwiGLU that multiply the same tokens, side by side in the stacks of the layers' parameters."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from lsm_jax.feedforward import SwiGLU
from lsm_jax.mixers.joined import is_plain
from lsm_jax.models.narrow import is_large
from lsm_jax.ops.backends.select import note
from lsm_jax.ops.core.platforms import compute_capabilities
from lsm_jax.ops.swiglu.product import unsupported

_OP = "swiglu"
_SAVING = (
    "none",
    "dots_and_inputs",
    "dots_and_states",
)  # with which SwiGLU's hidden layer is saved


def join_stacks(periods: Any, remat: str, x: jax.Array) -> Any:
    """Return layers with stacked parameters in which each SwiGLU multiplies tokens by its gate and up matrices at once, if that is faster.

    It is for layers whose stacks are cast to 16 bits next (`cast_stacks`): the pass that casts them then puts them side by side, and moves
    no more bytes. Layers with adapters, with products in FP8, with frozen matrices in 16 bits or with small ones keep two products. So do
    all on other cards than Hopper's, where nobody has compiled it.

    The gradients of gate and up are then one array, which is computed in one pass. Where rematerialisation saves the hidden layer, that
    pass is XLA's. Where it does not, XLA would compute the hidden layer in a pass of its own, which loads gate and up once more and costs
    more than is gained; there a kernel computes all three.

    Args:
        periods: the layers of a period, with stacked parameters; they are not changed.
        remat: the model's `remat`.
        x: the tokens [B, T, D] that the layers receive.
    """
    copied = jax.tree.map(lambda x: x, periods)
    layers = [node for _, node in nnx.iter_graph(copied) if type(node) is SwiGLU]
    by_kernel = remat not in _SAVING
    joined = False
    for layer in layers:
        if (reason := _reason_against(layer, by_kernel, x)) is None:
            layer.join(by_kernel=by_kernel)
            joined = True
            how = ", whose gradients a kernel computes with the hidden layer" * by_kernel
            note(_OP, f"one product with gate and up{how}")
        else:
            note(_OP, f"two products with gate and up (one requires {reason})")
    return copied if joined else periods


def _reason_against(layer: SwiGLU, by_kernel: bool, x: jax.Array) -> str | None:
    """Return, in words, the first requirement of one product with gate and up that a layer with stacked parameters does not meet; None if it
    meets all.
    """
    if (cards := compute_capabilities()) != {"9.0"}:
        listed = ", ".join(sorted(cards)) or "an unknown one"
        return f"an NVIDIA card of compute capability 9.0, not {listed}"
    projections = [layer.gate_proj, layer.up_proj]
    if not all(is_large(p.kernel) for p in projections):
        return "float32 matrices of 65,536 numbers or more"
    if not all(map(is_plain, [*projections, *[layer.down_proj] * by_kernel])):
        return "projections without adapters and FP8"
    return unsupported(x, layer.gate_proj.kernel.shape[-1]) if by_kernel else None
