"""Tests of the Hopper kernels of the delta rule, run by Mosaic GPU's interpreter, and lowered for an H200."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.delta_rule import delta_rule, unsupported
from pallas_kernels.delta_rule.cases import (
    GRADIENT_TOLERANCE,
    HOPPER_INTERPRETED,
    OUTPUT_TOLERANCE,
)
from pallas_kernels.delta_rule.hopper import scan, streamed_chunk_backward
from pallas_kernels.delta_rule.hopper.chunk_backward import chunk_backward, fits_streamed
from pallas_kernels.hopper import parts as hopper_parts
from pallas_kernels.hopper import scan as hopper_scan
from tests.kernels.test_linear_attention_gpu import (
    assert_alike,
    assert_equal_with_memories_saved,
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
    decay,
    alike=False,
    size=1.0,
) -> dict[str, Any]:
    """Return random arguments of the delta rule's kernel, by name.

    Args:
        length: T, the number of tokens of a row.
        heads: H, the number of query heads.
        key_heads: Hk, the number of key heads.
        memories: G, the number of memories.
        key_dim: K, the number of key channels.
        value_dim: V, the number of value channels.
        documents: whether the row has five documents, or one.
        decay: whether there is a decay; or words: "channel" for one per key channel, "strong" or "steep" for large ones.
        alike: whether all key vectors are near to each other.
        size: a factor by which the random queries are multiplied.
    """
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    k = normal(BATCH, length, key_heads, key_dim)
    if alike:  # as in a trained model
        k = k + 2 * normal(1, 1, key_heads, key_dim)
    k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
    channels = (key_dim,) if "channel" in str(decay) else ()
    log_decay = jax.nn.log_sigmoid(normal(BATCH, length, memories, *channels) + 2)
    if "strong" in str(decay):
        log_decay = jnp.asarray(rng.choice([0.0, -1e-3, -30.0], size=log_decay.shape), jnp.float32)
    if "steep" in str(decay):
        log_decay *= 8
    starts = jnp.isin(jnp.arange(length), jnp.array([30, 31, 64, 150]))
    run = jnp.broadcast_to(jnp.cumsum(starts, dtype=jnp.int32), (BATCH, length))
    q = normal(BATCH, length, heads, key_dim, dtype=jnp.bfloat16) * size
    v = normal(BATCH, length, memories, value_dim, dtype=jnp.bfloat16)
    beta = 2 * jax.nn.sigmoid(normal(BATCH, length, memories)).at[:, ::9].set(0)
    if not alike:  # with nearly equal keys and negative beta the memory would grow without bound
        beta = beta.at[:, 4::9].multiply(-0.5)
    return dict(
        q=q,
        k=k.astype(jnp.bfloat16),
        v=v,
        beta=beta,
        log_decay=log_decay if decay else None,
        initial=normal(BATCH, memories, key_dim, value_dim) * 0.3,
        run=run if documents else None,
    )


def by_token(q, k, v, beta, log_decay, initial, run, erase="decayed"):
    state = ops.delta_state(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    state = state._replace(memory=initial, segment_id=jnp.ones(BATCH, jnp.int32))
    ids = None if run is None else run + 1
    output, state = ops.delta_memory(
        q, k, v, beta, log_decay, erase=erase, scale=SCALE, initial_state=state, segment_ids=ids,
        form="recurrent",
    )  # fmt: skip
    return output, state.memory


def fused(q, k, v, beta, log_decay, initial, run, erase="decayed", save_memories=False):
    return delta_rule(
        q, k, v, beta, log_decay, initial=initial, run=run, scale=SCALE, erase=erase,
        save_memories=save_memories, interpret=gpu_interpreter(),
    )  # fmt: skip


def choose_plans(case, monkeypatch):
    """Make the kernels choose the parts, checkpoints and warpgroups of a case."""
    if case.parts is not None:
        monkeypatch.setattr(hopper_parts, "count_parts", lambda q, k, v: case.parts)
    if case.checkpoints is not None:
        monkeypatch.setattr(
            hopper_parts, "count_checkpoints", lambda q, k, v, chunk_bounds: case.checkpoints
        )
    if case.many:
        monkeypatch.setattr(hopper_scan, "PROCESSORS", 1)
        monkeypatch.setattr(streamed_chunk_backward, "PROCESSORS", 1)


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.slow if n > 0 else (), id=x.name) for n, x in enumerate(HOPPER_INTERPRETED)],
)  # fmt: skip
def test_equals_the_recurrence_in_value_and_every_gradient(case, monkeypatch):
    choose_plans(case, monkeypatch)
    inputs = make(*case.dims, documents=case.documents, **case.options)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs | dict(run=None))
    run = inputs.pop("run")
    del widened["run"]
    options = dict(run=run, erase=case.erase)
    assert_alike(
        lambda x: fused(**x, **options), inputs, lambda x: by_token(**x, **options), widened,
        output=OUTPUT_TOLERANCE, gradient=GRADIENT_TOLERANCE,
    )  # fmt: skip
    assert not races_found()


SAVED = dict(zip((case.name for case in HOPPER_INTERPRETED), HOPPER_INTERPRETED, strict=True))


@pytest.mark.parametrize(
    "name, memories",
    [
        # Two outputs in two buffers, which the tiles of the next chunk's memory use too.
        ("many", 1),
        *(
            pytest.param(name, memories, marks=pytest.mark.slow)
            for name, memories in (
                ("decay", 2), ("queries-share", 1), ("many-deep", 1), ("parts-documents", 1), ("checkpoints", 1),
                ("values-in-parts", 1), ("undecayed-strong", 1),
                ("channel", 2), ("many-channel", 1), ("parts-channel", 1), ("checkpoints-channel", 1), ("channel-deep-wide", 1), 
            )
        ),
    ],
)  # fmt: skip
def test_saved_memories_are_those_that_are_computed_again(name, memories, monkeypatch):
    """Results have the same bits where outputs are computed by the scan that stores memories (the split scan stores none)."""
    monkeypatch.setattr(scan, "FORWARD", "joint")
    case = SAVED[name]
    choose_plans(case, monkeypatch)
    inputs = make(*case.dims, documents=case.documents, **case.options)
    inputs = inputs if memories == 1 else with_two_memories(inputs)
    run = inputs.pop("run")
    call = lambda x, **o: fused(**x, run=run, erase=case.erase, **o)  # noqa: E731
    assert_equal_with_memories_saved(call, inputs, monkeypatch)


def test_wide_heads_are_streamed():
    sizes = [(k, v) for k in (64, 128, 256) for v in (64, 128, 256, 512) if fits_streamed(k, v)]
    assert sizes == [
        (128, 256),
        (128, 512),
        (256, 128),
        (256, 256),
        (256, 512),
    ]


@pytest.mark.parametrize(
    ("key_dim", "width", "decay", "erase", "documents"),
    [
        (64, 256, True, "decayed", True),
        pytest.param(256, 256, True, "undecayed", True, marks=pytest.mark.slow),
        pytest.param(256, 512, True, "decayed", False, marks=pytest.mark.slow),
        pytest.param(256, 128, False, "decayed", True, marks=pytest.mark.slow),
        pytest.param(128, 256, False, "decayed", False, marks=pytest.mark.slow),
    ],
)
def test_streamed_chunks_equal_those_that_are_kept(
    key_dim, width, decay, erase, documents, monkeypatch
):
    """Two thread blocks compute six chunks, and two heads share their queries: the gradients of both kernels of `chunk_backward`."""
    monkeypatch.setattr(streamed_chunk_backward, "PROCESSORS", 2)
    length, heads = 192, 2
    x = make(length, 1, heads, heads, key_dim, width, documents=documents, decay=decay)
    rng = np.random.default_rng(1)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    values = [normal(BATCH, length, heads, width) for _ in range(3)]
    memories = [normal(BATCH, heads, length // 64, width, key_dim) for _ in range(2)]
    inputs = x["q"], x["k"], *values, *memories, x["beta"], x["log_decay"], x["run"]
    results = []
    for stream in (False, True):
        results.append(
            chunk_backward(
                *inputs, scale=SCALE, decay_gradient=decay, erase=erase, stream=stream,
                interpret=gpu_interpreter(),
            )
        )  # fmt: skip
        assert not races_found()
    assert len(results[1]) == 3 + decay
    for kept, streamed in zip(*results, strict=True):
        kept, streamed = (np.asarray(y, np.float32) for y in (kept, streamed))
        # Gradients of q and k are bfloat16; the others differ by the order of their sums.
        np.testing.assert_allclose(streamed, kept, rtol=2**-7, atol=1e-5 * np.abs(kept).max())


def test_refuses_to_stream_what_does_not_fit():
    x = make(64, 1, 1, 1, 64, 64, documents=False, decay=False)
    memory = jnp.zeros((BATCH, 1, 1, 64, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="stream=True .* K=64 and V=64"):
        chunk_backward(
            x["q"], x["k"], *[x["v"]] * 3, memory, memory, x["beta"], None, None, scale=SCALE,
            decay_gradient=False, erase="decayed", stream=True, interpret=gpu_interpreter(),
        )  # fmt: skip


@pytest.mark.slow
def test_maps_over_one_more_axis():
    """`jax.vmap` of the delta rule's kernel over two inputs returns, to the bit, the values and gradients of
    two single calls.
    """
    case = make(64, 1, 1, 1, 64, 64, documents=False, decay=True)
    arrays = {n: jnp.stack([case[n], case[n][:, ::-1]]) for n in ("q", "k", "v", "beta")}
    check_map(fused, arrays, {n: x for n, x in case.items() if n not in arrays})


def check_map(fused, arrays, rest):
    """Check that the kernel `fused`, mapped by `jax.vmap` over the first axis of `arrays`, with the other
    arguments `rest`, has the values and gradients of single calls, to the bit.
    """

    def both(x):
        values, pull = jax.vjp(lambda x: fused(**x, **rest), x)
        return values, pull(values)

    one_by_one = (both({name: x[i] for name, x in arrays.items()}) for i in range(2))
    expected = jax.tree.map(lambda *x: jnp.stack(x), *one_by_one)
    got = jax.vmap(both)(arrays)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "erase"), [(True, "decayed"), ("channel", "decayed"), (True, "undecayed")]
)
def test_causal_to_the_bit(decay, erase):
    inputs = make(128, 1, 1, 1, 64, 64, documents=False, decay=decay)
    changed = dict(inputs)
    for name in ("q", "k", "v", "beta", "log_decay"):
        changed[name] = inputs[name].at[:, 77:].multiply(0.5)
    # Beyond `halving.RANGE` of the chunk's start, where pairs of rows are computed by levels.
    changed["log_decay"] = inputs["log_decay"].at[:, 77:].multiply(100)
    before, after = (fused(**x, erase=erase)[0][:, :77] for x in (inputs, changed))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("reverse", [False, True])
def test_parts_are_linked_in_float32(reverse):
    rng = np.random.default_rng(0)
    transitions, written, memory = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((1, 6, 64, 64), (1, 6, 64, 128), (1, 2, 64, 128))
    )
    transitions /= 8
    linked = hopper_parts.link_parts(
        *map(jnp.asarray, (transitions, written, memory)), reverse=reverse,
        interpret=gpu_interpreter(),
    )  # fmt: skip
    for head in range(2):
        state = np.float64(memory[0, head])
        for part in range(3 * head, 3 * head + 3)[:: -1 if reverse else 1]:
            np.testing.assert_allclose(linked[0, part], state, atol=3e-4)
            transition = transitions[0, part]
            state = (transition.T if reverse else transition) @ state + written[0, part]
    assert not races_found()


def test_few_rows_of_a_long_sequence_are_cut_into_parts():
    def parts(batch, length, heads, dim=128, memories=None):
        q = jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.bfloat16)
        v = jax.ShapeDtypeStruct((batch, length, memories or heads, dim), jnp.bfloat16)
        return hopper_parts.count_parts(q, q, v)

    assert [parts(1, 16384, 8), parts(1, 16380, 16), parts(2, 8192, 8)] == [16, 8, 8]
    assert [parts(1, 16384, 4, memories=16), parts(2, 16384, 16)] == [8, 4]
    # Shapes of long rows: with too few SMs for four parts, with too few tokens for four parts, and with K =
    # 256.
    assert [parts(1, 16384, 64), parts(1, 4095, 4), parts(1, 16384, 4, 256)] == [1, 1, 1]


def test_a_scan_returns_memories_at_which_parts_can_begin():
    def checkpoints(batch, length, heads, dim, chunk_bounds=None):
        x = jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.bfloat16)
        return hopper_parts.count_checkpoints(x, x, x, chunk_bounds)

    assert [
        checkpoints(1, 16384, 4, 256),
        checkpoints(2, 4096, 4, 256),
        checkpoints(1, 2112, 4, 128),
    ] == [8, 4, 1]
    # Cases: a row in parts; too many scans for parts; a row that is too short for parts; an odd number of
    # chunks; rows of several memories.
    assert [
        checkpoints(1, 16384, 8, 128),
        checkpoints(8, 4096, 16, 128),
        checkpoints(1, 2047, 4, 256),
    ] == [1, 1, 1]
    assert [
        checkpoints(1, 64 * 65, 4, 256),
        checkpoints(1, 16384, 4, 256, jnp.zeros((1, 3), jnp.int32)),
    ] == [
        1,
        1,
    ]


@pytest.mark.parametrize(
    "width, channels, heads, erase",
    [
        *(pytest.param(64, x, 40, "decayed", marks=pytest.mark.slow) for x in (False, True)),
        pytest.param(128, False, 40, "decayed", marks=pytest.mark.slow),
        pytest.param(128, True, 40, "decayed", marks=pytest.mark.slow),
        (128, False, 4, "decayed"),
        pytest.param(128, False, 4, "undecayed", marks=pytest.mark.slow),
        pytest.param(256, False, 40, "undecayed", marks=pytest.mark.slow),
        pytest.param(64, True, 4, "decayed", marks=pytest.mark.slow),
    ],
)
def test_lowers_for_the_card(width, channels, heads, erase):
    struct = jax.ShapeDtypeStruct
    wide = struct((2, 8190, heads, width), jnp.bfloat16)
    narrow = struct(wide.shape[:3], jnp.float32)
    decay = struct(wide.shape, jnp.float32) if channels else narrow
    shapes = (
        wide, wide, wide, narrow, decay, struct((2, heads, width, width), jnp.float32),
        struct((2, 8190), jnp.int32),
    )  # fmt: skip

    def step(*inputs):
        def total(q, k, v, beta, log_decay, initial, run):
            output, final = delta_rule(
                q, k, v, beta, log_decay, initial=initial, run=run, scale=SCALE, erase=erase
            )
            return jnp.sum(output.astype(jnp.float32)) + jnp.sum(final)

        return jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4, 5))(*inputs)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    # Two kernels forward (three with a decay per channel) and three backward. Parts add three scans over
    # parts and two kernels that combine parts.
    assert text.count("custom_call @mosaic_gpu") == 5 + channels + 5 * (heads == 4)


def test_returns_the_unmet_requirement():
    inputs = make(64, 1, 1, 1, 64, 64, documents=False, decay=True)
    shapes = ("q", "k", "v", "log_decay")

    def why(inputs):
        return unsupported("mosaic_gpu", **{n: inputs[n] for n in shapes})

    assert why(inputs) is None
    wide = make(64, 1, 1, 1, 512, 64, documents=False, decay=False)
    assert "K of 64, 128 or 256, not 512" in why(wide)
    deep = make(64, 1, 1, 1, 512, 64, documents=False, decay="channel")
    assert "K of 64, 128 or 256, not 512" in why(deep)
    odd = make(64, 1, 1, 1, 64, 192, documents=False, decay="channel")
    assert why(odd) == "V of 64 or a multiple of 128, not 192"
    odd["v"], odd["erase"] = odd["q"], "undecayed"
    refused = unsupported("mosaic_gpu", **{n: odd[n] for n in (*shapes, "erase")})
    assert refused == "erase='decayed', not 'undecayed'"
    assert unsupported("mosaic_gpu", **{n: inputs[n] for n in shapes}, erase="undecayed") is None
    inputs["q"] = inputs["q"].astype(jnp.float32)
    with pytest.raises(
        NotImplementedError, match="requires q, k and v in bfloat16, not q in float32"
    ):
        delta_rule(**inputs, scale=SCALE)
    with pytest.raises(ValueError, match="implementation='cutile'; accepted are"):
        delta_rule(**inputs, scale=SCALE, implementation="cutile")
