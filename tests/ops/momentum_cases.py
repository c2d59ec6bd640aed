"""`momentum_memory` (the delta rule with momentum): its test cases, inputs and definition."""

from __future__ import annotations

import numpy as np

from lsm_jax import ops
from tests.ops.cases import KEY_DIM, VALUE_DIM, Case, Family, _at, make_qkv

CASES = [
    Case("momentum_memory", ("decay",), heads=(4, 1, 2), core=True),
    Case("momentum_memory", ("decay", "any_p"), heads=(1, 2, 2)),
]


def _inputs(case, rng, shape, log_decay):
    """Draw random inputs: p is the decayed key, as in the published layer, or with "any_p" an unrelated one."""
    inputs, gates = make_qkv(case, rng, shape), (*shape, case.heads[2])
    k = inputs["k"] / np.linalg.norm(inputs["k"], axis=-1, keepdims=True)
    inputs |= dict(k=k, log_decay=log_decay(*gates), log_momentum=log_decay(*gates))
    inputs["beta"] = rng.uniform(0, 0.5, size=gates)
    inputs["eta"] = rng.uniform(0, 2, size=gates)
    if "any_p" in case.arrays:
        p = rng.normal(size=k.shape)
        return inputs | {"p": 0.3 * p / np.linalg.norm(p, axis=-1, keepdims=True)}
    spread = np.repeat(k, case.heads[2] // case.heads[1], axis=2)
    return inputs | {"p": np.exp(inputs["log_decay"])[..., None] * spread}


def _state(case, batch, *, capacity, **options):
    return ops.momentum_state(batch, case.heads[2], KEY_DIM, VALUE_DIM, **options)


def _step(case, inputs, leaves, b, t, written):
    heads = inputs["v"].shape[2]
    k, p = (_at(inputs[n], b, t, heads) for n in "kp")
    q = _at(inputs["q"], b, t, max(heads, case.heads[0])).reshape(heads, -1, KEY_DIM)
    if written:
        beta, eta, decay, momentum = (
            inputs[n][b, t][:, None, None] for n in ("beta", "eta", "log_decay", "log_momentum")
        )
        error = inputs["v"][b, t] - np.einsum("gk,gkv->gv", p, leaves[0])
        leaves[1] = np.exp(momentum) * leaves[1] - eta * k[:, :, None] * error[:, None, :]
        leaves[0] = np.exp(decay) * leaves[0] - beta * leaves[1]
    return KEY_DIM**-0.5 * np.einsum("grk,gkv->grv", q, leaves[0]).reshape(-1, VALUE_DIM)


FAMILIES = {
    "momentum_memory": Family(
        ("q", "k", "v", "p", "beta", "eta", "log_decay", "log_momentum"), _inputs, _state, _step
    )
}
