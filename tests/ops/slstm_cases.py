"""`slstm_memory` (xLSTM's scalar memory): its test cases, inputs and definition."""

from __future__ import annotations

import numpy as np

from lsm_jax import ops
from tests.ops.cases import KEY_DIM, Case, Family, make_random_state

CASES = [Case("slstm_memory", core=True)]


def _inputs(case, rng, shape, log_decay):
    gates = {n: 2 * rng.normal(size=(*shape, 2, KEY_DIM)) for n in "oifz"}
    return gates | {"recurrent": 0.5 * rng.normal(size=(2, KEY_DIM, 4, KEY_DIM))}


def _state(case, batch, *, capacity, **options):
    return ops.slstm_state(batch, 2, KEY_DIM, **options)


def _used(case, state):
    return make_random_state(state)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _step(case, inputs, leaves, b, t, written):
    """Apply one token: the leaves are y, c, n and m."""
    y, c, n, m = leaves
    i, f, z, o = (
        inputs[name][b, t] + np.einsum("gk,gkl->gl", y, inputs["recurrent"][:, :, gate])
        for gate, name in enumerate("ifzo")
    )
    if written:
        kept = m + np.log(_sigmoid(f))
        top = np.where(n == 0, i, np.maximum(i, kept))
        c = np.exp(kept - top) * c + np.exp(i - top) * np.tanh(z)
        n = np.exp(kept - top) * n + np.exp(i - top)
        output = _sigmoid(o) * c / n
        leaves[:] = [output, c, n, top]
        return output
    return _sigmoid(o) * c / np.where(n == 0, 1, n)


FAMILIES = {
    "slstm_memory": Family(
        ("o", "i", "f", "z", "recurrent"), _inputs, _state, _step, (None,), used=_used
    )
}
