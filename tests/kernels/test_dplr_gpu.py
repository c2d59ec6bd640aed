"""Tests of the Hopper kernels of RWKV7's memory, run by Mosaic GPU's interpreter, and lowered for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.dplr import dplr, unsupported
from pallas_kernels.dplr.cases import GRADIENT_TOLERANCE, HOPPER_INTERPRETED, OUTPUT_TOLERANCE
from pallas_kernels.dplr.hopper.all_pairs_backward import all_pairs_backward
from pallas_kernels.dplr.hopper.chunk_backward import chunk_backward
from pallas_kernels.hopper import parts as hopper_parts
from pallas_kernels.hopper import scan as hopper_scan
from pallas_kernels.hopper import unit_inverse
from tests.kernels.test_delta_rule_gpu import check_map
from tests.kernels.test_linear_attention_gpu import (
    assert_alike,
    assert_equal_with_memories_saved,
    error,
    with_two_memories,
)

BATCH, SCALE = 1, 0.25


def make(
    length,
    heads,
    key_heads,
    memories,
    key_dim,
    value_dim,
    *,
    documents,
    strong: float = False,
    size=1.0,
):
    """Return random arguments of the kernel of RWKV7's memory, by name.

    Args:
        length: T, the number of tokens of a row.
        heads: H, the number of query heads.
        key_heads: Hk, the number of key heads, also of a and b.
        memories: G, the number of memories.
        key_dim: K, the number of key channels.
        value_dim: V, the number of value channels.
        documents: whether the row has four documents, or one.
        strong: True makes some decays e^-30; a number above 1 multiplies the log decays.
        size: a factor by which the random queries are multiplied.
    """
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    removed = normal(BATCH, length, key_heads, key_dim, dtype=jnp.float32)
    removed /= jnp.linalg.norm(removed, axis=-1, keepdims=True)
    share = jax.nn.sigmoid(normal(*removed.shape, dtype=jnp.float32))
    log_decay = -0.6 * jax.nn.sigmoid(normal(BATCH, length, memories, key_dim, dtype=jnp.float32))
    if strong > 1:
        log_decay *= strong
    elif strong:
        log_decay = jnp.where(log_decay < -0.35, -30.0, log_decay)
    starts = jnp.isin(jnp.arange(length), jnp.array([30, 31, 64]))
    run = jnp.broadcast_to(jnp.cumsum(starts, dtype=jnp.int32), (BATCH, length))
    return dict(
        q=normal(BATCH, length, heads, key_dim) * size,
        k=normal(BATCH, length, key_heads, key_dim),
        v=normal(BATCH, length, memories, value_dim),
        a=-removed.astype(jnp.bfloat16),
        b=(removed * share).astype(jnp.bfloat16),
        log_decay=log_decay,
        initial=normal(BATCH, memories, key_dim, value_dim, dtype=jnp.float32) * 0.3,
        run=run if documents else None,
    )


def by_token(q, k, v, a, b, log_decay, initial, run):
    state = ops.delta_state(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    state = state._replace(memory=initial, segment_id=jnp.ones(BATCH, jnp.int32))
    ids = None if run is None else run + 1
    output, state = ops.dplr_memory(
        q, k, v, a, b, log_decay, scale=SCALE, initial_state=state, segment_ids=ids, form="recurrent"
    )  # fmt: skip
    return output, state.memory


def fused(q, k, v, a, b, log_decay, initial, run, save_memories=False):
    return dplr(
        q, k, v, a, b, log_decay, initial=initial, run=run, scale=SCALE, save_memories=save_memories,
        interpret=gpu_interpreter(),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", HOPPER_INTERPRETED, ids=lambda case: case.name)
@pytest.mark.parametrize("inverse", ("doubled", "blocks"))
def test_equals_the_recurrence_in_value_and_every_gradient(inverse, case, monkeypatch):
    monkeypatch.setattr(unit_inverse, "METHOD", inverse)
    if case.parts is not None:
        monkeypatch.setattr(hopper_parts, "count_parts", lambda q, k, v: case.parts)
    options = dict(documents=case.documents, strong=case.strength, size=case.size)
    inputs = make(*case.dims, **options)
    run = inputs.pop("run")
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    assert_alike(
        lambda x: fused(**x, run=run), inputs, lambda x: by_token(**x, run=run), widened,
        output=OUTPUT_TOLERANCE, gradient=GRADIENT_TOLERANCE,
    )  # fmt: skip
    assert not races_found()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, memories",
    [("documents", 2), ("queries-share", 1), ("parts", 1), ("deeper", 1), ("many", 1)],
)
def test_saved_memories_are_those_that_are_computed_again(name, memories, monkeypatch):
    if name == "many":  # two warpgroups share what is loaded
        monkeypatch.setattr(hopper_scan, "PROCESSORS", 1)
    named = {case.name: case for case in HOPPER_INTERPRETED}
    case = named["queries-share" if name == "many" else name]
    if case.parts is not None:
        monkeypatch.setattr(hopper_parts, "count_parts", lambda q, k, v: case.parts)
    inputs = make(*case.dims, documents=case.documents, strong=case.strength)
    inputs = inputs if memories == 1 else with_two_memories(inputs)
    run = inputs.pop("run")
    call = lambda x, **o: fused(**x, run=run, **o)  # noqa: E731
    assert_equal_with_memories_saved(call, inputs, monkeypatch)


@pytest.mark.parametrize("strong", [1, 8])
def test_forward_equals_the_recurrence(strong):
    inputs = make(64, 1, 1, 1, 64, 64, documents=True, strong=strong)
    run = inputs.pop("run")
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    for got, wanted in zip(fused(**inputs, run=run), by_token(**widened, run=run), strict=True):
        assert error(got, wanted) < OUTPUT_TOLERANCE
    assert not races_found()


def phase_inputs(dim: int = 64, **scales):
    """Return random arguments of `chunk_backward` for one chunk of one head with `dim` key and value channels; `scales` has factors of
    inputs by name.
    """
    rng = np.random.default_rng(1)

    def normal(*shape, dtype=jnp.bfloat16, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    names = "q", "k", "a", "b", "log_decay", "v", "a_read", "d_out", "d_right_side"
    arrays = {name: normal(1, 64, 1, dim) for name in names}
    arrays |= {name: normal(1, 1, 1, dim, dim) for name in ("states", "d_states")}
    arrays = {name: x * jnp.asarray(scales.get(name, 1), x.dtype) for name, x in arrays.items()}
    decay = -0.6 * jax.nn.sigmoid(arrays["log_decay"].astype(jnp.float32))
    arrays["log_decay"] = decay * scales.get("decay", 1)
    return arrays | dict(through_memory=normal(1, 1, dim, dtype=jnp.float32), documents=None)


@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_of_a_chunk_in_range_are_those_by_levels(dim):
    inputs = phase_inputs(dim)
    options = dict(scale=SCALE, interpret=gpu_interpreter())
    got = chunk_backward(**inputs, **options, all_pairs=True)
    assert not races_found()
    for x, y in zip(got, chunk_backward(**inputs, **options, all_pairs=False), strict=True):
        assert error(x, y) < GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    "scales, wanted",
    [
        ({}, True),
        (dict(d_out=0, a_read=0), True),
        (dict(decay=1.69, d_out=1e-9, d_states=1e-9), True),  # RWKV7's strongest decay
        (dict(decay=8), False),
        (dict(q=1e25), False),
        (dict(d_out=1e-25), False),
        (dict(v=1e20), False),
        (dict(d_states=1e20), False),
        (dict(b=np.nan), False),
    ],
    ids=str,
)
def test_chunks_with_extreme_numbers_are_not_in_range(scales, wanted):
    inputs = phase_inputs(**scales)
    inputs |= dict(g=inputs.pop("log_decay"))
    inputs.pop("documents")
    _, near = all_pairs_backward(inputs, scale=SCALE, interpret=gpu_interpreter())
    assert near.tolist() == [[[wanted]]]


@pytest.mark.slow
def test_maps_over_one_more_axis():
    """`jax.vmap` of the kernel of RWKV7's memory over two inputs returns, to the bit, the values and
    gradients of two single calls.
    """
    case = make(64, 1, 1, 1, 64, 64, documents=False)
    arrays = {n: jnp.stack([case[n], case[n][:, ::-1]]) for n in "qkvab"}
    check_map(fused, arrays, {n: x for n, x in case.items() if n not in arrays})


@pytest.mark.slow
def test_causal_to_the_bit():
    inputs = make(128, 1, 1, 1, 64, 64, documents=False)
    changed = dict(inputs)
    for name in ("q", "k", "v", "a", "b", "log_decay"):
        changed[name] = inputs[name].at[:, 77:].multiply(0.5)
    # Beyond `halving.RANGE` of the chunk's start, where pairs of rows are computed by levels.
    changed["log_decay"] = inputs["log_decay"].at[:, 77:].multiply(100)
    np.testing.assert_array_equal(fused(**inputs)[0][:, :77], fused(**changed)[0][:, :77])


@pytest.mark.slow
@pytest.mark.parametrize("width, heads", [(64, 40), (128, 40), (128, 4)])
def test_lowers_for_the_card(width, heads):
    struct = jax.ShapeDtypeStruct
    wide = struct((2, 8190, heads, width), jnp.bfloat16)
    decay, initial = (struct(s, jnp.float32) for s in (wide.shape, (2, heads, width, width)))

    def step(*inputs):
        def total(q, k, v, a, b, log_decay, initial, run):
            output, final = dplr(q, k, v, a, b, log_decay, initial=initial, run=run, scale=SCALE)
            return jnp.sum(output.astype(jnp.float32)) + jnp.sum(final)

        return jax.value_and_grad(total, argnums=range(7))(*inputs)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(step).trace(*[wide] * 5, decay, initial, struct((2, 8190), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Three kernels forward, and backward four, with heads of 64 channels five. Parts add three scans over parts and two kernels that combine
    # parts.
    assert text.count("custom_call @mosaic_gpu") == 7 + (width == 64) + 5 * (heads == 4)


def test_returns_the_unmet_requirement():
    inputs = make(64, 1, 1, 1, 64, 64, documents=False)

    def why(inputs):
        arrays = {n: inputs[n] for n in ("q", "k", "v", "a", "b", "log_decay")}
        return unsupported("mosaic_gpu", **arrays)

    assert why(inputs) is None
    wide = make(64, 1, 1, 1, 512, 64, documents=False)
    assert "K of 64, 128 or 256, not 512" in why(wide)
    assert (
        why(make(64, 1, 1, 1, 64, 192, documents=False)) == "V of 64 or a multiple of 128, not 192"
    )
    inputs["a"] = inputs["a"].astype(jnp.float32)
    with pytest.raises(NotImplementedError, match="requires a and b in bfloat16, not a in float32"):
        dplr(**inputs, scale=SCALE)
    with pytest.raises(ValueError, match="implementation='cutile'; accepted are"):
        dplr(**inputs, scale=SCALE, implementation="cutile")
