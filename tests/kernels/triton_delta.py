"""Calls of `delta_memory` and `dplr_memory` with which their Triton kernels are compared with the recurrence, on a CPU in Triton's
interpreter.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_delta [CASE ...]

Prints a line of JSON for each case, as `tests.kernels.triton_interpreted` does for `linear_memory`, with the number of parts of a row.
`tests/kernels/test_delta_rule_triton.py` starts it.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels import triton_interpreted


class Case(NamedTuple):
    """Sizes and options of one call of `delta_memory` or `dplr_memory`.

    Attributes:
        decay: "none", "constant", "token" or "channel".
        heads: numbers of heads of q, of k and of v.
        key_dim: number of key channels, K.
        value_dim: number of value channels, V.
        length: number of tokens of each row, T.
        dtype: dtype of q, k and v.
        states: "row" (one document), "documents" (several, with a mask) or "segments" (one state each, with a mask).
        strong: whether some decays are e^-30 and others 0; or the factor of the log decay.
        alike: whether all keys are near to each other, as in a trained model.
        low_rank: whether the op is `dplr_memory`.
        erase: "decayed" or "undecayed", the memory that keys of `delta_memory` read.
    """

    decay: str
    heads: tuple[int, int, int] = (1, 1, 1)
    key_dim: int = 64
    value_dim: int = 64
    length: int = 100
    dtype: str = "float32"
    states: str = "row"
    strong: float = False
    alike: bool = False
    low_rank: bool = False
    erase: str = "decayed"


CASES = {
    "none": Case("none", (2, 1, 1), 64, 128, 65),
    "none, alike": Case("none", alike=True),
    "none, alike, bfloat16": Case("none", dtype="bfloat16", alike=True),
    "none, segments": Case("none", (2, 1, 1), length=200, states="segments", dtype="bfloat16"),
    "constant": Case("constant", (1, 1, 2), dtype="bfloat16"),
    "token": Case("token", (1, 1, 2), 128, 64, 130, states="documents"),
    "token, bfloat16": Case("token", length=200, dtype="bfloat16", states="documents"),
    "token, row, bfloat16": Case("token", length=65, dtype="bfloat16"),
    "token, float32": Case("token", length=65),
    "token, float16": Case("token", dtype="float16"),
    "token, strong": Case("token", states="documents", strong=True),
    "token, segments": Case("token", length=200, states="segments"),
    "token, wide": Case("token", (1, 1, 1), 256, 512, 65),
    "undecayed": Case("token", (2, 1, 2), 64, 128, 130, states="documents", erase="undecayed"),
    "undecayed, float32": Case("token", length=65, erase="undecayed"),
    "undecayed, bfloat16": Case("token", dtype="bfloat16", erase="undecayed"),
    "undecayed, float16": Case("constant", (1, 1, 2), dtype="float16", erase="undecayed"),
    "undecayed, strong": Case("token", states="documents", strong=True, erase="undecayed"),
    "undecayed, steep": Case("token", states="documents", strong=100, erase="undecayed"),
    "undecayed, segments": Case("token", length=200, states="segments", erase="undecayed"),
    "undecayed, wide": Case("token", (1, 1, 1), 256, 512, 65, erase="undecayed"),
    "channel": Case("channel", (1, 1, 2), 128, 64, 130, states="documents"),
    "channel, queries": Case("channel", (2, 1, 1), 64, 128, 65, states="documents"),
    "channel, alike, bfloat16": Case("channel", dtype="bfloat16", alike=True),
    "channel, bfloat16": Case("channel", dtype="bfloat16", states="documents"),
    "channel, float32": Case("channel", length=65),
    "channel, float16": Case("channel", dtype="float16"),
    "channel, strong": Case("channel", states="documents", strong=True),
    "channel, steep": Case("channel", strong=8),
    "channel, segments": Case("channel", length=200, states="segments"),
    "channel, wide": Case("channel", (1, 1, 1), 256, 256, 65),
    "none, parts": Case("none", length=512, dtype="float32"),
    "none, bfloat16, parts": Case("none", (1, 1, 2), length=512, dtype="bfloat16"),
    "token, parts": Case("token", (2, 1, 1), length=500, states="documents"),
    "token, bfloat16, parts": Case("token", (1, 1, 2), 128, 128, 512, dtype="bfloat16", states="documents"),
    "token, float16, parts": Case("token", length=512, dtype="float16"),
    "token, strong, parts": Case("token", length=512, states="documents", strong=True),
    "undecayed, parts": Case("token", (1, 1, 2), 64, 128, 500, states="documents", erase="undecayed"),
    "channel, parts": Case("channel", (2, 1, 1), 128, 64, 1000, states="documents"),
    "channel, bfloat16, parts": Case("channel", (1, 1, 2), length=512, dtype="bfloat16", states="documents"),
    "channel, strong, parts": Case("channel", length=512, states="documents", strong=True),
    "channel, wide, parts": Case("channel", (1, 1, 1), 256, 256, 512),
    "dplr, parts": Case("channel", (1, 1, 2), 64, 128, 500, states="documents", low_rank=True),
    "dplr, bfloat16, parts": Case("channel", (2, 1, 1), length=512, dtype="bfloat16", low_rank=True),
    "dplr, strong, parts": Case("channel", length=512, states="documents", strong=True, low_rank=True),
    "dplr": Case("channel", (1, 1, 2), 128, 64, 130, states="documents", low_rank=True),
    "dplr, token": Case("token", dtype="bfloat16", low_rank=True),
    "dplr, queries": Case("channel", (2, 1, 1), 64, 128, 65, states="documents", low_rank=True),
    "dplr, bfloat16": Case("channel", dtype="bfloat16", states="documents", low_rank=True),
    "dplr, alike, bfloat16": Case("channel", dtype="bfloat16", alike=True, low_rank=True),
    "dplr, float32": Case("channel", length=65, low_rank=True),
    "dplr, float16": Case("channel", dtype="float16", low_rank=True),
    "dplr, strong": Case("channel", states="documents", strong=True, low_rank=True),
    "dplr, steep": Case("channel", strong=8, low_rank=True),
    "dplr, segments": Case("channel", length=200, states="segments", low_rank=True),
    "dplr, wide": Case("channel", (1, 1, 1), 256, 256, 65, low_rank=True),
}  # fmt: skip
"""Cases by name. Those whose name ends with "parts" are computed in parts of 128 tokens."""


def inputs_of(case: Case) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Return the arrays that are differentiated, with the initial memory as "memory", and the segment ids and mask."""
    linear = triton_interpreted.Case(
        case.decay, case.heads, case.key_dim, case.value_dim, case.length, "float32", case.states, case.strong
    )  # fmt: skip
    x, marks = triton_interpreted.inputs_of(linear)
    rng = np.random.default_rng(2)
    key = x["k"]
    if case.alike:
        key += 0.6 * jnp.asarray(rng.normal(size=(1, 1, *key.shape[2:])), jnp.float32)
    x["k"] = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    if case.low_rank:  # as in RWKV7: a removes what b writes in part
        strength = jax.nn.sigmoid(jnp.asarray(rng.normal(size=x["k"].shape), jnp.float32))
        x |= dict(a=-x["k"], b=x["k"] * strength, k=key * strength)
        return x | {n: x[n].astype(case.dtype) for n in "qkvab"}, marks
    x |= {n: x[n].astype(case.dtype) for n in "qkv"}
    beta = 2 * jax.nn.sigmoid(jnp.asarray(rng.normal(size=x["v"].shape[:3]), jnp.float32))
    return x | dict(beta=beta.at[:, ::9].set(0)), marks


