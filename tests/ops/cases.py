"""The table of cases with which the ops are tested, and the definition of each op in numpy, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops

KEY_DIM, VALUE_DIM, CHANNELS, WIDTH = 8, 4, 6, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A test case: an op of `lsm_jax.ops`, and which inputs it gets.

    Attributes:
        op: name of the op in `lsm_jax.ops`, such as "linear_memory".
        arrays: names of the optional inputs that the op gets, besides q, k and v.
        heads: the numbers of query, key and value heads.
        normalize: argument `normalize` of `linear_memory`.
        window: argument `window` of `attention`, the number of keys that a query sees.
        erase: argument `erase` of `delta_memory`.
        fast: whether the case is in the default test run (one case for each kind of transition).
        core: whether the case is in the default run of the most important tests, if it is not `fast`.
    """

    op: str
    arrays: tuple[str, ...] = ()
    heads: tuple[int, int, int] = (2, 2, 2)
    normalize: float | None = None
    window: int | None = None
    erase: str | None = None
    fast: bool = False
    core: bool = False

    @property
    def name(self) -> str:
        parts = [self.op, *self.arrays]
        if self.heads != (2, 2, 2):
            parts.append("heads" + "".join(map(str, self.heads)))
        if self.normalize is not None:
            parts.append("normalize")
        if self.window is not None:
            parts.append("window")
        if self.erase is not None:
            parts.append(self.erase)
        return "-".join(parts)

    @property
    def forms(self) -> tuple[str | None, ...]:
        return FAMILIES[self.op].forms

    @property
    def static(self) -> dict:
        static = {"window": self.window, "normalize": self.normalize, "erase": self.erase}
        return {name: value for name, value in static.items() if value is not None}


CASES = [
    Case("linear_memory"),
    Case("linear_memory", heads=(4, 1, 2), normalize=0.5),
    Case("linear_memory", ("constant_decay",)),
    Case("linear_memory", ("decay",), normalize=0.5, heads=(4, 2, 2)),
    Case("linear_memory", ("key_decay",), heads=(1, 1, 2)),
    Case("linear_memory", ("value_decay",)),
    Case("linear_memory", ("decay", "value_decay")),
    Case("linear_memory", ("key_decay", "value_decay"), heads=(4, 1, 2), fast=True),
    Case("linear_memory", ("key_decay", "bonus"), heads=(2, 1, 2)),
    Case("linear_memory", ("key_decay", "value_decay", "bonus"), normalize=0.5),
    Case("linear_memory", ("decay", "bonus")),
    Case("linear_memory", ("input_gate",), heads=(4, 1, 2), normalize=1e-3),
    Case("linear_memory", ("constant_decay", "input_gate"), normalize=1e-6),
    Case("linear_memory", ("decay", "input_gate"), normalize=1e-6, core=True),
    Case("delta_memory", heads=(2, 1, 2)),
    Case("delta_memory", ("constant_decay",)),
    Case("delta_memory", ("decay",), heads=(1, 1, 2)),
    Case("delta_memory", ("key_decay",), heads=(4, 1, 2), fast=True),
    Case("delta_memory", ("constant_decay",), erase="undecayed"),
    Case("delta_memory", ("decay",), heads=(4, 1, 2), erase="undecayed"),
    Case("delta_memory", ("key_decay",), heads=(1, 1, 2), erase="undecayed"),
    Case("attention"),
    Case("attention", heads=(4, 2, 2)),
    Case("attention", heads=(4, 1, 2), window=5),
    Case("attention", ("forget",), heads=(1, 1, 2)),
    Case("attention", ("forget",), heads=(4, 1, 2), window=5, fast=True),
    Case("attention", ("constant_forget",)),
    Case("short_convolution", ("bias",), fast=True),
    Case("token_shift"),
]


def parametrize(cases=CASES):
    """Parametrize a test function over test cases of ops; the cases outside the default test run are marked
    slow.
    """
    return pytest.mark.parametrize(
        "case",
        [pytest.param(c, id=c.name, marks=[] if c.fast else [pytest.mark.slow]) for c in cases],
    )


