"""The calls of selective memories, short convolutions and one token in the cases of `pallas_kernels`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.calls.compare import Compared
from lsm_jax import ops
from lsm_jax.ops.core.segments import read_tokens
from lsm_jax.ops.core.states import Layer
from pallas_kernels.selective_scan import cases as selective_scan_cases
from pallas_kernels.short_convolution import cases as short_convolution_cases
from pallas_kernels.short_convolution import short_convolution


def scan_inputs(
    case: selective_scan_cases.Case, seed: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return random inputs of the op of selective memories with the sizes of `case`: the arrays that are
    differentiated, by name, and the segment ids and masks. Arrays are NaN at padding, and no output may be
    NaN.
    """
    batch, length, channels, states = case.batch, case.length, case.channels, case.states
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    def tokens(*shape, dtype=jnp.float32):
        return normal(batch, length, *shape, dtype=dtype)

    arrays: dict[str, Any] = dict(u=tokens(channels, dtype=jnp.bfloat16))
    if states:
        arrays |= dict(
            delta=jax.nn.softplus(tokens(channels) - 2),
            A=-jnp.exp(0.5 * normal(channels, states)),
            B=tokens(states),
            C=tokens(states),
            D=normal(channels),
        )
        if case.strong:
            arrays["delta"] = jnp.where(tokens(1) > 1, 30.0, arrays["delta"])
    else:
        arrays["log_decay"] = jax.nn.log_sigmoid(tokens(channels) + 2)
        if not case.real:
            arrays |= dict(angle=tokens(channels), C=tokens(channels, dtype=jnp.bfloat16))
        if case.strong:
            arrays["log_decay"] = jnp.where(tokens(1) > 1, -30.0, arrays["log_decay"])
    arrays["memory"] = normal(batch, channels, max(states, 1))
    marks: dict[str, Any] = {}
    if case.documents:
        # Few documents, so that none begins in some chunks.
        ids = np.cumsum(rng.random((batch, length)) < 4 / length, axis=1) + 1
        ids[rng.random(ids.shape) < 0.1] = 0
        ids[:, 0] = 1
        marks = dict(segment_ids=jnp.asarray(ids, jnp.int32))
        marks["update_mask"] = jnp.asarray(rng.random(ids.shape) < 0.9)
        arrays["u"] = jnp.where((ids == 0)[..., None], jnp.nan, arrays["u"])
    return arrays, marks


def scan_call(arrays: dict[str, Any], marks: dict[str, Any], implementation: str | None):
    """Return the output and the final memory of `ops.selective_memory`, the memory as its real and imaginary
    part; a complex memory starts with equal real and imaginary parts.
    """
    given = dict(arrays)
    memory = given.pop("memory")
    ones = jnp.ones((memory.shape[1], 1))
    if "log_decay" in given and "angle" not in given:
        # Powers of two, by which bfloat16 multiplies exactly.
        given |= dict(delta=given.pop("log_decay"), A=ones, B=2 * ones, C=0.5 * ones)
        given["discretization"] = "none"
    if "angle" in given:
        given |= dict(A=ones, B=ones, C=given["C"][..., None], discretization="none")
        given["delta"] = jax.lax.complex(given.pop("log_decay"), given.pop("angle"))
        memory = jax.lax.complex(memory, memory)
    state = ops.SelectiveState(memory, jnp.ones(len(memory), jnp.int32))
    y, state = ops.selective_memory(
        **given, **marks, initial_state=state, implementation=implementation
    )
    return y, jnp.stack([state.memory.real, state.memory.imag])


def scan_both(arrays, marks, implementation, cotangents):
    """Return the output and the final memory of selective memories, and the gradients of the inputs `arrays`
    for the given cotangents.
    """
    values, pull = jax.vjp(lambda a: scan_call(a, marks, implementation), arrays)
    return values, pull(cotangents)[0]


def scan(case: selective_scan_cases.Case) -> Compared:
    """Return the call of a case of selective memories."""
    arrays, marks = scan_inputs(case)
    rng = np.random.default_rng(1)
    dy = jnp.asarray(rng.normal(size=arrays["u"].shape), jnp.bfloat16)
    d_memory = jnp.asarray(rng.normal(size=(2, *arrays["memory"].shape)), jnp.float32)
    return Compared(lambda name, x: scan_call(x, marks, name), arrays, (dy, d_memory))


def convolution_inputs(
    length, channels, width, *, documents, bias, batch=1, contiguous=False
) -> tuple[dict[str, Any], Any]:
    """Return random inputs of a short convolution, by name, and segment ids (None without `documents`) with
    padding inside documents (between documents if `contiguous`) and at the end; the first token continues the state's document.
    """
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    ids = np.cumsum(rng.random((batch, length)) < 0.15, axis=1) + 1
    if contiguous:
        ids[ids % 3 == 2] = 0
    else:
        ids[rng.random(ids.shape) < 0.15] = 0
    ids[:, 0], ids[:, -3:] = 1, 0
    x = normal(batch, length, channels)
    if documents:  # the values of padding are never used
        x = jnp.where(jnp.asarray(ids == 0)[..., None], jnp.nan, x)
    arrays = dict(x=x, weight=normal(width, channels), initial=normal(batch, width - 1, channels))
    if bias:
        arrays["bias"] = normal(channels)
    return arrays, jnp.asarray(ids, jnp.int32) if documents else None