def run(case: Case, x, marks, **options):
    """Return the output and the final memory of the case's op for arrays of `inputs_of`."""
    from lsm_jax import ops

    x = dict(x)
    memory = x.pop("memory")
    state = ops.delta_state(len(memory), *memory.shape[-3:])._replace(memory=memory)
    if case.states == "documents":
        state = state._replace(segment_id=jnp.ones(len(memory), jnp.int32))
    if case.decay == "constant":
        x["log_decay"] = jnp.log1p(-(2.0 ** (-2 - jnp.arange(case.heads[2]))))
    if not case.low_rank:
        options["erase"] = case.erase
    op = ops.dplr_memory if case.low_rank else ops.delta_memory
    output, state = op(initial_state=state, **x, **marks, **options)
    return output, state.memory


def main() -> None:
    """Compare the cases that the command line names, or all."""
    from pallas_kernels.delta_rule.triton import channel_decay, passes, scalar_decay
    from pallas_kernels.dplr.triton import channel_decay as dplr
    from pallas_kernels.hopper import row_layout
    from pallas_kernels.triton.host import compute_bfloat16_exactly

    # Without jit: a compiled program waits for its callbacks in the threads that they need.
    for name in ("delta_memory", "dplr_memory"):
        module: Any = importlib.import_module(f"lsm_jax.ops.delta.{name}")
        module.run = module.run.__wrapped__
    compute_bfloat16_exactly()
    for module in (channel_decay, scalar_decay, dplr):
        module.REQUIREMENTS = ()  # float32 too, whose products are exact here
    parts: list[int] = []
    count = passes.count_parts

    def counted(*x, **options):
        parts.append(count(*x, **options))
        return parts[-1]

    passes.count_parts = counted
    shortest = row_layout._SHORTEST_PART
    for name in sys.argv[1:] or CASES:
        row_layout._SHORTEST_PART = 128 if name.endswith("parts") else shortest
        errors = triton_interpreted.compare(CASES[name], inputs_of, run)
        print(json.dumps(dict(case=name, parts=parts[-1], **errors)), flush=True)


if __name__ == "__main__":
    main()