def parametrize_forms(cases=CASES, skip=(), core=False, slow=()):
    """Parametrize a test function over pairs (test case of an op, form). Cases that are not `fast` are marked
    slow; with `core=True`, those that are `core` are not. The forms `slow` are always.
    """
    rows = [(c, f) for c in cases for f in c.forms if f not in skip]
    return pytest.mark.parametrize(
        ("case", "form"),
        [
            pytest.param(
                c,
                f,
                id=f"{c.name}-{f}",
                marks=[] if (c.fast or (core and c.core)) and f not in slow else [pytest.mark.slow],
            )
            for c, f in rows
        ],
    )


@dataclasses.dataclass(frozen=True)
class Family:
    """The description of one op for the tests: its inputs, its state and its definition.

    Attributes:
        positional: names of the op's positional arguments.
        inputs: (case, rng, (batch, length), log_decay) -> arrays by name; `log_decay(*shape)` draws log
            decays.
        state: (case, batch, **options) -> an empty state; the options are num_segments, dtype and capacity.
        step: (case, inputs, leaves, b, t, written) -> the output of token t of row b by the definition, in
            numpy. `leaves` is the list of the row's state arrays (without the segment id), which the step
            updates in place.
        forms: the op's forms; (None,) if it has no argument `form`.
        pack: (case, inputs) -> the op's arguments by name; None if they are the inputs.
        used: (case, state) -> the state with values that are not 0; None fills it with random numbers.
    """

    positional: tuple[str, ...]
    inputs: Callable
    state: Callable
    step: Callable
    forms: tuple[str | None, ...] = ("recurrent", "chunk", "associative")
    pack: Callable | None = None
    used: Callable | None = None


FAMILIES: dict[str, Family] = {}


def make_inputs(case: Case, batch=2, length=37, *, seed=0, decay="mild", dtype=np.float64) -> dict:
    """Return random inputs of a test case's op by argument name. `decay` is "mild", or "mixed": log decays
    from 0 to -30 per token.
    """
    rng = np.random.default_rng(seed)

    def log_decay(*shape):
        mild = -np.exp(rng.normal(size=shape) - 2)
        if decay == "mild":
            return mild
        kind = rng.integers(0, 4, size=shape)
        return np.choose(kind, [np.zeros(shape), np.full(shape, -30.0), mild, mild * 10])

    inputs = FAMILIES[case.op].inputs(case, rng, (batch, length), log_decay)
    return {n: jnp.asarray(a, dtype) for n, a in inputs.items()}


def make_qkv(case: Case, rng, shape) -> dict:
    """Return random queries, keys and values with the test case's numbers of heads; queries and keys are
    positive if the case normalises the output.
    """
    queries, keys, heads = case.heads
    q = rng.normal(size=(*shape, queries, KEY_DIM))
    k = rng.normal(size=(*shape, keys, KEY_DIM))
    if case.normalize is not None:
        q, k = np.abs(q), np.abs(k)
    return {"q": q, "k": k, "v": rng.normal(size=(*shape, heads, VALUE_DIM))}


def make_decays(case: Case, shape, log_decay) -> dict:
    """Return the random log decays that a test case requires, by the op's argument name: those of the kinds
    (constant, per token, per key channel, per value channel) that its `arrays` name, drawn by
    `log_decay(*shape)`.
    """
    heads = case.heads[2]
    shapes = {
        "constant_decay": ("log_decay", (heads,)),
        "decay": ("log_decay", (*shape, heads)),
        "key_decay": ("log_decay", (*shape, heads, KEY_DIM)),
        "value_decay": ("value_log_decay", (*shape, heads, VALUE_DIM)),
    }
    return {shapes[n][0]: log_decay(*shapes[n][1]) for n in case.arrays if n in shapes}


def make_state(case: Case, batch=2, *, num_segments=None, capacity=64, seed=1, empty=False):
    """Return a float64 state of the test case's op with random values (for attention: of three tokens), or
    an empty one.
    """
    options = dict(num_segments=num_segments, dtype=jnp.float64, capacity=capacity)
    state = FAMILIES[case.op].state(case, batch, **options)
    if empty:
        return state
    if (used := FAMILIES[case.op].used) is not None:
        return used(case, state)
    if case.op == "attention":
        state = state._replace(count=state.count + 3)
    return make_random_state(state, seed)


