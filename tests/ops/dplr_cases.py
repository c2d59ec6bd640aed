"""`dplr_memory` (a memory with a diagonal plus low-rank transition): its test cases, inputs and definition."""

from __future__ import annotations

import numpy as np

from tests.ops.cases import (
    KEY_DIM,
    VALUE_DIM,
    Case,
    Family,
    _at,
    _decays,
    _delta_state,
    make_decays,
    make_qkv,
)

CASES = [
    Case("dplr_memory"),
    Case("dplr_memory", ("any_ab",), heads=(2, 1, 2)),
    Case("dplr_memory", ("constant_decay",)),
    Case("dplr_memory", ("decay", "correlated"), heads=(1, 1, 2)),
    Case("dplr_memory", ("correlated",)),
    Case("dplr_memory", ("key_decay",), heads=(4, 1, 2), core=True),
    Case("dplr_memory", ("key_decay", "any_ab")),
]


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _inputs(case, rng, shape, log_decay):
    """Draw random inputs of `dplr_memory` with a = -κ and b = κ ⊙ gate (κ a unit key), as in RWKV7.

    "correlated" cases have similar κ for all tokens, and gates near 1 + the decay; "any_ab" cases have
    unrelated, small a and b.
    """
    inputs = make_qkv(case, rng, shape) | make_decays(case, shape, log_decay)
    keys, heads = case.heads[1:]
    draw = rng.normal(size=(*shape, keys, KEY_DIM))
    gate = rng.uniform(0, 1, size=(*shape, heads, KEY_DIM))
    if "any_ab" in case.arrays:
        other = rng.normal(size=(*shape, heads, KEY_DIM))
        return inputs | {"a": 0.6 * _unit(draw), "b": 0.6 * _unit(other)}
    if "correlated" in case.arrays:
        draw = draw[:, :1] + 0.05 * draw
        # a reads before the decay w: the eigenvalue along κ is w - gate, which must stay above -1.
        decay = np.exp(inputs["log_decay"])[..., None] if "log_decay" in inputs else 1.0
        gate = np.broadcast_to((1 + decay) * (1 - 0.1 * gate[..., :1]), gate.shape)
    kappa = _unit(draw)
    return inputs | {"a": -kappa, "b": np.repeat(kappa, heads // keys, axis=2) * gate}


def _step(case, inputs, leaves, b, t, written):
    heads = inputs["v"].shape[2]
    k, a, b_at_t = (_at(inputs[n], b, t, heads) for n in ("k", "a", "b"))
    q = _at(inputs["q"], b, t, max(heads, case.heads[0])) * KEY_DIM**-0.5
    if written:
        transition = _decays(inputs, b, t) * np.eye(KEY_DIM) + b_at_t[:, :, None] * a[:, None, :]
        leaves[0] = transition @ leaves[0] + k[:, :, None] * inputs["v"][b, t][:, None, :]
    return np.einsum("grk,gkv->grv", q.reshape(heads, -1, KEY_DIM), leaves[0]).reshape(
        -1, VALUE_DIM
    )


FAMILIES = {"dplr_memory": Family(("q", "k", "v", "a", "b"), _inputs, _delta_state, _step)}
