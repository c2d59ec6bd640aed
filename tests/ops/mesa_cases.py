"""`mesa_memory` (ridge regression of values on keys): its test cases, inputs and definition by a direct solver."""

from __future__ import annotations

import jax.numpy as jnp
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

CASES = [
    Case("mesa_memory", heads=(2, 1, 2)),
    Case("mesa_memory", ("decay",), heads=(4, 1, 2)),
    Case("mesa_memory", ("decay", "start"), heads=(1, 1, 2)),
]


def _inputs(case, rng, shape, log_decay):
    inputs = make_qkv(case, rng, shape) | make_decays(case, shape, log_decay)
    inputs["k"] = inputs["k"] / np.linalg.norm(inputs["k"], axis=-1, keepdims=True)
    inputs["beta"] = rng.uniform(0, 1, size=(*shape, case.heads[2]))
    return inputs | {"regularizer": rng.uniform(1, 2, size=(case.heads[2], KEY_DIM))}


def _state(case, batch, *, capacity, **options):
    return ops.mesa_state(batch, case.heads[2], KEY_DIM, VALUE_DIM, **options)


def _used(case, state):
    """Return the state with a random positive matrix of keys."""
    state = make_random_state(state)
    return state._replace(keys=jnp.matmul(state.keys, jnp.swapaxes(state.keys, -1, -2)) / KEY_DIM)


def _pack(case, inputs):
    return inputs | ({"start": "diagonal"} if "start" in case.arrays else {})


def _step(case, inputs, leaves, b, t, written):
    heads = inputs["v"].shape[2]
    k, v = _at(inputs["k"], b, t, heads), inputs["v"][b, t]
    q = _at(inputs["q"], b, t, max(heads, case.heads[0])).reshape(heads, -1, KEY_DIM)
    if written:
        weighed = inputs["beta"][b, t][:, None] * k
        for leaf, x in enumerate((k, v)):
            kept = _decays(inputs, b, t) * leaves[leaf]
            leaves[leaf] = kept + weighed[:, :, None] * x[:, None, :]
    matrix = leaves[0] + np.eye(KEY_DIM) * inputs["regularizer"][:, None, :]
    solved = np.linalg.solve(matrix[:, None], q[..., None])[..., 0]
    return np.einsum("grk,gkv->grv", solved, leaves[1]).reshape(-1, VALUE_DIM)


FAMILIES = {
    "mesa_memory": Family(
        ("q", "k", "v", "beta", "regularizer"), _inputs, _state, _step, pack=_pack, used=_used
    )
}
