"""Tests of the memories' kernels that run on an NVIDIA Hopper GPU: `make test-gpu`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.calls import compare, memories
from lsm_jax import ops
from lsm_jax.ops.core.saved import memories_saved
from pallas_kernels.decode_step import cases as decode_step_cases
from pallas_kernels.delta_rule import cases as delta_rule_cases
from pallas_kernels.dplr import cases as dplr_cases
from pallas_kernels.linear_attention import cases as linear_attention_cases
from pallas_kernels.linear_attention.hopper import scalar_decay, scalar_plan, scalar_scan
from pallas_kernels.memory_cases import SEGMENTS, SEGMENTS_WIDE, SLOTS
from pallas_kernels.selective_scan import cases as selective_scan_cases
from tests.kernels import test_decode_step_gpu as decode_step
from tests.kernels import test_selective_scan_gpu as scans
from tests.kernels.marks import on_hopper
from tests.kernels.on_card import assert_alike, assert_alike_without_a_derivative
from tests.kernels.test_linear_attention_gpu import error

pytestmark = on_hopper


# Sizes of layers in 1.3B (the first, whose two slices of keys fill the processors together) and in 340M.
SAVED = [
    ((4, 4, 4), 256, 512, 512, True, "channel"),
    ((4, 4, 4), 256, 512, 512, False, "channel"),
    ((4, 4, 4), 128, 256, 1100, True, "channel"),
    ((2, 1, 2), 128, 128, 1100, True, "token"),
    ((3, 3, 3), 256, 512, 700, True, "delta, token"),
    ((2, 2, 2), 128, 128, 1100, True, "delta, channel"),
    ((2, 2, 2), 64, 64, 1100, True, "dplr, channel"),
    ((2, 2, 2), 128, 128, 700, True, "dplr, channel"),
]


@pytest.mark.parametrize("configuration", SAVED, ids=compare.case_id)
def test_saved_memories_give_the_gradients_of_the_recurrence(configuration):
    """The same with the memories before all chunks saved for the backward pass (`remat="dots_and_states"`), in 8 rows."""
    with memories_saved():
        saving = check(configuration, batch=8)
    assert saving != check(configuration, batch=8)


@pytest.mark.parametrize("configuration", memories.CONFIGURATIONS, ids=compare.case_id)
def test_equals_the_recurrence(configuration):
    """On the card, the value, final state and every gradient of a memory's kernel are those of the recurrence
    in float32 at full precision; a second run gives the same bits.
    """
    check(configuration, batch=2)


@pytest.mark.parametrize("configuration", memories.CONFIGURATIONS, ids=compare.case_id)
def test_equals_the_recurrence_without_a_derivative(configuration):
    """On the card, so does the kernel of a call without a derivative, as of an evaluation."""
    call, cases = memories.memory(configuration, 2), cases_of(configuration)
    assert_alike_without_a_derivative(call, cases.OUTPUT_TOLERANCE)


@pytest.fixture
def by_roles(monkeypatch):
    """A fixture with the scan by roles of a scalar decay, and no trace of the same shapes with the other scan."""
    monkeypatch.setattr(scalar_scan, "ROLES", True)
    jax.clear_caches()
    yield
    jax.clear_caches()


SCALAR = [x for x in memories.CONFIGURATIONS if str(x[-1]) in ("token", "None", "strong", "constant")]  # fmt: skip


@pytest.mark.parametrize("configuration", SCALAR, ids=compare.case_id)
@pytest.mark.parametrize("wide", [False, True])
def test_the_scan_by_roles_equals_the_recurrence(configuration, wide, by_roles, monkeypatch):
    """With one block of value channels in a thread block, and, if `wide`, with two if there are two, and with sums of decays by products."""
    monkeypatch.setattr(scalar_plan, "PROCESSORS", 1 if wide else 132)
    monkeypatch.setattr(scalar_decay, "SUMS_BY_PRODUCTS", wide)
    check(configuration, batch=2)


@pytest.mark.parametrize("case", ["scalar", "plain-shared", "scalar-wide"])
def test_the_scan_by_roles_with_one_state_a_segment(case, by_roles):
    test_one_state_a_segment((SEGMENTS | SEGMENTS_WIDE)[case])


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 2, 2), (1, 1, 3)], ids=str)
def test_the_scan_by_roles_with_factors_of_writes_and_skips(heads, documents, by_roles):
    test_factors_of_writes_and_skips(heads, documents)


def cases_of(configuration):
    """Return the module that has a configuration's tolerances."""
    words = str(configuration[-1])
    return dplr_cases if "dplr" in words else delta_rule_cases if "delta" in words else linear_attention_cases  # fmt: skip


