"""The backends of `selective_memory`: fused kernels for Hopper and TPU, Triton kernels for other NVIDIA cards, and XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.memory_kernels import CHUNK_FORM
from lsm_jax.ops.backends.registry import PALLAS, TRITON, Backend, Call, register
from lsm_jax.ops.core.segments import finish_output, read_tokens, select
from lsm_jax.ops.selective.state import SelectiveState
from lsm_jax.ops.selective.xla import document_starts, run_in_form
from pallas_kernels.requirements import Requirement


def run_xla(call: Call) -> tuple[jax.Array, SelectiveState]:
    """Compute `selective_memory` by XLA in the call's form: return the output [B, T, D] and the state after the last
    token.
    """
    return run_in_form(call.options._replace(form=call.form), **call.arguments)


def _all_arguments(call: Call) -> dict[str, Any]:
    """Return the arrays of a `selective_memory` call by name, including those that are constant in time; None for those
    that are absent.
    """
    absent = dict.fromkeys(("delta", "b", "c"))
    return absent | call.arguments["constant"] | call.arguments


def _is_mamba(call: Call) -> bool:
    """Return whether the arguments of a `selective_memory` call with a real memory are of the kind that Mamba
    passes and the kernel supports: discretization "euler", and real B and C [B, T, N].
    """
    arguments = _all_arguments(call)
    b, c = arguments["b"], arguments["c"]
    real = not any(jnp.iscomplexobj(x) for x in (b, c))
    return call.options.discretization == "euler" and jnp.ndim(b) == jnp.ndim(c) == 3 and real


def _is_elementwise(call: Call) -> bool:
    """Return whether the arguments of a `selective_memory` call with a real memory are of the kind that HGRN and RG-LRU pass:
    one entry per channel, no discretization, real B and C [D, N] and no D.
    """
    return _has_one_entry(call, c_ndim=2)


def _is_gate_loop(call: Call) -> bool:
    """Return whether the arguments of a `selective_memory` call with a complex memory are of the kind that
    GateLoop passes and the kernel supports: one entry per channel, no discretization, real B [D, N], real C
    [B, T, D, N] and no D.
    """
    return _has_one_entry(call, c_ndim=4)


def _has_one_entry(call: Call, c_ndim: int) -> bool:
    arguments = _all_arguments(call)
    a, b, c = arguments["a"], arguments["b"], arguments["c"]
    real = not any(jnp.iscomplexobj(x) for x in (b, c))
    one_entry = a.shape[1] == 1 and jnp.ndim(b) == 2 and jnp.ndim(c) == c_ndim
    return call.options.discretization == "none" and one_entry and real and arguments["d"] is None


REQUIREMENTS = (
    CHUNK_FORM,
    Requirement(
        "one state per row, not one per segment",
        lambda call: call.arguments["state"].memory.ndim == 3,
    ),
    Requirement("delta [B, T, D]", lambda call: jnp.ndim(_all_arguments(call)["delta"]) == 3),
    Requirement(
        "for a complex memory: one entry per channel, discretization='none', real B [D, N], real C [B, T, D, N] and no D",
        lambda call: not call.options.is_complex or _is_gate_loop(call),
    ),
    Requirement(
        "for a real memory: discretization='euler', and real B and C [B, T, N]; or one entry per channel, discretization='none', "
        "real B and C [D, N] and no D",
        lambda call: call.options.is_complex or _is_mamba(call) or _is_elementwise(call),
    ),
)


def _unsupported_by_kernel(name: str, call: Call) -> str | None:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    from pallas_kernels.selective_scan import complex_unsupported, unsupported

    u = call.arguments["u"]
    if call.options.is_complex or not _is_mamba(call):
        return complex_unsupported(name, u)
    return unsupported(name, u, call.arguments["a"].shape[1])


def run_kernel(name: str, call: Call) -> tuple[jax.Array, SelectiveState]:
    """Compute `selective_memory` by the fused kernel of the backend called `name`: return the output [B, T, D] and the
    state after the last token.
    """
    arguments = _all_arguments(call)
    state = arguments["state"]
    tokens = read_tokens(arguments["segment_ids"], arguments["update_mask"], state.segment_id, None)
    starts = document_starts(tokens)
    if call.options.is_complex:
        scan = _complex_scan
    else:
        scan = _real_scan if _is_mamba(call) else _elementwise_scan
    output, memory = scan(name, tokens, starts, arguments)
    return finish_output(tokens, output), SelectiveState(memory, tokens.last_id)


def _real_scan(name, tokens, starts, arguments) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.selective_scan import selective_scan

    u, d = arguments["u"], arguments["d"]
    # A masked token still adds D u to its output. The kernel cannot add it: there u must be 0, since times
    # a delta of 0 it may be NaN.
    masked = tokens.written is not tokens.real
    y, final = selective_scan(
        select(tokens.written, u),
        select(tokens.written, arguments["delta"]),
        arguments["a"],
        select(tokens.written, arguments["b"]),
        select(tokens.real, arguments["c"]),
        None if masked else d,
        initial=arguments["state"].memory,
        begin=starts,
        implementation=name,
    )
    if masked and d is not None:
        skipped = d.astype(jnp.float32) * select(tokens.real, u).astype(jnp.float32)
        y = (y.astype(jnp.float32) + skipped).astype(y.dtype)
    return y, final


def _complex_scan(name, tokens, starts, arguments) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.selective_scan import complex_scan

    u, memory = arguments["u"], arguments["state"].memory
    delta = select(tokens.written, arguments["delta"].astype(jnp.complex64))
    exponent = delta * arguments["a"][:, 0]
    decay = jnp.exp(exponent)
    if starts is not None:
        decay = jnp.where(starts[..., None], 0, decay)
    write = (u * arguments["b"][:, 0]).astype(u.dtype)
    initial = jnp.stack([memory[..., 0].real, memory[..., 0].imag], axis=1)
    y, final = complex_scan(
        select(tokens.written, write),
        select(tokens.real, arguments["c"][..., 0]),
        decay.real,
        decay.imag,
        initial=initial,
        implementation=name,
    )
    return y, jax.lax.complex(final[:, 0], final[:, 1])[..., None]


def _elementwise_scan(name, tokens, starts, arguments) -> tuple[jax.Array, jax.Array]:
    """Compute a real memory of one entry per channel as the real part of a complex one."""
    from pallas_kernels.selective_scan import complex_scan

    u, memory = arguments["u"], arguments["state"].memory
    delta = select(tokens.written, arguments["delta"].astype(jnp.float32))
    decay = jnp.exp(delta * arguments["a"][:, 0])
    if starts is not None:
        decay = jnp.where(starts[..., None], 0, decay)
    write = select(tokens.written, (u * arguments["b"][:, 0]).astype(u.dtype))
    initial = memory[..., 0].astype(jnp.float32)
    initial = jnp.stack([initial, jnp.zeros_like(initial)], axis=1)
    y, final = complex_scan(
        write,
        jnp.ones_like(write),
        decay,
        jnp.zeros_like(decay),
        initial=initial,
        implementation=name,
    )
    y = (select(tokens.real, y) * arguments["c"][:, 0]).astype(y.dtype)
    return y, final[:, :1].swapaxes(1, 2)


def _kernel(name: str, *requirements: Requirement, **fields: Any) -> Backend:
    """Return the backend of `selective_memory` that computes by the fused kernel called `name`, with the requirements that it has
    besides those of all kernels; `fields` are further fields of `Backend`, such as its platforms.
    """
    return Backend(
        name=name,
        run=functools.partial(run_kernel, name),
        requirements=(*REQUIREMENTS, *requirements, *PALLAS),
        more=functools.partial(_unsupported_by_kernel, name),
        **fields,
    )


_REAL = Requirement(
    "a real memory with discretization='euler'",
    lambda call: not call.options.is_complex and _is_mamba(call),
)

register(
    "selective_memory",
    _kernel("mosaic_gpu", platforms=("cuda",), compute_capabilities=("9.0",)),
    _kernel("mosaic_tpu", platforms=("tpu",), automatic=False),
    _kernel("triton", _REAL, **TRITON),
    Backend(name="xla", run=run_xla),
)
