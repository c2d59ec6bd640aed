"""Linear attention with a scalar decay whose tokens write with factors of their own, on Mosaic GPU (Hopper).

It is linear attention of the values `e^w v` (w is `log_write`), plus a skip `d v` of each head: Mamba2 (arXiv 2405.21060) with its step
sizes and its D. The kernel of `scalar_decay` multiplies and adds both in registers, so that neither `e^w v` nor the gradient through it is
an array. The gradient of w is the inner product of v with its gradient, without the skip's.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.linear_attention.hopper import scalar_decay
from pallas_kernels.linear_attention.hopper.scalar_decay import CHUNK, Residuals

__all__ = ["CHUNK", "FROM_ZERO", "REQUIREMENTS", "backward", "forward"]

FROM_ZERO, REQUIREMENTS = scalar_decay.FROM_ZERO, scalar_decay.REQUIREMENTS


def forward(
    q, k, v, log_write, skip, log_decay, run, initial, *, scale: float, save: bool = True, interpret: Any = False
) -> tuple[jax.Array, jax.Array, Residuals]:  # fmt: skip
    """Compute linear attention with a scalar decay, factors of writes and a skip; return what `scalar_decay.forward` does."""
    return scalar_decay.forward(
        q, k, v, log_decay, run, initial, scale=scale, log_write=log_write, skip=skip, save=save,
        interpret=interpret,
    )  # fmt: skip


def backward(
    q, k, v, log_write, skip, log_decay, run, initial, residuals: Residuals, d_output, d_final, *, scale: float,
    decay_gradient: bool = True, interpret: Any = False,
):  # fmt: skip
    """Return the gradients of q, k, v, log_write, skip, log_decay and initial."""
    return scalar_decay.backward(
        q, k, v, log_decay, run, initial, residuals, d_output, d_final, scale=scale, log_write=log_write, skip=skip,
        decay_gradient=decay_gradient, interpret=interpret,
    )  # fmt: skip