def check(configuration, batch):
    """Compare a configuration's kernel with the recurrence, and with itself, on the card. Return the text of its program."""
    call = memories.memory(configuration, batch)
    cases = cases_of(configuration)
    assert_alike(call, cases.OUTPUT_TOLERANCE, cases.GRADIENT_TOLERANCE)
    return compare.program(call, "mosaic_gpu").lower(call.cotangents, call.arrays).as_text()


@pytest.mark.parametrize("case", linear_attention_cases.MLSTM, ids=compare.case_id)
def test_mlstm_equals_the_recurrence(case):
    """On the card, the value, final memory and normaliser, and every gradient of mLSTM's exact scans are those of the recurrence in float32; a
    second run gives the same bits. The gradient of the initial stabiliser is a sum over a memory of terms of both signs.
    """
    call = memories.mlstm(case[:6])
    stabilizer = call.arrays["stabilizer"]
    rest = {n: x for n, x in call.arrays.items() if n != "stabilizer"}
    run = lambda implementation, x: call.run(implementation, x | dict(stabilizer=stabilizer))  # noqa: E731
    tolerances = linear_attention_cases.OUTPUT_TOLERANCE, linear_attention_cases.GRADIENT_TOLERANCE
    assert_alike(call._replace(run=run, arrays=rest), *tolerances)
    assert_alike_without_a_derivative(call, tolerances[0])


@pytest.mark.parametrize("case", (SEGMENTS | SEGMENTS_WIDE).values(), ids=compare.case_id)
def test_one_state_a_segment(case):
    """On the card, with one state per segment, the value, final states and every gradient of a memory's
    kernel are those of the recurrence; a second run gives the same bits.
    """
    assert_alike(memories.segments(case), 5e-3, 1e-2)


@pytest.mark.parametrize("op", [ops.linear_memory, ops.delta_memory, ops.dplr_memory])
def test_none_picks_the_kernel_and_changes_nothing_else(op):
    inputs = [jnp.ones((8, 128, 2, 64), jnp.bfloat16)] * 3
    if op is ops.delta_memory:
        inputs.append(jnp.ones((8, 128, 2)))
    if op is ops.dplr_memory:
        inputs += inputs[:2]
    text = jax.jit(lambda *x: op(*x)[0]).lower(*inputs).as_text()
    assert "mosaic_gpu" in text
    text = jax.jit(lambda *x: op(*x, implementation="xla")[0]).lower(*inputs)
    assert "mosaic_gpu" not in text.as_text()


@pytest.mark.parametrize("case", decode_step_cases.HOPPER, ids=lambda case: case.id)
def test_one_token_equals_the_recurrence(case):
    """On the card, the output and memory of the kernel of one token are those of the recurrence in float32,
    other memories do not change, and a second run gives the same bits.
    """
    op, heads, key_dim, value_dim, decays, documents, stacked, dtype, batch = case
    arrays = decode_step.make(op, heads, key_dim, value_dim, decays, documents, dtype, batch)

    @functools.partial(jax.jit, static_argnums=0)
    def both(options, arrays):
        return decode_step.run(op, arrays, stacked=stacked, **dict(options))

    fused = both((("implementation", "mosaic_gpu"),), arrays)
    for a, b in zip(fused, both((("implementation", "mosaic_gpu"),), arrays), strict=True):
        np.testing.assert_array_equal(a, b)
    wide = {n: x.astype(jnp.float32) if x.dtype == dtype else x for n, x in arrays.items()}
    wanted = both((("implementation", "xla"), ("form", "recurrent")), wide)
    assert error(fused[0], wanted[0]) < decode_step_cases.OUTPUT_TOLERANCE
    assert error(fused[1], wanted[1]) < decode_step_cases.MEMORY_TOLERANCE
    if "segment_ids" in arrays:
        kept = fused[1][1] if stacked else fused[1]
        np.testing.assert_array_equal(kept[:2], arrays["memory"][:2])


@pytest.mark.parametrize("case", SLOTS, ids=compare.case_id)
def test_slot_memory_equals_the_recurrence(case):
    """On the card, the value, final memories and every gradient of the slot memory's kernels are those of the
    recurrence in float32 at full precision; a second run gives the same bits.
    """
    tolerances = linear_attention_cases.OUTPUT_TOLERANCE, linear_attention_cases.GRADIENT_TOLERANCE
    assert_alike(memories.slots(case), *tolerances)


