"""The backends of `linear_memory`: fused kernels for Hopper and TPU, Triton kernels for other NVIDIA
cards and for few memories on Hopper, and XLA."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends import memory_kernels, one_token
from lsm_jax.ops.backends.registry import TRITON as TRITON_CARDS
from lsm_jax.ops.backends.registry import Backend, Call, register
from lsm_jax.ops.core.platforms import compute_capabilities
from lsm_jax.ops.core.segments import cut_into_chunks, finish_output, select
from lsm_jax.ops.core.states import LinearState
from lsm_jax.ops.linear import stabilized
from lsm_jax.ops.linear.writes import apart
from lsm_jax.ops.linear.xla import by_xla
from pallas_kernels.requirements import Requirement
from pallas_kernels.triton import launch


def run_xla(call: Call) -> tuple[jax.Array, LinearState]:
    """Compute `linear_memory` by XLA in the call's form (recurrent, chunk or associative): return the output [B, T, H,
    V] and the state after the last token.
    """
    return by_xla(call.options._replace(form=call.form), **call.arguments)


def _absent(name: str) -> Requirement:
    def met(call: Call) -> bool:
        return call.arguments.get(name, getattr(call.options, name, None)) is None

    return Requirement(f"no {name}", met)


def _unsupported_by_kernel(name: str, call: Call) -> str | None:
    # Imported here, so that a backend that is not used adds no time to `import lsm_jax`.
    from pallas_kernels.linear_attention import unsupported

    given = call.arguments
    q, k, v = (given[n] for n in "qkv")
    log_decay, value_log_decay = given["log_decay"], given["value_log_decay"]
    if given["constant_log_decay"] is not None:
        log_decay = jax.ShapeDtypeStruct(v.shape[:3], jnp.float32)
    elif log_decay is not None:
        log_decay = jax.ShapeDtypeStruct(v.shape[:3] + log_decay.shape[3:], jnp.float32)
    if value_log_decay is not None:
        value_log_decay = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return unsupported(
        name, q, k, v, log_decay, bonus=given["bonus"], value_log_decay=value_log_decay,
        **_in_registers(name, call),
    )  # fmt: skip


def _in_registers(name: str, call: Call) -> dict[str, Any]:
    """Return the arguments of a call that Hopper's kernel computes by itself and others' callers compute apart, by name."""
    if name != "mosaic_gpu":
        return {}
    return dict(log_write=call.arguments.get("log_write"), rank=call.options.rank)


def run_kernel(name: str, call: Call) -> tuple[jax.Array, LinearState]:
    """Compute `linear_memory` by the fused kernel of the backend called `name`: return the output [B, T, H, V] and the
    state after the last token.
    """
    from pallas_kernels.linear_attention import linear_attention

    given, options = call.arguments, call.options
    q, k, v, bonus, state = (given[n] for n in ("q", "k", "v", "bonus", "state"))
    log_decay, value_log_decay = given["log_decay"], given["value_log_decay"]
    if given["constant_log_decay"] is not None:
        log_decay = given["constant_log_decay"]
    tokens = memory_kernels.tokens_of(given)
    if log_decay is not None:
        shape = v.shape[:3] + log_decay.shape[3:]
        log_decay = jnp.broadcast_to(log_decay.astype(jnp.float32), shape)
        log_decay = select(tokens.written, log_decay)
    if value_log_decay is not None:
        value_log_decay = select(tokens.written, value_log_decay.astype(jnp.float32))
    if bonus is not None:
        bonus = bonus.astype(jnp.float32)
    k, v = select(tokens.written, k), select(tokens.written, v)
    shared: dict[str, Any] = dict(bonus=bonus, rank=options.rank)
    if (log_write := given.get("log_write")) is not None:
        log_write = select(tokens.written, log_write.astype(jnp.float32))
        shared["skip"] = given["skip"].astype(jnp.float32)
    arrays: dict[str, Any] = dict(q=select(tokens.real, q), k=k, v=v, log_decay=log_decay)
    arrays |= dict(value_log_decay=value_log_decay, log_write=log_write)
    memory = None if options.fresh and state.memory.ndim == 4 else state.memory
    laid_out, restore = memory_kernels.lay_out(name, tokens, memory, arrays)
    output, memory = restore(
        *linear_attention(
            **laid_out, **shared, scale=options.scale, exact=options.exact, save_memories=call.save_memories,
            implementation=name,
        )
    )  # fmt: skip
    return finish_output(tokens, output), LinearState(memory, None, None, tokens.last_id)


def run_stabilized(call: Call) -> tuple[jax.Array, LinearState]:
    """Compute `linear_memory` with exponential input gates and a normaliser (mLSTM) by Hopper's exact scans: return the output [B, T, H, V] and the
    state after the last token. XLA computes the stabiliser.
    """
    from pallas_kernels.linear_attention.stabilized import Initial, stabilized_attention

    given, options = call.arguments, call.options
    q, k, v, state = (given[n] for n in ("q", "k", "v", "state"))
    tokens = memory_kernels.tokens_of(given)
    gate = jnp.maximum(given["log_input_gate"].astype(jnp.float32), stabilized.NEVER)  # also -inf
    gate = select(tokens.written, gate)
    if tokens.written is not None:
        gate = jnp.where(tokens.written[..., None], gate, stabilized.NEVER)
    log_decay = given["log_decay"]
    if given["constant_log_decay"] is not None:
        log_decay = given["constant_log_decay"]
    if log_decay is None:
        log_decay = jnp.zeros((), jnp.float32)
    log_decay = jnp.broadcast_to(log_decay.astype(jnp.float32), gate.shape)
    log_decay = select(tokens.written, log_decay)
    chunks = cut_into_chunks(tokens, call.length, _CHUNK, None)
    before = Initial(*(x.astype(jnp.float32) for x in state[:3]))
    m, final = stabilized.stabilizers(log_decay, gate, before.stabilizer, chunks)
    output, memory, normalizer = stabilized_attention(
        select(tokens.real, q), select(tokens.written, k), select(tokens.written, v), log_decay, gate, m,
        initial=None if options.fresh else before, run=tokens.run, scale=options.scale, eps=options.normalize,
        exact=options.exact,
    )  # fmt: skip
    state = LinearState(memory, normalizer, final, tokens.last_id)
    return finish_output(tokens, output), state


def _unsupported_stabilized(call: Call) -> str | None:
    from pallas_kernels.linear_attention.stabilized import unsupported

    return unsupported(*(call.arguments[n] for n in "qkv"))


def _declined_stabilized(call: Call) -> str | None:
    """Return the reason, in words, why exact scans are not selected automatically for a call that they support; None if they are."""
    rows, _, heads, channels = call.arguments["v"].shape
    heads = max(heads, call.arguments["q"].shape[2])
    if (blocks := rows * heads * channels // 128) < _LEAST_BLOCKS:
        return f"its rows are not divided into parts: faster than XLA with {_LEAST_BLOCKS} or more times 128 value channels, not {blocks}"
    return None


def _kernel(name: str, requirements: tuple[Requirement, ...], **fields: Any) -> Backend:
    """Return the backend of the fused kernel called `name`, with the requirements that its platform has besides the op's."""
    run = functools.partial(run_kernel, name)
    return Backend(
        name=name,
        run=run if name == "mosaic_gpu" else apart(run),
        requirements=(*requirements, _absent("log_input_gate"), _absent("normalize")),
        more=functools.partial(_unsupported_by_kernel, name),
        **fields,
    )


