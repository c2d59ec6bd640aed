"""Tests of mLSTM's memory by Hopper's exact scans, in Mosaic GPU's interpreter: compared with the recurrence in float32."""

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.linear_attention import stabilized as kernels
from pallas_kernels.linear_attention.cases import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE
from pallas_kernels.linear_attention.hopper import stabilized
from tests.kernels.test_linear_attention_gpu import error

SCALE, EPS = 0.25, 1e-6
PRECISION = 1e-3
"""The largest error of an output, relative to the largest one."""
STATE = "memory", "normalizer", "stabilizer"
H200 = AbstractMesh(
    (),
    (),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu"),
)


class Case(NamedTuple):
    """Numbers of heads of q, k and v, K, V and T of one row; the gates: "mild", "long" (decays near 1), "strong" (input gates of e^±20, decays
    of 1 and of e^-30) or "floor" (input gates of e^-10, so that e^-m divides); whether there are documents and tokens that write nothing; and
    whether there is an initial state.
    """

    heads: tuple[int, int, int]
    sizes: tuple[int, int]
    length: int
    gates: str
    documents: bool = False
    state: bool = True


CASES = {
    "mild": Case((1, 1, 1), (64, 64), 130, "mild"),
    "documents": Case((1, 1, 1), (64, 64), 128, "mild", True),
    "long": Case((1, 1, 1), (64, 64), 320, "long"),
    "strong": Case((1, 1, 1), (64, 64), 200, "strong"),
    "strong-documents": Case((1, 1, 1), (64, 64), 200, "strong", True),
    "floor": Case((1, 1, 1), (64, 64), 200, "floor", True),
    "empty": Case((1, 1, 1), (64, 64), 130, "mild", True, False),
    "queries-share": Case((2, 1, 1), (64, 64), 130, "mild"),
    "keys-share": Case((1, 1, 2), (64, 64), 130, "long", True),
    "wide": Case((1, 1, 1), (64, 128), 130, "long"),
    "deep": Case((1, 1, 1), (256, 64), 100, "mild"),
}
RANDOM_SIGNS = "mild", "long"


