"""Run the Triton kernels of linear attention in Triton's interpreter, on a CPU with numpy, and compare them with the recurrence.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_interpreted [CASE ...]

Prints a line of JSON for each case of `CASES`: its name, the relative RMS error of the output, of the final memory and of every gradient,
and the number of outputs before a token that change when the token and later ones change. The interpreter must be switched on
before Triton is imported, so that it has a process of its own; `tests/kernels/test_linear_attention_triton.py` starts it.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Case(NamedTuple):
    """Sizes and options of one call of `linear_memory`.

    Attributes:
        decay: "none", "constant", "token", "channel", "bonus" (channel with a bonus) or "value".
        heads: numbers of heads of q, of k and of v.
        key_dim: number of key channels, K.
        value_dim: number of value channels, V.
        length: number of tokens of each row, T.
        dtype: dtype of q, k and v.
        states: "row" (one document), "documents" (several, with a mask) or "segments" (one state each, with a mask).
        strong: whether some decays are e^-30 and others 0; or the factor of the log decay.
        gradients: the size of the gradients of the output and of the final memory.
    """

    decay: str
    heads: tuple[int, int, int] = (1, 1, 1)
    key_dim: int = 64
    value_dim: int = 64
    length: int = 100
    dtype: str = "float32"
    states: str = "row"
    strong: float = False
    gradients: float = 1.0


CASES = {
    "none": Case("none", (2, 1, 1), 64, 128, 65),
    "constant": Case("constant", (1, 1, 2), dtype="bfloat16"),
    "token": Case("token", (1, 1, 2), 128, 64, 130, states="documents"),
    "token, bfloat16": Case("token", dtype="bfloat16", states="documents"),
    "token, float32": Case("token", length=65),
    "token, float16": Case("token", dtype="float16"),
    "token, strong": Case("token", states="documents", strong=True),
    "token, segments": Case("token", length=200, states="segments"),
    "none, segments": Case("none", (2, 1, 1), length=200, states="segments", dtype="bfloat16"),
    "token, wide": Case("token", (1, 1, 1), 256, 256, 65),
    "token, joined": Case("token", (2, 1, 2), 128, 64, 130, states="documents"),
    "none, joined": Case("none", (2, 1, 1), 64, 128, 65),
    "constant, joined": Case("constant", (1, 1, 2), 128, 64, 130, states="documents"),
    "constant, steep, joined": Case("constant", (1, 1, 2), dtype="bfloat16", strong=4),
    "constant, small gradients, joined": Case("constant", (1, 1, 2), strong=3, gradients=1e-30),
    "token, strong, joined": Case("token", states="documents", strong=True),
    "token, segments, joined": Case("token", (1, 1, 2), length=200, states="segments"),
    "token, parts": Case("token", (2, 1, 1), length=256, states="documents"),
    "channel": Case("channel", (1, 1, 2), 128, 64, 130, states="documents"),
    "channel, bfloat16": Case("channel", dtype="bfloat16", states="documents"),
    "channel, float32": Case("channel", length=65),
    "channel, float16": Case("channel", dtype="float16"),
    "channel, strong": Case("channel", states="documents", strong=True),
    "channel, steep": Case("channel", strong=8),
    "channel, one chunk steep": Case("channel", strong=2),
    "channel, segments": Case("channel", length=200, states="segments"),
    "channel, parts": Case("channel", length=250, states="documents"),
    "bonus, parts": Case("bonus", (1, 1, 2), length=250),
    "channel, queries": Case("channel", (2, 1, 1), 64, 512, 65),
    "bonus": Case("bonus", (2, 1, 1), length=130, states="documents"),
    "bonus, bfloat16": Case("bonus", dtype="bfloat16"),
    "bonus, float32": Case("bonus", length=65),
    "bonus, float16": Case("bonus", length=65, dtype="float16"),
    "bonus, steep": Case("bonus", (1, 1, 2), strong=8),
    "bonus, one chunk steep": Case("bonus", strong=2, dtype="bfloat16"),
    "bonus, segments": Case("bonus", length=200, states="segments", dtype="bfloat16"),
    "value": Case("value", (2, 1, 1), 64, 128, 130, states="documents"),
    "value, float32": Case("value", length=65),
    "value, bfloat16": Case("value", (1, 1, 2), dtype="bfloat16"),
    "value, float16": Case("value", (1, 1, 1), 128, 64, 65, dtype="float16"),
    "value, strong": Case("value", states="documents", strong=True),
    "value, segments": Case("value", length=200, states="segments"),
}
"""Cases by name. Those whose name ends with "parts" are computed in parts of 64 tokens, and those with "joined" by the kernel
`joined_gradients`, which is the default for bfloat16."""


def inputs_of(case: Case) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Return the arrays that are differentiated, with the initial memory as "memory", and the segment ids and mask."""
    rng = np.random.default_rng(0)
    batch, (heads, key_heads, memories) = 2 if case.states == "documents" else 1, case.heads

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    rows = batch, case.length
    x = dict(
        q=normal(*rows, heads, case.key_dim),
        k=normal(*rows, key_heads, case.key_dim) * 0.3,
        v=normal(*rows, memories, case.value_dim),
    )
    x = {n: a.astype(case.dtype) for n, a in x.items()}
    channels: Any = {"token": (), "channel": (case.key_dim,), "bonus": (case.key_dim,), "value": (case.value_dim,)}  # fmt: skip
    if case.decay in channels:
        gate = jax.nn.log_sigmoid(normal(*rows, memories, *channels[case.decay]) + 2)
        if case.strong is True:
            gate = jnp.asarray(rng.choice([0.0, -1e-3, -30.0], size=gate.shape), jnp.float32)
        elif case.strong:
            gate *= case.strong
        x["value_log_decay" if case.decay == "value" else "log_decay"] = gate
    if case.decay == "bonus":
        x["bonus"] = normal(memories, case.key_dim)
    states = (4,) if case.states == "segments" else ()
    x["memory"] = 0.3 * normal(batch, *states, memories, case.key_dim, case.value_dim)
    marks: dict[str, Any] = {}
    if case.states == "segments":
        # State 3 has no token, segment 1 continues after segment 2, and there is padding.
        ids = np.repeat([1, 2, 1, 0, 4], [70, 5, 40, 5, case.length - 120])
        marks["segment_ids"] = jnp.asarray(ids[None], jnp.int32)
    if case.states == "documents":
        starts = np.isin(np.arange(case.length), [20, 21, 63, 64, 90, 256, 300, 384])
        ids = np.stack([1 + np.cumsum(starts), np.ones(case.length, int)])
        ids[0, 30:33] = 0
        marks["segment_ids"] = jnp.asarray(ids, jnp.int32)
    if marks:
        marks["update_mask"] = jnp.asarray(rng.random(rows) < 0.9)
    return x, marks


