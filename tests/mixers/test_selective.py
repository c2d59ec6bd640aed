"""Tests of Mamba, S4D and GateLoop, compared with the published recurrences in numpy; of S4D's convolution,
compared with its recurrence; and of GateLoop with heads wider than one channel.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, ops
from lsm_jax.mixers import METHODS
from lsm_jax.mixers.gateloop import polar
from tests.mixers import test_mixers
from tests.mixers.conftest import Small
from tests.mixers.test_mixers import close
from tests.mixers.test_variants import convolved, dense, rms, silu


def array(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def test_mamba_is_the_published_recurrence():
    small = Small(METHODS["mamba"], stirred=True)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    inner = convolved(mixer.conv, dense(mixer.x_proj, x))
    b, c = dense(mixer.b_proj, inner), dense(mixer.c_proj, inner)
    step = dense(mixer.dt_up, dense(mixer.dt_down, inner)) + array(mixer.dt_bias)
    step, rate, skip = np.log1p(np.exp(step)), -np.exp(array(mixer.a_log)), array(mixer.skip)
    h, y = np.zeros((64, 16)), np.zeros((10, 64))
    for t in range(10):
        for channel in range(64):
            for n in range(16):
                decay = np.exp(step[t, channel] * rate[channel, n])
                write = step[t, channel] * b[t, n] * inner[t, channel]
                h[channel, n] = decay * h[channel, n] + write
            y[t, channel] = c[t] @ h[channel] + skip[channel] * inner[t, channel]
    close(small()[0][0], dense(mixer.o_proj, y * silu(dense(mixer.z_proj, x))))


def test_mamba_starts_as_published():
    def initial():
        mixer = mixers.Mamba(mixers.MambaConfig(), 256, rngs=nnx.Rngs(0))
        step = jax.nn.softplus(mixer.dt_bias[...])
        return jnp.exp(mixer.a_log[...]), step, mixer.dt_up.kernel[...], mixer.skip[...]

    rate, step, kernel, skip = jax.jit(initial)()
    np.testing.assert_allclose(rate, np.tile(np.arange(1, 17), (512, 1)), rtol=1e-6)
    assert (step > 0.99e-3).all() and (step < 0.101).all() and step.max() > 0.05
    assert kernel.shape == (16, 512) and 0.24 < abs(kernel).max() <= 0.25
    assert (skip == 1).all()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return (
        0.5 * x * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x.ravel()]).reshape(x.shape))
    )


@pytest.mark.parametrize("convolution", ["scan", "blocks"])
def test_s4d_is_the_published_recurrence(convolution):
    small = Small(METHODS["s4d"], stirred=True, convolution=convolution)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    step = np.exp(array(mixer.log_step))[:, None]
    a = -np.exp(array(mixer.a_log)) + 1j * array(mixer.a_imag)
    c = array(mixer.c) @ np.array([1, 1j])
    h, y = np.zeros(a.shape, complex), np.zeros((10, 32))
    for t in range(10):
        h = np.exp(step * a) * h + (np.exp(step * a) - 1) / a * x[t][:, None]
        y[t] = 2 * np.sum(c * h, axis=1).real + array(mixer.skip) * x[t]
    y, gate = np.split(dense(mixer.o_proj, gelu(y)) + array(mixer.o_proj.bias), 2, axis=-1)
    output, state = small()
    close(output[0], y * sigmoid(gate))
    np.testing.assert_allclose(state.memory.memory[0], h, atol=1e-5 * np.abs(h).max())


def test_s4d_starts_as_published():
    mixer = jax.jit(lambda: mixers.S4D(mixers.S4DConfig(), 256, rngs=nnx.Rngs(0)))()
    step = jnp.exp(mixer.log_step[...])
    assert (step > 0.99e-3).all() and (step < 0.101).all() and step.max() > 0.05
    np.testing.assert_allclose(jnp.exp(mixer.a_log[...]), np.full((256, 32), 0.5), rtol=1e-6)
    np.testing.assert_allclose(mixer.a_imag[7], np.pi * np.arange(32), rtol=1e-6)
    assert abs(jnp.mean(jnp.sum(mixer.c[...] ** 2, axis=-1)) - 1) < 0.05


def test_s4d_by_convolution_is_its_recurrence_in_value_and_gradients():
    def run(**fields):
        small = Small(METHODS["s4d"], stirred=True, **fields)
        (of_mixer, of_x), (y, state) = small.gradient(small.mixer, small.x)
        return y, state.memory, of_x, nnx.to_pure_dict(nnx.state(of_mixer))

    close(run(convolution="blocks"), run(convolution="scan", form="recurrent"), 1e-5)


def test_s4d_decodes_what_it_convolved_and_packs():
    small = Small(METHODS["s4d"], convolution="blocks")
    whole, final = small()
    y, state = small(small.x[:, :7])
    outputs = [y]
    for t in range(7, 10):
        y, state = small(small.x[:, t : t + 1], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), whole)
    close(state, final)
    ids = jnp.tile(jnp.repeat(jnp.array([3, 1], jnp.int32), 5), (2, 1))
    alone = jnp.concatenate([small(small.x[:, :5])[0], small(small.x[:, 5:])[0]], axis=1)
    close(small(segment_ids=ids)[0], alone)


@pytest.mark.parametrize("length", [1, 5, 100, 2048, 3001])
def test_long_convolution_is_the_long_recurrence(length):
    """S4D's convolution of long rows, in float32 with the initial parameters, equals the recurrence in
    float64; no later token changes a bit of an output.
    """
    rng = np.random.default_rng(0)
    u = rng.normal(size=(1, length, 4))
    delta = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), size=4))
    a = -0.5 + 1j * np.pi * np.tile(np.arange(32), (4, 1))
    c = rng.normal(size=(4, 32)) + 1j * rng.normal(size=(4, 32))
    arguments = (jnp.asarray(delta, jnp.float32), jnp.asarray(a, jnp.complex64), jnp.ones((4, 32)))
    run = jax.jit(lambda u: ops.time_invariant_memory(u, *arguments, jnp.asarray(c, jnp.complex64)))
    output, state = run(jnp.asarray(u, jnp.float32))
    decay = np.exp(delta[:, None] * a)
    h, y = np.zeros((4, 32), complex), np.zeros((length, 4))
    for t in range(length):
        h = decay * h + (decay - 1) / a * u[0, t][:, None]
        y[t] = np.sum(c * h, axis=1).real
    assert np.abs(output[0] - y).max() < 1e-5 * np.abs(y).max()
    assert np.abs(state.memory[0] - h).max() < 1e-5 * np.abs(h).max()
    for t in (length // 2, length - 1):
        moved, _ = run(jnp.asarray(u, jnp.float32).at[:, t].multiply(-20.0))
        np.testing.assert_array_equal(moved[:, :t], output[:, :t])


@pytest.mark.parametrize(
    ("length", "which"), [(50, "ABC"), (700, "ABC"), (700, ""), (200, "B"), (200, "C")]
)
def test_convolution_by_blocks_is_the_recurrence_in_value_and_every_gradient(length, which):
    """S4D's convolution by blocks has, in float64, the values and gradients of its recurrence: for rows of
    one block of tokens, and for rows of twelve blocks in two levels of groups, the first group incomplete.
    `which` names the arrays (of A, B, C) that are complex.
    """
    rng = np.random.default_rng(0)
    turned = {n: 1j * rng.uniform(0, 9, size=(3, 4)) for n in "ABC"}
    arrays = dict(A=-rng.uniform(0.2, 2, size=(3, 4)), B=rng.normal(size=(3, 4)))
    arrays |= dict(C=rng.normal(size=(3, 4)))
    arrays = {n: x + turned[n] if n in which else x for n, x in arrays.items()}
    arrays |= dict(u=rng.normal(size=(2, length, 3)), D=rng.normal(size=3))
    arrays |= dict(delta=np.exp(rng.uniform(-7, -2, size=3)))
    weights = [rng.normal(size=s) for s in ((2, length, 3), (2, 3, 4), (2, 3, 4))]

    def total(op, arrays):
        output, state = op(**arrays)
        parts = output, jnp.real(state.memory), jnp.imag(state.memory)
        return sum(jnp.sum(x * w) for x, w in zip(parts, weights, strict=True)), (output, state)

    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, arrays)
        scanned = functools.partial(ops.selective_memory, discretization="zoh", form="recurrent")
        found, expected = (
            jax.jit(jax.value_and_grad(functools.partial(total, op), has_aux=True))(arrays)
            for op in (ops.time_invariant_memory, scanned)
        )
        for got, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-11 * np.abs(wanted).max())


def complex_gate(mixer, x):
    z = dense(mixer.a_proj, x) + array(mixer.a_proj.bias)
    z = z[:, : z.shape[1] // 2] + 1j * z[:, z.shape[1] // 2 :]
    return sigmoid(np.abs(z)) * np.exp(1j * np.angle(z))


@pytest.mark.parametrize("num_heads", [None, 4, 32])
@pytest.mark.parametrize("norm", [False, True])
def test_gateloop_is_the_published_recurrence(num_heads, norm):
    """GateLoop's layer equals the published complex recurrence; its wide heads are computed as real
    memories with rotated keys and queries.
    """
    small = Small(METHODS["gateloop"], stirred=True, num_heads=num_heads, norm=norm)
    mixer, x = small.mixer, np.asarray(small.x[0], np.float64)
    heads = num_heads or 32
    q, k, v = (dense(getattr(mixer, f"{n}_proj"), x).reshape(10, heads, 32 // heads) for n in "qkv")
    a, memory, o = complex_gate(mixer, x), np.zeros((heads, 32 // heads, 32 // heads), complex), []
    for t in range(10):
        memory = a[t][:, None, None] * memory + k[t][:, :, None] * v[t][:, None, :]
        o.append(np.einsum("hk,hkv->hv", q[t], memory).real)
    o = np.array(o)
    if norm:
        o = rms(o if num_heads else o.reshape(10, 1, 32)) * array(mixer.norm.scale)
    expected = dense(mixer.o_proj, o.reshape(10, 32) * silu(dense(mixer.g_proj, x)))
    close(small()[0][0], expected)


def test_gateloops_heads_of_one_channel_are_one_complex_number_each():
    wide = Small(METHODS["gateloop"], stirred=True, num_heads=32)
    single = Small(METHODS["gateloop"], stirred=True)
    for a, b in zip(jax.tree.leaves(wide.mixer), jax.tree.leaves(single.mixer), strict=True):
        np.testing.assert_array_equal(a, b)
    (wide_y, wide_state), (y, state) = wide(), single()
    close(wide_y, y)
    kept = wide_state.memory.memory[..., 0] @ np.array(
        [1, -1j], np.complex64
    )  # the conjugate's parts
    close(kept, state.memory.memory[..., 0])


@pytest.mark.parametrize(
    "check",
    [
        test_mixers.test_prefill_then_decoding_equals_one_call,
        test_mixers.test_state_has_one_static_shape,
        test_mixers.test_packed_documents_equal_documents_alone,
        functools.partial(test_mixers.test_tokens_left_out_change_nothing, how="padding"),
        functools.partial(test_mixers.test_tokens_left_out_change_nothing, how="mask"),
        test_mixers.test_causal_to_the_bit,
        functools.partial(test_mixers.test_gradients_are_finite, size=0.0),
        functools.partial(test_mixers.test_gradients_are_finite, size=1e3),
    ],
    ids=lambda f: getattr(f, "__name__", "") or f"{f.func.__name__}-{f.keywords}",
)
@pytest.mark.slow
def test_gateloops_wide_heads_keep_every_promise(check):
    check(small=wide_gateloop())


@functools.cache
def wide_gateloop() -> Small:
    return Small(METHODS["gateloop"], stirred=True, num_heads=4)


@pytest.mark.slow
def test_gateloops_wide_heads_have_one_gradient_in_every_form():
    def run(form):
        small = Small(METHODS["gateloop"], stirred=True, num_heads=4, form=form)
        (of_mixer, of_x), _ = small.gradient(small.mixer, small.x)
        return nnx.to_pure_dict(nnx.state(of_mixer)), of_x

    expected = run("recurrent")
    close(run("chunk"), expected, 3e-5)
    close(run("associative"), expected, 3e-5)


def test_a_gate_of_zero_has_an_angle_and_gradients_of_zero():
    def gate(x, y):
        length, angle = polar(x, y)
        return jax.nn.log_sigmoid(length) + 3 * angle

    for x, y in ((0.0, 0.0), (1e-30, -1e-30)):
        assert polar(x, y) == (0, 0)
        assert jax.grad(gate, argnums=(0, 1))(x, y) == (0, 0)
    slopes = jax.grad(gate, argnums=(0, 1))(-0.3, 0.4)
    np.testing.assert_allclose(
        slopes, np.array([-0.6, 0.8]) * sigmoid(-0.5) + 3 * np.array([-1.6, -1.2]), rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "one turn after another"])
def test_phase_does_not_drift(kind):
    """The phase of a complex memory does not drift: 50,000 tokens and up to 25,000 full turns in float32
    are compared with float64.
    """
    angle = np.full((1, 50_000, 3), 3.1)
    if kind == "random":
        angle = np.random.default_rng(0).uniform(-np.pi, np.pi, size=angle.shape)
    angle = angle.astype(np.float32)
    run = jax.jit(ops.cumulative_phase)
    phase, final = run(angle)
    exact = np.exp(1j * np.cumsum(angle.astype(np.float64), axis=1))
    assert np.abs(np.exp(1j * np.asarray(phase, np.float64)) - exact).max() < 1e-5
    assert np.abs(phase).max() < 3.1416
    np.testing.assert_array_equal(final, phase[:, -1])
    moved, _ = run(np.where(np.arange(50_000)[:, None] == 40_000, 1.0, angle))
    assert (moved[:, :40_000] == phase[:, :40_000]).all()
    with jax.enable_x64(True):
        phase, _ = run(jnp.asarray(angle, jnp.float64))
    assert np.abs(np.exp(1j * np.asarray(phase)) - exact).max() < 1e-9


def test_phase_begins_again_with_a_document_and_skips_what_is_masked():
    angle = np.random.default_rng(1).normal(size=(1, 9, 2)).astype(np.float32)
    ids = jnp.array([[1, 1, 0, 1, 2, 2, 1, 1, 1]])
    mask = jnp.array([[1, 0, 1, 1, 1, 1, 1, 0, 1]])
    poisoned = np.where(np.arange(9)[:, None] == 7, np.nan, angle)
    phase, final = ops.cumulative_phase(poisoned, segment_ids=ids, update_mask=mask)
    a = angle[0]
    expected = [a[0], a[0], 0 * a[0], a[0] + a[3], a[4], a[4] + a[5], a[6], a[6], a[6] + a[8]]
    np.testing.assert_allclose(phase[0], expected, atol=1e-6)
    np.testing.assert_allclose(final[0], expected[-1], atol=1e-6)
    each, kept = ops.cumulative_phase(angle, num_segments=3, segment_ids=ids)
    own = np.array([0, 1, 3, 6, 7, 8])
    sums = a[own].cumsum(0)
    assert abs(sums).max() < np.pi
    np.testing.assert_allclose(each[0, own], sums, atol=1e-6)
    np.testing.assert_allclose(kept[0], [sums[-1], a[4] + a[5], 0 * a[0]], atol=1e-6)


def test_phase_has_the_gradient_of_a_sum():
    weights = np.random.default_rng(2).normal(size=(1, 9, 2))
    ids = jnp.array([[1, 1, 0, 1, 2, 2, 2, 2, 2]])

    def loss(angle):
        phase, final = ops.cumulative_phase(angle, segment_ids=ids)
        return jnp.sum(phase * weights) + jnp.sum(final)

    of_angle = jax.grad(loss)(3 * jnp.sin(jnp.arange(18.0)).reshape(1, 9, 2))[0]
    w, backwards = weights[0], lambda x: x[::-1].cumsum(0)[::-1]
    w[2] = 0  # the output at padding is 0
    expected = np.concatenate([backwards(w[:4]), backwards(w[4:]) + 1])
    expected[2] = 0
    np.testing.assert_allclose(of_angle, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("mamba", dict(state_size=0), "state_size=0"),
        ("mamba", dict(step_rank=0), "step_rank=0"),
        ("s4d", dict(state_size=5), "state_size=5: it must be even"),
        ("s4d", dict(max_step=1e-4), "max_step=0.0001: it must be at least min_step"),
        ("s4d", dict(convolution="direct"), "convolution='direct': accepted are 'blocks', 'scan'"),
        ("gateloop", dict(num_heads=5), "num_heads=5 does not divide hidden_size=32"),
    ],
)
def test_fields_that_do_not_fit_are_refused(name, fields, words):
    with pytest.raises(ValueError, match=words):
        Small(METHODS[name], **fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(discretization="tustin"), "discretization='tustin'; accepted are 'euler', 'zoh'"),
        (dict(form="parallel"), "form='parallel'; accepted are 'recurrent'"),
        (dict(u=jnp.zeros((2, 5))), "u has shape (2, 5); accepted is [B, T, D]"),
        (dict(u=jnp.zeros((2, 5, 3), jnp.complex64)), "u has dtype complex64; accepted are real"),
        (dict(delta=jnp.zeros((2, 5, 4))), "delta has shape (2, 5, 4); accepted is"),
        (dict(A=jnp.zeros((4, 4))), "A has shape (4, 4); accepted is [D, N] = [3, *]"),
        (dict(B=jnp.zeros((2, 4))), "B has shape (2, 4); accepted are [B, T, N], [D, N]"),
        (dict(D=jnp.zeros(4)), "D has shape (4,); accepted is [D] = [3]"),
        (dict(initial_state=ops.selective_state(2, 3, 5)), "initial_state.memory has shape (2, 3, 5)"),
        (dict(initial_state=ops.selective_state(2, 3, 4, is_complex=True)), "has dtype complex64; accepted with"),
    ],
)  # fmt: skip
def test_selective_memory_names_the_argument(change, message):
    arguments = dict(
        u=jnp.zeros((2, 5, 3)),
        delta=jnp.zeros((2, 5, 3)),
        A=jnp.zeros((3, 4)),
        B=jnp.zeros((2, 5, 4)),
        C=jnp.zeros((2, 5, 4)),
    )
    with pytest.raises(ValueError) as error:
        ops.selective_memory(**(arguments | change))
    assert message in str(error.value)