def make(case: Case, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a call, among them those of the initial state, and its marks. Signs of queries and keys are random, so that their
    products with the normaliser cancel.
    """
    rng = np.random.default_rng(seed)
    (heads, key_heads, memories), (key_dim, value_dim), length = case.heads, case.sizes, case.length
    gates = 1, length, memories

    def normal(*shape, dtype: Any = jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    x = dict(
        q=normal(1, length, heads, key_dim, dtype=jnp.bfloat16),
        k=normal(1, length, key_heads, key_dim, dtype=jnp.bfloat16),
        v=normal(*gates, value_dim, dtype=jnp.bfloat16),
        log_decay=jax.nn.log_sigmoid(normal(*gates) + (6 if case.gates == "long" else 3)),
        log_input_gate=normal(*gates) - (10 if case.gates == "floor" else 0),
    )
    if case.gates == "strong":
        x["log_decay"] = jnp.asarray(rng.choice([0, -1e-3, -0.1, -30], size=gates), jnp.float32)
        x["log_input_gate"] = jnp.asarray(rng.choice([-20, 20, 0, 1], size=gates), jnp.float32)
    state = dict(
        memory=normal(1, memories, key_dim, value_dim),
        normalizer=normal(1, memories, key_dim), stabilizer=normal(1, memories),
    )  # fmt: skip
    if case.state:
        x |= state
    marks = {}
    if case.documents:
        ids = 1 + np.cumsum(np.isin(np.arange(length), [30, 31, 64, 150]))
        ids[90:95] = 0  # padding
        marks["segment_ids"] = jnp.asarray(ids)[None]
        marks["update_mask"] = jnp.asarray(rng.random((1, length)) < 0.9)
    return x, marks


def call(marks, x, **options):
    """Return the output and the final state of mLSTM's memory, as arrays."""
    x = dict(x)
    state = None
    if "memory" in x:
        sizes = x["v"].shape[2], x["k"].shape[3], x["v"].shape[3]
        empty = ops.linear_state(1, *sizes, normalize=True, stabilize=True)
        state = empty._replace(**{n: x.pop(n) for n in STATE}, segment_id=jnp.ones(1, jnp.int32))
    output, state = ops.linear_memory(
        **x, **marks, initial_state=state, normalize=EPS, scale=SCALE, **options
    )
    return output, *state[:3]


def recurrence(marks, x):
    return call(marks, {n: a.astype(jnp.float32) for n, a in x.items()}, form="recurrent")


def fused(marks, x):
    return call(marks, x, implementation="mosaic_gpu")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """A fixture that runs the kernels in the interpreter, and returns their output before it is rounded."""
    kernel = kernels.stabilized_attention
    monkeypatch.setattr(
        kernels, "stabilized_attention",
        lambda *arrays, **options: kernel(*arrays, **options | dict(exact=True, interpret=gpu_interpreter())),
    )  # fmt: skip
    module = importlib.import_module("lsm_jax.ops.linear.linear_memory")
    # Without jit: a program that waits for its kernels would occupy a thread, which they need if there are few cores.
    monkeypatch.setattr(module, "run", module.run.__wrapped__)


def largest_error(actual, expected):
    """Return the largest difference of the arrays `actual` and `expected`, relative to the largest entry of `expected`."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.abs(actual - expected).max() / np.abs(expected).max()


def sizes_of_gradients(x, gradients) -> dict[str, float]:
    """Return the RMS to which the error of each gradient is relative: its own, and that of the terms of the stabiliser's, which is a sum of
    terms of both signs over a memory and normaliser.
    """
    sizes = {
        n: np.sqrt(np.mean(np.square(np.asarray(g, np.float64)))) for n, g in gradients.items()
    }
    if "stabilizer" in sizes:
        terms = sum(np.sum(np.square(x[n] * gradients[n])) for n in STATE[:2])
        sizes["stabilizer"] = max(sizes["stabilizer"], np.sqrt(terms / x["stabilizer"].size))
    return sizes


@pytest.mark.parametrize(
    "name", ["documents", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "documents")]
)  # fmt: skip
def test_equals_the_recurrence_in_value_and_every_gradient(name):
    """Outputs are within 1e-3 of the largest, and final states within 1e-4."""
    x, marks = make(CASES[name])
    wanted, wanted_pull = jax.vjp(functools.partial(recurrence, marks), x)
    got, pull = jax.vjp(functools.partial(fused, marks), x)
    assert not races_found()
    for a, b, bound in zip(got, wanted, (PRECISION, 1e-4, 1e-4, 1e-6), strict=True):
        assert a.dtype == jnp.float32 and a.shape == b.shape
        assert largest_error(a, b) < bound
    rng = np.random.default_rng(1)
    cotangents = tuple(jnp.asarray(rng.normal(size=a.shape), jnp.bfloat16).astype(jnp.float32) for a in got)  # fmt: skip
    (gradients,), (expected,) = pull(cotangents), wanted_pull(cotangents)
    assert not races_found()
    sizes = sizes_of_gradients(x, expected)
    for field, gradient in gradients.items():
        assert gradient.shape == x[field].shape and gradient.dtype == x[field].dtype
        difference = np.asarray(gradient, np.float64) - np.asarray(expected[field], np.float64)
        size = sizes[field] or 1.0
        assert np.sqrt(np.mean(difference**2)) < GRADIENT_TOLERANCE * size, field


@pytest.mark.parametrize(
    "gates, seed",
    [("mild", 0), *(pytest.param(g, s, marks=pytest.mark.slow) for g in RANDOM_SIGNS for s in range(1, 3))],
)  # fmt: skip
def test_operands_of_one_term_would_be_amplified(gates, seed, monkeypatch):
    """Where q n cancels, outputs of the scans with weights and memories in bfloat16 are farther off than the bound of tests on cards, and those of
    exact scans are not.
    """
    x, marks = make(Case((1, 1, 1), (64, 64), 320, gates), seed)
    wanted, got = recurrence(marks, x)[0], fused(marks, x)[0]
    assert largest_error(got, wanted) < PRECISION / 3
    scan = stabilized.scalar_scan

    def rounded(*arrays, **options):
        output, *others = scan(*arrays, **options | dict(terms=1))
        return output.astype(jnp.float32), *others

    monkeypatch.setattr(stabilized, "scalar_scan", rounded)
    worse = fused(marks, x)[0]
    assert error(worse, wanted) > OUTPUT_TOLERANCE and largest_error(worse, wanted) > 10 * PRECISION


def test_two_terms_of_the_normaliser_would_be_amplified(monkeypatch):
    """Where q n cancels to a 3,000th of its terms, the largest output has the bound's precision with three terms of q n, and not with two."""
    x, marks = make(Case((1, 1, 1), (64, 64), 64, "strong"), seed=80)
    wanted = recurrence(marks, x)[0]
    assert largest_error(fused(marks, x)[0], wanted) < PRECISION
    monkeypatch.setattr(stabilized, "_NORMALIZER_TERMS", 2)
    assert largest_error(fused(marks, x)[0], wanted) > 3 * PRECISION


def test_rounding_of_the_stabiliser_cancels():
    """A stabiliser of 20 has 1e-6 left of each token's decay. Decays that are computed from it differ by as much from those of the gates, both ways,
    and their sums over 1,000 tokens by no more.
    """
    rng, count = np.random.default_rng(0), 1000
    log_decay = -np.abs(rng.normal(size=(1, count, 1)) * 1e-3).astype(np.float32)
    gates, m = np.full_like(log_decay, -20), np.zeros_like(log_decay)
    last = np.float32(20.3)
    initial = stabilized.Initial(np.zeros((1, 1, 64, 64)), np.zeros((1, 1, 64)), np.full((1, 1), last))  # fmt: skip
    for t in range(count):
        m[:, t] = last = log_decay[0, t, 0] + last
    kept, written = stabilized._factors(*map(jnp.asarray, (log_decay, gates, m)), None, initial)
    kept, written, wide = (np.asarray(x, np.float64)[0, :, 0] for x in (kept, written, log_decay))
    m = m[0, :, 0].astype(np.float64)
    sums = np.cumsum(wide) + np.float64(np.float32(20.3)) - m
    assert kept.max() > 1e-7
    np.testing.assert_allclose(np.cumsum(kept), sums, atol=1e-7)
    np.testing.assert_allclose(written, -20 - m, rtol=1e-7)


@pytest.mark.parametrize("case", ["closed gates", "emptied"])
def test_gates_without_a_limit(case):
    """Input gates of -inf write nothing, and a decay of e^-1e10 with closed gates after it overflows nothing."""
    x, marks = make(Case((1, 1, 1), (64, 64), 256, "mild", state=False))
    if case == "closed gates":
        x["log_input_gate"] = x["log_input_gate"].at[0, jnp.array([5, 6, 255])].set(-jnp.inf)
    else:
        x["log_decay"] = jnp.full_like(x["log_decay"], -30.0).at[0, 0].set(-1e10)
        x["log_input_gate"] = x["log_input_gate"].at[0, :200].set(-1e30)
    wanted = recurrence(marks, x)
    got, pull = jax.vjp(functools.partial(fused, marks), x)
    for a, b in zip(got, wanted, strict=True):
        assert largest_error(a, b) < PRECISION
    (gradients,) = pull(tuple(map(jnp.ones_like, got)))
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients.values())


