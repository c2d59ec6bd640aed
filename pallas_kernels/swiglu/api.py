"""The gradient of `silu(scale gate) ⊙ up` for gate and up side by side in one array, together with the value, by a fused kernel that reads
and writes every array once.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.swiglu import hopper


def unsupported(gate_up) -> str | None:
    """Return the first requirement that a call of `swiglu_gradients` with this array (or its shape and dtype) does not meet, or None if
    the kernel supports it.
    """
    return hopper.unsupported(gate_up)


def swiglu_gradients(
    gate_up: Float[Array, "B T 2F"],
    d_hidden: Float[Array, "B T F"],
    *,
    scale: float = 1.0,
    interpret: Any = False,
) -> tuple[Float[Array, "B T 2F"], Float[Array, "B T F"]]:
    """Return the gradient of gate and up, side by side in one array, and the hidden layer `silu(scale gate) ⊙ up`.

    With g = scale gate and s = sigmoid(g) the gradients are `scale d ⊙ up ⊙ (s + g s (1 - s))` and `d ⊙ g s`. All is computed in float32.

    Args:
        gate_up: [B, T, 2F], gate in the first half of the channels; `hopper.REQUIREMENTS` lists what the kernel requires.
        d_hidden: [B, T, F], the gradient d of the hidden layer, in the same dtype.
        scale: multiplies the gate.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.

    Raises:
        NotImplementedError: the arrays do not meet a requirement of the kernel; the message says which.
        ValueError: `d_hidden` has another shape or dtype.
    """
    shape = (*gate_up.shape[:2], gate_up.shape[2] // 2)
    if d_hidden.shape != shape or d_hidden.dtype != gate_up.dtype:
        raise ValueError(
            f"swiglu_gradients: d_hidden has shape {d_hidden.shape} and dtype {d_hidden.dtype}; accepted are {shape} and {gate_up.dtype}"
        )
    if (requirement := unsupported(gate_up)) is not None:
        raise NotImplementedError(f"swiglu_gradients: the kernel requires {requirement}")
    return hopper.gradients(scale, interpret, gate_up, d_hidden)
