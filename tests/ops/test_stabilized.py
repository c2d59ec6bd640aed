"""Tests of memories with exponential input gates of any size: every form equals xLSTM's recurrence, is
finite, and is causal to the bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops

FORMS = ("recurrent", "chunk", "associative")
LENGTH, HEADS, KEYS, VALUES, EPS = 40, 2, 4, 3, 1e-6


def inputs(seed=0, dtype=np.float64, gates="mixed"):
    """Return random inputs of a memory with exponential input gates: log gates from -50 to 50 and log
    decays from 0 to -30.
    """
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, 1, LENGTH, HEADS, KEYS))
    v = rng.normal(size=(1, LENGTH, HEADS, VALUES))
    shape = (1, LENGTH, HEADS)
    gate = rng.choice([-50.0, 50.0, 0.0, 49.0], size=shape) + rng.normal(size=shape)
    if gates == "rising":
        gate = np.broadcast_to(np.linspace(-50, 50, LENGTH)[None, :, None], shape)
    if gates == "falling":
        gate = np.broadcast_to(np.linspace(50, -50, LENGTH)[None, :, None], shape)
    decay = -rng.choice([0.0, 1e-4, 0.5, 30.0], size=shape)
    return [np.asarray(x, dtype) for x in (q, k, v, decay, gate)]


def run(q, k, v, decay, gate, *, form, **options):
    options = dict(normalize=EPS, chunk_size=8) | options
    return ops.linear_memory(q, k, v, decay, log_input_gate=gate, form=form, **options)


def true_recurrence(q, k, v, decay, gate):
    """Compute xLSTM's output without stabilisers, in extended precision: `q C / max(|q n|, 1)`, with the
    memory C and the normaliser n, without ε.
    """
    wide = [np.asarray(x[0], np.longdouble) for x in (q, k, v, decay, gate)]
    q, k, v, f, i = wide[0] * KEYS**-0.5, *wide[1:3], np.exp(wide[3]), np.exp(wide[4])
    c, n, outputs = np.zeros((HEADS, KEYS, VALUES), np.longdouble), np.zeros((HEADS, KEYS)), []
    for t in range(LENGTH):
        c = f[t][:, None, None] * c + i[t][:, None, None] * k[t][:, :, None] * v[t][:, None]
        n = f[t][:, None] * n + i[t][:, None] * k[t]
        divisor = np.maximum(np.abs(np.sum(q[t] * n, -1)), 1)
        outputs.append(np.sum(q[t][:, :, None] * c, 1) / divisor[:, None])
    return np.array(outputs, np.float64)


@pytest.mark.parametrize("gates", ["mixed", "rising", "falling"])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_unstabilised_memory(form, gates):
    with jax.enable_x64(True):
        arrays = inputs(gates=gates)
        output, state = run(*arrays, form=form, normalize=0.0)
        expected = true_recurrence(*arrays)
        np.testing.assert_allclose(output[0], expected, rtol=1e-9, atol=1e-12)
        assert np.abs(state.memory).max() < 1e3  # however large the gates were


@pytest.mark.parametrize("form", FORMS)
def test_float32_is_finite_and_as_exact_as_its_gates(form):
    """With exponential input gates, outputs, states and gradients in float32 are finite and within 2e-5,
    relative to the largest entry, of those in float64 for the same gates. Keys and queries are positive,
    so that the normaliser is not near 0.
    """
    q, k, *rest = inputs(dtype=np.float32)
    arrays = [np.abs(q) + 0.5, np.abs(k) + 0.5, *rest]

    def total(arrays, form):
        output, state = run(*arrays, form=form)
        leaves = (output, *state[:3])
        weighted = [jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in leaves]
        return sum(weighted), leaves

    results = []
    for dtype, run_form in ((np.float32, form), (np.float64, "recurrent")):
        with jax.enable_x64(dtype == np.float64):
            inputs_in_dtype = [jnp.asarray(x, dtype) for x in arrays]
            grads, values = jax.grad(lambda a, f=run_form: total(a, f), has_aux=True)(
                inputs_in_dtype
            )
            results.append([np.asarray(x, np.float64) for x in (*values, *grads)])
    for a, b in zip(*results, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


@pytest.mark.parametrize("form", FORMS)
def test_gates_beyond_the_range_of_floats(form):
    """Input gates of e^±1000, which is not a float32 number, give a finite output."""
    q, k, v, decay, gate = inputs(dtype=np.float32)

    def total(gate):
        output, state = run(q, k, v, decay, gate, form=form)
        return jnp.sum(output), (output, state)

    for scale in (20.0, -20.0):
        for shift in (0.0, 1000.0, -1000.0):
            grad, (output, state) = jax.grad(total, has_aux=True)(scale * gate + shift)
            for x in (grad, output, *state[:3]):
                assert jnp.isfinite(x).all()


@pytest.mark.parametrize("form", FORMS)
def test_causal_to_the_bit_under_extreme_gates(form):
    arrays = inputs(dtype=np.float32)
    ids = jnp.asarray(np.repeat([[1, 2, 3]], [13, 4, 23], axis=1))
    for segment_ids in (None, ids):
        call = jax.jit(lambda *a, s=segment_ids: run(*a, form=form, segment_ids=s)[0])
        base = np.asarray(call(*arrays))
        for t in (5, 15, 31):
            for change in (200.0, -200.0):
                gate = np.copy(arrays[4])
                gate[:, t] += change
                moved = np.asarray(call(*arrays[:4], gate))
                np.testing.assert_array_equal(moved[:, :t], base[:, :t])


def test_gates_of_one_equal_a_memory_without_gates():
    """Input gates of 1 give the output of a memory without gates. Keys and queries are positive, so that |q
    n| is q n, and greater than 1.
    """
    with jax.enable_x64(True):
        q, k, v, decay, gate = inputs()
        q, k = np.abs(q) + 3, np.abs(k) + 3
        gated, state = run(q, k, v, decay, 0 * gate, form="chunk", normalize=1e-12)
        expected, expected_state = ops.linear_memory(q, k, v, decay, normalize=1e-12)
        np.testing.assert_allclose(gated, expected, rtol=1e-9, atol=1e-10)
        scale = np.exp(state.stabilizer)
        np.testing.assert_allclose(scale[..., None] * state.normalizer, expected_state.normalizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(normalize=None), "log_input_gate requires normalize"),
        (dict(bonus=np.ones((HEADS, KEYS))), "neither value_log_decay nor bonus"),
        (dict(log_input_gate=np.zeros((1, LENGTH, 3))), "log_input_gate has shape (1, 40, 3)"),
        (
            dict(initial_state=ops.linear_state(1, HEADS, KEYS, VALUES, normalize=True)),
            "has no stabilizer, but log_input_gate is given",
        ),
    ],
)
def test_errors_name_the_argument(change, message):
    q, k, v, decay, gate = inputs(dtype=np.float32)
    arguments = dict(log_input_gate=gate, normalize=EPS) | change
    with pytest.raises(ValueError) as error:
        ops.linear_memory(q, k, v, decay, **arguments)
    assert message in str(error.value)
