"""The calls of `linear_memory`, `delta_memory`, `dplr_memory` and `slot_memory` in the cases of `pallas_kernels`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.calls.compare import Compared
from lsm_jax import ops
from pallas_kernels.delta_rule import cases as delta_rule_cases
from pallas_kernels.dplr import cases as dplr_cases
from pallas_kernels.linear_attention import cases as linear_attention_cases
from pallas_kernels.memory_cases import Segments, Slots


def _configuration(op: str, case) -> tuple:
    """Return a test case of the delta rule or of RWKV7's memory (`op`) as a tuple of sizes and options, an
    entry of `CONFIGURATIONS`.
    """
    sizes = case.heads, case.key_dim, case.value_dim, case.length, case.documents
    words = [op, case.decay, "undecayed" * (getattr(case, "erase", "") == "undecayed")]
    return *sizes, ", ".join(word for word in words if word)


CONFIGURATIONS = [
    *(case[:6] for case in linear_attention_cases.HOPPER),
    *(_configuration("delta", case) for case in delta_rule_cases.HOPPER),
    *(_configuration("dplr", case) for case in dplr_cases.HOPPER),
]
"""Heads of q, k and v; K, V; T; documents; decay."""


def memory(configuration: tuple, batch: int = 2) -> Compared:
    """Return the call of one of `CONFIGURATIONS`, in bfloat16, on `batch` rows."""
    (heads, key_heads, memories), key_dim, value_dim, length, documents, decay = configuration
    words = str(decay)
    rng = np.random.default_rng(0)

    def normal(*shape, dtype: Any = jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    x: dict[str, Any] = dict(
        q=normal(batch, length, heads, key_dim),
        k=normal(batch, length, key_heads, key_dim),
        v=normal(batch, length, memories, value_dim),
    )
    delta, low_rank = "delta" in words, "dplr" in words
    if low_rank:
        unit = _unit(x["k"])
        share = jax.nn.sigmoid(normal(*unit.shape, dtype=jnp.float32))
        x |= dict(a=-unit.astype(jnp.bfloat16), b=(unit * share).astype(jnp.bfloat16))
    if delta:
        beta = 2 * jax.nn.sigmoid(normal(batch, length, memories, dtype=jnp.float32))
        x |= dict(k=_unit(x["k"]).astype(jnp.bfloat16), beta=beta)
    name = "value_log_decay" if "value" in words else "log_decay"
    kind = words.removeprefix("dplr, ").removeprefix("delta").removeprefix(", ")
    if "constant" in kind:
        x[name] = jnp.log1p(-(2.0 ** (-5 - jnp.arange(memories))))
    elif kind.removesuffix("undecayed") not in ("None", ""):
        channels = (value_dim if "value" in words else key_dim,) if "channel" in words else ()
        gate = jax.nn.log_sigmoid(normal(batch, length, memories, *channels, dtype=jnp.float32) + 3)
        gate *= 20 if "steep" in words else 1
        x[name] = jnp.where(gate < -0.2, -30.0, gate) if "strong" in words else gate
    if "bonus" in words:
        x["bonus"] = normal(memories, key_dim, dtype=jnp.float32)
    start = normal(batch, memories, key_dim, value_dim, dtype=jnp.float32)
    large = 1e25 if "large" in words else 1
    x |= dict(q=x["q"] * large, k=x["k"] / large, memory=start / large)
    marks: dict[str, Any] = {}
    if documents:
        ids = np.cumsum(rng.random((batch, length)) < 0.01, axis=1) + 1
        mask = jnp.asarray(rng.random((batch, length)) < 0.9)
        marks = dict(segment_ids=jnp.asarray(ids), update_mask=mask)
    if "undecayed" in words:
        marks["erase"] = "undecayed"
    op: Any = ops.dplr_memory if low_rank else ops.delta_memory if delta else ops.linear_memory
    empty: Any = ops.delta_state if delta or low_rank else ops.linear_state

    def run(implementation, arrays):
        arrays = dict(arrays)
        state = empty(batch, memories, key_dim, value_dim)._replace(
            memory=arrays.pop("memory"), segment_id=jnp.ones(batch, jnp.int32)
        )
        form = "recurrent" if implementation == "xla" else "chunk"
        output, state = op(**arrays, **marks, initial_state=state, form=form, implementation=implementation)  # fmt: skip
        return output, state.memory

    small = 1e-25 if "small gradients" in words else 1
    d_output = normal(batch, length, max(heads, memories), value_dim)
    d_final = normal(*start.shape, dtype=jnp.float32) * large
    by_head = (name,) if "constant" in kind else ()
    return Compared(run, x, (d_output * small, d_final * small), by_head=by_head)


def mlstm(configuration: tuple, batch: int = 2) -> Compared:
    """Return the call of mLSTM's memory of one of the cases `MLSTM` in bfloat16, on `batch` rows."""
    (heads, key_heads, memories), key_dim, value_dim, length, documents, words = configuration
    rng = np.random.default_rng(0)

    def normal(*shape, dtype: Any = jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    tokens = batch, length
    x: dict[str, Any] = dict(
        q=normal(*tokens, heads, key_dim, dtype=jnp.bfloat16),
        k=normal(*tokens, key_heads, key_dim, dtype=jnp.bfloat16),
        v=normal(*tokens, memories, value_dim, dtype=jnp.bfloat16),
    )
    decay, gate = (
        normal(*tokens, memories) + (6 if "long" in words else 3),
        normal(*tokens, memories),
    )
    x |= dict(log_decay=jax.nn.log_sigmoid(decay), log_input_gate=gate - 10 * ("closed" in words))
    if "strong" in words:
        x["log_decay"] = jnp.where(decay < 1.5, -30.0, x["log_decay"])
        x["log_input_gate"] = 20 * jnp.round(gate)
    x |= dict(
        memory=normal(batch, memories, key_dim, value_dim),
        normalizer=normal(batch, memories, key_dim), stabilizer=normal(batch, memories),
    )  # fmt: skip
    marks: dict[str, Any] = {}
    if documents:
        marks["segment_ids"] = jnp.asarray(np.cumsum(rng.random(tokens) < 0.01, axis=1) + 1)
        marks["update_mask"] = jnp.asarray(rng.random(tokens) < 0.9)

    def run(implementation, arrays):
        arrays = dict(arrays)
        empty = ops.linear_state(
            batch, memories, key_dim, value_dim, normalize=True, stabilize=True
        )
        state = empty._replace(
            **{n: arrays.pop(n) for n in ("memory", "normalizer", "stabilizer")},
            segment_id=jnp.ones(batch, jnp.int32),
        )
        form = "recurrent" if implementation == "xla" else "chunk"
        output, state = ops.linear_memory(
            **arrays, **marks, initial_state=state, normalize=1e-6, form=form, implementation=implementation
        )  # fmt: skip
        return output, state.memory, state.normalizer

    types = jax.eval_shape(lambda a: run("xla", a), x)
    return Compared(run, x, tuple(normal(*t.shape, dtype=t.dtype) for t in types))


def _unit(k: jax.Array) -> jax.Array:
    """Return keys divided by their norms, in float32."""
    k = k.astype(jnp.float32)
    return k / jnp.linalg.norm(k, axis=-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------- one state per segment


def segment_inputs(case: Segments, length: int) -> dict[str, Any]:
    """Return the arrays of a call with four states, the initial memories as "memory"."""
    op, (heads, key_heads, memories), key_dim, value_dim, decay = case
    rng = np.random.default_rng(0)

    def normal(*shape, dtype: Any = jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    rows = 2, length
    k = _unit(normal(*rows, key_heads, key_dim, dtype=jnp.float32))
    x = dict(q=normal(*rows, heads, key_dim), k=k.astype(jnp.bfloat16))
    x |= dict(v=normal(*rows, memories, value_dim))
    if op == "dplr":
        share = jax.nn.sigmoid(normal(*k.shape, dtype=jnp.float32))
        x |= dict(a=-x["k"], b=(k * share).astype(jnp.bfloat16))
    if op == "delta":
        x |= dict(beta=2 * jax.nn.sigmoid(normal(*rows, memories, dtype=jnp.float32)))
    if decay:
        channels = () if decay == "token" else (value_dim if decay == "value" else key_dim,)
        gate = jax.nn.log_sigmoid(normal(*rows, memories, *channels, dtype=jnp.float32) + 2)
        x |= {"value_log_decay" if decay == "value" else "log_decay": gate}
    if decay == "bonus":
        x |= dict(bonus=normal(memories, key_dim, dtype=jnp.float32))
    return x | dict(memory=0.3 * normal(2, 4, memories, key_dim, value_dim, dtype=jnp.float32))


def segment_call(op: str, ids, memory, *, mask=None, **x):
    """Return the output and the final memories of a call with one state per segment, whose initial memories are `memory`."""
    state: Any = (ops.linear_state if op == "linear" else ops.delta_state)(len(memory), *memory.shape[-3:])  # fmt: skip
    state = state._replace(memory=memory)
    run = dict(linear=ops.linear_memory, delta=ops.delta_memory, dplr=ops.dplr_memory)[op]
    output, state = run(initial_state=state, segment_ids=ids, update_mask=mask, **x)
    return output, state.memory


def two_rows(ids: np.ndarray) -> jax.Array:
    """Return segment ids [2, T] of two rows: the given `ids` [T], and the same with other numbers for three
    tokens.
    """
    other = ids.copy()
    other[[3, 50, 80]] = 4, 3, 1
    return jnp.asarray(np.stack([ids, other]), jnp.int32)


LONG_IDS = np.repeat([1, 2, 1, 0, 4], [700, 5, 300, 30, 1001])
"""Segment ids of a row for four states. State 3 has no token, segment 1 continues after segment 2, and there is padding."""


def segments(case: Segments) -> Compared:
    """Return the call of a case with one state per segment, on the tokens of `LONG_IDS`."""
    x, ids = segment_inputs(case, len(LONG_IDS)), two_rows(LONG_IDS)
    rng = np.random.default_rng(1)
    mask = jnp.asarray(rng.random(ids.shape) < 0.9)

    def run(implementation, arrays):
        form = "recurrent" if implementation == "xla" else "chunk"
        return segment_call(case.op, ids, mask=mask, implementation=implementation, form=form, **arrays)  # fmt: skip

    types = jax.eval_shape(lambda a: run("xla", a), x)
    d_output, d_final = (jnp.asarray(rng.normal(size=t.shape), t.dtype) for t in types)

    def unchanged(results, gradients):
        states = (results[1], x["memory"]), (gradients["memory"], d_final)
        return all(bool((a[0, 2] == b[0, 2]).all()) for a, b in states)

    return Compared(run, x, (d_output, d_final), unchanged)


# ------------------------------------------------------------------------------------------------------------------- slots


def slots(case: Slots) -> Compared:
    """Return the call of a case of `slot_memory` on two rows."""
    heads, key_heads, memories = case.heads
    key_dim, count, value_dim = case.sizes
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(2, case.length, *shape)), dtype)  # noqa: E731
    gate = jax.nn.log_sigmoid(normal(memories, count).astype(jnp.float32)) / 8
    x = dict(
        q=normal(heads, key_dim), k=normal(key_heads, key_dim), v=normal(memories, value_dim)
    )  # fmt: skip
    if case.spread is not None:
        x = {n: jax.nn.silu(case.spread * a) for n, a in x.items()}
    x |= dict(s=-jnp.expm1(gate), log_decay=gate)
    ids = None
    if case.states == "documents":
        ids = jnp.asarray(np.cumsum(rng.random((2, case.length)) < 0.01, axis=1) + 1)
    if case.states == "segments":
        ids = two_rows(LONG_IDS[-case.length :])
    several = (4,) if case.states == "segments" else ()
    shapes = [(2, *several, memories, *s) for s in ((key_dim, count), (count, value_dim))]
    if case.states in ("state", "segments"):
        x |= {n: jnp.asarray(0.3 * rng.normal(size=s), jnp.float32) for n, s in zip(("keys", "values"), shapes, strict=True)}  # fmt: skip

    def run(implementation, arrays):
        arrays, state = dict(arrays), None
        if "keys" in arrays:
            empty = ops.slot_state(2, memories, count, key_dim, value_dim, num_segments=4 if several else None)  # fmt: skip
            state = empty._replace(keys=arrays.pop("keys"), values=arrays.pop("values"))
        output, state = ops.slot_memory(
            **arrays, scale=case.scale, segment_ids=ids, initial_state=state,
            form="recurrent" if implementation == "xla" else "chunk", implementation=implementation,
        )  # fmt: skip
        return output, state.keys, state.values

    cotangents = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    return Compared(run, x, (normal(max(heads, memories), value_dim), *cotangents))
