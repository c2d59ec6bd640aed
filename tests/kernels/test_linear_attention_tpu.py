"""Tests of the TPU kernel of linear attention: compared with the recurrence in the interpreter, and lowered
for a TPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from pallas_kernels.linear_attention import unsupported
from pallas_kernels.linear_attention.cases import TPU_SCALAR_INTERPRETED, TPU_TOLERANCE
from pallas_kernels.linear_attention.tpu import scalar_decay as tpu
from pallas_kernels.linear_attention.tpu import scalar_layout

SCALE = 0.3
NAMES = ("output", "final", "dq", "dk", "dv", "dlog_decay", "dinitial")


def make(heads, dims, *, length=256, decay=True, runs=False, dtype=jnp.float32, seed=0):
    """Return random inputs of linear attention, q, k, v, the log decay, the tokens' documents and the initial
    memory, for `heads` (H, Hk, G) and `dims` (K, V). With documents (`runs`) there are two rows.
    """
    rng = np.random.default_rng(seed)
    batch = 2 if runs else 1
    (query_heads, key_heads, memories), (key_dim, value_dim) = heads, dims

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    log_decay = rng.choice([0, -1e-3, -0.1, -1, -30], size=(batch, length, memories))
    run = None
    if runs:  # a document that begins inside a chunk, one that begins at a chunk, one of two tokens; a row with one document
        run = np.zeros((2, length), np.int32)
        run[0, 100:] += 1
        run[0, 128:] += 1
        run[0, 130:] += 1
        run = jnp.asarray(run)
    return (
        normal(batch, length, query_heads, key_dim),
        normal(batch, length, key_heads, key_dim),
        normal(batch, length, memories, value_dim),
        jnp.asarray(log_decay, jnp.float32) if decay else None,
        run,
        normal(batch, memories, key_dim, value_dim).astype(jnp.float32),
    )


def recurrent(q, k, v, log_decay, run, initial):
    state = ops.linear_state(len(q), *initial.shape[1:])
    state = state._replace(memory=initial, segment_id=jnp.ones(len(q), jnp.int32))
    ids = None if run is None else run + 1
    output, state = ops.linear_memory(
        q, k, v, log_decay, scale=SCALE, initial_state=state, segment_ids=ids, form="recurrent"
    )
    return output, state.memory


def cotangents(arrays):
    rng = np.random.default_rng(1)
    q, _, v, *_, initial = arrays
    shape = (*q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3])
    return (
        jnp.asarray(rng.normal(size=shape), v.dtype),
        jnp.asarray(rng.normal(size=initial.shape), jnp.float32),
    )


@functools.partial(jax.jit, static_argnames="interpret")
def fused(arrays, cotangents, interpret=True):
    """Return the output, the final memory and the gradients of linear attention's TPU kernel for these inputs
    and cotangents, in the order of `NAMES`.
    """
    output, final, saved = tpu.forward(*arrays, scale=SCALE, interpret=interpret)
    grads = tpu.backward(*arrays, saved, *cotangents, scale=SCALE, interpret=interpret)
    return output, final, *grads


@jax.jit
def expected(arrays, cotangents):
    wide = [x if x is None or x.dtype == jnp.int32 else x.astype(jnp.float32) for x in arrays]
    values, vjp = jax.vjp(recurrent, *wide)
    grads = vjp(tuple(x.astype(jnp.float32) for x in cotangents))
    return *values, *grads[:4], grads[5]


def compare(arrays, interpret=True, tolerance=TPU_TOLERANCE):
    assert unsupported("mosaic_tpu", *arrays[:4]) is None
    given = cotangents(arrays)
    actual, wanted = fused(arrays, given, interpret), expected(arrays, given)
    likes = (arrays[2], arrays[5], *arrays[:4], arrays[5])
    for name, like, a, b in zip(NAMES, likes, actual, wanted, strict=True):
        if like is None:
            assert a is None
            continue
        assert a.dtype == like.dtype and a.shape == b.shape, name
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()), err_msg=name
        )


FAST = ("pairs",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in TPU_SCALAR_INTERPRETED],
)
def test_equals_the_recurrence_in_value_and_every_gradient(name, monkeypatch):
    heads, dims, layout = TPU_SCALAR_INTERPRETED[name]
    monkeypatch.setattr(scalar_layout, "HEADS", 2)  # several programs with few heads each
    arrays = make(heads, dims, runs=True)
    plan = scalar_layout.plan_heads(*arrays[:3])
    assert (plan.count, plan.keys, plan.tile_count, plan.programs) == layout
    compare(arrays)


def test_without_decay_or_documents_and_over_three_chunks():
    compare(make((1, 1, 1), (8, 8), length=384, decay=False), tolerance=4e-6)


@pytest.mark.slow
def test_documents_without_decay():
    compare(make((1, 1, 1), (8, 8), runs=True, decay=False), tolerance=4e-6)


def test_bfloat16_is_as_exact_as_its_operands():
    compare(make((1, 1, 1), (16, 16), dtype=jnp.bfloat16), tolerance=8e-3)


def test_has_no_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    compare(make((1, 1, 1), (8, 8)), interpret=pltpu.InterpretParams(detect_races=True))
    assert not interpret_pallas_call.races.races_found


def test_extreme_decays_leave_no_nan():
    q, k, v, log_decay, run, initial = make((1, 1, 1), (8, 8))
    log_decay = jnp.where(log_decay == -30, -3e38, log_decay)
    compare((q, k, v, log_decay, run, initial))


@functools.cache
def _forward():
    return jax.jit(functools.partial(tpu.forward, scale=SCALE, save=False, interpret=True))


@pytest.mark.parametrize("token", [1, 127, 128, 200])
def test_causal_to_the_bit(token):
    arrays = make((1, 1, 1), (8, 8), dtype=jnp.bfloat16)
    changed = [x.at[:, token:].multiply(-100) for x in arrays[:3]]
    changed.append(arrays[3].at[:, token:].add(-20))
    before, _, saved = _forward()(*arrays)
    after, _, _ = _forward()(*changed, *arrays[4:])
    assert saved is None
    np.testing.assert_array_equal(before[:, :token], after[:, :token])
    assert np.any(before[:, token:] != after[:, token:])


def test_what_is_not_asked_for_is_not_computed():
    """Linear attention saves no memories if no gradient follows, and computes no gradient of a decay unless
    it is asked for.
    """
    arrays = make((1, 1, 1), (8, 8))
    given = cotangents(arrays)
    saved = jax.eval_shape(lambda *a: tpu.forward(*a, scale=SCALE), *arrays)[2]
    assert saved.shape == (1, 1, 2, 8, 8)
    assert jax.eval_shape(lambda *a: tpu.forward(*a, scale=SCALE, save=False), *arrays)[2] is None
    gradient = functools.partial(tpu.backward, scale=SCALE, decay_gradient=False, interpret=True)
    grads = jax.jit(gradient)(*arrays, None, *given)  # which computes the memories again
    assert grads[3] is None
    for a, b in zip(grads, fused(arrays, given)[2:], strict=True):
        if a is not None:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dims", [(128, 128), (64, 64)])
def test_lowers_for_a_tpu(dims):
    arrays = jax.eval_shape(
        lambda: make((8, 8, 8), dims, length=1024, runs=True, dtype=jnp.bfloat16)
    )
    given = jax.eval_shape(cotangents, arrays)
    step = functools.partial(fused.__wrapped__, interpret=False)
    device = AbstractDevice("TPU v5 lite", 1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(step).trace(arrays, given).lower(lowering_platforms=("tpu",))
    text = lowered.as_text()
    assert text.count("custom_call @tpu_custom_call") == 2
    wide = f"tensor<2x1024x{8 * dims[0]}xbf16>"
    transposed = [x for x in text.splitlines() if "stablehlo.transpose" in x and "bf16" in x]
    assert (
        wide in text and not transposed
    )  # q, k, v and the output are not copied to another layout


def test_names_the_unmet_requirement():
    def why(heads=(2, 2, 2), dims=(64, 64), **options):
        q, k, v, *rest = jax.eval_shape(lambda: make(heads, dims, **options))
        return unsupported("mosaic_tpu", q, k, v, rest[0])

    assert why() is None
    assert why(dtype=jnp.float16) == "q, k and v all in bfloat16 or all in float32, not float16"
    assert why(dims=(12, 64)) == "K a multiple of 8 up to 256, not 12"
    assert why(dims=(64, 512)) == "V a multiple of 8 up to 256, not 512"
    wanted = "heads that fill 128 columns, not 7 query, 7 key and 7 value heads of K = 80, V = 80"
    assert why((7, 7, 7), (80, 80)) == wanted
    with pytest.raises(
        ValueError, match="heads that fill 128 columns, not 7 query, 7 key and 7 value heads"
    ):
        tpu.forward(*make((7, 7, 7), (80, 80)), scale=SCALE)