def plain_convolution(arrays, ids, silu, head_dim):
    """Return the output of XLA's form of the short convolution for the inputs `arrays` and the segment ids
    `ids`.
    """
    arrays = dict(arrays)
    initial = arrays.pop("initial")
    state = ops.ShiftState(initial, jnp.ones(initial.shape[0], jnp.int32))
    return ops.short_convolution(
        **arrays, silu=silu, head_dim=head_dim, initial_state=state, segment_ids=ids,
        implementation="xla",
    )[0]  # fmt: skip


def convolution(case: short_convolution_cases.Case) -> Compared:
    """Return the call of a case of short convolutions, by the kernel's function."""
    length, channels, width, documents, bias, silu, head_dim, batch, contiguous = case
    arrays, ids = convolution_inputs(
        length, channels, width, documents=documents, bias=bias, batch=batch, contiguous=contiguous
    )

    def run(implementation, arrays):
        if implementation == "xla":
            return (plain_convolution(arrays, ids, silu, head_dim),)
        tokens = read_tokens(ids, None, jnp.ones(batch, jnp.int32), None)
        options: dict[str, Any] = dict(contiguous=contiguous, silu=silu, head_dim=head_dim)
        options |= dict(run=tokens.run, real=tokens.real, implementation=implementation)
        return (short_convolution(**arrays, **options),)

    dy = jnp.asarray(np.random.default_rng(1).normal(size=arrays["x"].shape), jnp.bfloat16)
    return Compared(run, arrays, (dy,))


_OF_ONE_TOKEN = {
    "linear": ops.linear_memory,
    "delta": ops.delta_memory,
    "undecayed delta": functools.partial(ops.delta_memory, erase="undecayed"),
    "dplr": ops.dplr_memory,
}


def one_token_inputs(
    op, heads, key_dim, value_dim, decays, documents, dtype, batch=4
) -> dict[str, Any]:
    """Return the inputs of the memory `op` for one token of each row, and its initial memory; the rows are in
    turn: padding, a masked token, the first token of a document, and a token that continues one.
    """
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    of_queries, of_keys, memories = heads
    unit = lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)  # noqa: E731
    arrays: dict[str, Any] = dict(
        q=normal(batch, 1, of_queries, key_dim).astype(dtype),
        k=unit(normal(batch, 1, of_keys, key_dim)),
        v=normal(batch, 1, memories, value_dim).astype(dtype),
    )
    if "delta" in op:
        arrays["beta"] = 2 * jax.nn.sigmoid(normal(batch, 1, memories))
    if op == "dplr":
        arrays["a"] = -unit(normal(batch, 1, of_keys, key_dim))
        arrays["b"] = unit(normal(batch, 1, of_keys, key_dim))
    shapes = dict(
        token=(batch, 1, memories), key=(batch, 1, memories, key_dim), constant=(memories,)
    )
    for name, shape in (shapes | dict(value=(batch, 1, memories, value_dim))).items():
        if name in decays:
            gate = jax.nn.log_sigmoid(normal(*shape) + 3)
            gate = jnp.where(gate < -0.1, -120.0, gate) if "strong" in decays else gate
            arrays["value_log_decay" if name == "value" else "log_decay"] = gate
    if "bonus" in decays:
        arrays["bonus"] = normal(memories, key_dim)
    if documents:
        arrays["segment_ids"] = jnp.resize(jnp.asarray([0, 1, 2, 1]), (batch, 1))
        arrays["update_mask"] = jnp.resize(jnp.asarray([1, 0, 1, 1]), (batch, 1))
        # The values of a token that does not write are never used.
        arrays["v"] = arrays["v"].at[0].set(jnp.nan)
    arrays["memory"] = normal(batch, memories, key_dim, value_dim)
    return arrays


def one_token(op, arrays, *, stacked=False, **options):
    """Apply one token to the memories with the op's `implementation`; return the output, and the memory after
    the token, or the stack of all layers' memories if `stacked`.
    """
    arrays = dict(arrays)
    memory = arrays.pop("memory")
    if stacked:
        memory = Layer(jnp.stack([-memory, memory, 2 * memory]), jnp.int32(1))
    rows = jnp.ones(arrays["q"].shape[0], jnp.int32)
    state: Any = ops.LinearState(memory, None, None, rows)
    if op != "linear":
        state = ops.DeltaState(memory, rows)
    output, after = _OF_ONE_TOKEN[op](**arrays, initial_state=state, **options)
    memory: Any = after.memory
    return output, memory.stack if stacked else memory