def run(case: Case, x, marks, **options):
    """Return the output and the final memory of `linear_memory` for arrays of `inputs_of`."""
    from lsm_jax import ops

    x = dict(x)
    memory = x.pop("memory")
    empty = ops.linear_state(len(memory), *memory.shape[-3:])
    state = empty._replace(memory=memory)
    if case.states == "documents":
        state = state._replace(segment_id=jnp.ones(len(memory), jnp.int32))
    if case.decay == "constant":
        x["log_decay"] = jnp.log1p(-(2.0 ** (-2 - jnp.arange(case.heads[2])))) * (case.strong or 1)
    output, state = ops.linear_memory(initial_state=state, **x, **marks, **options)
    return output, state.memory


def error(actual, expected) -> float:
    """Return the RMS of the difference of two arrays relative to the RMS of `expected`, or to 1 if that is 0."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    size = np.sqrt(np.mean(expected**2)) or 1.0
    return float(np.sqrt(np.mean((actual - expected) ** 2)) / size)


def compare(case: Any, inputs_of=inputs_of, run=run) -> dict[str, float]:
    """Return the errors of one case, and the number of its outputs that are not causal."""
    x, marks = inputs_of(case)

    def fused(x):
        return run(case, x, marks, implementation="triton")

    def recurrent(x):
        return run(case, x, marks, implementation="xla", form="recurrent")

    actual, pull = jax.vjp(fused, x)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), x)
    expected, wanted_pull = jax.vjp(recurrent, wide)
    rng = np.random.default_rng(1)
    size = getattr(case, "gradients", 1.0)
    cotangents = [jnp.asarray(size * rng.normal(size=a.shape), a.dtype) for a in actual]
    (gradients,) = pull(tuple(cotangents))
    (wanted,) = wanted_pull(tuple(a.astype(jnp.float32) for a in cotangents))
    errors = dict(
        output=error(actual[0], expected[0]), final=error(actual[1], expected[1]),
    )  # fmt: skip
    errors |= {f"d_{n}": error(a, wanted[n]) for n, a in gradients.items()}
    place = case.length * 2 // 3
    changed = {n: a if n in ("memory", "bonus") else a.at[:, place:].multiply(2) for n, a in x.items()}  # fmt: skip
    outputs = [np.asarray(run(case, y, marks, implementation="triton")[0])[:, :place] for y in (x, changed)]  # fmt: skip
    return errors | dict(not_causal=int(np.sum(outputs[0] != outputs[1])))


def main() -> None:
    """Compare the cases that the command line names, or all."""
    from pallas_kernels.hopper import row_layout
    from pallas_kernels.linear_attention.triton import (
        channel_decay,
        scalar_decay,
        tilings,
        value_decay,
    )
    from pallas_kernels.triton.host import compute_bfloat16_exactly

    # Without jit: a compiled program waits for its callbacks in the threads that they need.
    module = importlib.import_module("lsm_jax.ops.linear.linear_memory")
    module.run = module.run.__wrapped__
    compute_bfloat16_exactly()
    for module in (channel_decay, scalar_decay, value_decay):
        module.REQUIREMENTS = ()  # float32 too, whose products are exact here
    shortest = row_layout._SHORTEST_PART
    for name in sys.argv[1:] or CASES:
        row_layout._SHORTEST_PART = 64 if name.endswith("parts") else shortest
        tilings.JOINED["float32"] = (64, 128) if name.endswith("joined") else ()
        print(json.dumps(dict(case=name, **compare(CASES[name]))), flush=True)


if __name__ == "__main__":
    main()
