"""`slot_memory` (GSA's memory of slots, read by a softmax over the slots): its test cases, inputs and
definition.
"""

from __future__ import annotations

import numpy as np

from lsm_jax import ops
from tests.ops.cases import KEY_DIM, VALUE_DIM, Case, Family, _at, make_qkv

SLOTS = 5

CASES = [
    Case("slot_memory", heads=(2, 1, 2)),
    Case("slot_memory", ("slot_decay",), heads=(4, 1, 2), core=True),
    Case("slot_memory", ("slot_decay",), heads=(1, 1, 2)),
]


def _inputs(case, rng, shape, log_decay):
    slots = (*shape, case.heads[2], SLOTS)
    inputs = make_qkv(case, rng, shape) | {"s": rng.uniform(0, 1, size=slots)}
    return inputs | ({"log_decay": log_decay(*slots)} if case.arrays else {})


def _state(case, batch, *, capacity, **options):
    return ops.slot_state(batch, case.heads[2], SLOTS, KEY_DIM, VALUE_DIM, **options)


def _step(case, inputs, leaves, b, t, written):
    heads = inputs["v"].shape[2]
    k, v, s = _at(inputs["k"], b, t, heads), inputs["v"][b, t], inputs["s"][b, t]
    q = _at(inputs["q"], b, t, max(heads, case.heads[0])) * KEY_DIM**-0.5
    if written:
        alpha = np.exp(inputs["log_decay"][b, t]) if case.arrays else np.ones_like(s)
        leaves[0] = leaves[0] * alpha[:, None, :] + k[:, :, None] * s[:, None, :]
        leaves[1] = leaves[1] * alpha[:, :, None] + s[:, :, None] * v[:, None, :]
    scores = np.einsum("grk,gkm->grm", q.reshape(heads, -1, KEY_DIM), leaves[0])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("grm,gmv->grv", weights, leaves[1]).reshape(-1, VALUE_DIM)


FAMILIES = {"slot_memory": Family(("q", "k", "v", "s"), _inputs, _state, _step)}
