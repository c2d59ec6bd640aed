"""Tests of `native_sparse_attention` where the scores of complete blocks' means, of selected blocks and of windows alone are
computed: rows of at least 1.5 `num_blocks` blocks, without a state.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lsm_jax import ops
from lsm_jax.ops.blocks import means, selected, tiles, units
from tests.conftest import AS_USERS
from tests.ops import test_selected_blocks as selected_blocks
from tests.ops.test_selected_blocks import KINDS, equations, inputs_of, rows_of


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def arrays_of(rng, batch, length, heads, dtype=np.float64):
    """Return random queries, keys, values and gates with these numbers of heads."""
    gates = rng.uniform(size=(batch, length, max(heads), 3))
    return [*inputs_of(rng, batch, length, heads, dtype), jnp.asarray(gates, dtype)]


results = functools.partial(selected_blocks.results, op=ops.native_sparse_attention)
check = functools.partial(selected_blocks.check, op=ops.native_sparse_attention)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))]
)
def test_random_sizes_are_the_recurrence(seed, kind):
    """Values, final states and gradients, for blocks, windows, lengths, heads and tiles of random sizes."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    size, blocks, window = (int(rng.integers(*x)) for x in ((1, 8), (3, 6), (1, 60)))
    length = int(rng.integers(-(-3 * blocks * size // 2), 2 * blocks * size + 70))
    heads = [(4, 2, 2), (1, 1, 2), (2, 2, 2), (6, 1, 2)][rng.integers(4)]
    chunk_size = [None, 1, 4, 16][rng.integers(4)]
    options = dict(block_size=size, num_blocks=blocks, window=window, chunk_size=chunk_size)
    check(arrays_of(rng, 2, length, heads), **options, **rows_of(rng, kind, 2, length))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "kind", ["both", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:-1])]
)
def test_parts_of_rows_heads_and_queries(monkeypatch, kind):
    """Where all have too many numbers, some rows, memories and query heads are computed at a time, and some queries' scores of
    means. No array of scores has more.
    """
    most, length = 12000, 143
    monkeypatch.setattr(units, "_NUMBERS", most)
    monkeypatch.setattr(tiles, "_COMPARISONS", 0)
    rng = np.random.default_rng(0)
    arrays = arrays_of(rng, 2, length, (8, 2, 2))
    options = dict(block_size=2, num_blocks=4, window=20, **rows_of(rng, kind, 2, length))
    check(arrays, **options)
    jaxpr = jax.make_jaxpr(lambda *x: ops.native_sparse_attention(*x, **options)[0])(*arrays).jaxpr
    products = [x for x in equations(jaxpr) if x.primitive.name == "dot_general"]
    assert max(math.prod(x.outvars[0].aval.shape) for x in products) <= most
    scans = [x.params["length"] for x in equations(jaxpr) if x.primitive.name == "scan"]
    # 4 pairs of a row and a memory, one after another, and 4 parts of each: of the queries for means, else of the query heads.
    assert scans == [4, 4, 16, 16]


@pytest.mark.usefixtures("x64")
def test_certain_blocks_are_selected_whatever_the_weights():
    """The first, previous and own blocks are selected if another one has all the weight, too."""
    length, size = 40, 4
    q, k, v, gates = arrays_of(np.random.default_rng(0), 1, length, (2, 1, 1))
    # All weight is block 3's.
    q, k = q.at[..., 0].set(200.0), k.at[..., 0].set(0.0).at[:, 12:16, :, 0].set(200.0)
    gates = gates.at[:].set(jnp.array([0.0, 1.0, 0.0]))
    options = dict(block_size=size, num_blocks=3, window=4)
    for form in ("recurrent", "chunk"):
        base, moved = (
            ops.native_sparse_attention(q, k, v, gates, form=form, **options)[0]
            for v in (v, v.at[:, 12:16].add(1.0))
        )
        # The tokens from 20 on, of which block 3 is none of the three.
        np.testing.assert_array_equal(moved[:, 20:], base[:, 20:])
    check([q, k, v, gates], **options)