def test_no_output_depends_on_later_tokens():
    """A change of one token changes no bit of an earlier output, and every later one."""
    x, marks = make(CASES["mild"])
    x = {n: a for n, a in x.items() if n not in STATE}
    got, place = fused(marks, x)[0], 100
    later = {n: a.at[:, place].set(-a[:, place] + 1) for n, a in x.items()}
    later["log_decay"] = jnp.minimum(later["log_decay"], 0)
    other = fused(marks, later)[0]
    np.testing.assert_array_equal(got[:, :place], other[:, :place])
    assert (got[:, place:] != other[:, place:]).any(axis=(2, 3)).all()


def test_a_row_in_two_calls_is_the_row_in_one():
    """The final state of the first part continues in the second."""
    x, marks = make(CASES["mild"])
    whole = fused(marks, x)
    parts = [{n: a if n in STATE else a[:, s] for n, a in x.items()} for s in (slice(70), slice(70, None))]  # fmt: skip
    first = fused(marks, parts[0])
    second = fused(marks, parts[1] | dict(zip(STATE, first[1:], strict=True)))
    output = jnp.concatenate([first[0], second[0]], axis=1)
    for a, b in zip((output, *second[1:]), whole, strict=True):
        assert largest_error(a, b) < PRECISION / 5


def test_gates_that_never_open_write_nothing():
    """Without any write and without a state the output is 0, and all gradients are finite."""
    x, marks = make(CASES["empty"])
    x["log_input_gate"] = jnp.full_like(x["log_input_gate"], -200.0)
    got, pull = jax.vjp(functools.partial(fused, marks), x)
    assert not np.asarray(got[0]).any()
    (gradients,) = pull(tuple(map(jnp.ones_like, got)))
    assert all(bool(jnp.isfinite(a).all()) for a in gradients.values())