@pytest.mark.parametrize("case", selective_scan_cases.HOPPER, ids=lambda case: case.id)
def test_selective_memory_equals_the_recurrence(case):
    """On the card, the value, final memory and every gradient of the selective scan's kernels are those of
    the recurrence; a second run gives the same bits.
    """

    def run(arrays, marks, cotangents):
        fused = jax.jit(lambda a, c: scans.both(a, marks, "mosaic_gpu", c))
        found = fused(arrays, cotangents)
        again = fused(arrays, cotangents)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)
        return found

    scans.compare(case, run)


@pytest.mark.parametrize("length", [1000, 8192])  # the latter in parts
def test_rows_of_a_token_read_all_of_its_writes(length):
    """The kernel of tokens of four rows equals XLA's form in float32 in the output, the final memory and every gradient, and returns the
    same bits twice.
    """
    rank, keys = 4, jax.random.split(jax.random.key(0), 5)
    inputs = {
        n: jax.random.normal(key, (2, length, 2, d), jnp.bfloat16) * (0.1 if n != "v" else 1)
        for n, d, key in zip("qkv", (128, 128, 64), keys, strict=False)
    }
    log_decay = jax.nn.log_sigmoid(jax.random.normal(keys[3], (2, length // rank, 2)) + 2)
    cotangent = jax.random.normal(keys[4], (2, length, 2, 64), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def both(implementation, dtype, inputs, log_decay):
        def call(x, log_decay):
            first = jnp.pad(log_decay[:, :, None], [(0, 0), (0, 0), (0, rank - 1), (0, 0)])
            decays = first.reshape(2, length, 2)
            y, state = ops.linear_memory(
                **x, log_decay=decays, scale=1.0, rank=rank, implementation=implementation
            )
            return y, state.memory

        given = {n: a.astype(dtype) for n, a in inputs.items()}
        (y, memory), pull = jax.vjp(call, given, log_decay)
        return y, memory, pull((cotangent.astype(y.dtype), jnp.sin(memory)))

    got, again = (both("mosaic_gpu", jnp.bfloat16, inputs, log_decay) for _ in range(2))
    with jax.default_matmul_precision("highest"):
        wanted = both("xla", jnp.float32, inputs, log_decay)
    for a, b, c in zip(*map(jax.tree.leaves, (got, again, wanted)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert error(a, c) < linear_attention_cases.GRADIENT_TOLERANCE


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 2, 2), (1, 1, 3)], ids=str)
def test_factors_of_writes_and_skips(heads, documents):
    """The kernel whose writes have factors, with the heads of a thread block paired where they share q and k, equals XLA's form in float32
    in the output, the final memory and every gradient, and returns the same bits twice.
    """
    keys = jax.random.split(jax.random.key(0), 8)
    sizes = zip("qkv", heads, (128, 128, 64), keys, strict=False)
    inputs = {
        n: jax.random.normal(key, (2, 1000, h, d), jnp.bfloat16) * (0.1 if n != "v" else 1)
        for n, h, d, key in sizes
    }
    shape = 2, 1000, heads[2]
    inputs["log_decay"] = jax.nn.log_sigmoid(jax.random.normal(keys[4], shape) + 2)
    inputs["log_write"] = jax.random.normal(keys[5], shape) - 1
    inputs["skip"] = jax.random.normal(keys[6], shape[2:])
    ids = 1 + jnp.cumsum(jnp.isin(jnp.arange(1000), jnp.array([30, 64, 500])))
    ids = jnp.broadcast_to(ids, (2, 1000)).astype(jnp.int32) if documents else None
    cotangent = jax.random.normal(keys[7], (2, 1000, max(heads), 64), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def both(implementation, dtype, inputs):
        def call(x):
            y, state = ops.linear_memory(
                **x, scale=1.0, segment_ids=ids, implementation=implementation
            )
            return y, state.memory

        given = {n: a.astype(dtype) if n in "qkv" else a for n, a in inputs.items()}
        (y, memory), pull = jax.vjp(call, given)
        return y, memory, pull((cotangent.astype(y.dtype), jnp.sin(memory)))[0]

    got, again = (both("mosaic_gpu", jnp.bfloat16, inputs) for _ in range(2))
    with jax.default_matmul_precision("highest"):
        wanted = both("xla", jnp.float32, inputs)
    for a, b, c in zip(*map(jax.tree.leaves, (got, again, wanted)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert error(a, c) < linear_attention_cases.GRADIENT_TOLERANCE
