"""A selective scan on Mosaic GPU (Hopper): `h_t = continues_t e^{δ_t A} h_{t-1} + δ_t u_t B_t`,
`y_t = Σ_n C_t h_t + D u_t`.

`continues_t` is 0 at the first token of a document and 1 elsewhere. A row is divided into chunks of 64
tokens. The decay of a chunk without the start of a document is `exp(A Σ δ)`, so that three kernels compute
the forward pass:

1. `chunk_writes`, all chunks in parallel: the memory after each chunk that starts from an empty one, and the
   sum of its δ;
2. `scan`, chunk after chunk: the memory that enters each chunk;
3. `chunk_forward`, all chunks in parallel: each chunk's outputs, computed token by token from the memory that
   enters it.

The backward pass has the same three phases in reverse order of time: `chunk_writes` with `dy`, `scan` over
the gradients of memories, and `chunk_backward`. No memory of a single token is stored: `chunk_backward`
recomputes a few at a time from those that enter the chunks.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.selective_scan.hopper.common import grid_requirements
from pallas_kernels.selective_scan.hopper.real_backward import chunk_backward
from pallas_kernels.selective_scan.hopper.real_block import CHANNELS, CHUNK, split_channels
from pallas_kernels.selective_scan.hopper.real_forward import chunk_forward, chunk_writes, scan
from pallas_kernels.selective_scan.inputs import RealInputs as Inputs

__all__ = ["CHUNK", "REQUIREMENTS", "Inputs", "backward", "forward", "unsupported"]

_STATES = (8, 16)
REQUIREMENTS = (
    Requirement(
        "u in bfloat16", lambda c: c.u.dtype == jnp.bfloat16, lambda c: jnp.dtype(c.u.dtype).name
    ),
    Requirement(
        f"a multiple of {CHANNELS} channels",
        lambda c: c.u.shape[2] % CHANNELS == 0,
        lambda c: str(c.u.shape[2]),
    ),
    Requirement(
        f"memories of {' or '.join(map(str, _STATES))} numbers for each channel",
        lambda c: c.state_size in _STATES,
        lambda c: str(c.state_size),
    ),
    *grid_requirements(CHUNK),
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Hopper kernels that a call of `selective_scan` does not meet, or
    None if they support it.
    """
    return first_unmet(REQUIREMENTS, call)


def forward(x: Inputs, initial, *, save: bool, interpret: Any = False) -> tuple[Any, Any, Any]:
    """Compute a selective scan; return the output [B, T, D] bfloat16, the memory after the last token [B, D,
    N], and the memories that enter each chunk of 64 tokens, [B, chunks, D / 16, 16, N], for `backward`.
    """
    del save  # the memories are computed in any case
    writes = chunk_writes(x, interpret=interpret)
    entering, final = scan(x, writes, split_channels(initial), interpret=interpret)
    y = chunk_forward(x, entering, interpret=interpret)
    return y, final.reshape(initial.shape), entering


def backward(x: Inputs, entering, dy, d_final, *, interpret: Any = False) -> tuple[Inputs, Any]:
    """Return the gradients of the scan's inputs, in the same `Inputs` tuple, and of the memory before the
    first token, given the memories `entering` each chunk as the forward pass returned them, and the gradients
    of the output, dy [B, T, D], and of the final memory, d_final [B, D, N].
    """
    writes = chunk_writes(x, dy, interpret=interpret)
    d_leaving, d_initial = scan(
        x, writes, split_channels(d_final), reverse=True, interpret=interpret
    )
    du, d_delta, da, db, dc = chunk_backward(x, dy, entering, d_leaving, interpret=interpret)
    dd = jnp.sum(dy.astype(jnp.float32) * x.u.astype(jnp.float32), axis=(0, 1))
    d_continues = None if x.continues is None else jnp.zeros_like(x.continues)
    gradients = Inputs(du, d_delta, da, db, dc, dd, d_continues)
    return gradients, d_initial.reshape(d_final.shape)
