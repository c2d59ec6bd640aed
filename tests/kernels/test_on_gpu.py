"""Tests of the memories' kernels that run on an NVIDIA Hopper GPU: `make test-gpu`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from lsm_jax.ops.core.saved import memories_saved
from pallas_kernels.decode_step import cases as decode_step_cases
from pallas_kernels.delta_rule import cases as delta_rule_cases
from pallas_kernels.dplr import cases as dplr_cases
from pallas_kernels.linear_attention import cases as linear_attention_cases
from pallas_kernels.selective_scan import cases as selective_scan_cases
from tests.kernels import test_decode_step_gpu as decode_step
from tests.kernels import test_segments as segments
from tests.kernels import test_selective_scan_gpu as scans
from tests.kernels.marks import on_hopper
from tests.kernels.test_linear_attention_gpu import error

pytestmark = on_hopper


def case_id(case) -> str:
    """Return the name of a kernel's case for pytest: its fields joined by hyphens, those that are tuples by
    commas.
    """
    fields = (",".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in case)
    return "-".join(x.replace(", ", ",").replace(" ", "_") for x in fields if x)


def _configuration(op: str, case) -> tuple:
    """Return a test case of the delta rule or of RWKV7's memory (`op`) as a tuple of sizes and options, an
    entry of `CONFIGURATIONS`.
    """
    sizes = case.heads, case.key_dim, case.value_dim, case.length, case.documents
    words = [op, case.decay, "undecayed" * (getattr(case, "erase", "") == "undecayed")]
    return *sizes, ", ".join(word for word in words if word)


# heads of q, k and v; K, V; T; documents; decay
CONFIGURATIONS = [
    *(case[:6] for case in linear_attention_cases.HOPPER),
    *(_configuration("delta", case) for case in delta_rule_cases.HOPPER),
    *(_configuration("dplr", case) for case in dplr_cases.HOPPER),
]


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


@pytest.mark.parametrize("configuration", SAVED, ids=case_id)
def test_saved_memories_give_the_gradients_of_the_recurrence(configuration):
    """The same with the memories before all chunks saved for the backward pass (`remat="dots_and_states"`), in 8 rows."""
    with memories_saved():
        saving = check(configuration, batch=8)
    assert saving != check(configuration, batch=8)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=case_id)
def test_equals_the_recurrence(configuration):
    """On the card, the value, final state and every gradient of a memory's kernel are those of the recurrence
    in float32 at full precision; a second run gives the same bits.
    """
    check(configuration, batch=2)


def check(configuration, batch):
    """Compare a configuration's kernel with the recurrence, and with itself, on the card. Return the text of its program."""
    (heads, key_heads, memories), key_dim, value_dim, length, documents, decay = configuration
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    inputs = [
        normal(batch, length, heads, key_dim),
        normal(batch, length, key_heads, key_dim),
        normal(batch, length, memories, value_dim),
    ]
    delta, dplr = "delta" in str(decay), "dplr" in str(decay)
    erase = dict(erase="undecayed") if "undecayed" in str(decay) else {}
    if dplr:
        k = inputs[1].astype(jnp.float32)
        removed = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        share = jax.nn.sigmoid(normal(*k.shape, dtype=jnp.float32))
        inputs += [-removed.astype(jnp.bfloat16), (removed * share).astype(jnp.bfloat16)]
        decay = decay.removeprefix("dplr, ")
    if delta:
        k = inputs[1].astype(jnp.float32)
        inputs[1] = (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(jnp.bfloat16)
        inputs.append(2 * jax.nn.sigmoid(normal(batch, length, memories, dtype=jnp.float32)))
        decay = decay.removeprefix("delta").removeprefix(", ").removesuffix(", undecayed") or None
    if decay == "constant":
        inputs.append(jnp.log1p(-(2.0 ** (-5 - jnp.arange(memories)))))
    elif decay is not None:
        channels = (value_dim if "value" in decay else key_dim,) if "channel" in decay else ()
        gate = jax.nn.log_sigmoid(normal(batch, length, memories, *channels, dtype=jnp.float32) + 3)
        gate *= 20 if "steep" in decay else 1
        inputs.append(jnp.where(gate < -0.2, -30.0, gate) if "strong" in decay else gate)
    if "bonus" in str(decay):
        inputs.append(normal(memories, key_dim, dtype=jnp.float32))
    memory = normal(batch, memories, key_dim, value_dim, dtype=jnp.float32)
    large = 1e25 if "large" in str(decay) else 1
    inputs[:2], memory = [inputs[0] * large, inputs[1] / large], memory / large
    ids = (
        jnp.asarray(np.cumsum(rng.random((batch, length)) < 0.01, axis=1) + 1)
        if documents
        else None
    )
    mask = jnp.asarray(rng.random((batch, length)) < 0.9) if documents else None

    def run(implementation, form, memory, q, k, v, *rest):
        empty: Any = ops.delta_state if delta or dplr else ops.linear_state
        state = empty(batch, memories, key_dim, value_dim)
        state = state._replace(memory=memory, segment_id=jnp.ones(batch, jnp.int32))
        call: Any
        if delta or dplr:
            op = ops.delta_memory if delta else ops.dplr_memory
            call = functools.partial(op, q, k, v, *rest, **erase)
        else:
            given, bonus = (*rest, None, None)[:2]
            name = "value_log_decay" if "value" in str(decay) else "log_decay"
            call = functools.partial(ops.linear_memory, q, k, v, bonus=bonus, **{name: given})
        output, state = call(
            initial_state=state, segment_ids=ids, update_mask=mask, form=form,
            implementation=implementation,
        )  # fmt: skip
        return output, state.memory

    def both(implementation, form, cotangents, *inputs):
        outputs, pull = jax.vjp(lambda *x: run(implementation, form, *x), *inputs)
        return outputs, pull(cotangents)

    cotangents = normal(batch, length, max(heads, memories), value_dim), normal(*memory.shape, dtype=jnp.float32) * large  # fmt: skip
    small = 1e-25 if "small gradients" in str(decay) else 1
    cotangents = jax.tree.map(lambda x: x * small, cotangents)
    fused = jax.jit(lambda *x: both("mosaic_gpu", "chunk", *x))
    values, gradients = fused(cotangents, memory, *inputs)
    for a, b in zip(
        jax.tree.leaves((values, gradients)), jax.tree.leaves(fused(cotangents, memory, *inputs)), strict=True
    ):  # fmt: skip
        np.testing.assert_array_equal(a, b)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), (cotangents, memory, *inputs))
    with jax.default_matmul_precision("highest"):
        expected, wanted = jax.jit(lambda *x: both("xla", "chunk", *x))(*widened)
    cases = dplr_cases if dplr else delta_rule_cases if delta else linear_attention_cases
    for got, want in zip(values, expected, strict=True):
        assert error(got, want) < cases.OUTPUT_TOLERANCE
    for got, want in zip(gradients, wanted, strict=True):
        assert error(got, want) < cases.GRADIENT_TOLERANCE
    return fused.lower(cotangents, memory, *inputs).as_text()


