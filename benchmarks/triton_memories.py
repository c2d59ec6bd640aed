"""The checks of the Triton kernels of `linear_memory`, `delta_memory` and `dplr_memory`, of `python -m benchmarks triton_kernels`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.calls.compare import Compared, judged
from lsm_jax import ops


class Memory(NamedTuple):
    """One checked call of a memory.

    Attributes:
        op: the op's name in the benchmark's rows: a decay, or an op of `DELTA`.
        heads: numbers of heads of q, of k and of v.
        key_dim: number of key channels, K.
        value_dim: number of value channels, V.
        length: number of tokens of each row, T.
        dtype: dtype of q, k and v; of float32 the products are in tf32.
        states: "row" (one document), "documents" (several, with a mask) or "segments" (one state each, with a mask).
        decays: "strong" if decays below e^-0.2 are e^-30, "steep" if the log decay is 20 times as large, or "".
    """

    op: str
    heads: tuple[int, int, int]
    key_dim: int
    value_dim: int
    length: int
    dtype: str
    states: str
    decays: str = ""


CHECKS = {
    "none": Memory("no decay", (4, 2, 2), 64, 128, 500, "bfloat16", "row"),
    "constant": Memory("constant decay", (2, 2, 2), 128, 128, 1024, "bfloat16", "row"),
    "none 64": Memory("no decay", (4, 4, 4), 64, 64, 600, "bfloat16", "row"),
    "constant 64": Memory("constant decay", (4, 4, 4), 64, 64, 600, "bfloat16", "row"),
    "scalar": Memory("scalar decay", (4, 4, 4), 128, 128, 512, "bfloat16", "row"),
    "scalar documents": Memory("scalar decay", (4, 2, 2), 64, 128, 500, "bfloat16", "documents"),
    "scalar strong": Memory("scalar decay", (2, 2, 4), 128, 64, 1100, "bfloat16", "documents", "strong"),
    "scalar wide": Memory("scalar decay", (2, 1, 2), 256, 256, 1100, "bfloat16", "documents"),
    "scalar long": Memory("scalar decay", (1, 1, 1), 64, 64, 8150, "bfloat16", "documents"),
    "scalar float16": Memory("scalar decay", (2, 2, 2), 128, 128, 600, "float16", "documents"),
    "scalar segments": Memory("scalar decay", (2, 1, 1), 64, 128, 2036, "bfloat16", "segments"),
    "key": Memory("key decay", (4, 4, 4), 128, 128, 512, "bfloat16", "row"),
    "key documents": Memory("key decay", (4, 2, 2), 64, 128, 1100, "bfloat16", "documents"),
    "key strong": Memory("key decay", (2, 2, 4), 128, 128, 512, "bfloat16", "documents", "strong"),
    "key steep": Memory("key decay", (2, 2, 4), 128, 128, 512, "bfloat16", "documents", "steep"),
    "key wide": Memory("key decay", (2, 2, 2), 256, 256, 700, "bfloat16", "documents"),
    "key float16": Memory("key decay", (2, 2, 2), 128, 64, 600, "float16", "documents"),
    "key segments": Memory("key decay", (1, 1, 2), 64, 64, 2036, "bfloat16", "segments"),
    "bonus": Memory("key decay and bonus", (2, 2, 2), 128, 64, 600, "bfloat16", "documents"),
    "bonus steep": Memory("key decay and bonus", (2, 2, 2), 64, 256, 512, "bfloat16", "row", "steep"),
    "bonus segments": Memory("key decay and bonus", (2, 1, 1), 128, 64, 2036, "bfloat16", "segments"),
    "value": Memory("value decay", (4, 1, 2), 128, 64, 300, "bfloat16", "documents"),
    "value strong": Memory("value decay", (2, 1, 2), 256, 256, 600, "bfloat16", "documents", "strong"),
    "key 512": Memory("key decay", (2, 1, 2), 128, 512, 600, "bfloat16", "documents"),
    "gated delta 512": Memory("gated delta rule", (1, 1, 1), 256, 512, 600, "bfloat16", "documents"),
    "kda 512": Memory("kda", (1, 1, 2), 128, 512, 600, "bfloat16", "documents"),
    "value segments": Memory("value decay", (1, 1, 1), 64, 64, 2036, "bfloat16", "segments"),
    "delta": Memory("delta rule", (4, 4, 4), 128, 128, 512, "bfloat16", "row"),
    "delta queries": Memory("delta rule", (4, 2, 2), 64, 128, 500, "bfloat16", "documents"),
    "delta segments": Memory("delta rule", (2, 1, 1), 64, 128, 2036, "bfloat16", "segments"),
    "gated delta": Memory("gated delta rule", (2, 2, 4), 128, 128, 1100, "bfloat16", "documents"),
    "gated delta strong": Memory("gated delta rule", (2, 2, 4), 128, 64, 1100, "bfloat16", "documents", "strong"),
    "gated delta wide": Memory("gated delta rule", (2, 1, 2), 256, 256, 700, "bfloat16", "documents"),
    "gated delta float16": Memory("gated delta rule", (2, 2, 2), 128, 128, 600, "float16", "documents"),
    "gated delta segments": Memory("gated delta rule", (1, 1, 2), 64, 64, 2036, "bfloat16", "segments"),
    "gated delta undecayed": Memory("undecayed delta rule", (2, 2, 4), 128, 128, 1100, "bfloat16", "documents", "strong"),
    "gated delta undecayed wide": Memory("undecayed delta rule", (2, 2, 2), 256, 512, 600, "bfloat16", "row"),
    "kda": Memory("kda", (4, 4, 4), 128, 128, 512, "bfloat16", "row"),
    "kda documents": Memory("kda", (4, 2, 2), 64, 128, 1100, "bfloat16", "documents"),
    "kda strong": Memory("kda", (2, 2, 4), 128, 64, 512, "bfloat16", "documents", "strong"),
    "kda steep": Memory("kda", (2, 2, 4), 128, 128, 512, "bfloat16", "documents", "steep"),
    "kda wide": Memory("kda", (2, 2, 2), 256, 256, 700, "bfloat16", "documents"),
    "kda float16": Memory("kda", (2, 2, 2), 128, 64, 600, "float16", "documents"),
    "kda segments": Memory("kda", (1, 1, 2), 64, 64, 2036, "bfloat16", "segments"),
    "rwkv7": Memory("rwkv7", (4, 4, 4), 64, 64, 512, "bfloat16", "row"),
    "rwkv7 documents": Memory("rwkv7", (4, 2, 2), 128, 64, 1100, "bfloat16", "documents"),
    "rwkv7 strong": Memory("rwkv7", (2, 2, 4), 64, 128, 512, "bfloat16", "documents", "strong"),
    "rwkv7 steep": Memory("rwkv7", (2, 2, 2), 128, 128, 512, "bfloat16", "documents", "steep"),
    "rwkv7 wide": Memory("rwkv7", (2, 2, 2), 256, 256, 700, "bfloat16", "documents"),
    "rwkv7 float16": Memory("rwkv7", (2, 2, 2), 64, 64, 600, "float16", "documents"),
    "rwkv7 segments": Memory("rwkv7", (1, 1, 2), 64, 64, 2036, "bfloat16", "segments"),
    # In four parts.
    "delta long": Memory("delta rule", (1, 1, 1), 64, 64, 8192, "bfloat16", "row"),
    "gated delta long": Memory("gated delta rule", (4, 2, 2), 128, 128, 8150, "bfloat16", "documents"),
    "gated delta long strong": Memory("gated delta rule", (1, 1, 2), 64, 128, 8192, "bfloat16", "row", "strong"),
    "gated delta long float16": Memory("gated delta rule", (1, 1, 2), 128, 128, 8192, "float16", "row"),
    "gated delta long float32": Memory("gated delta rule", (1, 1, 2), 64, 64, 8150, "float32", "documents"),
    "gated delta undecayed long": Memory("undecayed delta rule", (1, 1, 2), 128, 128, 8150, "bfloat16", "documents"),
    "kda long": Memory("kda", (2, 1, 1), 128, 128, 8150, "bfloat16", "documents"),
    "kda long strong": Memory("kda", (1, 1, 2), 64, 64, 8192, "bfloat16", "row", "strong"),
    "kda long wide": Memory("kda", (1, 1, 1), 256, 256, 8192, "bfloat16", "row"),
    "rwkv7 long": Memory("rwkv7", (2, 1, 1), 64, 64, 8150, "bfloat16", "documents"),
    "rwkv7 long 128": Memory("rwkv7", (1, 1, 2), 128, 128, 8192, "bfloat16", "row"),
    "rwkv7 long float32": Memory("rwkv7", (1, 1, 2), 64, 64, 8192, "float32", "row"),
    "none float32": Memory("no decay", (4, 2, 2), 64, 128, 500, "float32", "row"),
    "constant float32": Memory("constant decay", (2, 2, 2), 128, 128, 1024, "float32", "row"),
    "scalar float32": Memory("scalar decay", (4, 2, 2), 128, 128, 600, "float32", "documents"),
    "scalar float32 wide": Memory("scalar decay", (2, 1, 2), 256, 256, 600, "float32", "documents"),
    "scalar float32 strong": Memory("scalar decay", (2, 2, 4), 64, 64, 1100, "float32", "documents", "strong"),
    "key float32": Memory("key decay", (4, 2, 2), 128, 64, 600, "float32", "documents"),
    "key float32 wide": Memory("key decay", (2, 2, 2), 256, 256, 600, "float32", "documents"),
    "key float32 strong": Memory("key decay", (2, 2, 4), 64, 64, 1100, "float32", "documents", "strong"),
    "bonus float32": Memory("key decay and bonus", (2, 2, 2), 128, 64, 600, "float32", "documents"),
    "value float32": Memory("value decay", (2, 1, 2), 128, 64, 600, "float32", "documents"),
    "delta float32": Memory("delta rule", (4, 2, 2), 64, 128, 500, "float32", "documents"),
    "gated delta float32": Memory("gated delta rule", (2, 2, 4), 128, 128, 600, "float32", "documents"),
    "gated delta float32 wide": Memory("gated delta rule", (2, 1, 2), 256, 256, 600, "float32", "documents"),
    "gated delta float32 strong": Memory("gated delta rule", (2, 2, 4), 64, 64, 1100, "float32", "documents", "strong"),
    "gated delta undecayed float32": Memory("undecayed delta rule", (2, 2, 4), 128, 128, 600, "float32", "documents"),
    "kda float32": Memory("kda", (4, 2, 2), 128, 64, 600, "float32", "documents"),
    "kda float32 wide": Memory("kda", (2, 2, 2), 256, 256, 600, "float32", "documents"),
    "rwkv7 float32": Memory("rwkv7", (4, 2, 2), 64, 64, 600, "float32", "documents"),
    "rwkv7 float32 wide": Memory("rwkv7", (2, 2, 2), 256, 256, 600, "float32", "documents"),
}  # fmt: skip
"""Checked calls by name."""
DELTA = ("delta rule", "gated delta rule", "undecayed delta rule", "kda", "rwkv7")
"""The names of the ops with a delta rule."""


def check(name: str) -> dict[str, Any]:
    """Return the errors of one of `CHECKS` against the step-by-step form in float32, with the Triton kernels compiled as `launch` says."""
    return judged(call_of(CHECKS[name]), "triton")


def call_of(case: Memory) -> Compared:
    """Return the call of one of `CHECKS`."""
    (heads, key_heads, memories), key_dim, value_dim = case.heads, case.key_dim, case.value_dim
    op, length, dtype = case.op, case.length, case.dtype
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    x = dict(
        q=normal(2, length, heads, key_dim, dtype=dtype),
        k=normal(2, length, key_heads, key_dim, dtype=dtype),
        v=normal(2, length, memories, value_dim, dtype=dtype),
    )
    constant = jnp.log1p(-(2.0 ** (-5 - jnp.arange(memories)))) if "constant" in op else None
    if op not in ("no decay", "constant decay", "delta rule"):
        width = {"scalar": (), "gated": (), "undecayed": (), "value": (value_dim,)}.get(
            op.split()[0], (key_dim,)
        )
        gate = jax.nn.log_sigmoid(normal(2, length, memories, *width) + 3)
        gate = (
            jnp.where(gate < -0.2, -30.0, gate)
            if case.decays == "strong"
            else gate * (20 if case.decays == "steep" else 1)
        )
        x["value_log_decay" if "value" in op else "log_decay"] = gate
    if "bonus" in op:
        x["bonus"] = normal(memories, key_dim)
    if op in DELTA:
        wide = x["k"].astype(jnp.float32)
        unit = wide / jnp.linalg.norm(wide, axis=-1, keepdims=True)
        strength = jax.nn.sigmoid(normal(*x["k"].shape))
        if op == "rwkv7":
            vectors = dict(k=unit * strength, a=-unit, b=unit * strength)
            x |= {n: y.astype(dtype) for n, y in vectors.items()}
        else:
            x |= dict(k=unit.astype(dtype), beta=2 * jax.nn.sigmoid(normal(2, length, memories)))
    function: Any = ops.linear_memory
    empty: Any = ops.linear_state
    if op in DELTA:
        function, empty = ops.dplr_memory if op == "rwkv7" else ops.delta_memory, ops.delta_state
    if op == "undecayed delta rule":
        function = functools.partial(function, erase="undecayed")
    several = (4,) if case.states == "segments" else ()
    x["memory"] = normal(2, *several, memories, key_dim, value_dim)
    marks: dict[str, Any] = {}
    if case.states == "documents":
        marks["segment_ids"] = jnp.asarray(np.cumsum(rng.random((2, length)) < 0.01, axis=1) + 1)
    if case.states == "segments":
        ids = np.repeat([1, 2, 1, 0, 4], [700, 5, 300, 30, length - 1035])
        marks["segment_ids"] = jnp.asarray(np.stack([ids, ids]), jnp.int32)
    if marks:
        marks["update_mask"] = jnp.asarray(rng.random((2, length)) < 0.9)

    def run(implementation, x):
        x = dict(x)
        memory = x.pop("memory")
        state = empty(2, *memory.shape[-3:])._replace(memory=memory)
        if case.states == "documents":
            state = state._replace(segment_id=jnp.ones(2, jnp.int32))
        if constant is not None:
            x["log_decay"] = constant
        form = "recurrent" if implementation == "xla" else "chunk"
        output, state = function(**x, **marks, initial_state=state, form=form, implementation=implementation)  # fmt: skip
        return output, state.memory

    output_heads = max(heads, memories)
    cotangents = normal(2, length, output_heads, value_dim, dtype=dtype), normal(*x["memory"].shape)
    return Compared(run, x, cotangents, tf32=dtype == "float32")
