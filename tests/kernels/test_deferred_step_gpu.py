"""Tests of the step that writes a memory once in a group of tokens, in Mosaic GPU's interpreter, against the recurrence."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import gpu_interpreter, races_found
from pallas_kernels.decode_step import api, deferred, hopper, pending
from pallas_kernels.decode_step.deferred import apply_writes, deferred_step, empty_writes

BATCH, MEMORIES, KEYS, VALUES, RANK = 2, 2, 128, 64, 4
SLOW = pytest.mark.slow
WIDTHS = MEMORIES * KEYS, MEMORIES * KEYS, MEMORIES * VALUES, RANK
COLUMNS = (0, WIDTHS[0], WIDTHS[0] + WIDTHS[1], sum(WIDTHS[:3]))


# Values' channels of a memory, and the number of programs: with 2 a program has both rows, one after the other; without, a part of one.
APART, IN_TURN = (VALUES, None), (128, 2)


def set_programs(monkeypatch, programs: int | None) -> None:
    """Set about how many programs compute rows in turn; None: rows are apart."""
    monkeypatch.setattr(deferred, "PROGRAMS", {4: programs, 8: programs} if programs else {})


@pytest.fixture
def programs(request, monkeypatch):
    """A fixture that sets the number of programs, a parameter."""
    set_programs(monkeypatch, request.param)


def make(
    tokens: int,
    bias: tuple[float, float],
    dtype,
    keys: int = KEYS,
    values: int = VALUES,
    seed: int = 0,
) -> dict:
    """Return a memory and arrays of tokens [T, B, C] with their gate, whose bias is drawn between two numbers."""
    rng = np.random.default_rng(seed)
    width = 2 * MEMORIES * keys + MEMORIES * values + RANK
    return dict(
        memory=jnp.asarray(rng.normal(size=(BATCH, MEMORIES, keys, values)), jnp.float32),
        tokens=jnp.asarray(rng.normal(size=(tokens, BATCH, width)), dtype),
        up=jnp.asarray(rng.normal(size=(RANK, MEMORIES * keys)), dtype),
        bias=jnp.asarray(rng.uniform(*bias, MEMORIES * keys), jnp.float32),
    )


def recurrence(memory, tokens, up, bias, temperature: float):
    """Yield the output (times 1) and memory after each token, in float64."""
    batch, memories, keys, values = memory.shape
    tokens, up, bias = (np.asarray(x, np.float64) for x in (tokens, up, bias))
    ends = np.cumsum([memories * keys, memories * keys, memories * values])
    m = np.asarray(memory, np.float64)
    for token in tokens:
        q, k, v, down = np.split(token, ends, axis=1)
        q, k, v = (x.reshape(batch, memories, -1) for x in (q, k, v))
        log_decay = -np.logaddexp(0, -(down @ up + bias)) / temperature
        decay = np.exp(log_decay).reshape(batch, memories, keys, 1)
        m = decay * m + k[..., None] * v[..., None, :]
        yield np.einsum("bhk,bhkv->bhv", q, m), m


def columns_of(memory) -> tuple[int, ...]:
    _, memories, keys, values = memory.shape
    return 0, memories * keys, 2 * memories * keys, memories * (2 * keys + values)


def step(memory, temperature: float):
    return jax.jit(functools.partial(
        deferred_step, columns=columns_of(memory), temperature=temperature, scale=0.25, interpret=gpu_interpreter()
    ))  # fmt: skip


def near(got, wanted, tolerance: float) -> None:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted)
    assert np.isfinite(got).all()
    assert np.abs(got - wanted).max() <= tolerance * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize(
    ("group", "bias", "temperature", "dtype", "keys", "values", "programs"),
    [
        pytest.param(4, (-3, 6), 16.0, jnp.float32, 128, *APART, id="usual"),
        pytest.param(4, (-120, 20), 0.5, jnp.bfloat16, 128, *APART, id="strong, bfloat16"),
        pytest.param(8, (9, 14), 16.0, jnp.float32, 256, *APART, id="slow, K=256", marks=SLOW),
        pytest.param(8, (-3, 6), 16.0, jnp.bfloat16, 128, *APART, id="8, bfloat16", marks=SLOW),
        pytest.param(4, (-3, 6), 16.0, jnp.float32, 128, *IN_TURN, id="rows in turn"),
        pytest.param(4, (-120, 20), 0.5, jnp.bfloat16, 128, 256, 2, id="in turn, strong", marks=SLOW),
        pytest.param(8, (9, 14), 16.0, jnp.float32, 128, *IN_TURN, id="in turn, 8, slow", marks=SLOW),
        pytest.param(8, (-3, 6), 16.0, jnp.bfloat16, 128, *IN_TURN, id="in turn, 8, bfloat16", marks=SLOW),
    ],
    indirect=["programs"],
)  # fmt: skip
def test_outputs_and_memories_are_those_of_the_recurrence(
    group, bias, temperature, dtype, keys, values, programs
):
    """Over 2n + 3 tokens: each output, the memory as it is stored and after the pending writes, and the buffers, which the next group
    overwrites. The memory is stored by the last token of a group only.
    """
    arrays = make(2 * group + 3, bias, dtype, keys, values)
    run = step(arrays["memory"], temperature)
    memory, pending = arrays["memory"], empty_writes(arrays["memory"], group, dtype)
    gate, stored = (arrays["up"], arrays["bias"]), memory
    for t, (output, wanted) in enumerate(recurrence(**arrays, temperature=temperature)):
        count = t % group
        token = arrays["tokens"][t]
        o, memory, pending = run(memory, pending, jnp.int32(count), token, *gate)
        assert not races_found()
        assert o.dtype == dtype and memory.dtype == jnp.float32
        near(o, 0.25 * output, 5e-3 if dtype == jnp.bfloat16 else 3e-6)
        now = (count + 1) % group
        near(apply_writes(memory, pending, jnp.int32(now)), wanted, 3e-6)
        if now:
            np.testing.assert_array_equal(memory, stored)
            parts = np.split(np.asarray(token), columns_of(memory)[1:], axis=1)
            np.testing.assert_array_equal(pending.keys[:, count], parts[1])
            np.testing.assert_array_equal(pending.values[:, count], parts[2])
        else:
            near(memory, wanted, 3e-6)
            stored = memory


@pytest.mark.parametrize(
    ("group", "count", "keys", "values", "dtype", "programs"),
    [
        pytest.param(4, 0, 128, 64, jnp.bfloat16, None, id="no write waits"),
        pytest.param(4, 3, 128, 64, jnp.bfloat16, None, id="the memory is written"),
        pytest.param(4, 2, 128, 32, jnp.float32, None, id="32 channels", marks=SLOW),
        pytest.param(4, 1, 256, 128, jnp.bfloat16, None, id="K=256", marks=SLOW),
        pytest.param(4, 0, 128, 128, jnp.bfloat16, 2, id="in turn, no write waits"),
        pytest.param(4, 3, 128, 256, jnp.float32, 4, id="in turn, written", marks=SLOW),
        pytest.param(4, 2, 128, 384, jnp.bfloat16, 4, id="in turn, V=384", marks=SLOW),
        pytest.param(8, 7, 128, 128, jnp.bfloat16, 2, id="8, in turn, written"),
        pytest.param(8, 5, 128, 256, jnp.bfloat16, 4, id="8, in turn, five wait", marks=SLOW),
    ],
    indirect=["programs"],
)
def test_a_gate_multiplies_the_output_and_leaves_all_else_as_it_is(
    group, count, keys, values, dtype, programs
):
    """The gated output is that of the step without a gate times silu(gate), its squares are those of that output, and memory and writes have
    the same bits. Gates are from -200 to 200.
    """
    rng = np.random.default_rng(count)
    memory = jnp.asarray(rng.normal(size=(BATCH, MEMORIES, keys, values)), jnp.float32)
    ends = np.cumsum([MEMORIES * keys, MEMORIES * keys, MEMORIES * values, MEMORIES * values])
    tokens = rng.normal(size=(BATCH, ends[-1] + RANK))
    tokens[:, ends[2] : ends[3]] *= rng.choice([1, 100], size=ends[3] - ends[2])
    tokens = jnp.asarray(tokens.clip(-200, 200), dtype)
    up = jnp.asarray(rng.normal(size=(RANK, MEMORIES * keys)), dtype)
    empty = empty_writes(memory, group, dtype)
    pending = jax.tree.map(lambda x: jnp.asarray(-rng.uniform(size=x.shape), x.dtype), empty)
    columns = 0, int(ends[0]), int(ends[1]), int(ends[3])
    call = memory, pending, jnp.int32(count), tokens, up, jnp.ones(MEMORIES * keys)
    options = dict(columns=columns, temperature=16.0, scale=0.25, interpret=gpu_interpreter())
    plain, *known = deferred_step(*call, **options)
    (gated, squares), *got = deferred_step(*call, **options, gate=int(ends[2]))
    assert not races_found()
    jax.tree.map(np.testing.assert_array_equal, got, known)
    o, gate = np.asarray(plain, np.float64), np.asarray(tokens[:, ends[2] : ends[3]], np.float64)
    with np.errstate(over="ignore"):
        wanted = o * (gate / (1 + np.exp(-gate))).reshape(o.shape)
    unit = 2**-8 if dtype == jnp.bfloat16 else 1e-6
    assert gated.dtype == dtype and squares.dtype == jnp.float32
    assert (np.abs(np.asarray(gated, np.float64) - wanted) <= unit * np.abs(wanted) + 1e-30).all()
    by_part = (o**2).reshape(BATCH, MEMORIES, squares.shape[1], -1).sum(axis=-1)
    np.testing.assert_allclose(np.transpose(squares, (2, 0, 1)), by_part, rtol=1e-6)


@pytest.mark.parametrize(
    ("group", "count"),
    [
        (4, 0),
        *(pytest.param(4, count, marks=SLOW) for count in (1, 2, 3)),
        *(pytest.param(8, count, marks=SLOW) for count in (0, 4)),
        (8, 7),
    ],
)
def test_rows_in_turn_have_the_results_of_rows_apart(group, count, monkeypatch):
    """Three rows in programs of two, so that the last program has one. Keys and values have the same bits; the rest contains sums in another order."""
    rng = np.random.default_rng(count)
    ends = np.cumsum([WIDTHS[0], WIDTHS[1], MEMORIES * 128, MEMORIES * 128])
    memory = jnp.asarray(rng.normal(size=(3, MEMORIES, KEYS, 128)), jnp.float32)
    tokens = jnp.asarray(rng.normal(size=(3, ends[-1] + RANK)), jnp.float32)
    up = jnp.asarray(rng.normal(size=(RANK, WIDTHS[0])), jnp.float32)
    empty = empty_writes(memory, group, jnp.float32)
    writes = jax.tree.map(lambda x: jnp.asarray(-rng.uniform(size=x.shape), x.dtype), empty)
    call = memory, writes, jnp.int32(count), tokens, up, jnp.ones(WIDTHS[0])
    options: dict = dict(columns=(0, int(ends[0]), int(ends[1]), int(ends[3])), temperature=16.0)
    options |= dict(scale=0.25, gate=int(ends[2]), interpret=gpu_interpreter())
    results = []
    for programs in (None, 3):
        set_programs(monkeypatch, programs)
        results.append(deferred_step(*call, **options))
        assert not races_found()
    (apart, squares), *rest = results[0]
    (output, got), *others = results[1]
    # The squares' parts are of 64 channels where rows are apart and memories few.
    near(got.sum(1), squares.sum(1), 1e-6)
    near(output, apart, 1e-6)
    jax.tree.map(functools.partial(near, tolerance=1e-6), others, rest)
    jax.tree.map(np.testing.assert_array_equal, others[1][:2], rest[1][:2])


@pytest.mark.parametrize(("values", "programs"), [APART, IN_TURN], indirect=["programs"])
def test_places_beyond_the_count_are_not_read(values, programs):
    """Places of pending writes that are empty leave no trace, also where they contain NaN."""
    arrays = make(1, (-3, 6), jnp.float32, values=values)
    run, memory = step(arrays["memory"], 16.0), arrays["memory"]
    for count in range(4):
        filled = make(3, (-3, 6), jnp.float32, values=values, seed=count)["tokens"]
        rows = jnp.moveaxis(filled, 0, 1)
        decays = -0.3 * jax.nn.sigmoid(rows[..., : WIDTHS[0]])
        late = rows[..., -MEMORIES * values :]
        pending = deferred.Pending(rows[..., : WIDTHS[0]], late, decays)
        call = jnp.int32(count), arrays["tokens"][0], arrays["up"], arrays["bias"]
        clean = run(memory, fill(pending, count, 0.0), *call)
        for got, wanted in zip(run(memory, fill(pending, count, jnp.nan), *call)[:2], clean[:2], strict=True):  # fmt: skip
            np.testing.assert_array_equal(got, wanted)
            assert np.isfinite(got).all()
        applied = [
            deferred.apply_writes(memory, fill(pending, count, x), count) for x in (0.0, jnp.nan)
        ]
        np.testing.assert_array_equal(*applied)


def fill(pending: deferred.Pending, count: int, number: float) -> deferred.Pending:
    return jax.tree.map(lambda x: x.at[:, count:].set(number), pending)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_slow_decays_lose_nothing_over_many_tokens(group):
    """The decay of 10,240 tokens of log decay -1e-5 each, joined by groups as in the kernel and rounded to float32 after each, is as exact
    as that of token by token (`group` 1); plain products of float32 are not.
    """
    log_decay = np.float32(-1e-5) * np.linspace(0.5, 1.5, 64, dtype=np.float32)
    factor = api.decay_factor(jnp.asarray(log_decay))

    @jax.jit
    def after_a_group(memory):
        joined = factor
        for _ in range(group - 1):
            joined = pending.joined_decay(factor, joined)
        return hopper.apply_decay(memory, joined)

    memory = plain = jnp.ones(64, jnp.float32)
    for _ in range(10240 // group):
        memory = after_a_group(memory)
    exact = np.exp(10240 * log_decay.astype(np.float64))
    worst = np.abs(np.asarray(memory) / exact - 1).max()
    assert worst < 6e-8 * np.sqrt(10240 / group) * 4
    for _ in range(10240):
        plain = plain * jnp.exp(log_decay)
    assert np.abs(np.asarray(plain) / exact - 1).max() > 4 * worst


def test_names_the_requirement_that_is_not_met():
    arrays = make(1, (0, 1), jnp.float32)
    call = arrays["memory"], arrays["tokens"][0], arrays["up"]
    assert deferred.unsupported(*call, 4) is None
    assert "groups of 4 or 8 tokens, not 5" in str(deferred.unsupported(*call, 5))
    small = arrays["memory"][:, :, :64]
    assert "K 128 or 256 and V a multiple of 32, not K 64" in str(deferred.unsupported(small, *call[1:], 4))  # fmt: skip
    wide = jnp.zeros((65, WIDTHS[0]))
    assert "at most 64 inner channels of the gate, not 65" in str(deferred.unsupported(*call[:2], wide, 4))  # fmt: skip
    pending = empty_writes(arrays["memory"], 5, jnp.float32)
    with pytest.raises(NotImplementedError, match="deferred_step requires groups of 4"):
        deferred_step(
            arrays["memory"], pending, jnp.int32(0), *call[1:], arrays["bias"],
            columns=COLUMNS, temperature=16.0, scale=1.0,
        )  # fmt: skip