@pytest.mark.parametrize("case", [*segments.CASES, *segments.WIDE])
def test_one_state_a_segment(case):
    """On the card, with one state per segment, the value, final states and every gradient of a memory's
    kernel are those of the recurrence; a second run gives the same bits.
    """
    ids = np.repeat([1, 2, 1, 0, 4], [700, 5, 300, 30, 1001])
    for a, b in zip(*(jax.tree.leaves(segments.check(case, "mosaic_gpu", ids)) for _ in "ab"), strict=True):  # fmt: skip
        np.testing.assert_array_equal(a, b)


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


# heads of q and of k, memories; K, M and V; T; documents; scale of q; deviation of the input of SiLU (None: normal q, k, v)
SLOTS = [
    ((2, 2, 2), (256, 64, 256), 2048, False, 1 / 256, None),
    ((2, 1, 2), (64, 64, 128), 1100, True, 1.0, None),
    ((4, 2, 2), (128, 128, 128), 700, True, 1 / 128, None),
    # As in the layer of the 340M model: 0.64 is the initial deviation 0.02 times the root of 1024 channels.
    ((4, 4, 4), (256, 64, 256), 2048, True, 1.0, 0.64),
    # Scores with a deviation of 16, whose softmax selects one slot.
    ((2, 2, 2), (256, 64, 256), 2048, False, 1.0, None),
]


@pytest.mark.parametrize("configuration", SLOTS, ids=case_id)
def test_slot_memory_equals_the_recurrence(configuration):
    """On the card, the value, final memories and every gradient of the slot memory's kernels are those of the
    recurrence in float32 at full precision; a second run gives the same bits.
    """
    (heads, key_heads, memories), sizes, length, documents, scale, spread = configuration
    key_dim, slots, value_dim = sizes
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(2, length, *shape)), jnp.bfloat16)  # noqa: E731
    gate = jax.nn.log_sigmoid(normal(memories, slots).astype(jnp.float32)) / 8
    inputs = [normal(heads, key_dim), normal(key_heads, key_dim), normal(memories, value_dim)]
    if spread is not None:
        inputs = [jax.nn.silu(spread * x) for x in inputs]
    inputs += [-jnp.expm1(gate), gate]
    ids = jnp.asarray(np.cumsum(rng.random((2, length)) < 0.01, axis=1) + 1) if documents else None

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def both(implementation, form, cotangents, *inputs):
        def run(*x):
            output, state = ops.slot_memory(
                *x, scale=scale, segment_ids=ids, form=form, implementation=implementation
            )
            return output, state.keys, state.values

        outputs, pull = jax.vjp(run, *inputs)
        return *outputs, *pull(cotangents)

    shapes = [(memories, key_dim, slots), (memories, slots, value_dim)]
    cotangents = [jnp.asarray(rng.normal(size=(2, *s)), jnp.float32) for s in shapes]
    cotangents = (normal(max(heads, memories), value_dim), *cotangents)
    fused = both("mosaic_gpu", "chunk", cotangents, *inputs)
    for a, b in zip(fused, both("mosaic_gpu", "chunk", cotangents, *inputs), strict=True):
        np.testing.assert_array_equal(a, b)
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), (cotangents, *inputs))
        expected = both("xla", "recurrent", *wide)
    output = linear_attention_cases.OUTPUT_TOLERANCE  # also of the final memories
    gradient = linear_attention_cases.GRADIENT_TOLERANCE
    for index, (got, want) in enumerate(zip(fused, expected, strict=True)):
        assert error(got, want) < (output if index < 3 else gradient), index


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
