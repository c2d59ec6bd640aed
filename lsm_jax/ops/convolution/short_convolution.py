"""Short causal convolutions and the token shift: each token is combined with the few tokens before it."""

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
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[Float[Array, "B T D"], ShiftState]:
    """Causal depthwise convolution, `y_t = Σ_d weight[W - 1 - d] x_{t-d} + bias`, over a document's written
    tokens.

    `silu` and `head_dim` add the operations that follow it in layers with a delta rule: SiLU, and then the
    normalisation of heads.

    Args:
        x: [B, T, D].
        weight: [W, D]; the last row multiplies the current token.
        bias: [D].
        silu: whether SiLU, `z * sigmoid(z)`, is applied to the result.
        head_dim: channels of a head, if each head is divided by its L2 norm at the end (`l2_normalize`);
            None means no division.
        initial_state: the last W - 1 written tokens; None is an empty state. With tail [B, S, ...] there is
            one state per segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that later tokens skip; the output of such a token is computed
            from itself and the written tokens before it.
        contiguous: the caller's assurance that all tokens between two tokens of one document are written.
            With one state per row the convolution is then computed by shifts of x, which is several times
            as fast on accelerators. If the assurance is wrong, so is the output.
        implementation: None (the first automatic backend that supports the call; see docs/kernels.md), a
            backend's name ("xla", "mosaic_gpu" or "triton"), or a tuple of names in order of preference.

    Returns:
        The output [B, T, D] in x's dtype, and the final state, with a tail in x's dtype.

    Raises:
        NotImplementedError: no backend of the given names supports the call; the message names the
            requirement.
        ValueError: a shape, head_dim or implementation is not accepted.
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
    # If a device may hold a part of a head only, heads are normalised after the channels are gathered.
    meshes = jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.mesh
    shards = [math.prod(dict(m.shape).get(n, 1) for n in mesh_axes("heads")) for m in meshes]
    complete_heads = head_dim and not any(x.shape[2] // head_dim % n for n in shards)
    device_head_dim = head_dim if complete_heads else None
    options = ConvolutionOptions(contiguous, silu, device_head_dim, masked=update_mask is not None)
    y, state = over_mesh(
        run_inline,
        batched,
        dict(weight=weight, bias=bias),
        static_of(op, options, implementation),
        axes=_axes(batched, "heads") | dict(weight=(None, "heads"), bias=("heads",)),
        out_axes=((*TOKENS[:2], "heads"), "state"),
        in_sequence=in_sequence,
    )
    return (y if complete_heads or head_dim is None else l2_normalize(y, head_dim)), state


def token_shift(
    x: Float[Array, "B T D"],
    *,
    initial_state: ShiftState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    contiguous: bool = False,
) -> tuple[Float[Array, "B T D"], ShiftState]:
    """Return the last written token before each token of a document, [B, T, D], 0 before the first (RWKV's time shift),
    and the state after the call.

    The arguments, the state and the errors are those of `short_convolution`, with one token in the state.
    """
    op = "token_shift"
    checks.check_row_channels(op, "x", x)
    batched = _arguments(op, x, 1, initial_state, segment_ids, update_mask)
    # The channels are those of the model's activations, which no mesh axis splits.
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
    """Return the logical axes of a short convolution's arguments, by name; `channels` is the logical axis of x's
    channels.
    """
    rows = ("batch",) if batched["state"].tail.ndim == 3 else ("batch", None)
    state: Any = ShiftState((*rows, None, channels), ("batch",))  # pyrefly: ignore
    axes: dict[str, Any] = dict.fromkeys(("segment_ids", "update_mask"), TOKENS[:2])
    return axes | dict(x=(*TOKENS[:2], channels), state=state)


def _arguments(op, x, width, state, segment_ids, update_mask):
    """Check the arguments of a short convolution that have an axis of batch rows, and return them by name;
    the state is an empty one if the caller passed none.
    """
    batch, length, channels = x.shape
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    empty = functools.partial(shift_state, batch, width, channels, dtype=x.dtype)
    state = checks.state_or_empty(op, state, empty, segment_ids)
    return dict(x=x, state=state, segment_ids=segment_ids, update_mask=update_mask)