def make_random_state(state, seed=1):
    """Return a state with positive random numbers in the place of its floating-point ones."""
    rng = np.random.default_rng(seed)

    def fill(x):
        return (
            x
            if jnp.issubdtype(x.dtype, jnp.integer)
            else jnp.asarray(np.abs(rng.normal(size=x.shape)))
        )

    return jax.tree.map(fill, state)


def call(case: Case, inputs: dict, *, form=None, **options):
    """Call the op of a test case on these inputs, with chunks of 8 tokens if the op has forms."""
    positional, pack = FAMILIES[case.op].positional, FAMILIES[case.op].pack
    if form is not None:
        options = {"form": form, "chunk_size": 8} | options
    if pack is not None:
        inputs = pack(case, inputs)
    keywords = {n: a for n, a in inputs.items() if n not in positional}
    op: Callable = getattr(ops, case.op)
    return op(*(inputs[n] for n in positional), **keywords, **case.static, **options)


# ----------------------------------------------------------------------------------------------------------------
# oracle


def oracle(case: Case, inputs: dict, *, state, segment_ids=None, update_mask=None):
    """Compute the output and the final state of a test case's op by its definition, in numpy float64."""
    inputs = {n: np.asarray(a, np.float64) for n, a in inputs.items()}
    memory = jax.tree.map(np.array, state)
    reference = next(iter(inputs.values()))
    batch, length = reference.shape[:2]
    leaves, tree = jax.tree.flatten(memory._replace(segment_id=None))
    segmented = leaves[0].ndim - jax.tree.leaves(make_state(case, batch, empty=True))[0].ndim == 1
    ids = np.ones((batch, length), int) if segment_ids is None else np.asarray(segment_ids)
    mask = np.ones((batch, length), int) if update_mask is None else np.asarray(update_mask)
    outputs, last_id = [], np.array(memory.segment_id)
    for b in range(batch):
        row_leaves = {
            s: [np.copy(x[b, s] if segmented else x[b]) for x in leaves]
            for s in range(leaves[0].shape[1] if segmented else 1)
        }
        row = []
        for t in range(length):
            token = ids[b, t]
            slot = max(token - 1, 0) if segmented else 0
            if segment_ids is not None and token:
                if not segmented and last_id[b] not in (0, token):
                    row_leaves[0] = [np.zeros_like(x) for x in row_leaves[0]]
                last_id[b] = token
            output = FAMILIES[case.op].step(
                case, inputs, row_leaves[slot], b, t, bool(token and mask[b, t])
            )
            row.append(output if token else np.zeros_like(output))
        outputs.append(row)
        for s, final_leaves in row_leaves.items():
            for x, leaf in zip(leaves, final_leaves, strict=True):
                x[(b, s) if segmented else b] = leaf
    return np.array(outputs), jax.tree.unflatten(tree, leaves)._replace(segment_id=last_id)


