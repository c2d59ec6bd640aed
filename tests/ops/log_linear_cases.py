"""`log_linear_memory` (a memory for each power of two of tokens into the past): its test cases, inputs and definition."""

from __future__ import annotations

import numpy as np

from lsm_jax import ops
from tests.ops.cases import (
    KEY_DIM,
    VALUE_DIM,
    Case,
    Family,
    _at,
    _decays,
    make_decays,
    make_qkv,
    make_random_state,
)

LEVELS = 5  # fewer than rows of 37 tokens require: the last contains several

CASES = [
    Case("log_linear_memory", heads=(2, 1, 2)),
    Case("log_linear_memory", ("decay",), heads=(4, 1, 2)),
    Case("log_linear_memory", ("beta",)),
    Case("log_linear_memory", ("decay", "beta"), heads=(1, 1, 2), core=True),
]


def _inputs(case, rng, shape, log_decay):
    inputs = make_qkv(case, rng, shape) | make_decays(case, shape, log_decay)
    inputs["level_scales"] = rng.uniform(0, 1, size=(*shape, max(case.heads), LEVELS))
    if "beta" in case.arrays:
        inputs["k"] = inputs["k"] / np.linalg.norm(inputs["k"], axis=-1, keepdims=True)
        inputs["beta"] = rng.uniform(0, 2, size=(*shape, case.heads[2]))
    return inputs


def _state(case, batch, *, capacity, **options):
    return ops.log_linear_state(batch, case.heads[2], LEVELS, KEY_DIM, VALUE_DIM, **options)


def _used(case, state):
    """Return the state with random memories after 6 tokens."""
    return make_random_state(state)._replace(position=state.position + 6)


def _step(case, inputs, leaves, b, t, written):
    """Apply one token: leaves are the memories [G, L, K, V] and the number of tokens so far."""
    heads = inputs["v"].shape[2]
    k, v = _at(inputs["k"], b, t, heads), inputs["v"][b, t]
    query_heads = max(heads, case.heads[0])
    q = _at(inputs["q"], b, t, query_heads).reshape(heads, -1, KEY_DIM) * KEY_DIM**-0.5
    if written:
        memory, position = leaves[0].copy(), int(leaves[1])
        if position:
            zeros = (position & -position).bit_length() - 1
            target = min(zeros + 1, LEVELS - 1)
            merged = memory[:, : target + 1].sum(axis=1)
            memory[:, :target] = 0
            memory[:, target] = merged
        memory = _decays(inputs, b, t)[:, None] * memory
        beta = inputs["beta"][b, t][:, None] if "beta" in inputs else None
        if beta is not None:
            held = np.einsum("gk,glkv->glv", beta * k, memory)
            memory, k = memory - np.einsum("gk,glv->glkv", k, held), beta * k
        memory[:, 0] += k[:, :, None] * v[:, None, :]
        leaves[0], leaves[1] = memory, np.array(position + 1)
    scales = inputs["level_scales"][b, t].reshape(heads, -1, LEVELS)
    return np.einsum("grl,grk,glkv->grv", scales, q, leaves[0]).reshape(-1, VALUE_DIM)


FAMILIES = {
    "log_linear_memory": Family(
        ("q", "k", "v", "level_scales"), _inputs, _state, _step, ("recurrent", "chunk"), used=_used
    )
}
