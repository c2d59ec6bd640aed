"""The checks of the Triton kernels of attention and slot memory, and attention's inputs for timing, of `python -m benchmarks
triton_kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.calls.compare import Compared, judged
from lsm_jax import ops
from pallas_kernels.forgetting_attention.triton import passes

ATTENTION, SLOTS = "forgetting attention", "slot memory"


class Attention(NamedTuple):
    """One checked call of `attention`.

    Attributes:
        op: the op's name in the benchmark's rows.
        heads: numbers of heads of q and of k and v.
        dim: number of channels of a head.
        length: number of tokens of each row, T.
        dtype: dtype of q, k and v.
        gates: "mild" or "strong"; None is no gates.
        documents: whether rows have several documents and a mask.
        window: the number of last tokens that a query sees, or None.
        stored: the number of tokens of a state that the call continues from, or None.
    """

    op: str
    heads: tuple[int, int]
    dim: int
    length: int
    dtype: str = "bfloat16"
    gates: str | None = "mild"
    documents: bool = False
    window: int | None = None
    stored: int | None = None


class Slots(NamedTuple):
    """One checked call of `slot_memory`, with 64 slots.

    Attributes:
        op: the op's name in the benchmark's rows.
        heads: numbers of heads of q and of v.
        dim: number of key and of value channels of a head.
        length: number of tokens of each row, T.
        dtype: dtype of q, k, v and s.
        documents: whether rows have several documents and a mask.
    """

    op: str
    heads: tuple[int, int]
    dim: int
    length: int
    dtype: str = "bfloat16"
    documents: bool = False


CHECKS: dict[str, Any] = {
    "attention": Attention(ATTENTION, (4, 2), 64, 1000),
    "attention documents": Attention(ATTENTION, (4, 2), 128, 1000, documents=True),
    "attention strong": Attention(ATTENTION, (2, 2), 64, 4096, gates="strong"),
    "attention strong 128": Attention(ATTENTION, (2, 1), 128, 2048, gates="strong", documents=True),
    "attention window": Attention(ATTENTION, (2, 1), 64, 1024, window=300),
    "attention window 128": Attention(ATTENTION, (2, 2), 128, 1024, window=127),
    "attention without gates": Attention(ATTENTION, (4, 1), 128, 700, gates=None, documents=True),
    "attention wide": Attention(ATTENTION, (2, 1), 256, 900, documents=True),
    "attention state": Attention(ATTENTION, (4, 2), 128, 300, stored=500),
    "attention state window": Attention(ATTENTION, (2, 2), 64, 300, stored=500, window=200),
    "attention float16": Attention(ATTENTION, (2, 2), 128, 600, "float16", documents=True),
    "attention float32": Attention(ATTENTION, (2, 1), 128, 600, "float32", documents=True),
    "attention float32 wide": Attention(ATTENTION, (2, 1), 256, 600, "float32", documents=True),
    "slots": Slots(SLOTS, (2, 2), 64, 500),
    "slots documents": Slots(SLOTS, (4, 2), 128, 1100, documents=True),
    "slots float16": Slots(SLOTS, (2, 2), 128, 600, "float16"),
    "slots float32": Slots(SLOTS, (4, 2), 128, 600, "float32", documents=True),
    "slots float32 64": Slots(SLOTS, (2, 2), 64, 500, "float32"),
}
"""Checked calls by name."""


def make_inputs(op: str, shape: str) -> tuple[jax.Array, ...]:
    """Return random q, k, v, the gradient of the output, and the log forget gates, for timing."""
    del op
    batch, length, heads, dim = map(int, shape.split("x"))
    keys = jax.random.split(jax.random.key(0), 5)
    normal = [jax.random.normal(key, (batch, length, heads, dim), jnp.bfloat16) for key in keys[:4]]
    return *normal, jax.nn.log_sigmoid(jax.random.normal(keys[4], (batch, length, heads)) + 3)


def library_call(op: str, implementation: Any) -> Callable[..., jax.Array]:
    """Return `attention` with forget gates, without pruning, as a function of q, k, v and the log gates that returns the output."""
    del op

    def call(q, k, v, log_forget):
        return ops.attention(q, k, v, log_forget=log_forget, prune=False, implementation=implementation)[0]  # fmt: skip

    return call


def set_tiling(word: str, name: str, numbers: list[int]) -> str | None:
    """Change the tiling of an attention kernel for bfloat16 and float16: `name` is KERNEL/CHANNELS and `numbers` are the fields of
    `passes.Tiling`, of which the last ones may be left out. It is that of every capability. Return what is accepted if the word is not
    accepted.
    """
    kernel, _, channels = name.partition("/")
    key = kernel, int(channels) if channels.isdecimal() else 0
    tiling = passes.Tiling(*numbers)
    if key not in passes.TILINGS or not _accepted(kernel, tiling):
        names = ", ".join(f"{kernel}/{dim}" for kernel, dim in passes.TILINGS)
        return (
            f"{word!r}: accepted are {names} = queries:keys:warps:stages[:registers[:parts[:columns[:ahead]]]], with divisors of {passes.TILE} as queries "
            "and keys, and of attend no more keys than queries; only attend has 1, 2 or 4 parts, 1 or 8 columns and 0 or 1 as ahead"
        )
    passes.TILINGS[key] = tiling
    for narrower in (passes.TILINGS_8_0, passes.FEW_REGISTERS_8_0):
        narrower.pop(key, None)
    return None


def _accepted(kernel: str, tiling: passes.Tiling) -> bool:
    """Return whether a kernel of attention can have a tiling."""
    if passes.TILE % tiling.queries or passes.TILE % tiling.keys:
        return False
    own = tiling.parts, tiling.columns, tiling.ahead
    if not kernel.startswith("attend"):
        return own == (1, 1, 0)
    # `attend` moves the running maximum by whole tiles of keys inside one of queries.
    known = tiling.parts in (1, 2, 4) and tiling.columns in (1, 8) and tiling.ahead in (0, 1)
    return tiling.keys <= tiling.queries and known


def check(name: str) -> dict[str, Any]:
    """Return the errors of one of `CHECKS` against XLA in float32, with the Triton kernels compiled as `launch` says."""
    return judged(call_of(CHECKS[name]), "triton")


def call_of(case: Any) -> Compared:
    """Return the call of one of `CHECKS`."""
    run, x = _slots(case) if case.op == SLOTS else _attention(case)
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(functools.partial(run, "xla"), x)
    cotangents = tuple(jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in shapes)
    return Compared(run, x, cotangents, tf32=case.dtype == "float32")


def _marks(documents: bool, length: int, rng) -> dict[str, jax.Array]:
    """Return segment ids and a mask for two rows, or no arguments without `documents`."""
    if not documents:
        return {}
    ids = np.cumsum(rng.random((2, length)) < 0.01, axis=1) + 1
    return dict(segment_ids=jnp.asarray(ids), update_mask=jnp.asarray(rng.random((2, length)) < 0.9))  # fmt: skip


def _attention(case: Attention) -> tuple[Callable[..., tuple], dict[str, jax.Array]]:
    """Return `attention` as a function of an implementation and of arrays by name, and these arrays."""
    rng = np.random.default_rng(0)
    heads, key_heads = case.heads

    def tokens(length):
        sizes = dict(q=heads, k=key_heads, v=key_heads)
        x = {n: jnp.asarray(rng.normal(size=(2, length, h, case.dim)), case.dtype) for n, h in sizes.items()}  # fmt: skip
        if case.gates is not None:
            bias = 3 if case.gates == "mild" else 0
            x["log_forget"] = jax.nn.log_sigmoid(jnp.asarray(rng.normal(size=(2, length, heads)) + bias, jnp.float32))  # fmt: skip
        return x

    state = None
    if case.stored is not None:
        capacity = case.window or case.stored + case.length
        gates = None if case.gates is None else heads
        state = ops.attention_state(
            2, capacity, key_heads, case.dim, case.dim, forget_heads=gates, dtype=jnp.dtype(case.dtype)
        )  # fmt: skip
        _, state = ops.attention(
            **tokens(case.stored), window=case.window, initial_state=state, implementation="xla"
        )
    x, marks = tokens(case.length), _marks(case.documents, case.length, rng)

    def run(implementation, x):
        start = state
        if start is not None:
            start = start._replace(keys=start.keys.astype(x["k"].dtype), values=start.values.astype(x["v"].dtype))  # fmt: skip
        output, _ = ops.attention(
            **x, **marks, window=case.window, initial_state=start, implementation=implementation
        )
        return (output,)

    return run, x


def _slots(case: Slots) -> tuple[Callable[..., tuple], dict[str, jax.Array]]:
    """Return `slot_memory` as a function of an implementation and of arrays by name, and these arrays."""
    rng = np.random.default_rng(0)
    heads, memories = case.heads

    def normal(count, size):
        return jnp.asarray(rng.normal(size=(2, case.length, count, size)), jnp.float32)

    gate = jax.nn.log_sigmoid(normal(memories, 64)) / 8
    x = dict(
        q=normal(heads, case.dim), k=normal(min(heads, memories), case.dim), v=normal(memories, case.dim),
        s=-jnp.expm1(gate),
    )  # fmt: skip
    x = {n: a.astype(case.dtype) for n, a in x.items()} | dict(log_decay=gate)
    marks = _marks(case.documents, case.length, rng)

    def run(implementation, x):
        form = "recurrent" if implementation == "xla" else "chunk"
        output, final = ops.slot_memory(**x, **marks, form=form, implementation=implementation)
        return output, final.keys, final.values

    return run, x
