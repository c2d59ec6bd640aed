"""Short causal convolutions and token shift: what mixes a token with the few before it."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends.registry import check_implementation
from lsm_jax.ops.backends.run import run_inline, static_of
from lsm_jax.ops.convolution.backends import ConvolutionOptions, l2_normalize
from lsm_jax.ops.convolution.shared_rows import in_sequence
from lsm_jax.ops.convolution.state import ShiftState, shift_state
from lsm_jax.ops.core import checks
from lsm_jax.parallel import TOKENS, mesh_axes, over_mesh


def short_convolution(
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    silu: bool = False,
    head_dim: int | None = None,
    initial_state: ShiftState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    contiguous: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], ShiftState]:
    """Causal depthwise convolution, `y_t = Σ_d weight[W - 1 - d] x_{t-d} + bias`, over a document's written tokens.

    What surrounds it in the layers of delta rules follows where it is asked for: SiLU, then the unit length of each head.

    Args:
        x: [B, T, D].
        weight: [W, D]; the last row multiplies the current token.
        bias: [D].
        silu: whether `z * sigmoid(z)` follows.
        head_dim: channels of a head, whose L2 norm is made 1 at the end (`l2_normalize`); None leaves it.
        initial_state: W - 1 remembered tokens; with tail [B, S, ...], segment id s has state s - 1. None is empty.
        segment_ids: [B, T] integers, 0 padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 where a token is not remembered: later tokens look past it, and it sees itself and the
            written tokens before it.
        contiguous: whether every token between two of one document is written, as the caller knows; with one state a row the
            convolution then is plain shifts, several times as fast on accelerators. Where it is not so, the output is wrong.
        implementation: None (the fused kernel where it serves: NVIDIA Hopper, bfloat16, 64 tokens or more, D a multiple of 256,
            W of 2 to 4, no `update_mask`, one state a row; else XLA), "xla" or "mosaic_gpu".

    Returns:
        [B, T, D] in x's dtype, and the state, its tail in x's dtype.

    Raises:
        NotImplementedError: the kernel asked for by name does not serve the call; the message says why.
        ValueError: shapes that do not fit.
    """
    op = "short_convolution"
    check_implementation(op, implementation)
    checks.check_row_channels(op, "x", x)
    checks.check_shape(op, "weight", weight, (None, x.shape[2]), "W, D")
    if bias is not None:
        checks.check_shape(op, "bias", bias, (x.shape[2],), "D")
    if weight.shape[0] < 2:
        raise ValueError(f"{op}: weight has {weight.shape[0]} rows; accepted are 2 or more")
    if head_dim is not None and (head_dim < 1 or x.shape[2] % head_dim):
        raise ValueError(f"{op}: head_dim={head_dim!r}; accepted are divisors of x's {x.shape[2]}")
    batched = _arguments(op, x, weight.shape[0] - 1, initial_state, segment_ids, update_mask)
    # Where a device may get a part of a head, heads are normalised when they are together again.
    meshes = jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.mesh
    shards = [math.prod(dict(m.shape).get(n, 1) for n in mesh_axes("heads")) for m in meshes]
    whole_heads = head_dim and not any(x.shape[2] // head_dim % n for n in shards)
    inside = head_dim if whole_heads else None
    options = ConvolutionOptions(contiguous, silu, inside, masked=update_mask is not None)
    y, state = over_mesh(
        run_inline,
        batched,
        dict(weight=weight, bias=bias),
        static_of(op, options, implementation),
        axes=_axes(batched, "heads") | dict(weight=(None, "heads"), bias=("heads",)),
        out_axes=((*TOKENS[:2], "heads"), "state"),
        in_sequence=in_sequence,
    )
    return (y if whole_heads or head_dim is None else l2_normalize(y, head_dim)), state


def token_shift(
    x: Float[Array, "B T D"],
    *,
    initial_state: ShiftState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    contiguous: bool = False,
) -> tuple[Float[Array, "B T D"], ShiftState]:
    """The written token before each token of its document, 0 before the first (RWKV's time shift).

    Arguments, state and errors are `short_convolution`'s, with one remembered token.
    """
    op = "token_shift"
    checks.check_row_channels(op, "x", x)
    batched = _arguments(op, x, 1, initial_state, segment_ids, update_mask)
    # The channels are a model's, which no axis shards.
    return over_mesh(
        run_inline,
        batched,
        {},
        static_of(op, ConvolutionOptions(contiguous), None),
        axes=_axes(batched, None),
        out_axes=((*TOKENS[:2], None), "state"),
        in_sequence=in_sequence,
    )


def _axes(batched: dict[str, Any], channels: str | None) -> dict[str, Any]:
    """The logical axes of the arguments; `channels` is that of x's channels."""
    rows = ("batch",) if batched["state"].tail.ndim == 3 else ("batch", None)
    state: Any = ShiftState((*rows, None, channels), ("batch",))  # pyrefly: ignore
    axes: dict[str, Any] = dict.fromkeys(("segment_ids", "update_mask"), TOKENS[:2])
    return axes | dict(x=(*TOKENS[:2], channels), state=state)


def _arguments(op, x, width, state, segment_ids, update_mask):
    batch, length, channels = x.shape
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    empty = functools.partial(shift_state, batch, width, channels, dtype=x.dtype)
    state = checks.state_or_empty(op, state, empty, segment_ids)
    return dict(x=x, state=state, segment_ids=segment_ids, update_mask=update_mask)
