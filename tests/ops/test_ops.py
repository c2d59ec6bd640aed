"""Tests that all forms of an op compute the same function: values, all gradients, final states, resets at
documents, masks and causality.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from tests.conftest import AS_USERS
from tests.marks import slow_after
from tests.ops.cases import (
    CASES,
    call,
    make_inputs,
    make_state,
    oracle,
    parametrize,
    parametrize_forms,
)

BATCH, LENGTH = 2, 37
# Two documents per row, with padding before, between, inside and after them. The first row begins with
# document 3, which continues that of the state.
SEGMENT_IDS = np.array(
    [[3] * 9 + [0] + [3] * 4 + [5] * 16 + [0] * 7, [0, 0] + [1] * 10 + [2] * 8 + [1] * 17]
)
MASK = np.random.default_rng(5).integers(0, 2, size=(BATCH, LENGTH))


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def settings(kind: str, case):
    """Return the arguments of an op for one setting of documents: the state, and segment ids and mask if
    the setting has them.

    Args:
        kind: "plain" (one document, an empty state), "documents" (one state per row) or "segments" (one
            state per segment).
        case: the test case (an op and its inputs) that the state is for.
    """
    if kind == "plain":
        return {"state": None}
    if kind == "documents":
        state = make_state(case)._replace(segment_id=jnp.array([3, 0], jnp.int32))
        return {
            "state": state,
            "segment_ids": jnp.asarray(SEGMENT_IDS),
            "update_mask": jnp.asarray(MASK),
        }
    if kind == "segments":
        return {
            "state": make_state(case, num_segments=5),
            "segment_ids": jnp.asarray(SEGMENT_IDS),
            "update_mask": jnp.asarray(MASK),
        }
    raise ValueError(kind)


def as_real(x):
    """Return the array x in float64; the real and imaginary parts of complex numbers are an additional
    axis.
    """
    x = np.asarray(x)
    parts = np.stack([x.real, x.imag], axis=-1) if np.iscomplexobj(x) else x
    return parts.astype(np.float64)


def visible(case, state):
    """Return the arrays of an op's state, with 0 at the indices of attention's ring buffers that contain no
    token.
    """
    state = jax.tree.map(as_real, state)
    if isinstance(state, ops.AttentionState):
        hidden = np.arange(state.keys.shape[-3]) >= state.count[..., None]
        sums = state.log_forget and np.where(hidden[..., None], 0, sum(state.log_forget))
        state = state._replace(
            keys=np.where(hidden[..., None, None], 0, state.keys),
            values=np.where(hidden[..., None, None], 0, state.values),
            log_forget=sums,
        )
    return jax.tree.leaves(state)


def close(a, b, tolerance):
    """Assert that the arrays a and b differ by at most `tolerance` times the largest entry of b."""
    a, b = as_real(a), as_real(b)
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    assert np.max(np.abs(a - b), initial=0) <= tolerance * max(np.max(np.abs(b), initial=0), 1e-3)


def objective(case, form, weights, inputs, state, **options):
    """Return the pair (objective, (output, final state)) of one call of an op. The objective, a number to
    take gradients of, is the sum of all entries of the outputs and states, each with a different weight.
    """
    output, final = call(case, inputs, form=form, initial_state=state, **options)
    leaves = [x for x in jax.tree.leaves((output, final)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if case.op == "attention":  # the state's values at indices without a token are arbitrary
        leaves = leaves[:1]
    leaves = [
        part
        for x in leaves
        for part in ((jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else (x,))
    ]
    total = sum(
        jnp.sum(x.astype(jnp.float64) * jnp.cos(weights + jnp.arange(x.size).reshape(x.shape)))
        for x in leaves
    )
    return total, (output, final)


@functools.cache
def reference_gradients(case, kind, decay="mild"):
    """Return the results of an op's reference, its recurrent form (or only form) in float64, for a test case:
    a weighted sum of all outputs, the output, the final state, and the gradients of that sum.
    """
    arguments = settings(kind, case)
    state = arguments.pop("state")
    inputs = make_inputs(case, decay=decay)
    return gradients(case, case.forms[0], inputs, state, **arguments)


@functools.cache
def wide_gradients(case, decay, dtype):
    """Return the float64 results of an op's first form for a test case whose random inputs are rounded to
    `dtype`: a weighted sum of all outputs, the output, the final state, and the gradients of that sum.
    """
    inputs = make_inputs(case, decay=decay, dtype=dtype)
    wide = {n: x.astype(jnp.float64) for n, x in inputs.items()}
    return gradients(case, case.forms[0], wide, None)


@functools.cache
def long_gradients(case, length):
    """Return the test case's objective, output, final state and gradients, as `gradients` does, for the
    recurrent form, `length` tokens and an empty state.
    """
    return gradients(case, "recurrent", make_inputs(case, length=length), None, chunk_size=64)


def gradients(case, form, inputs, state, **arguments):
    """Return an op's objective (a weighted sum of all results), (output, final state), and the objective's
    gradients with respect to all inputs and the state.
    """
    leaves, tree = jax.tree.flatten((inputs, state if state is not None else {}))
    inexact = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def function(values):
        filled = list(leaves)
        for i, x in zip(inexact, values, strict=True):
            filled[i] = x
        inputs, initial = jax.tree.unflatten(tree, filled)
        initial = initial if state is not None else None
        return objective(case, form, 0.3, inputs, initial, **arguments)

    (value, results), grads = jax.jit(jax.value_and_grad(function, has_aux=True))(
        [leaves[i] for i in inexact]
    )
    return value, results, grads


@pytest.mark.parametrize("kind", slow_after(1, ["segments", "documents", "plain"]))
@parametrize_forms(core=True)
def test_matches_the_definition(case, form, kind):
    arguments = settings(kind, case)
    state = arguments.pop("state")
    inputs = make_inputs(case)
    output, final = jax.jit(lambda x, s, g: call(case, x, form=form, initial_state=s, **g))(
        inputs, state, arguments
    )
    start = (
        make_state(case, capacity=5 if case.window else LENGTH, empty=True)
        if state is None
        else state
    )
    expected, expected_final = oracle(case, inputs, state=start, **arguments)
    close(output, expected, 1e-12)
    for a, b in zip(visible(case, final), visible(case, expected_final), strict=True):
        close(a, b, 1e-12)


@parametrize_forms(skip=("recurrent", None))
def test_gradients_agree_between_forms(case, form):
    """With one state per segment, all forms of an op have the gradients of the recurrent form in float64."""
    check_gradients(case, form, "segments")


@pytest.mark.slow
@parametrize_forms(skip=("recurrent", "associative", None))
def test_gradients_of_one_state_per_row(case, form):
    check_gradients(case, form, "documents")


def check_gradients(case, form, kind):
    """Compare the values and gradients of one form of an op with those of the recurrent form in float64."""
    arguments = settings(kind, case)
    state = arguments.pop("state")
    value, _, grads = gradients(case, form, make_inputs(case), state, **arguments)
    expected, _, expected_grads = reference_gradients(case, kind)
    close(value, expected, 1e-11)
    for a, b in zip(grads, expected_grads, strict=True):
        close(a, b, 1e-10)


@pytest.mark.slow
@parametrize()
def test_gradients_match_finite_differences(case):
    """The gradients of an op's recurrent form, with which the other forms are compared, agree with finite
    differences.
    """
    from jax.test_util import check_grads

    form = case.forms[0]
    state = make_state(case, capacity=20)
    floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(state)]

    def function(inputs, values):
        remaining = iter(values)
        leaves, tree = jax.tree.flatten(state)
        leaves = [next(remaining) if f else x for x, f in zip(leaves, floating, strict=True)]
        return objective(case, form, 0.3, inputs, jax.tree.unflatten(tree, leaves))[0]

    values = [x for x, f in zip(jax.tree.leaves(state), floating, strict=True) if f]
    check_grads(jax.jit(function), (make_inputs(case, length=11), values), order=1, modes=["rev"])


@pytest.mark.parametrize("length", [1, pytest.param(300, marks=pytest.mark.slow)])
@parametrize_forms(skip=("recurrent", None))
def test_any_length_in_chunks_of_64(case, form, length):
    inputs = make_inputs(case, length=length)
    value, _, grads = gradients(case, form, inputs, None, chunk_size=64)
    expected, _, expected_grads = long_gradients(case, length)
    close(value, expected, 1e-11)
    for a, b in zip(grads, expected_grads, strict=True):
        close(a, b, 1e-10)


WITH_DECAY = [c for c in CASES if any("decay" in a or "forget" in a for a in c.arrays)]


@parametrize_forms()
def test_bfloat16(case, form):
    """In bfloat16, the RMS error of an op's output and gradients in comparison with float64 on the same
    rounded inputs is small.
    """
    for a, b in narrow_and_wide(case, form, jnp.bfloat16):
        assert np.sqrt(np.mean((a - b) ** 2)) <= 5e-3 * np.sqrt(np.mean(b**2))


@pytest.mark.slow
@parametrize_forms([c for c in CASES if c not in WITH_DECAY])
def test_float32(case, form):
    """In float32, the largest error of an op's results is small; `test_strong_zero_and_mixed_decay` tests
    cases with decays.
    """
    for a, b in narrow_and_wide(case, form, jnp.float32):
        close(a, b, 1e-5)


def narrow_and_wide(case, form, dtype):
    """Return pairs of an op's results in one form, (computed in `dtype`, computed in float64 from the same
    rounded inputs): its output, and its gradient for each input.
    """
    value, (output, final), grads = gradients(case, form, make_inputs(case, dtype=dtype), None)
    _, (expected, _), expected_grads = wide_gradients(case, "mild", dtype)
    assert output.dtype == dtype and np.isfinite(value)
    if case.op not in (
        "attention",
        "block_attention",
        "native_sparse_attention",
        "path_attention",
        "short_convolution",
        "token_shift",
    ):  # states of activations have their dtype
        for leaf in jax.tree.leaves(final):
            assert leaf.dtype in (jnp.float32, jnp.complex64, jnp.int32)
    pairs = [(output, expected), *zip(grads, expected_grads, strict=True)]
    return [(as_real(a), as_real(b)) for a, b in pairs]


@parametrize_forms(WITH_DECAY)
def test_strong_zero_and_mixed_decay(case, form):
    """With log decays from 0 to -30 per token, an op in float32 is as accurate as with mild decays."""
    inputs = make_inputs(case, decay="mixed", dtype=jnp.float32)
    value, (output, _), grads = gradients(case, form, inputs, None)
    expected, (wide, _), expected_grads = wide_gradients(case, "mixed", jnp.float32)
    close(value, expected, 1e-5)
    close(output, wide, 1e-5)
    for a, b in zip(grads, expected_grads, strict=True):
        close(a, b, 1e-5)


@parametrize_forms([c for c in CASES if c.op == "delta_memory"], skip=("recurrent",))
def test_correlated_keys_with_beta_two(case, form):
    """With correlated keys and β = 2, the delta rule's inverse of a chunk's matrix is accurate even if the
    powers of the matrix grow exponentially.
    """
    inputs = make_inputs(case, length=64, dtype=jnp.float32)
    common = inputs["k"][:, :1] + 0.05 * inputs["k"]
    inputs["k"] = common / jnp.linalg.norm(common, axis=-1, keepdims=True)
    inputs["beta"] = 2 - 0.1 * inputs["beta"]
    wide = {n: x.astype(jnp.float64) for n, x in inputs.items()}
    output, _ = ops.delta_memory(**inputs, form=form, chunk_size=64)
    expected, _ = ops.delta_memory(**wide, form="recurrent")
    close(output, expected, 1e-5)


@parametrize_forms()
def test_split_anywhere_and_resume(case, form):
    arguments = settings("documents", case)
    state = arguments.pop("state")
    inputs = make_inputs(case)
    run = jax.jit(lambda x, s, g: call(case, x, form=form, initial_state=s, **g))
    expected, expected_final = run(inputs, state, arguments)
    outputs = []
    for a, b in (
        (0, 1),
        (1, 13),
        (13, 25),
        (25, LENGTH),
    ):  # lengths that are no multiples of a chunk
        part = {n: x[:, a:b] if x.shape[:2] == (BATCH, LENGTH) else x for n, x in inputs.items()}
        output, state = run(part, state, {n: x[:, a:b] for n, x in arguments.items()})
        outputs.append(output)
    close(jnp.concatenate(outputs, axis=1), expected, 1e-12)
    for a, b in zip(visible(case, state), visible(case, expected_final), strict=True):
        close(a, b, 1e-12)


@parametrize_forms()
def test_packed_documents_equal_documents_alone(case, form):
    inputs = make_inputs(case)
    ids = jnp.asarray(np.repeat([[1, 2, 3]], [14, 9, 14], axis=1).repeat(BATCH, 0))
    run = jax.jit(lambda x, g: call(case, x, form=form, **g)[0])
    packed = run(inputs, {"segment_ids": ids})
    for a, b in ((0, 14), (14, 23), (23, LENGTH)):
        document = {
            n: x[:, a:b] if x.shape[:2] == (BATCH, LENGTH) else x for n, x in inputs.items()
        }
        alone = run(document, {})
        close(packed[:, a:b], alone, 1e-12)


@parametrize_forms()
def test_masked_tokens_change_nothing(case, form):
    """No bit of an op's later outputs or of its state depends on the values at a masked token."""
    inputs = make_inputs(case)
    changed = {
        n: jnp.where((MASK == 0).reshape(MASK.shape + (1,) * (x.ndim - 2)), 1e3, x)
        if x.shape[:2] == (BATCH, LENGTH)
        and n not in ("q", "o", "gates", "level_scales")  # read without writing
        else x
        for n, x in inputs.items()
    }
    run = jax.jit(lambda x: call(case, x, form=form, update_mask=jnp.asarray(MASK)))
    (output, final), (expected, expected_final) = run(changed), run(inputs)
    if (
        case.op == "short_convolution" or "D" in case.arrays
    ):  # the output of a masked token depends on itself
        output, expected = output[MASK == 1], expected[MASK == 1]
    np.testing.assert_array_equal(output, expected)
    for a, b in zip(visible(case, final), visible(case, expected_final), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", slow_after(1, ["documents", "plain"]))
@parametrize_forms(core=True, slow=("recurrent", "associative"))
def test_causal_to_the_bit(case, form, kind):
    """No bit of an op's output changes if one of the inputs changes at a later token."""
    arguments = settings(kind, case)
    state = arguments.pop("state")
    inputs = make_inputs(case, decay="mixed", dtype=jnp.float32)
    state = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.float64 else x, state)
    run = jax.jit(
        lambda x: call(case, x, form=form, initial_state=state, **arguments)[0],
        compiler_options=AS_USERS,
    )
    base = np.asarray(run(inputs))
    for t in (6, 19, 36):
        for name, x in inputs.items():
            if x.shape[:2] != (BATCH, LENGTH):
                continue
            change = -7.0 if "decay" in name or "forget" in name else 2.5
            changed = np.asarray(run(inputs | {name: x.at[:, t].add(change)}))
            np.testing.assert_array_equal(changed[:, :t], base[:, :t])
            if kind == "plain" and name == "v" and t < LENGTH - 1:
                assert (changed[:, t:] != base[:, t:]).any()