def _shapes(batch=2, length=512, heads=4, key_dim=128, value_dim=256, dtype=jnp.bfloat16):
    struct = jax.ShapeDtypeStruct
    tokens = batch, length, heads
    x: dict[str, Any] = {n: struct((*tokens, key_dim), dtype) for n in "qk"}
    x |= dict(v=struct((*tokens, value_dim), dtype))
    return x | {n: struct(tokens, jnp.float32) for n in ("log_decay", "log_input_gate")}


@pytest.mark.parametrize("derivative, calls", [(False, 2), (True, 7)])
def test_lowers_for_an_h200(derivative, calls, monkeypatch):
    """Two scans, and five of the derivative."""
    monkeypatch.undo()

    def run(x):
        both = lambda x: ops.linear_memory(**x, normalize=EPS, implementation="mosaic_gpu")[0]  # noqa: E731
        if not derivative:
            return both(x)
        output, pull = jax.vjp(both, x)
        return output, pull(output)

    with use_abstract_mesh(H200):
        text = jax.jit(run).trace(_shapes()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == calls


@pytest.mark.parametrize("batch, kernel", [(8, True), (7, False)])
def test_runs_where_it_fills_half_of_a_card(batch, kernel, monkeypatch):
    """By default on an H200: 64 thread blocks of 128 value channels."""
    monkeypatch.undo()
    with use_abstract_mesh(H200):
        run = lambda x: ops.linear_memory(**x, normalize=EPS)[0]  # noqa: E731
        traced = jax.jit(run).trace(_shapes(batch=batch))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) is kernel


@pytest.mark.parametrize(
    "sizes, options, words",
    [(dict(dtype=jnp.float32), {}, "q in bfloat16, not float32"),
     (dict(key_dim=96), {}, "K of 64, 128, 256 or 512, not 96"),
     (dict(value_dim=320), {}, "V of 64, 128, 256 or 512, not 320"),
     ({}, dict(form="associative"), "form='chunk'"),
     ({}, dict(initial_state=3), "one state per row, not 3 states per row")],
)  # fmt: skip
def test_names_the_unmet_requirement(sizes, options, words):
    x = _shapes(**sizes)
    if "initial_state" in options:
        state = ops.linear_state(2, 4, 128, 256, num_segments=options["initial_state"], normalize=True, stabilize=True)  # fmt: skip
        options = dict(initial_state=state, segment_ids=jnp.ones((2, 512), jnp.int32))
    with pytest.raises(NotImplementedError, match=f"requires .*{words}"):
        jax.eval_shape(
            lambda x: ops.linear_memory(**x, normalize=EPS, implementation="mosaic_gpu", **options)[0], x
        )  # fmt: skip
