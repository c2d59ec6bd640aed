"""A backend of `linear_memory` from outside the package: one file and one `register`.

As a plugin of pytest (`-p tests.toys.toy_backend`) it runs the op's tests on this backend, because it is the
first backend for CPUs that `implementation=None` may select.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.memory_kernels import tokens_of
from lsm_jax.ops.backends.registry import Backend, Call, register
from lsm_jax.ops.core.segments import finish_output, select
from lsm_jax.ops.core.states import LinearState
from pallas_kernels.requirements import Requirement

CALLS: list[str] = []


def run(call: Call) -> tuple[jax.Array, LinearState]:
    """Compute the toy backend's linear memory, `M_t = a_t ⊙ M_{t-1} + k_tᵀ v_t`, `o_t = q_t M_t`, token by
    token; a is the decay.
    """
    CALLS.append(call.op)
    given, options = call.arguments, call.options
    tokens, state = tokens_of(given), given["state"]
    heads, dtype = given["v"].shape[2], options.dtype

    def by_head(x):
        return jnp.repeat(x, max(1, heads // x.shape[2]), axis=2).astype(dtype)

    q = by_head(select(tokens.real, given["q"])) * options.scale
    k, v = (select(tokens.written, by_head(given[n])) for n in "kv")
    decay = jnp.zeros((*v.shape[:3], 1, 1), dtype)
    for name in ("constant_log_decay", "log_decay"):
        if (x := given[name]) is not None:
            # Converted first, so that the gradient of a constant is summed over all tokens in `dtype`.
            x = jnp.broadcast_to(x.astype(dtype), (*v.shape[:3], *x.shape[3:]))
            decay = decay + (x if x.ndim == 4 else x[..., None])[..., None]
    if given["value_log_decay"] is not None:
        decay = decay + given["value_log_decay"][..., None, :]
    decay = select(tokens.written, jnp.exp(decay))
    if tokens.written is not None:
        decay = jnp.where(tokens.written[..., None, None, None], decay, 1)
    document = jnp.zeros(v.shape[:2], jnp.int32) if tokens.run is None else tokens.run
    starts = jnp.diff(document, axis=1, prepend=jnp.zeros_like(document[:, :1])) > 0

    def step(memory, token):
        q, k, v, decay, starts = token
        memory = jnp.where(starts[:, None, None, None], 0, memory)
        memory = decay * memory + k[..., None] * v[..., None, :]
        read = jnp.einsum("bgrk,bgkv->bgrv", q, memory, precision=jax.lax.Precision.HIGHEST)
        return memory, read.reshape(len(q), -1, v.shape[-1])

    q = q.reshape(*q.shape[:2], heads, -1, q.shape[3])
    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, decay, starts))
    memory, output = jax.lax.scan(step, state.memory.astype(dtype), inputs)
    output = finish_output(tokens, jnp.moveaxis(output, 0, 1)).astype(given["v"].dtype)
    return output, LinearState(memory, None, None, tokens.last_id)


TOY = Backend(
    name="toy",
    run=run,
    requirements=(
        Requirement(
            "form='chunk'", lambda call: call.form == "chunk", lambda call: repr(call.form)
        ),
        Requirement("one state per row", lambda call: call.arguments["state"].memory.ndim == 4),
        Requirement("no normalize", lambda call: call.options.normalize is None),
        Requirement("no bonus", lambda call: call.arguments["bonus"] is None),
        Requirement("no log_input_gate", lambda call: call.arguments["log_input_gate"] is None),
    ),
    platforms=("cpu",),
)


def pytest_configure(config):
    """Register the toy backend: pytest calls this when it loads the plugin."""
    register("linear_memory", TOY)


def pytest_terminal_summary(terminalreporter):
    """Print the number of calls of the toy backend at the end of the pytest session."""
    terminalreporter.write_line(f"the toy backend was traced {len(CALLS)} times")
