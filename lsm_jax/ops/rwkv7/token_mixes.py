"""Interpolations of each token with the token before it, several at once."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run_inline, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.rwkv7 import backends  # noqa: F401  (registers the backends)
from lsm_jax.parallel import TOKENS, alone, over_mesh

_OP = "token_mixes"


def token_mixes(
    x: Float[Array, "B T D"],
    before: Float[Array, "B T D"],
    shares: Float[Array, "N D"],
    *,
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, ...]:
    """Interpolate each token with the token before it, once for each row of learned weights: `x + (before - x) shares[i]` (RWKV's
    token shift).

    Args:
        x: [B, T, D], the tokens.
        before: [B, T, D] in x's dtype, the token before each one (`token_shift`).
        shares: [N, D], the weights of the token before in each result; they are cast to x's dtype.
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a
            backend's name ("xla" or "mosaic_gpu"), or a tuple of names in order of preference.

    Returns:
        N arrays [B, T, D] in x's dtype. They have reverse-mode derivatives only.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the
            requirement.
        ValueError: a shape, a dtype or `implementation` is not accepted.
    """
    check_implementation(_OP, implementation)
    checks.check_row_channels(_OP, "x", x)
    checks.check_shape(_OP, "before", before, x.shape, "B, T, D")
    checks.check_shape(_OP, "shares", shares, (None, x.shape[2]), "N, D")
    if before.dtype != x.dtype:
        raise ValueError(f"{_OP}: before has dtype {before.dtype}; accepted is x's, {x.dtype}")
    tokens = (*TOKENS[:2], None)
    return over_mesh(
        run_inline,
        dict(x=x, before=before),
        dict(shares=shares),
        static_of(_OP, None, implementation),
        axes=dict(x=tokens, before=tokens, shares=(None, None)),
        out_axes=(tokens,) * shares.shape[0],
        in_sequence=alone,
    )
