"""The backends of `short_convolution` and `token_shift`: fused kernels for Hopper and other NVIDIA cards, and XLA."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lsm_jax.ops.backends.registry import PALLAS, TRITON, Backend, Call, register
from lsm_jax.ops.convolution.state import ShiftState
from lsm_jax.ops.convolution.taps import previous_tokens
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.saved import convolved
from lsm_jax.ops.core.segments import finish_output, select
from pallas_kernels.requirements import Requirement

_MIN_TOKENS = 64


class ConvolutionOptions(NamedTuple):
    """The options of `short_convolution` and `token_shift` that are constant when a program is compiled.

    Attributes:
        contiguous: whether every token between two tokens of one document is written.
        silu: whether the convolution is followed by SiLU.
        head_dim: channels of a head, if heads are normalised on each device; else None.
        masked: whether the caller gave an `update_mask`. A mask that only hides the padding at a row's end
            does not count.
    """

    contiguous: bool = False
    silu: bool = False
    head_dim: int | None = None
    masked: bool = False


def l2_normalize(x: Array, head_dim: int | None = None, eps: float = 1e-6) -> Array:
    """Return x with each vector along the last axis, or each `head_dim` channels of it, divided by its
    length: `x / sqrt(sum(x²) + eps)`, in x's dtype; computed in float32.
    """
    heads = x if head_dim is None else x.reshape(*x.shape[:-1], -1, head_dim)
    wide = heads.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype).reshape(x.shape)


REQUIREMENTS = (
    Requirement("no update_mask", lambda call: not call.options.masked),
    Requirement(
        "one state per row, not one per segment",
        lambda call: call.arguments["state"].tail.ndim == 3,
    ),
    *PALLAS,
)
_ROWS = Requirement(
    f"{_MIN_TOKENS} tokens or more",
    lambda call: call.length >= _MIN_TOKENS,
    lambda call: str(call.length),
)
_ROWS_UNLESS_NAMED = Requirement(
    f"{_MIN_TOKENS} tokens or more, or implementation='triton', with which any number is accepted",
    lambda call: call.length >= _MIN_TOKENS or isinstance(call.implementation, str),
    lambda call: str(call.length),
)
_BFLOAT16 = Requirement(
    "x in bfloat16",
    lambda call: call.arguments["x"].dtype == jnp.bfloat16,
    lambda call: str(call.arguments["x"].dtype),
)


def _unsupported_by_kernel(name: str, call: Call, head_dim: int | None) -> str | None:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    from pallas_kernels.short_convolution import unsupported

    x, weight, ids = (call.arguments[n] for n in ("x", "weight", "segment_ids"))
    ordered = ids is not None and not call.options.contiguous
    return unsupported(x, weight, head_dim, name, ordered=ordered)


def _unsupported_arrays(name: str, call: Call) -> str | None:
    # A kernel that is not asked for by name may leave the normalisation of heads to XLA.
    named = isinstance(call.implementation, str)
    return _unsupported_by_kernel(name, call, call.options.head_dim if named else None)


def kernel_normalizes(name: str, call: Call) -> bool:
    """Return whether the fused kernel of the backend called `name` normalises the heads of a call, which XLA does otherwise."""
    return _unsupported_by_kernel(name, call, call.options.head_dim) is None


def run_kernel(name: str, call: Call) -> tuple[Array, ShiftState]:
    """Compute a short convolution by the fused kernel of the backend called `name`: return the output [B, T, D] and the
    state after the last token.
    """
    from pallas_kernels.short_convolution import short_convolution

    arguments, options = call.arguments, call.options
    x, weight, state = (arguments[n] for n in ("x", "weight", "state"))
    rows = state, arguments["segment_ids"], arguments["update_mask"]
    # The taps are not used here, so that XLA does not compute them.
    _, tokens, after = previous_tokens(options.contiguous, x, *rows, weight.shape[0] - 1)
    head_dim = options.head_dim if kernel_normalizes(name, call) else None
    y = short_convolution(
        x,
        weight,
        arguments["bias"],
        initial=state.tail,
        run=tokens.run,
        real=tokens.real,
        contiguous=options.contiguous,
        silu=options.silu,
        head_dim=head_dim,
        implementation=name,
    )
    y = convolved(y)
    return (y if head_dim == options.head_dim else l2_normalize(y, options.head_dim)), after


def run_xla(call: Call) -> tuple[Array, ShiftState]:
    """Compute a short convolution by XLA: return the output [B, T, D] and the state after the last token."""
    arguments, options = call.arguments, call.options
    x, weight, bias = (arguments[n] for n in ("x", "weight", "bias"))
    dtype = checks.compute_dtype(x)
    rows = arguments["state"], arguments["segment_ids"], arguments["update_mask"]
    taps, tokens, state = previous_tokens(options.contiguous, x, *rows, weight.shape[0] - 1)
    kernel = weight.astype(dtype)
    y = select(tokens.real, x).astype(dtype) * kernel[-1]
    for distance, tap in enumerate(taps, start=1):
        y = y + tap.astype(dtype) * kernel[-1 - distance]
    if bias is not None:
        y = y + bias.astype(dtype)
    y = finish_output(tokens, y).astype(x.dtype)
    y = convolved(jax.nn.silu(y) if options.silu else y)
    return (y if options.head_dim is None else l2_normalize(y, options.head_dim)), state


def run_shift(call: Call) -> tuple[Array, ShiftState]:
    """Compute a token shift by XLA: return, for each token, the last written token before it in its document, [B, T,
    D], and the state with the last token.
    """
    arguments: Any = call.arguments
    (tap,), tokens, state = previous_tokens(call.options.contiguous, width=1, **arguments)
    return finish_output(tokens, tap), state


def _kernel(name: str, *requirements: Requirement, **fields: Any) -> Backend:
    """Return the backend of `short_convolution` that computes by the fused kernel called `name`, with the requirements that it has
    besides those of all kernels; `fields` are further fields of `Backend`, such as its platforms.
    """
    return Backend(
        name=name,
        run=functools.partial(run_kernel, name),
        requirements=(*requirements, *REQUIREMENTS),
        more=functools.partial(_unsupported_arrays, name),
        **fields,
    )


register(
    "short_convolution",
    _kernel("mosaic_gpu", _BFLOAT16, _ROWS, platforms=("cuda",), compute_capabilities=("9.0",)),
    _kernel("triton", _ROWS_UNLESS_NAMED, **TRITON),
    Backend(name="xla", run=run_xla),
)
register("token_shift", Backend(name="xla", run=run_shift))
