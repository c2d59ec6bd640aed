"""`block_attention` (attention to selected blocks of tokens): its test cases, inputs and definition."""

from __future__ import annotations

import numpy as np

from lsm_jax import ops
from tests.ops.cases import KEY_DIM, VALUE_DIM, Case, Family, _at, make_qkv, make_random_state

BLOCK, BLOCKS = 4, 3

CASES = [
    Case("block_attention", heads=(4, 2, 2), core=True),
    Case("block_attention", heads=(1, 1, 2)),
]


def _inputs(case, rng, shape, log_decay):
    return make_qkv(case, rng, shape)


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
    return inputs | dict(block_size=BLOCK, num_blocks=BLOCKS)


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
    output = np.zeros((*q.shape[:2], VALUE_DIM))
    own = (count - 1) // BLOCK
    for g in range(heads):
        for r in range(q.shape[1]):
            means = [keys[n * BLOCK : (n + 1) * BLOCK, g].mean(axis=0) for n in range(own)]
            best = sorted(range(own), key=lambda n: -(q[g, r] @ means[n]))[: BLOCKS - 1]
            index = [s for s in range(count) if s // BLOCK in (*best, own)]
            if not index:
                continue
            scores = keys[index, g] @ q[g, r] * KEY_DIM**-0.5
            weights = np.exp(scores - scores.max())
            output[g, r] = weights / weights.sum() @ values[index, g]
    return output.reshape(-1, VALUE_DIM)


FAMILIES = {
    "block_attention": Family(
        ("q", "k", "v"), _inputs, _state, _step, ("recurrent", "chunk"), pack=_pack, used=_used
    )
}
