"""Tests of `block_attention` where only the scores of the own and the selected blocks are computed: rows of at least 1.5
`num_blocks` blocks, without a state.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from lsm_jax.ops.blocks import selected, tiles, units
from lsm_jax.ops.blocks.selected import tile_size
from tests.conftest import AS_USERS
from tests.ops.test_ops import close

KEY_DIM, VALUE_DIM = 8, 4
KINDS = ("plain", "documents", "masked", "both")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def inputs_of(rng, batch, length, heads, dtype=np.float64):
    """Return random queries, keys and values with these numbers of heads."""
    dims = (KEY_DIM, KEY_DIM, VALUE_DIM)
    shapes = ((batch, length, n, dim) for n, dim in zip(heads, dims, strict=True))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def rows_of(rng, kind, batch, length):
    """Return the arguments that say which tokens are written and of which document: packed documents of random lengths with
    padding between and inside them, a random mask, or both.
    """
    rows = {}
    if kind in ("documents", "both"):
        ids = np.sort(rng.integers(1, 4, size=(batch, length)), axis=1)
        ids[rng.random(ids.shape) < 0.1] = 0
        rows["segment_ids"] = jnp.asarray(ids)
    if kind in ("masked", "both"):
        rows["update_mask"] = jnp.asarray(rng.random((batch, length)) < 0.6)
    return rows


def results(arrays, form, op=ops.block_attention, **options):
    """Return the output of an op, its final state and the gradients of its arrays, of a sum of all entries of output and state with
    different weights.
    """

    def objective(*arrays):
        output, final = op(*arrays, form=form, **options)
        parts = (output, final.keys, final.values)
        total = sum(jnp.sum(x * jnp.cos(0.3 + jnp.arange(x.size)).reshape(x.shape)) for x in parts)
        return total, (output, final)

    gradient = jax.grad(objective, argnums=tuple(range(len(arrays))), has_aux=True)
    return jax.tree.leaves(jax.jit(gradient)(*arrays))


def check(arrays, **options):
    """Compare all results with those of the recurrent form in float64."""
    expected = results(arrays, "recurrent", **options)
    for a, b in zip(results(arrays, "chunk", **options), expected, strict=True):
        close(a, b, 1e-11)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))]
)
def test_random_sizes_are_the_recurrence(seed, kind):
    """Values, final states and gradients, for blocks, lengths, heads and tiles of random sizes."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    size, blocks = int(rng.integers(1, 8)), int(rng.integers(1, 5))
    length = int(rng.integers(-(-3 * blocks * size // 2), 2 * blocks * size + 70))
    heads = [(4, 2, 2), (1, 1, 2), (2, 2, 2), (6, 1, 3)][rng.integers(4)]
    chunk_size = [None, 1, 4, 16][rng.integers(4)]
    options = dict(block_size=size, num_blocks=blocks, chunk_size=chunk_size)
    check(inputs_of(rng, 2, length, heads), **options, **rows_of(rng, kind, 2, length))


@pytest.mark.usefixtures("x64")
def test_more_blocks_than_are_searched_one_after_another():
    rng = np.random.default_rng(0)
    check(inputs_of(rng, 1, 61, (2, 2, 2)), block_size=3, num_blocks=12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("tile", [1, 4, 64])
def test_all_queries_select_one_block(tile):
    """One block has all tiles, which are summed as many at a time, or by a product, and others none."""
    rng = np.random.default_rng(0)
    q, k, v = inputs_of(rng, 1, 150, (2, 2, 2))
    q, k = q.at[..., 0].set(3.0), k.at[:, 8:12, :, 0].add(20.0)
    check([q, k, v], block_size=4, num_blocks=2, chunk_size=tile)


@pytest.mark.usefixtures("x64")
def test_rows_of_many_memories_in_several_steps(monkeypatch):
    """Some memories are computed at a time where all of them have too many scores."""
    monkeypatch.setattr(units, "_NUMBERS", 6000)  # of two memories
    rng = np.random.default_rng(0)
    arrays = inputs_of(rng, 3, 40, (2, 2, 2))
    options = dict(block_size=4, num_blocks=3, **rows_of(rng, "both", 3, 40))
    check(arrays, **options)
    jaxpr = jax.make_jaxpr(lambda *x: ops.block_attention(*x, **options))(*arrays)
    assert [x.params["length"] for x in equations(jaxpr.jaxpr) if x.primitive.name == "scan"] == [3]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", KINDS)
def test_selection_for_some_queries_at_a_time(monkeypatch, kind):
    """A row whose queries have too many scores of blocks selects, and counts, for parts of its queries; the last is shorter."""
    length, size, most = 143, 2, 3000
    monkeypatch.setattr(units, "_NUMBERS", most)  # of 41 queries
    monkeypatch.setattr(tiles, "_COMPARISONS", 0)
    rng = np.random.default_rng(0)
    arrays = inputs_of(rng, 2, length, (4, 2, 2))
    options = dict(block_size=size, num_blocks=3, **rows_of(rng, kind, 2, length))
    check(arrays, **options)
    jaxpr = jax.make_jaxpr(lambda *x: ops.block_attention(*x, **options)[0])(*arrays).jaxpr
    names, blocks = ("dot_general", "cumsum"), (length // size, -(-length // size))
    shapes = [x.outvars[0].aval.shape for x in equations(jaxpr) if x.primitive.name in names]
    of_blocks = [x for x in shapes if len(x) > 1 and x[-1] in blocks]
    assert of_blocks and max(map(math.prod, of_blocks)) <= most


@pytest.mark.parametrize("rows", [(), ("segment_ids",), ("update_mask",)])
def test_memory_does_not_grow_with_the_number_of_blocks(monkeypatch, rows):
    """All together needs less than one array [T, N], of queries and blocks, of one memory would."""
    monkeypatch.setattr(units, "_NUMBERS", 1 << 20)
    length = 16384
    rows = {name: jnp.ones((1, length), jnp.int32) for name in rows}
    function, arrays = gradient_of(length, heads=2, block_size=4, **rows)
    compiled = jax.jit(function).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * length * 4096


@pytest.mark.parametrize("chunk_size", [None, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["plain", pytest.param("both", marks=pytest.mark.slow)])
def test_causal_to_the_bit(kind, chunk_size):
    """No bit of an output depends on a later token, although later queries are in the tiles of earlier ones and move them."""
    rng, length = np.random.default_rng(0), 90
    arrays, rows = inputs_of(rng, 2, length, (4, 2, 2), np.float32), rows_of(rng, kind, 2, length)
    options = dict(block_size=4, num_blocks=3, chunk_size=chunk_size)
    run = jax.jit(
        lambda x, rows: ops.block_attention(*x, **options, **rows)[0], compiler_options=AS_USERS
    )
    base = np.asarray(run(arrays, rows))
    for t in (13, 41, 88):
        for place in range(3):
            changed = list(arrays)
            # All later queries agree on other blocks, so that tiles of earlier blocks become more or fewer.
            later = 30.0 if place == 0 else 2.5
            changed[place] = changed[place].at[:, t:].add(later)
            got = np.asarray(run(changed, rows))
            np.testing.assert_array_equal(got[:, :t], base[:, :t])
            assert (got[:, t:] != base[:, t:]).any()
        for name, x in rows.items():
            for value in (0, 1, 7):
                changed = x.at[:, t:].set(jnp.asarray(value, x.dtype))
                got = np.asarray(run(arrays, rows | {name: changed}))
                np.testing.assert_array_equal(got[:, :t], base[:, :t])


def equations(jaxpr):
    """Yield all equations of a jaxpr, and those of the functions that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from equations(getattr(value, "jaxpr", value))


def is_jaxpr(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def gradient_of(length, *, present=False, heads=1, block_size=256, **options):
    """Return a function of q, k and v [1, length, heads, 64], abstract ones, and its gradient of a sum of outputs; `present` is
    the form in which a query meets all keys.
    """
    arrays = [jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)] * 3

    def total(q, k, v):
        state = ops.attention_state(1, length, heads, 64, 64) if present else None
        options_of_call = dict(block_size=block_size, initial_state=state) | options
        return jnp.sum(ops.block_attention(q, k, v, **options_of_call)[0])

    return jax.grad(total, argnums=(0, 1, 2)), arrays


def flops_per_token(length, **options):
    """Return the floating-point operations per token of the compiled gradient, which has no loop over chunks or heads."""
    function, arrays = gradient_of(length, **options)
    compiled = jax.jit(function).lower(*arrays).compile()
    return compiled.cost_analysis()["flops"] / length


@pytest.mark.parametrize("size", [256, pytest.param(64, marks=pytest.mark.slow)])
def test_work_per_token_does_not_grow_with_the_row(size):
    lengths = (2048, 16384)
    short, long = (flops_per_token(n, block_size=size) for n in lengths)
    assert long < 1.3 * short
    for rows in ("segment_ids", "update_mask"):
        ones = (jnp.ones((1, n), jnp.int32) for n in lengths)
        few, many = (
            flops_per_token(n, block_size=size, **{rows: x})
            for n, x in zip(lengths, ones, strict=True)
        )
        assert many < 1.3 * few and many < 1.6 * long
    # The other form, in one chunk, does not meet the test.
    short, long = (flops_per_token(n, present=True, chunk_size=n, block_size=size) for n in lengths)
    assert long > 5 * short


@pytest.mark.parametrize(
    "gaps",
    [
        dict(gaps=False, all_write=False),
        dict(gaps=True, all_write=True),
        dict(gaps=True, all_write=False),
    ],
)
def test_only_integers_are_scattered(gaps):
    """Sums by a scatter would have no fixed order on a GPU."""
    arrays = inputs_of(np.random.default_rng(0), 1, 600, (1, 1, 1), np.float32)
    arrays[0] = arrays[0][:, :, :, None]  # [B, T, G, R, K]
    plan = units.Plan(4, 3, 2, 1, None, 1.0, jnp.float32, jnp.float32, jax.lax.Precision.HIGHEST)
    rank, written = jnp.arange(600)[None], jnp.ones((1, 600), bool)

    def total(*arrays):
        rows = selected.rows_of(plan, rank, written, 0, 600, **gaps)
        return jnp.sum(selected.attend_selected(plan, *arrays, rows))

    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(*arrays).jaxpr
    scattered = [x for x in equations(jaxpr) if x.primitive.name.startswith("scatter")]
    assert scattered and all(x.invars[0].aval.dtype == jnp.int32 for x in scattered)


def test_rows_in_which_most_blocks_are_seen_compute_all_scores():
    """There is little to select in a row of less than 1.5 `num_blocks` blocks; with an initial state all scores are computed,
    too.
    """
    for length, given, tiled in ((95, False, False), (96, False, True), (96, True, False)):
        state = ops.attention_state(1, length, 1, 8, 4) if given else None
        call = functools.partial(ops.block_attention, block_size=16, initial_state=state)
        arrays = inputs_of(np.random.default_rng(0), 1, length, (1, 1, 1), np.float32)
        jaxpr = jax.make_jaxpr(call)(*arrays).jaxpr
        names = {x.primitive.name for x in equations(jaxpr)}
        assert ("custom_vjp_call" in names) is tiled


def test_sizes_of_numpy():
    arrays = inputs_of(np.random.default_rng(0), 1, 40, (2, 2, 2), np.float32)
    got = ops.block_attention(*arrays, block_size=np.int64(4), num_blocks=np.int32(3))[0]
    expected = ops.block_attention(*arrays, block_size=4, num_blocks=3)[0]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("comparisons", [0, 1 << 21])
@pytest.mark.parametrize("spans", [1, 5])
@pytest.mark.parametrize("most", [1, 4, 5, 37])
def test_sum_of_tiles(monkeypatch, spans, most, comparisons):
    monkeypatch.setattr(tiles, "_COMPARISONS", comparisons)
    rng = np.random.default_rng(0)
    counts = rng.integers(0, most + 1, size=spans)
    counts[-1] = most
    span = np.concatenate([np.repeat(np.arange(spans), counts), [spans] * 3])
    x = rng.normal(size=(len(span), 2))
    got = tiles.sum_tiles(jnp.asarray(x), jnp.asarray(span), spans, most)
    expected = np.array([x[span == n].sum(axis=0) for n in range(spans)])
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_padding_of_tiles_is_at_most_a_quarter():
    for size in (1, 4, 64, 256, 4096):
        for earlier in (1, 3, 15):
            for group in (1, 3, 8):
                tile = tile_size(size, earlier, group)
                assert tile == 1 or tile <= size * earlier * group / 4
    assert tile_size(256, 3, 1) == 128
