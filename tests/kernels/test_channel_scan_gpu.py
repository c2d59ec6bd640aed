"""Tests of Hopper's scan of linear attention with a decay per key channel: its races, and slices of key channels in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention.cases import OUTPUT_TOLERANCE
from pallas_kernels.linear_attention.hopper import channel_scan
from tests.kernels.test_linear_attention_gpu import (
    BATCH,
    HOPPER_INTERPRETED,
    Case,
    assert_alike,
    by_token,
    error,
    fused,
    make,
    make_case,
)


def test_a_scan_that_returns_its_last_memories_alone_has_no_race():
    rng = np.random.default_rng(0)
    written, values = jnp.asarray(rng.normal(size=(2, BATCH, 256, 1, 64)), jnp.bfloat16)
    decay = jnp.asarray(rng.uniform(0.5, 1, size=(BATCH, 1, 4 * 64)), jnp.float32)
    (last,) = channel_scan.channel_scan(
        None, written, values, None, decay, interpret=gpu_interpreter()
    )
    assert not races_found()
    wanted = jnp.zeros((BATCH, 64, 64))
    for chunk in range(4):
        tokens, channels = slice(64 * chunk, 64 * (chunk + 1)), slice(64 * chunk, 64 * (chunk + 1))
        added = jnp.einsum(
            "btk,btv->bkv", *(x[:, tokens, 0].astype(jnp.float32) for x in (written, values))
        )
        wanted = decay[:, 0, channels, None] * wanted + added
    assert error(last[:, 0], wanted) < OUTPUT_TOLERANCE


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("save", [False, True], ids=["output", "memories"])
def test_a_scan_of_two_slices_of_keys_in_one_program_is_that_of_two(save, reverse, monkeypatch):
    """Also where buffers are loaded again, of which the interpreter then finds no race: it reports those of the last kernel alone."""
    length, pieces = 256, 2
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape) * 0.3, dtype)

    read, written = (normal(BATCH, length, 2, 128) for _ in range(2))
    values, scores = normal(BATCH, length, pieces, 64), normal(BATCH, 2, length, 64)
    decay = jnp.exp(-(normal(BATCH, 2, length // 64 * 128, dtype=jnp.float32) ** 2))
    initial = normal(BATCH, 2 * pieces, 128, 64, dtype=jnp.float32)

    def results(processors):
        monkeypatch.setattr(channel_scan, "PROCESSORS", processors)
        return channel_scan.channel_scan(
            read, written, values, scores, decay, initial=initial, save=save, reverse=reverse, key_slices=2,
            interpret=gpu_interpreter(),
        )  # fmt: skip

    got = jax.block_until_ready(results(1))
    assert not races_found()
    output, *memories = results(132)
    assert got[0].shape == output.shape == (BATCH, length, pieces, 64)
    assert error(got[0], output) < OUTPUT_TOLERANCE
    for actual, expected in zip(got[1:], memories, strict=True):
        np.testing.assert_array_equal(actual, expected)


SLICES = {
    "short": Case((1, 1, 1), 256, 64, 65, True, "channel"),
    "bonus": HOPPER_INTERPRETED["channels-deeper"],
    "wide": HOPPER_INTERPRETED["channels-deeper-wide"],
    "parts": Case((1, 1, 1), 256, 64, 256, True, "channel"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(SLICES)]
)
def test_slices_of_keys_in_one_program_equal_the_recurrence(name, monkeypatch):
    """Two slices of key channels, whose outputs a program adds where processors have several programs each."""
    monkeypatch.setattr(channel_scan, "PROCESSORS", 1)
    if name == "parts":
        monkeypatch.setattr(row_layout, "_SHORTEST_PART", 128)
    inputs = make_case(SLICES[name])
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs | dict(run=None))
    run = inputs.pop("run"), widened.pop("run")
    assert_alike(
        lambda x: fused(**x, run=run[0]), inputs, lambda x: by_token(**x, run=run[0]), widened
    )
    assert not races_found()


@pytest.mark.slow
def test_slices_of_keys_in_one_program_with_two_memories_per_row_are_those_apart(monkeypatch):
    """The numbers of chunks of a memory are then known when the kernel runs, and one memory has none."""
    inputs = make(192, 1, 1, 1, 256, 64, documents=False, decay="channel")
    rng = np.random.default_rng(2)
    inputs["initial"] = jnp.asarray(rng.normal(size=(3, 1, 256, 64)), jnp.float32) * 0.3
    run = jnp.asarray(np.repeat([0, 2], [64, 128])[None], jnp.int32)
    given = {n: inputs.pop(n) for n in ("run", "bonus", "value_log_decay")} | dict(run=run)

    def results(processors):
        monkeypatch.setattr(channel_scan, "PROCESSORS", processors)
        outputs, pull = jax.vjp(lambda x: fused(**x, **given), inputs)
        drawn = np.random.default_rng(1)
        cotangents = tuple(jnp.asarray(drawn.normal(size=x.shape), x.dtype) for x in outputs)
        return dict(zip(("output", "final"), outputs, strict=True)) | pull(cotangents)[0]

    got, wanted = results(1), results(132)
    for name, x in got.items():
        assert error(x, wanted[name]) < OUTPUT_TOLERANCE, name
    assert not races_found()


@pytest.mark.parametrize(
    ("rows", "slices", "sums"), [(8, 2, 0), (4, 2, 1), (12, 2, 1), (8, 3, 1), (8, 1, 0)]
)
def test_slices_of_keys_are_in_one_program_if_that_needs_no_more_rounds(rows, slices, sums):
    """Rows with 4 heads of 512 value channels have 32 programs a row and slice of two, on 132 processors."""
    length, heads, pieces = 128, 4, 4
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    keys, values = (shape((rows, length, heads * n, 128)) for n in (slices, pieces))
    scores = shape((rows, heads * slices, length, 64))
    decay = jax.ShapeDtypeStruct((rows, heads * slices, length // 64 * 128), jnp.float32)
    scan = functools.partial(channel_scan.channel_scan, key_slices=slices)
    traced = jax.make_jaxpr(scan)(keys, keys, values, scores, decay)
    assert traced.out_avals[0].shape == (rows, length, heads * pieces, 128)
    assert sum(e.primitive.name == "reduce_sum" for e in traced.eqns) == sums
