"""sLSTM (xLSTM, arXiv 2405.04517): a memory of one number for each channel with exponential gates, whose output is an input
of the next token's gates.

With the gates' inputs ĩ, f̃, z̃, õ of a token, to each of which `y_{t-1} R` of the head is added:
`l = m_{t-1} + log sigmoid(f̃)`, `m_t = max(ĩ, l)`, and ĩ before any token;
`c_t = e^(l - m_t) c_{t-1} + e^(ĩ - m_t) tanh(z̃)`, `n_t = e^(l - m_t) n_{t-1} + e^(ĩ - m_t)`, `y_t = sigmoid(õ) c_t / n_t`.

The state's update is not linear in the state: updates do not compose, and there is one form, a scan over tokens.

A state is empty for a channel whose n is 0, as in the authors' CUDA code; their PyTorch code asks whether all of the
batch are, which differs for batches of states of which some are empty.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lsm_jax.ops.backends.registry import Backend, check_implementation, register
from lsm_jax.ops.backends.run import run, static_of
from lsm_jax.ops.core import checks
from lsm_jax.ops.core.chunk_scans import per_chunk, scan_tokens
from lsm_jax.ops.core.segments import finish_output, read_tokens, select
from lsm_jax.ops.core.shared_rows import state_axes
from lsm_jax.ops.slstm.state import SLSTMState, slstm_state
from lsm_jax.parallel import TOKENS, over_mesh
from lsm_jax.parallel.sequence import run_in_turn


class Options(NamedTuple):
    """The options of `slstm_memory` that are constant when a program is compiled: the dtype of the state, and the
    precision of matrix products.
    """

    dtype: Any
    precision: jax.lax.Precision


def slstm_memory(
    o: Float[Array, "B T G K"],
    i: Float[Array, "B T G K"],
    f: Float[Array, "B T G K"],
    z: Float[Array, "B T G K"],
    recurrent: Float[Array, "G K 4 K"],
    *,
    initial_state: SLSTMState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    update_mask: Array | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> tuple[Float[Array, "B T G K"], SLSTMState]:
    """Update and read one number for each channel, token by token.

    Args:
        o, i, f, z: [B, T, G, K], the inputs of the output gate, the input gate, the forget gate and the value, ahead of
            their activations, with biases.
        recurrent: [G, K, 4, K], R: from the K channels of a head's last output to those of i, f, z and o, in this order.
        initial_state: the state to continue from; None is an empty one. With arrays [B, S, ...] there is one
            state per segment: the tokens of id s use state s - 1.
        segment_ids: [B, T] integers, 0 for padding; see `lsm_jax.ops.core.segments`.
        update_mask: [B, T], 0 for tokens that do not change the state: they read it through their own output gate.
        implementation: None or "xla"; there is no fused kernel.

    Returns:
        The output y in z's dtype, and the final state in float32 (float64 if an input is).

    Raises:
        ValueError: a shape, dtype or implementation is not accepted.
    """
    op = "slstm_memory"
    check_implementation(op, implementation)
    if jnp.ndim(z) != 4:
        raise ValueError(f"{op}: z has shape {jnp.shape(z)}; accepted is [B, T, G, K]")
    checks.check_filled(op, "z", z)
    batch, length, heads, dim = z.shape
    checks.warn_of_heads_first(op, "z", z.shape)
    inputs = dict(o=o, i=i, f=f, z=z)
    for name, x in inputs.items():
        checks.check_shape(op, name, x, z.shape, "B, T, G, K")
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise ValueError(f"{op}: {name} has dtype {x.dtype}; accepted are floating ones")
    checks.check_shape(op, "recurrent", recurrent, (heads, dim, 4, dim), "G, K, 4, K")
    checks.check_rows(op, batch, length, segment_ids, update_mask)
    dtype = checks.compute_dtype(*inputs.values(), recurrent)
    empty = functools.partial(slstm_state, batch, heads, dim, dtype=dtype)
    state = checks.state_or_empty(op, initial_state, empty, segment_ids)
    batched = dict(inputs, state=state, segment_ids=segment_ids, update_mask=update_mask)
    axes: dict[str, Any] = dict.fromkeys(batched, TOKENS) | {"recurrent": ("heads",)}
    axes["state"] = state_axes(state, segments=state.output.ndim == 4)
    return over_mesh(
        run,
        batched,
        dict(recurrent=recurrent),
        static_of(op, Options(dtype, checks.matmul_precision(z, recurrent)), implementation),
        axes=axes,
        out_axes=(TOKENS, "state"),
        in_sequence=_in_sequence,
    )


def _run_xla(
    options: Options, o, i, f, z, recurrent, state: SLSTMState, segment_ids, update_mask
) -> tuple[Array, SLSTMState]:
    """Compute `slstm_memory` on one device: return the output [B, T, G, K] and the state after the last token."""
    dtype = options.dtype
    num_segments = state.output.shape[1] if state.output.ndim == 4 else None
    tokens = read_tokens(segment_ids, update_mask, state.segment_id, num_segments)
    gates = [select(tokens.written, x.astype(dtype)) for x in (i, f, z)]
    gates = jnp.stack([*gates, select(tokens.real, o.astype(dtype))], axis=-2)  # [B, T, G, 4, K]
    written = jnp.ones(z.shape[:2], bool) if tokens.written is None else tokens.written
    step = functools.partial(_step, recurrent.astype(dtype), options.precision)
    memory = tuple(x.astype(dtype) for x in state[:4])
    output, memory = scan_tokens(step, (gates, written), memory, tokens.run, tokens.slot)
    y, c, n, m = memory
    return finish_output(tokens, output).astype(z.dtype), SLSTMState(y, c, n, m, tokens.last_id)


def _step(recurrent, precision, memory: tuple, token: tuple[Array, Array]) -> tuple[tuple, Array]:
    """Apply one token to the state (y, c, n, m), each [B, G, K]; return it and the output [B, G, K]."""
    (y, c, n, m), (gates, written) = memory, token
    gates = gates + jnp.einsum("bgk,gkxl->bgxl", y, recurrent, precision=precision)
    i, f, z, o = (gates[..., gate, :] for gate in range(4))
    empty = n == 0
    kept = m + jax.nn.log_sigmoid(f)
    m_next = jnp.where(empty, i, jnp.maximum(i, kept))
    forget = jnp.where(empty, 0, jnp.exp(jnp.where(empty, 0, kept - m_next)))
    write = jnp.exp(i - m_next)
    after = forget * c + write * jnp.tanh(z), forget * n + write, m_next
    keeps = per_chunk(written, n)
    c, n, m = (jnp.where(keeps, new, old) for new, old in zip(after, (c, n, m), strict=True))
    output = jax.nn.sigmoid(o) * c / jnp.where(n == 0, 1, n)
    return (jnp.where(keeps, output, y), c, n, m), output


def _in_sequence(axis, function, static, **arguments):
    """Compute `slstm_memory` where devices have consecutive parts of each row, on one device after the other: a gate
    requires the output before it.
    """
    state, dtype = arguments.pop("state"), static.options.dtype
    initial = jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x, state
    )

    def run_from(arguments, state):
        output, after = function(static, **arguments, state=state)
        return output, jax.tree.map(lambda x, y: x.astype(y.dtype), after, state)

    return run_in_turn(axis, run_from, arguments, initial)


register(
    "slstm_memory",
    Backend(name="xla", run=lambda call: _run_xla(call.options, **call.arguments)),
)
