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

_OP = "swiglu"
# With these values of `remat` SwiGLU's hidden layer is saved.
_SAVING = ("none", "dots_and_inputs", "dots_and_states")


def join_stacks(periods: Any, remat: str) -> Any:
    """Return layers with stacked parameters in which each SwiGLU multiplies tokens by its gate and up matrices at once, if that is faster.

    It is for layers whose stacks are cast to 16 bits next (`cast_stacks`): the pass that casts them then puts them side by side, and moves
    no more bytes. Layers with adapters, with products in FP8, with frozen matrices in 16 bits or with small ones keep two products. So do
    all on other cards than Hopper's, where nobody has compiled it.

    The gradients of gate and up are then one array, which XLA computes in one pass. Where rematerialisation does not save the hidden layer,
    XLA would compute it in a pass of its own, which loads gate and up once more and costs more than is gained: two products as well.

    Args:
        periods: the layers of a period, with stacked parameters; they are not changed.
        remat: the model's `remat`.
    """
    copied = jax.tree.map(lambda x: x, periods)
    layers = [node for _, node in nnx.iter_graph(copied) if type(node) is SwiGLU]
    joined = False
    for layer in layers:
        if (reason := _reason_against(layer, remat)) is None:
            layer.join()
            joined = True
            note(_OP, "one product with gate and up")
        else:
            note(_OP, f"two products with gate and up (one requires {reason})")
    return copied if joined else periods


def _reason_against(layer: SwiGLU, remat: str) -> str | None:
    """Return, in words, the first requirement of one product with gate and up that a layer with stacked parameters does not meet; None if it
    meets all.
    """
    if (cards := compute_capabilities()) != {"9.0"}:
        listed = ", ".join(sorted(cards)) or "an unknown one"
        return f"an NVIDIA card of compute capability 9.0, not {listed}"
    if remat not in _SAVING:
        return f"remat of {', '.join(_SAVING)}, not {remat}"
    projections = [layer.gate_proj, layer.up_proj]
    if not all(is_large(p.kernel) for p in projections):
        return "float32 matrices of 65,536 numbers or more"
    if not all(map(is_plain, projections)):
        return "projections without adapters and FP8"
    return None
