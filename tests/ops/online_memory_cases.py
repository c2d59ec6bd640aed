"""`online_memory` (TTT and Titans): its test cases, inputs and definition, with gradients of the inner loss
by complex steps.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax import ops
from tests.ops.cases import KEY_DIM, Case, Family, _at

MINI_BATCH, MIDDLE = 5, 6

CASES = [
    Case("online_memory", heads=(2, 1, 2)),
    Case("online_memory", ("coefficients", "norm", "bias", "residual"), core=True),
    Case("online_memory", ("coefficients", "norm", "mlp", "bias"), heads=(1, 1, 2)),
    Case("online_memory", ("mini_batch_1",)),
    Case("online_memory", ("decay",), heads=(4, 2, 2)),
    Case("online_memory", ("decay", "mlp"), heads=(2, 1, 2)),
    Case("online_memory", ("decay", "norm", "bias", "mini_batch_4")),
]


def _mini_batch(case):
    sizes = [int(n[-1]) for n in case.arrays if n.startswith("mini_batch")]
    return sizes[0] if sizes else MINI_BATCH


def _norm_eps(case):
    """Return the epsilon of the inner model's norm: large with decays, since the output of a decayed memory
    has no variance and a small epsilon would amplify errors.
    """
    return 1.0 if "decay" in case.arrays else 1e-6


def _sizes(case):
    return (KEY_DIM, MIDDLE, KEY_DIM) if "mlp" in case.arrays else (KEY_DIM, KEY_DIM)


def _inputs(case, rng, shape, log_decay):
    queries, keys, heads = case.heads
    q, k = (rng.normal(size=(*shape, n, KEY_DIM)) for n in (queries, keys))
    inputs = {
        "q": q,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.normal(size=(*shape, heads, KEY_DIM)),
        "eta": rng.uniform(0, 0.1 if "decay" in case.arrays else 0.2, size=(*shape, heads)),
    }
    for i, (before, after) in enumerate(itertools.pairwise(_sizes(case))):
        inputs[f"weight{i}"] = rng.normal(size=(heads, before, after)) * before**-0.5
        if "bias" in case.arrays:
            inputs[f"bias{i}"] = rng.normal(size=(heads, after))
    if "norm" in case.arrays:
        inputs["norm_scale"] = 1 + 0.3 * rng.normal(size=(heads, KEY_DIM))
        inputs["norm_bias"] = 0.3 * rng.normal(size=(heads, KEY_DIM))
    if "coefficients" in case.arrays:
        size = _mini_batch(case)
        inputs["coefficients"] = 1 / np.arange(1, size + 1) + 0.2 * rng.uniform(size=size)
    if "decay" in case.arrays:
        inputs["log_momentum"] = log_decay(*shape, heads) - 0.5
        inputs["log_decay"] = log_decay(*shape, heads)
    return inputs


def _pack(case, inputs):
    keywords = dict(inputs)
    layers = range(len(_sizes(case)) - 1)
    inner = ops.Inner(
        tuple(keywords.pop(f"weight{i}") for i in layers),
        tuple(keywords.pop(f"bias{i}") for i in layers) if "bias" in case.arrays else None,
        keywords.pop("norm_scale", None),
        keywords.pop("norm_bias", None),
    )
    static = dict(
        mini_batch=_mini_batch(case),
        residual="residual" in case.arrays,
        norm_eps=_norm_eps(case),
    )
    return keywords | dict(inner=inner) | static


def _state(case, batch, *, capacity, **options):
    options |= dict(bias="bias" in case.arrays, momentum="decay" in case.arrays)
    return ops.online_state(batch, case.heads[2], _sizes(case), **options)


def _used(case, state):
    """Return the state of an online memory (TTT or Titans) with random values in place of its floating-point
    entries, and a position in the middle of a mini-batch.
    """
    rng = np.random.default_rng(1)

    def fill(x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return x
        return jnp.asarray(0.3 * rng.normal(size=x.shape))

    state = jax.tree.map(fill, state)
    return state._replace(position=state.position + _mini_batch(case) // 2)


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _output(case, inputs, head, leaves, x):
    """Return the output of one head's inner model for x [K]; the trained arrays `leaves` may have leading
    axes.
    """
    step = 2 if "bias" in case.arrays else 1
    for i in range(0, len(leaves), step):
        x = np.einsum("...k,...kv->...v", _gelu(x) if i else x, leaves[i])
        x = x + leaves[i + 1] if step == 2 else x
    if "norm" in case.arrays:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + _norm_eps(case))
        x = x * inputs["norm_scale"][head] + inputs["norm_bias"][head]
    return x


def _gradient(case, inputs, head, leaves, k, target):
    """Return the gradients, with respect to the arrays `leaves`, of one head's inner loss for the key k and
    the target value `target`. They are exact to rounding: the imaginary part of the loss at complex
    arguments (complex-step differentiation).
    """
    total, gradients = sum(x.size for x in leaves), []
    moved, offset = [], 0
    for x in leaves:
        steps = np.zeros((total, x.size), complex)
        steps[offset : offset + x.size] = 1e-30j * np.eye(x.size)
        moved.append(x + steps.reshape(total, *x.shape))
        offset += x.size
    loss = 0.5 * ((_output(case, inputs, head, moved, k) - target) ** 2).sum(-1)
    slopes, offset = loss.imag / 1e-30, 0
    for x in leaves:
        gradients.append(slopes[offset : offset + x.size].reshape(x.shape))
        offset += x.size
    return gradients


def _step(case, inputs, leaves, b, t, written):
    names = [n for n in inputs if n.startswith(("weight", "bias"))]
    names = sorted(names, key=lambda n: (n[-1], n[0] != "w"))
    count, titans, residual = len(names), "decay" in case.arrays, "residual" in case.arrays
    start, sums = leaves[:count], leaves[count * (1 + titans) :][:count]
    current = leaves[count : 2 * count] if titans else None
    heads, size = inputs["v"].shape[2], _mini_batch(case)
    k = _at(inputs["k"], b, t, heads)
    coefficients = inputs.get("coefficients", np.ones(size))
    q = _at(inputs["q"], b, t, max(heads, case.heads[0])).reshape(heads, -1, KEY_DIM)
    if written:
        leaves[-1] = leaves[-1] + 1
    index = max(int(leaves[-1]) - 1, 0)
    output = np.zeros(q.shape)
    for h in range(heads):
        initial = [inputs[n][h] for n in names]
        if written:
            target = inputs["v"][b, t, h] - (k[h] if residual else 0)
            decayed = np.exp(leaves[-3][h]) if titans else 1
            weights = [decayed * w + x[h] for w, x in zip(initial, start, strict=True)]
            gradient = _gradient(case, inputs, h, weights, k[h], target)
            decay = np.exp(inputs["log_decay"][b, t, h]) if titans else 1
            if titans:
                leaves[-2][h] += np.log(decay)
            for i, g in enumerate(gradient):
                momentum = np.exp(inputs["log_momentum"][b, t, h]) if titans else 1
                sums[i][h] = momentum * sums[i][h] - inputs["eta"][b, t, h] * g
                if titans:
                    current[i][h] = decay * current[i][h] + sums[i][h]
        if titans:
            decayed = np.exp(leaves[-2][h])
            weights = [decayed * w + x[h] for w, x in zip(initial, current, strict=True)]
        else:
            weights = [
                w + x[h] + coefficients[index] * a[h]
                for w, x, a in zip(initial, start, sums, strict=True)
            ]
        for r, x in enumerate(q[h]):
            output[h, r] = _output(case, inputs, h, weights, x) + (x if residual else 0)
    if leaves[-1] == size:
        leaves[-1] = leaves[-1] * 0
        if titans:
            leaves[-3] = leaves[-2].copy()
        for i in range(count):
            if titans:
                start[i][...] = current[i]
            else:
                start[i][...] += coefficients[-1] * sums[i]
                sums[i][...] = 0
    return output.reshape(-1, KEY_DIM)


FAMILIES = {
    "online_memory": Family(
        ("q", "k", "v", "inner", "eta"),
        _inputs,
        _state,
        _step,
        ("recurrent", "chunk"),
        pack=_pack,
        used=_used,
    )
}