@pytest.mark.parametrize("chunk_size", [None, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["plain", pytest.param("both", marks=pytest.mark.slow)])
def test_causal_to_the_bit(kind, chunk_size):
    """No bit of an output depends on a later token, although later queries are in the tiles of earlier ones and move them."""
    rng, length = np.random.default_rng(0), 90
    arrays, rows = arrays_of(rng, 2, length, (4, 2, 2), np.float32), rows_of(rng, kind, 2, length)
    options = dict(block_size=4, num_blocks=3, window=9, chunk_size=chunk_size)
    run = jax.jit(
        lambda x, rows: ops.native_sparse_attention(*x, **options, **rows)[0],
        compiler_options=AS_USERS,
    )
    base = np.asarray(run(arrays, rows))
    for t in (13, 41, 88):
        for place in range(4):
            changed = list(arrays)
            changed[place] = changed[place].at[:, t:].add(30.0 if place == 0 else 2.5)
            got = np.asarray(run(changed, rows))
            np.testing.assert_array_equal(got[:, :t], base[:, :t])
            assert (got[:, t:] != base[:, t:]).any()
        for name, x in rows.items():
            for value in (0, 1, 7):
                changed = x.at[:, t:].set(jnp.asarray(value, x.dtype))
                got = np.asarray(run(arrays, rows | {name: changed}))
                np.testing.assert_array_equal(got[:, :t], base[:, :t])


def flops_per_token(length, *, present=False, **options):
    """Return the floating-point operations per token of the compiled gradient, which has no loop over chunks or memories; `present`
    is the form in which a query meets all keys.
    """
    arrays = [jax.ShapeDtypeStruct((1, length, n, 64), jnp.float32) for n in (2, 1, 1)]
    arrays.append(jax.ShapeDtypeStruct((1, length, 2, 3), jnp.float32))

    def total(q, k, v, gates):
        state = ops.attention_state(1, length, 1, 64, 64) if present else None
        call = functools.partial(ops.native_sparse_attention, initial_state=state, **options)
        return jnp.sum(call(q, k, v, gates)[0])

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3))).lower(*arrays).compile()
    return compiled.cost_analysis()["flops"] / length


def test_work_per_token_does_not_grow_with_the_row():
    lengths = (2048, 16384)
    short, long = map(flops_per_token, lengths)
    assert long < 1.3 * short
    for rows in ("segment_ids", "update_mask"):
        ones = [jnp.ones((1, n), jnp.int32) for n in lengths]
        few, many = (flops_per_token(n, **{rows: x}) for n, x in zip(lengths, ones, strict=True))
        assert many < 1.3 * few and many < 1.6 * long
    # The other form, in one chunk, does not meet the test.
    short, long = (flops_per_token(n, present=True, chunk_size=n) for n in lengths)
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
    rng, length = np.random.default_rng(0), 200
    q, k, v, _ = arrays_of(rng, 1, length, (4, 2, 2), np.float32)
    q = q.reshape(1, length, 2, 2, -1)
    numbers = (jnp.float32, jnp.float32, jax.lax.Precision.HIGHEST)
    plan = units.Plan(4, 3, 2, 2, None, 1.0, *numbers)
    near = units.Plan(16, 0, 4, 2, 40, 1.0, *numbers)
    rank, written = jnp.arange(length)[None], jnp.ones((1, length), bool)

    def total(q, k, v):
        rows, windows = (
            selected.rows_of(x, rank, written, 0, length, **gaps) for x in (plan, near)
        )
        output, chosen = means.attend_means(plan, q, k, v, rows)
        output += selected.attend_selected(plan, q, k, v, rows, chosen)
        return jnp.sum(output + selected.attend_selected(near, q, k, v, windows))

    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(q, k, v).jaxpr
    scattered = [x for x in equations(jaxpr) if x.primitive.name.startswith("scatter")]
    assert scattered and all(x.invars[0].aval.dtype == jnp.int32 for x in scattered)


def test_a_window_beyond_the_row_costs_no_more_than_the_row():
    length = 256
    arrays = arrays_of(np.random.default_rng(0), 1, length, (2, 1, 1), np.float32)

    def operations(window):
        run = functools.partial(ops.native_sparse_attention, block_size=16, num_blocks=4)
        compiled = jax.jit(lambda *x: run(*x, window=window)[0]).lower(*arrays).compile()
        return compiled.cost_analysis()["flops"], compiled(*arrays)

    (flops, output), (longer, same) = operations(length), operations(100_000)
    assert longer == flops
    np.testing.assert_array_equal(output, same)


def test_short_rows_and_states_compute_all_scores():
    """There is little to select in a row of less than 1.5 `num_blocks` blocks."""
    for length, given, tiled in ((95, False, False), (96, False, True), (96, True, False)):
        state = ops.attention_state(1, length, 1, 8, 4) if given else None
        options = dict(block_size=16, num_blocks=4, window=8, initial_state=state)
        arrays = arrays_of(np.random.default_rng(0), 1, length, (1, 1, 1), np.float32)
        call = functools.partial(ops.native_sparse_attention, **options)
        names = {x.primitive.name for x in equations(jax.make_jaxpr(call)(*arrays).jaxpr)}
        assert ("custom_vjp_call" in names) is tiled


def test_sizes_of_tiles():
    for window in (1, 5, 127, 128, 512, 4096):
        size = selected.window_tile(window)
        assert size & (size - 1) == 0 and 16 <= size <= 128
        assert size == 16 or size <= window / 8
    for together in (1, 3, 16, 1000):
        tile = selected.tile_size(64, 15, 1, together)
        assert tile == 1 or tile * together <= 512 and tile <= 64 * 15 / 4
    assert selected.tile_size(64, 15, 1, 16) == 32
