"""The backends of `selective_memory`: fused kernels for Hopper and TPU, and XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.memory_kernels import CHUNK_FORM
from lsm_jax.ops.backends.registry import PALLAS, Backend, Call, register
from lsm_jax.ops.core.segments import finish_output, read_tokens, select
from lsm_jax.ops.selective.state import SelectiveState
from lsm_jax.ops.selective.xla import by_xla, document_starts
from pallas_kernels.requirements import Requirement


def run_xla(call: Call) -> tuple[jax.Array, SelectiveState]:
    """`selective_memory` as XLA runs it, in the call's form."""
    return by_xla(call.options._replace(form=call.form), **call.arguments)


def _given(call: Call) -> dict[str, Any]:
    """The call's arrays by name, constant ones among them; None where absent."""
    absent = dict.fromkeys(("delta", "b", "c"))
    return absent | call.arguments["constant"] | call.arguments


def _kernel_of_real(call: Call) -> bool:
    """Whether a real memory has the arguments of Mamba."""
    given = _given(call)
    b, c = given["b"], given["c"]
    real = not any(jnp.iscomplexobj(x) for x in (b, c))
    return call.options.discretization == "euler" and jnp.ndim(b) == jnp.ndim(c) == 3 and real


def _kernel_of_complex(call: Call) -> bool:
    """Whether a complex memory has the arguments of GateLoop."""
    given = _given(call)
    a, b, c = given["a"], given["b"], given["c"]
    real = not any(jnp.iscomplexobj(x) for x in (b, c))
    one_number = a.shape[1] == 1 and jnp.ndim(b) == 2 and jnp.ndim(c) == 4
    return call.options.discretization == "none" and one_number and real and given["d"] is None


REQUIREMENTS = (
    CHUNK_FORM,
    Requirement(
        "one state per row, not one per segment",
        lambda call: call.arguments["state"].memory.ndim == 3,
    ),
    Requirement("delta [B, T, D]", lambda call: jnp.ndim(_given(call)["delta"]) == 3),
    Requirement(
        "for a complex memory one number per channel with discretization='none', real B [D, N], real C [B, T, D, N] and no D",
        lambda call: not call.options.is_complex or _kernel_of_complex(call),
    ),
    Requirement(
        "for a real memory discretization='euler' and real B and C [B, T, N]",
        lambda call: call.options.is_complex or _kernel_of_real(call),
    ),
)


def _unsupported_by_kernel(name: str, call: Call) -> str | None:
    # Imported here: a backend that is not used costs nothing at import.
    from pallas_kernels.selective_scan import complex_unsupported, unsupported

    u = call.arguments["u"]
    if call.options.is_complex:
        return complex_unsupported(name, u)
    return unsupported(name, u, call.arguments["a"].shape[1])


def run_kernel(name: str, call: Call) -> tuple[jax.Array, SelectiveState]:
    """`selective_memory` as the fused kernel of the backend `name` runs it."""
    given = _given(call)
    state = given["state"]
    tokens = read_tokens(given["segment_ids"], given["update_mask"], state.segment_id, None)
    begin = document_starts(tokens)
    scan = _complex_scan if call.options.is_complex else _real_scan
    output, memory = scan(name, tokens, begin, given)
    return finish_output(tokens, output), SelectiveState(memory, tokens.last_id)


def _real_scan(name, tokens, begin, given) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.selective_scan import selective_scan

    u, d = given["u"], given["d"]
    # A token that writes nothing is still passed on by D, outside the kernel: times a delta of 0 it may be NaN.
    masked = tokens.written is not tokens.real
    y, final = selective_scan(
        select(tokens.written, u),
        select(tokens.written, given["delta"]),
        given["a"],
        select(tokens.written, given["b"]),
        select(tokens.real, given["c"]),
        None if masked else d,
        initial=given["state"].memory,
        begin=begin,
        implementation=name,
    )
    if masked and d is not None:
        through = d.astype(jnp.float32) * select(tokens.real, u).astype(jnp.float32)
        y = (y.astype(jnp.float32) + through).astype(y.dtype)
    return y, final


def _complex_scan(name, tokens, begin, given) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.selective_scan import complex_scan

    u, memory = given["u"], given["state"].memory
    exponent = select(tokens.written, given["delta"].astype(jnp.complex64)) * given["a"][:, 0]
    decay = jnp.exp(exponent)
    if begin is not None:
        decay = jnp.where(begin[..., None], 0, decay)
    written = (u * given["b"][:, 0]).astype(u.dtype)
    parts = jnp.stack([memory[..., 0].real, memory[..., 0].imag], axis=1)
    y, final = complex_scan(
        select(tokens.written, written),
        select(tokens.real, given["c"][..., 0]),
        decay.real,
        decay.imag,
        initial=parts,
        implementation=name,
    )
    return y, jax.lax.complex(final[:, 0], final[:, 1])[..., None]


def _kernel(name: str, **fields: Any) -> Backend:
    return Backend(
        name=name,
        run=functools.partial(run_kernel, name),
        requirements=(*REQUIREMENTS, *PALLAS),
        more=functools.partial(_unsupported_by_kernel, name),
        **fields,
    )


register(
    "selective_memory",
    _kernel("mosaic_gpu", platforms=("cuda",), compute_capabilities=("9.0",)),
    _kernel("mosaic_tpu", platforms=("tpu",), automatic=False),
    Backend(name="xla", run=run_xla),
)
