"""The calls of attention in the cases of `pallas_kernels.forgetting_attention`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.calls.compare import Compared
from lsm_jax import ops
from lsm_jax.ops.attention.forget_gates import GateSum, sum_gates
from lsm_jax.ops.core.segments import read_tokens
from pallas_kernels.forgetting_attention import forgetting_attention
from pallas_kernels.forgetting_attention.cases import SPLITS, Case

HEADS, KEY_HEADS, DIM = 2, 1, 64
"""The heads of calls with a state."""


def _inputs(case: Case, rng: np.random.Generator) -> tuple[dict[str, jax.Array], Any, Any]:
    """Return q, k, v and the log forget gates of a case on two rows, by name, its segment ids and its mask."""
    (heads, key_heads), dim, length, documents, gates, _ = case
    sizes = dict(q=heads, k=key_heads, v=key_heads)
    x = {
        n: jnp.asarray(rng.normal(size=(2, length, h, dim)), jnp.bfloat16) for n, h in sizes.items()
    }
    if gates is not None:
        gate = jax.nn.log_sigmoid(jnp.asarray(rng.normal(size=(2, length, heads)), jnp.float32) + 3)
        x["log_forget"] = jnp.where(gate < -0.2, -30.0, gate) if gates == "strong" else gate
    ids = mask = None
    if documents is not None:
        ids = jnp.asarray(np.cumsum(rng.random((2, length)) < documents, axis=1) + 1)
        mask = jnp.asarray(rng.random((2, length)) < 0.9)
    return x, ids, mask


def attention(case: Case) -> Compared:
    """Return the call of a case of `attention`."""
    rng = np.random.default_rng(0)
    x, ids, mask = _inputs(case, rng)

    def run(implementation, arrays):
        return ops.attention(
            **arrays, window=case.window, segment_ids=ids, update_mask=mask, implementation=implementation
        )[:1]  # fmt: skip

    d_output = jnp.asarray(rng.normal(size=(2, case.length, case.heads[0], case.dim)), jnp.bfloat16)
    return Compared(run, x, (d_output,))


def parts(case: Case, where: int) -> Compared:
    """Return the call for the queries of one of four devices that share a row: parts `where` and 7 - `where` of eight."""
    rng = np.random.default_rng(0)
    x, ids, mask = _inputs(case, rng)
    part = case.length // 8
    places = jnp.asarray([where, 7 - where], jnp.int32) * part

    def cut_parts(x):
        return jnp.concatenate([x[:, p * part : (p + 1) * part] for p in (where, 7 - where)], 1)

    def plain(q, k, v, log_forget=None):
        output, _ = ops.attention(
            q, k, v, log_forget=log_forget, window=case.window, segment_ids=ids, update_mask=mask,
            implementation="xla",
        )  # fmt: skip
        return (cut_parts(output),)

    def run(implementation, arrays):
        if implementation == "xla":
            return plain(**arrays)
        tokens = read_tokens(ids, mask, jnp.zeros(2, jnp.int32), None)
        sums = None
        if "log_forget" in arrays:
            zero = jnp.zeros((2, case.heads[0]), jnp.float32)
            gates = arrays["log_forget"]
            sums = sum_gates(gates, tokens._replace(run=None), GateSum(zero, zero))
        q, k, v = (arrays[n] for n in "qkv")
        output = forgetting_attention(
            cut_parts(q), k, v, sums, run=tokens.run, written=tokens.written, places=places,
            scale=case.dim**-0.5, window=case.window, implementation=implementation,
        )  # fmt: skip
        return (output,)

    d_output = jnp.asarray(rng.normal(size=(2, 2 * part, case.heads[0], case.dim)), jnp.bfloat16)
    return Compared(run, x, (d_output,), part=(case.length, (where + 1) * part, part))


# ------------------------------------------------------------------------------------------------------------- with a state


def tokens_of(length, seed=0, batch=2, gates=True, dim=DIM):
    """Return random q, k, v and log forget gates by name."""
    rng = np.random.default_rng(seed)
    normal = lambda heads: jnp.asarray(rng.normal(size=(batch, length, heads, dim)), jnp.bfloat16)  # noqa: E731
    arrays = dict(q=normal(HEADS), k=normal(KEY_HEADS), v=normal(KEY_HEADS))
    if gates:
        logits = jnp.asarray(rng.normal(size=(batch, length, HEADS)) + 2, jnp.float32)
        arrays["log_forget"] = jax.nn.log_sigmoid(logits)
    return arrays


def cut(arrays, begin, end):
    """Return the tokens from `begin` to `end` of arrays."""
    return {name: x[:, begin:end] for name, x in arrays.items()}


def empty_state(capacity, gates=True, batch=2, dim=DIM):
    """Return an empty state for the heads of `tokens_of`."""
    heads = HEADS if gates else None
    sizes = (batch, capacity, KEY_HEADS, dim, dim)
    return ops.attention_state(*sizes, forget_heads=heads, dtype=jnp.bfloat16)


def pieces(name: str, implementation: str) -> list[tuple[Any, Any]]:
    """Return (output, state) of an implementation and of XLA for each call of SPLITS[name] but the first, made one after another from the
    state before.
    """
    lengths, capacity, options = SPLITS[name]
    gates, window, dim = options.get("gates", True), options.get("window"), options.get("dim", DIM)
    total = sum(lengths)
    arrays, rng = tokens_of(total, gates=gates, dim=dim), np.random.default_rng(1)
    if options.get("documents"):  # the first row's last document begins in the second piece
        ids = np.stack([np.arange(total) // 85 + 1, np.full(total, 7)])
        ids[1, 40:60] = 0
        arrays["segment_ids"] = jnp.asarray(ids, jnp.int32)
    if options.get("masked"):
        arrays["update_mask"] = jnp.asarray(rng.random((2, total)) < 0.8)
    state, begin = empty_state(capacity, gates, dim=dim), lengths[0]
    call = functools.partial(ops.attention, window=window)
    if begin:
        _, state = call(**cut(arrays, 0, begin), initial_state=state, implementation="xla")
    results = []
    for length in lengths[1:]:
        piece = cut(arrays, begin, begin + length)
        expected = call(**piece, initial_state=state, implementation="xla")
        actual = call(**piece, initial_state=state, implementation=implementation)
        results.append((actual, expected))
        state, begin = actual[1], begin + length
    return results


def state_gradients(implementation: str) -> Any:
    """Return the gradients of the tokens of a call, and of the state that it continues from, with a mask in the earlier call."""
    arrays = tokens_of(160)
    mask = jnp.asarray(np.random.default_rng(1).random((2, 90)) < 0.9)
    first = cut(arrays, 0, 90) | dict(update_mask=mask, implementation="xla")
    _, state = ops.attention(**first, initial_state=empty_state(200))
    weight = tokens_of(70, seed=2)["q"].astype(jnp.float32)

    def loss(piece, state):
        output, _ = ops.attention(**piece, initial_state=state, implementation=implementation)
        return jnp.sum(weight * output)

    return jax.grad(loss, argnums=(0, 1), allow_int=True)(cut(arrays, 90, 160), state)
