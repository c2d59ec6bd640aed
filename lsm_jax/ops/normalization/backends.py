"""The backends of `gated_rms_norm`: a fused kernel for Hopper, and XLA."""

from __future__ import annotations

import functools

import jax

from lsm_jax.ops.backends.registry import PALLAS, Backend, Call, register
from lsm_jax.ops.normalization.xla import in_few_passes, reference
from pallas_kernels.requirements import Requirement

MIN_TOKENS = 64
"""The smallest number of tokens of a row that the kernel computes."""

REQUIREMENTS = (
    Requirement(
        f"{MIN_TOKENS} tokens or more",
        lambda call: call.length >= MIN_TOKENS,
        lambda call: str(call.length),
    ),
    *PALLAS,
)


def _unsupported_arrays(call: Call) -> str | None:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    from pallas_kernels.gated_norm import unsupported

    x, gate = call.arguments["x"], call.arguments["gate"]
    return unsupported(x, gate, call.arguments["skip_input"], call.options.group)


def _composed(call: Call) -> bool:
    """Return whether a call has more than a norm and a gate after it: a gate before the norm, or a skip."""
    return call.options.gate_first or call.arguments["skip"] is not None


def _declined(call: Call) -> str | None:
    """Return the reason, in words, why the fused kernel is not selected automatically (`implementation=None`) for a call that it
    supports; None if it is.
    """
    if call.options.gate_first and call.arguments["skip"] is not None:
        return None
    return "it was timed to be faster with a skip and a gate before the norm only"


def run_kernel(call: Call) -> jax.Array:
    """Compute a gated norm by the fused kernel: return the output [B, T, H, V]."""
    from pallas_kernels.gated_norm import gated_rms_norm

    return gated_rms_norm(**call.arguments, **call.options._asdict())


def run_xla(call: Call) -> jax.Array:
    """Compute a gated norm by XLA: return the output [B, T, H, V]. XLA fuses the norm of one array by itself, and one token, as in
    decoding, is no pass over memory.
    """
    if _composed(call) and call.length > 1:
        return in_few_passes(call.options, **call.arguments)
    function = functools.partial(reference, call.options)
    # Otherwise a scan over layers would save every float32 array between arguments and result.
    return jax.checkpoint(function, prevent_cse=False)(**call.arguments)


register(
    "gated_rms_norm",
    Backend(
        name="mosaic_gpu",
        run=run_kernel,
        requirements=REQUIREMENTS,
        more=_unsupported_arrays,
        platforms=("cuda",),
        compute_capabilities=("9.0",),
        declined=_declined,
    ),
    Backend(name="xla", run=run_xla),
)
