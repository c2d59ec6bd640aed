"""Interpolations of each token with the token before it, several at once."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run_inline, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.rwkv7.backends import MixOptions
from lsm_jax.parallel import TOKENS, alone, over_mesh

_OP = "token_mixes"


def token_mixes(
    x: Float[Array, "B T D"],
    before: Float[Array, "B T D"] | None,
    shares: Float[Array, "N D"],
    *,
    twice: tuple[int, ...] = (),
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, ...]:
    """Interpolate each token with the token before it, once for each row of learned weights: `x + (before - x) shares[i]` (RWKV's
    token shift).

    Args:
        x: [B, T, D], the tokens.
        before: [B, T, D] in x's dtype, the token before each one (`token_shift`), or None for the one before it in its row, zeros before the
            first: its gradient is then part of the pass of x's.
        shares: [N, D], the weights of the token before in each result; they are cast to x's dtype.
        twice: a tuple of the indices, each once, of the results that are returned once more, after the others, so that two products which read one result have
            a copy each and their gradients are added where that of x is computed.
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a
            backend's name ("xla" or "mosaic_gpu"), or a tuple of names in order of preference.

    Returns:
        N arrays [B, T, D] in x's dtype, and one more for each index in `twice`. They have reverse-mode derivatives only.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the
            requirement.
        ValueError: a shape, a dtype, `twice` or `implementation` is not accepted.
    """
    check_implementation(_OP, implementation)
    checks.check_row_channels(_OP, "x", x)
    checks.check_shape(_OP, "shares", shares, (None, x.shape[2]), "N, D")
    batched = dict(x=x)
    if before is not None:
        checks.check_shape(_OP, "before", before, x.shape, "B, T, D")
        if before.dtype != x.dtype:
            raise ValueError(f"{_OP}: before has dtype {before.dtype}; accepted is x's, {x.dtype}")
        batched["before"] = before
    accepted = range(shares.shape[0])
    if not isinstance(twice, tuple) or len({*twice}) < len(twice):
        raise ValueError(f"{_OP}: twice={twice!r}; accepted is a tuple of different indices")
    if wrong := [i for i in twice if not isinstance(i, int) or i not in accepted]:
        raise ValueError(
            f"{_OP}: twice={twice!r} has {wrong[0]!r}; accepted are indices of the rows of shares, 0 to {shares.shape[0] - 1}"
        )
    tokens = (*TOKENS[:2], None)
    return over_mesh(
        run_inline,
        batched,
        dict(shares=shares),
        static_of(_OP, MixOptions(tuple(twice)), implementation),
        axes=dict.fromkeys(batched, tokens) | dict(shares=(None, None)),
        out_axes=(tokens,) * (shares.shape[0] + len(twice)),
        # Without `before` a device that has a part of a row would need the last token of the device before.
        in_sequence=None if before is None else alone,
    )