def _at(x, b, t, heads):
    """Return the values of token t of row b of x [B, T, ...], with its heads repeated to `heads` heads:
    [heads, ...].
    """
    return np.repeat(x[b, t], heads // x.shape[2], axis=0)


def _decays(inputs, b, t):
    """Return the decay (not its logarithm) of token t of row b, in a shape that broadcasts to the memory's
    [G, K, V].
    """
    log_decay = np.zeros((1, 1, 1))
    if "log_decay" in inputs:
        g = inputs["log_decay"]
        g = g if g.ndim == 1 else g[b, t]
        log_decay = log_decay + (g[:, None, None] if g.ndim == 1 else g[:, :, None])
    if "value_log_decay" in inputs:
        log_decay = log_decay + inputs["value_log_decay"][b, t][:, None, :]
    return np.exp(log_decay)


def _linear_step(case, inputs, leaves, b, t, written):
    heads = inputs["v"].shape[2]
    k, v = _at(inputs["k"], b, t, heads), inputs["v"][b, t]
    q = _at(inputs["q"], b, t, max(heads, case.heads[0])) * KEY_DIM**-0.5
    q = q.reshape(heads, -1, KEY_DIM)
    if "log_input_gate" in inputs:
        return _gated_step(case, inputs, leaves, q, k, v, b, t, written)
    write = k[:, :, None] * v[:, None, :] * written
    before = leaves[0].copy()
    leaves[0] = (_decays(inputs, b, t) * leaves[0] if written else leaves[0]) + write
    if case.normalize is not None:
        z_before = leaves[1].copy()
        keyed = {n: x for n, x in inputs.items() if n != "value_log_decay"}
        leaves[1] = (
            _decays(keyed, b, t)[:, :, 0] * leaves[1] if written else leaves[1]
        ) + k * written
    memory, z = leaves[0], None if case.normalize is None else leaves[1]
    if "bonus" in inputs:
        u = inputs["bonus"]
        memory = before + u[:, :, None] * write
        z = z_before + u * k * written if case.normalize is not None else None
    output = np.einsum("grk,gkv->grv", q, memory)
    if case.normalize is not None:
        output = output / (np.einsum("grk,gk->gr", q, z)[..., None] + case.normalize)
    return output.reshape(-1, VALUE_DIM)


def _gated_step(case, inputs, leaves, q, k, v, b, t, written):
    """Apply one token of xLSTM's stabilised recurrence (arXiv 2405.04517, Eqs. 15 and 19-21) to the state
    arrays `leaves`, and return its output.
    """
    if written:
        gate, log_f = inputs["log_input_gate"][b, t], np.log(_decays(inputs, b, t)[:, 0, 0])
        m = np.maximum(log_f + leaves[2], gate)
        f, i = np.exp(log_f + leaves[2] - m), np.exp(gate - m)
        leaves[0] = f[:, None, None] * leaves[0] + i[:, None, None] * k[:, :, None] * v[:, None, :]
        leaves[1] = f[:, None] * leaves[1] + i[:, None] * k
        leaves[2] = m
    divisor = np.maximum(np.abs(np.einsum("grk,gk->gr", q, leaves[1])), np.exp(-leaves[2])[:, None])
    output = np.einsum("grk,gkv->grv", q, leaves[0]) / (divisor[..., None] + case.normalize)
    return output.reshape(-1, VALUE_DIM)


def _delta_step(case, inputs, leaves, b, t, written):
    heads = inputs["v"].shape[2]
    k, v = _at(inputs["k"], b, t, heads), inputs["v"][b, t]
    q = _at(inputs["q"], b, t, max(heads, case.heads[0])) * KEY_DIM**-0.5
    if written:
        beta = inputs["beta"][b, t][:, None, None]
        decayed = _decays(inputs, b, t) * leaves[0]
        read = leaves[0] if case.erase == "undecayed" else decayed
        missing = v - np.einsum("gk,gkv->gv", k, read)
        leaves[0] = decayed + beta * k[:, :, None] * missing[:, None, :]
    q = q.reshape(heads, -1, KEY_DIM)
    return np.einsum("grk,gkv->grv", q, leaves[0]).reshape(-1, VALUE_DIM)


def _attention_step(case, inputs, leaves, b, t, written):
    heads = inputs["v"].shape[2]
    keys, values, count, *sums = leaves
    count = int(count)
    if written:
        index = count % len(keys)
        keys[index], values[index] = _at(inputs["k"], b, t, heads), inputs["v"][b, t]
        if sums:
            gate = inputs["log_forget"]
            before = sums[0][index - 1] + sums[1][index - 1] if count else 0
            sums[0][index], sums[1][index] = before + (gate if gate.ndim == 1 else gate[b, t]), 0
        count += 1
    leaves[2] = np.array(count)
    attended = min(count, len(keys), case.window or count)
    indices = [r % len(keys) for r in range(count - attended, count)]
    q = _at(inputs["q"], b, t, max(heads, case.heads[0])).reshape(heads, -1, KEY_DIM)
    if not indices:
        return np.zeros((q.shape[0] * q.shape[1], VALUE_DIM))
    scores = np.einsum("grk,sgk->grs", q, keys[indices]) * KEY_DIM**-0.5
    if sums:
        total = sums[0] + sums[1]
        scores += (total[indices[-1]] - total[indices]).T.reshape(scores.shape)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("grs,sgv->grv", weights, values[indices]).reshape(-1, VALUE_DIM)


def _convolution_step(case, inputs, leaves, b, t, written):
    x = inputs["x"][b, t]
    taps = np.concatenate([leaves[0], x[None]])
    if written:
        leaves[0] = taps[1:]
    return np.sum(taps * inputs["weight"], axis=0) + inputs.get("bias", 0)


def _shift_step(case, inputs, leaves, b, t, written):
    output = leaves[0][0].copy()
    if written:
        leaves[0] = inputs["x"][b, t][None]
    return output


def _linear_inputs(case, rng, shape, log_decay):
    inputs = make_qkv(case, rng, shape) | make_decays(case, shape, log_decay)
    if "bonus" in case.arrays:
        inputs["bonus"] = rng.normal(size=(case.heads[2], KEY_DIM))
    if "input_gate" in case.arrays:
        inputs["log_input_gate"] = 3 * rng.normal(size=(*shape, case.heads[2]))
    return inputs


def _linear_state(case, batch, *, capacity, **options):
    options |= dict(normalize=case.normalize is not None, stabilize="input_gate" in case.arrays)
    return ops.linear_state(batch, case.heads[2], KEY_DIM, VALUE_DIM, **options)


def _delta_inputs(case, rng, shape, log_decay):
    inputs = make_qkv(case, rng, shape) | make_decays(case, shape, log_decay)
    inputs["k"] = inputs["k"] / np.linalg.norm(inputs["k"], axis=-1, keepdims=True)
    # Along a key the transition is α - β of an undecayed erase, and α (1 - β) of a decayed one.
    largest = 1 if case.erase == "undecayed" else 2
    return inputs | {"beta": rng.uniform(0, largest, size=(*shape, case.heads[2]))}


def _delta_state(case, batch, *, capacity, **options):
    return ops.delta_state(batch, case.heads[2], KEY_DIM, VALUE_DIM, **options)


def _attention_inputs(case, rng, shape, log_decay):
    inputs, heads = make_qkv(case, rng, shape), max(case.heads)
    if case.arrays:
        tokens = () if "constant_forget" in case.arrays else shape
        inputs["log_forget"] = log_decay(*tokens, heads)
    return inputs


def _attention_state(case, batch, *, capacity, **options):
    if case.arrays:
        options["forget_heads"] = max(case.heads)
    return ops.attention_state(batch, capacity, case.heads[2], KEY_DIM, VALUE_DIM, **options)


def _shift_inputs(case, rng, shape, log_decay):
    inputs = {"x": rng.normal(size=(*shape, CHANNELS))}
    if case.op == "short_convolution":
        inputs["weight"] = rng.normal(size=(WIDTH, CHANNELS))
    if "bias" in case.arrays:
        inputs["bias"] = rng.normal(size=CHANNELS)
    return inputs


def _shift_state(case, batch, *, capacity, **options):
    width = WIDTH - 1 if case.op == "short_convolution" else 1
    return ops.shift_state(batch, width, CHANNELS, **options)


_QKV = ("q", "k", "v")
FAMILIES |= {
    "linear_memory": Family(_QKV, _linear_inputs, _linear_state, _linear_step),
    "delta_memory": Family((*_QKV, "beta"), _delta_inputs, _delta_state, _delta_step),
    "attention": Family(_QKV, _attention_inputs, _attention_state, _attention_step, (None,)),
    "short_convolution": Family(("x", "weight"), _shift_inputs, _shift_state, _convolution_step, (None,)),
    "token_shift": Family(("x",), _shift_inputs, _shift_state, _shift_step, (None,)),
}  # fmt: skip

# The cases of other ops are in separate files, which import the names above.
from tests.ops import (  # noqa: E402
    block_cases,
    dplr_cases,
    log_linear_cases,
    mesa_cases,
    momentum_cases,
    online_memory_cases,
    path_cases,
    selective_cases,
    slot_cases,
    slstm_cases,
)

for _module in (
    block_cases,
    dplr_cases,
    log_linear_cases,
    mesa_cases,
    momentum_cases,
    online_memory_cases,
    path_cases,
    selective_cases,
    slot_cases,
    slstm_cases,
):
    FAMILIES |= _module.FAMILIES
    CASES += _module.CASES
