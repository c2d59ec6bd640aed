"""`block_attention` and `native_sparse_attention` (attention to selected blocks of tokens): their test cases, inputs and
definitions.
"""

from __future__ import annotations

import numpy as np

from lsm_jax import ops
from tests.ops.cases import KEY_DIM, VALUE_DIM, Case, Family, _at, make_qkv, make_random_state

BLOCK, BLOCKS, WINDOW = 4, 4, 5

CASES = [
    Case("block_attention", heads=(4, 2, 2)),
    Case("block_attention", heads=(1, 1, 2)),
    Case("native_sparse_attention", heads=(4, 1, 2)),
]


def _inputs(case, rng, shape, log_decay):
    inputs = make_qkv(case, rng, shape)
    if case.op == "native_sparse_attention":
        inputs["gates"] = rng.uniform(0, 1, size=(*shape, max(case.heads), 3))
    return inputs


def _state(case, batch, *, capacity, **options):
    return ops.attention_state(batch, capacity, case.heads[2], KEY_DIM, VALUE_DIM, **options)


def _used(case, state):
    """Return the state with six random tokens, and nothing in the other places."""
    filled = make_random_state(state)
    place = (np.arange(state.keys.shape[-3]) < 6)[:, None, None]
    return filled._replace(
        keys=filled.keys * place, values=filled.values * place, count=state.count + 6
    )


def _pack(case, inputs):
    window = {} if case.op == "block_attention" else {"window": WINDOW}
    return inputs | dict(block_size=BLOCK, num_blocks=BLOCKS) | window


def _step(case, inputs, leaves, b, t, written):
    """Apply one token: leaves are keys [C, G, K], values [C, G, V] and the count."""
    heads = inputs["v"].shape[2]
    keys, values, count = leaves
    count = int(count)
    if written:
        keys[count], values[count] = _at(inputs["k"], b, t, heads), inputs["v"][b, t]
        count += 1
    leaves[2] = np.array(count)
    q = _at(inputs["q"], b, t, max(heads, case.heads[0])).reshape(heads, -1, KEY_DIM)
    if case.op == "block_attention":
        return _by_means(q, keys[:count], values[:count])
    return _three_kinds(q, keys[:count], values[:count], inputs["gates"][b, t])


def _attention(q, keys, values):
    """Return softmax attention of one query [K] to keys [S, K] and values [S, V], and its weights; 0 if S is 0."""
    if not len(keys):
        return np.zeros(VALUE_DIM), np.zeros(0)
    scores = keys @ q * KEY_DIM**-0.5
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights @ values, weights


def _means(x, blocks):
    return x[: blocks * BLOCK].reshape(blocks, BLOCK, x.shape[-1]).mean(axis=1)


def _by_means(q, keys, values):
    """Return MoBA's output for queries [G, R, K]."""
    output, count = np.zeros((*q.shape[:2], VALUE_DIM)), len(keys)
    own = (count - 1) // BLOCK
    for g in range(q.shape[0]):
        for r in range(q.shape[1]):
            scores = _means(keys[:, g], max(own, 0)) @ q[g, r]
            best = np.argsort(-scores, kind="stable")[: BLOCKS - 1]
            index = [s for s in range(count) if s // BLOCK in (*best, own)]
            output[g, r] = _attention(q[g, r], keys[index, g], values[index, g])[0]
    return output.reshape(-1, VALUE_DIM)


def _three_kinds(q, keys, values, gates):
    """Return NSA's output for queries [G, R, K] and gates [H, 3]."""
    output, count = np.zeros((*q.shape[:2], 3, VALUE_DIM)), len(keys)
    own, complete = (count - 1) // BLOCK, count // BLOCK
    for g in range(q.shape[0]):
        weights = np.zeros(max(own + 1, complete))
        for r in range(q.shape[1]):
            of_blocks = (_means(x[:, g], complete) for x in (keys, values))
            output[g, r, 0], part = _attention(q[g, r], *of_blocks)
            weights[:complete] += part / q.shape[1]
        weights[[n for n in (0, own - 1, own) if 0 <= n < len(weights)]] = 1
        best = np.argsort(-weights, kind="stable")[:BLOCKS]
        index = [s for s in range(count) if s // BLOCK in best]
        for r in range(q.shape[1]):
            output[g, r, 1] = _attention(q[g, r], keys[index, g], values[index, g])[0]
            near = slice(max(0, count - WINDOW), count)
            output[g, r, 2] = _attention(q[g, r], keys[near, g], values[near, g])[0]
    return np.einsum("hx,hxv->hv", gates, output.reshape(-1, 3, VALUE_DIM))


_FORMS = ("recurrent", "chunk")
_QKV = ("q", "k", "v")
FAMILIES = {
    op: Family(names, _inputs, _state, _step, _FORMS, pack=_pack, used=_used)
    for op, names in (("block_attention", _QKV), ("native_sparse_attention", (*_QKV, "gates")))
}