@pytest.mark.slow
@parametrize()
def test_segments_without_a_state_give_nan(case):
    """The outputs of tokens whose segment id has no state are NaN; no state and no later output depends on
    them.
    """
    inputs, state = make_inputs(case), make_state(case, num_segments=2)
    ids = jnp.full((BATCH, LENGTH), 2).at[:, 5].set(9)
    run = jax.jit(
        lambda ids, mask: call(case, inputs, segment_ids=ids, update_mask=mask, initial_state=state)
    )
    output, final = run(ids, jnp.ones_like(ids))
    assert np.isnan(output[:, 5]).all()
    expected, expected_final = run(ids.at[:, 5].set(2), (ids != 9).astype(jnp.int32))
    np.testing.assert_array_equal(output[:, 6:], expected[:, 6:])
    for a, b in zip(visible(case, final), visible(case, expected_final), strict=True):
        np.testing.assert_array_equal(a, b)


def test_attention_beyond_its_capacity_gives_nan():
    case = next(c for c in CASES if c.op == "attention")
    state = make_state(case, capacity=20, empty=True)
    output, _ = call(case, make_inputs(case), initial_state=state)
    assert np.isfinite(output[:, :20]).all()
    assert np.isnan(output[:, 20:]).all()


def test_long_attention_is_scanned_in_blocks():
    """Attention over a row in several blocks of queries, with and without a window, equals attention over
    the row in one block.
    """
    cases = [c for c in CASES if c.op == "attention" and c.arrays == ("forget",)]
    assert [c.window for c in cases] == [None, 5]
    for case in cases:
        inputs = make_inputs(case, batch=1, length=1100)
        output, _ = call(case, inputs)
        expected, _ = call(
            case, inputs, initial_state=make_state(case, 1, capacity=1100, empty=True)
        )
        close(output, expected, 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "parallel"}, "form='parallel'; accepted are 'recurrent', 'chunk', 'associative'"),
        ({"implementation": "mosaic"}, "implementation='mosaic'; accepted are None, 'xla'"),
        ({"chunk_size": 48}, "chunk_size=48; accepted are powers of two"),
        ({"log_decay": jnp.zeros((2, 37, 3))}, "log_decay has shape (2, 37, 3); accepted are"),
        ({"k": jnp.zeros((2, 37, 3, 8))}, "k has 3 heads; they must divide v's 2"),
        ({"q": jnp.zeros((2, 37, 3, 8))}, "q has 3 heads; accepted are multiples and divisors of v's 2"),
        ({"v": jnp.zeros((2, 36, 2, 8))}, "v has shape (2, 36, 2, 8); accepted is"),
        ({"segment_ids": jnp.zeros((2, 37), jnp.float32)}, "segment_ids has dtype float32; accepted are integers"),
        ({"initial_state": ops.linear_state(2, 2, 8, 5)}, "initial_state.memory has shape (2, 2, 8, 5)"),
        ({"initial_state": ops.linear_state(2, 2, 8, 4, normalize=True)}, "has a normalizer, but normalize=None"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, message):
    inputs = make_inputs(CASES[0]) | change
    with pytest.raises(ValueError) as error:
        ops.linear_memory(**inputs)
    assert message in str(error.value)
