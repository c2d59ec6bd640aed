"""Where `selective_memory` runs as a fused kernel, and why it does not elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.core.segments import Tokens, finish_output, select
from lsm_jax.ops.linear import kernels as linear_kernels

KERNELS = ("mosaic_gpu", "mosaic_tpu")
AUTOMATIC = "mosaic_gpu"  # what None may pick


def why_not(
    implementation: str, form: str, discretization: str, u, delta, A, B, C, D, memory, *,
    is_complex: bool,
) -> str | None:  # fmt: skip
    """What a kernel takes in place of this call, or None. The platform is not asked: lowering decides that.

    Args:
        implementation: one of `KERNELS`.
        form: as `selective_memory`'s, and the arrays.
        discretization: as `selective_memory`'s.
        u: or its shape.
        delta: or its shape.
        A: or its shape.
        B: or its shape.
        C: or its shape.
        D: or None.
        memory: the state's.
        is_complex: whether the memory is.
    """
    if form != "chunk":
        return f"form='chunk' of more than one token, not {form!r}"
    if memory.ndim == 4:
        return "one state a row, not one a segment"
    # Imported where it may serve: elsewhere the backends cost nothing.
    from pallas_kernels.selective_scan import complex_unsupported, unsupported

    if jnp.ndim(delta) != 3:
        return "delta [B, T, D]"
    if is_complex:
        fits = (
            discretization == "none"
            and A.shape[1] == 1
            and jnp.ndim(B) == 2
            and jnp.ndim(C) == 4
            and not any(jnp.iscomplexobj(x) for x in (B, C))
        )
        if not fits or D is not None:
            return (
                "of complex memories those of one number a channel with discretization='none', real B [D, N] and C "
                "[B, T, D, N], no D"
            )
        why = complex_unsupported(implementation, u)
    else:
        fits = discretization == "euler" and jnp.ndim(B) == jnp.ndim(C) == 3
        if not fits or any(jnp.iscomplexobj(x) for x in (B, C)):
            return "of real memories those with discretization='euler', B and C [B, T, N]"
        why = unsupported(implementation, u, A.shape[1])
    return why or linear_kernels.why_not_here(implementation, u, delta, B, C)


def run_kernel(
    implementation: str, tokens: Tokens, begin, u, memory, a, d, delta, b, c, constant
) -> tuple[jax.Array, jax.Array]:
    """Output and final memory as the kernel that `implementation` names.

    Args:
        implementation: one of `KERNELS`.
        tokens: of the call.
        begin: [B, T], True where a document begins, or None.
        u: [B, T, D].
        memory: [B, D, N], before the first token.
        a: [D, N].
        d: [D] or None.
        delta: [B, T, D].
        b: [B, T, N], or None where it is constant.
        c: [B, T, N] or [B, T, D, N].
        constant: the arrays that are, by name.
    """
    from pallas_kernels.selective_scan import complex_scan, selective_scan

    options: Any = dict(begin=begin, implementation=implementation)
    if not jnp.iscomplexobj(memory):
        # What writes nothing is still passed on by D, apart: times a δ of 0 it may be NaN.
        masked = tokens.written is not tokens.real
        y, final = selective_scan(
            select(tokens.written, u),
            select(tokens.written, delta),
            a,
            select(tokens.written, b),
            select(tokens.real, c),
            None if masked else d,
            initial=memory,
            **options,
        )
        if masked and d is not None:
            through = d.astype(jnp.float32) * select(tokens.real, u).astype(jnp.float32)
            y = (y.astype(jnp.float32) + through).astype(y.dtype)
        return finish_output(tokens, y), final
    exponent = select(tokens.written, delta.astype(jnp.complex64)) * a[:, 0]
    decay = jnp.exp(exponent)
    if begin is not None:
        decay = jnp.where(begin[..., None], 0, decay)
    written = (u * constant["b"][:, 0]).astype(u.dtype)
    parts = jnp.stack([memory[..., 0].real, memory[..., 0].imag], axis=1)
    y, final = complex_scan(
        select(tokens.written, written),
        select(tokens.real, c[..., 0]),
        decay.real,
        decay.imag,
        initial=parts,
        implementation=implementation,
    )
    memory = jax.lax.complex(final[:, 0], final[:, 1])[..., None]
    return finish_output(tokens, y), memory