HOPPER = _kernel(
    "mosaic_gpu", memory_kernels.HOPPER, platforms=("cuda",), compute_capabilities=("9.0",)
)
_LEAST_BLOCKS = 64
"""The smallest number of thread blocks, each of 128 value channels of one memory, with which exact scans are selected automatically: half of
those with which they are 2.4 times as fast as XLA forward and backward (docs/results/kernels.md)."""
_CHUNK = 64  # tokens of a chunk, whose stabilisers are computed by a matrix
STABILIZED = Backend(
    name="mosaic_gpu",
    run=run_stabilized,
    requirements=(
        *memory_kernels.HOPPER,
        Requirement(
            "log_input_gate with normalize and one state per row",
            lambda call: (
                call.options.normalize is not None and call.arguments["state"].memory.ndim == 4
            ),
            lambda call: f"{call.arguments['state'].memory.shape[1]} states per row",
        ),
    ),
    more=_unsupported_stabilized,
    platforms=("cuda",),
    compute_capabilities=("9.0",),
    declined=_declined_stabilized,
    concerns=lambda call: call.arguments.get("log_input_gate") is not None,
    label="mosaic_gpu, exact scans",
)
TPU = _kernel("mosaic_tpu", memory_kernels.TPU, platforms=("tpu",), automatic=False)
TRITON = _kernel("triton", memory_kernels.TRITON, **TRITON_CARDS)

FEW_MEMORIES, SHORT_ROW = 8, 4096
"""The largest number of memories in all rows for which Triton's kernels were timed, in half the time of Hopper's forward and backward (heads
of 128, no or a scalar decay; docs/results/triton.md), and the shortest row that Hopper's kernels may divide into parts."""


def _is_small(call: Call) -> bool:
    """Return whether a call is for one Hopper card and has few memories in short rows and no decay by channel, where Triton's kernels are
    installed.

    Hopper's scan then has few thread blocks, each of which computes all that a chunk needs before the next; Triton's scan updates the
    memory alone.
    """
    given = call.arguments
    # With one state per segment, the rows are those of all segments.
    rows = math.prod(given["state"].memory.shape[:-3])
    memories = rows * max(given[n].shape[2] for n in "qv")
    absent = all(given.get(n) is None for n in ("value_log_decay", "bonus", "log_write"))
    plain = absent and jnp.ndim(given["log_decay"]) < 4
    small = memories <= FEW_MEMORIES and 1 < call.length < SHORT_ROW
    mesh = jax.sharding.get_abstract_mesh()
    one_card = compute_capabilities() == {"9.0"} and (mesh.empty or mesh.size == 1)
    return plain and small and one_card and launch.usable()


TRITON_FOR_FEW = dataclasses.replace(
    TRITON,
    compute_capabilities=("9.0",),
    automatic=("9.0",),
    concerns=_is_small,
    label="triton for few memories",
)
XLA = Backend(name="xla", run=apart(run_xla))
_NOT_ONE_TOKEN = "log_input_gate", "normalize", "log_write", "skip"

register(
    "linear_memory",
    one_token.decode_backend(run_xla, without=_NOT_ONE_TOKEN, stacked_only=True),
    TRITON_FOR_FEW,
    HOPPER,
    STABILIZED,
    TPU,
    one_token.decode_backend(run_xla, name="triton", without=_NOT_ONE_TOKEN, stacked_only=True),
    TRITON,
    XLA,
)
