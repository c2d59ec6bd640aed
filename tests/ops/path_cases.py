"""`path_attention` (attention with products of the tokens' matrices as positions): its test cases, inputs and definition."""

from __future__ import annotations

import numpy as np

from lsm_jax import ops
from tests.ops.cases import KEY_DIM, VALUE_DIM, Case, Family, _at, make_qkv, make_random_state

CASES = [
    Case("path_attention", heads=(4, 2, 2), core=True),
    Case("path_attention", ("forget",), heads=(4, 1, 2)),
    Case("path_attention", ("constant_forget",), heads=(1, 1, 2)),
]


def _inputs(case, rng, shape, log_decay):
    inputs, heads = make_qkv(case, rng, shape), max(case.heads)
    w = rng.normal(size=inputs["k"].shape)
    inputs["w"] = w / np.linalg.norm(w, axis=-1, keepdims=True)
    inputs["beta"] = rng.uniform(0, 2, size=(*shape, case.heads[2]))
    if case.arrays:
        inputs["log_forget"] = log_decay(
            *(() if "constant_forget" in case.arrays else shape), heads
        )
    return inputs


def _state(case, batch, *, capacity, **options):
    if case.arrays:
        options["forget_heads"] = max(case.heads)
    return ops.path_attention_state(batch, capacity, case.heads[2], KEY_DIM, VALUE_DIM, **options)


def _used(case, state):
    """Return the state with three random tokens, and nothing in the other places."""
    filled = make_random_state(state)
    place = np.arange(state.keys.shape[-3]) < 3

    def stored(x):
        return x * place[:, None] if x.ndim < state.keys.ndim else x * place[:, None, None]

    sums = filled.log_forget
    if sums is not None:
        sums = type(sums)(stored(-sums.high), 0 * sums.low)
    return filled._replace(
        keys=stored(filled.keys), values=stored(filled.values), log_forget=sums, count=state.count + 3
    )  # fmt: skip


def _step(case, inputs, leaves, b, t, written):
    """Apply one token: leaves are keys [C, G, K], values, the count, and the two parts of the sums of log gates."""
    heads = inputs["v"].shape[2]
    keys, values, count, *sums = leaves
    count = int(count)
    if written:
        w, beta = _at(inputs["w"], b, t, heads), inputs["beta"][b, t]
        held = np.einsum("cgk,gk->cg", keys, w)
        keys -= (beta * held)[..., None] * w
        keys[count], values[count] = _at(inputs["k"], b, t, heads), inputs["v"][b, t]
        if sums:
            gate = inputs["log_forget"]
            before = sums[0][count - 1] + sums[1][count - 1] if count else 0
            sums[0][count], sums[1][count] = before + (gate if gate.ndim == 1 else gate[b, t]), 0
        count += 1
    leaves[2] = np.array(count)
    q = _at(inputs["q"], b, t, max(heads, case.heads[0])).reshape(heads, -1, KEY_DIM)
    if not count:
        return np.zeros((q.shape[0] * q.shape[1], VALUE_DIM))
    scores = np.einsum("grk,sgk->grs", q, keys[:count]) * KEY_DIM**-0.5
    if sums:
        total = (sums[0] + sums[1])[:count]
        scores += (total[-1] - total).T.reshape(scores.shape)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("grs,sgv->grv", weights, values[:count]).reshape(-1, VALUE_DIM)


FAMILIES = {
    "path_attention": Family(
        ("q", "k", "v", "w", "beta"), _inputs, _state, _step, ("recurrent", "chunk"), used=_used
    )
}
