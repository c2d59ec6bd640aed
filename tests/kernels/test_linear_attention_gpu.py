"""Tests of the Hopper kernels of linear attention: run in Mosaic GPU's interpreter, and lowered for an H200."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from lsm_jax import ops
from pallas_kernels.compat import gpu_interpreter, plgpu, races_found
from pallas_kernels.hopper import row_layout
from pallas_kernels.linear_attention import linear_attention, unsupported
from pallas_kernels.linear_attention.cases import (
    GRADIENT_TOLERANCE,
    HOPPER_INTERPRETED,
    OUTPUT_TOLERANCE,
    Case,
)
from pallas_kernels.linear_attention.hopper import scalar_decay

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
    strong=False,
    bonus=False,
):
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    channels = {"channel": (key_dim,), "value channel": (value_dim,)}.get(decay, ())
    log_decay = jax.nn.log_sigmoid(normal(BATCH, length, memories, *channels) + 2)
    if strong > 1:
        log_decay *= strong
    elif strong:
        log_decay = jnp.asarray(rng.choice([0.0, -1e-3, -30.0], size=log_decay.shape), jnp.float32)
    starts = jnp.isin(jnp.arange(length), jnp.array([30, 31, 64, 150]))
    run = jnp.broadcast_to(jnp.cumsum(starts, dtype=jnp.int32), (BATCH, length))
    return dict(
        q=normal(BATCH, length, heads, key_dim, dtype=jnp.bfloat16),
        k=normal(BATCH, length, key_heads, key_dim, dtype=jnp.bfloat16) * 0.3,
        v=normal(BATCH, length, memories, value_dim, dtype=jnp.bfloat16),
        log_decay=log_decay if decay and decay != "value channel" else None,
        value_log_decay=log_decay if decay == "value channel" else None,
        initial=normal(BATCH, memories, key_dim, value_dim) * 0.3,
        run=run if documents else None,
        bonus=normal(memories, key_dim) if bonus else None,
    )


def make_case(case):
    """Return random inputs of the linear attention kernel with the sizes and options of `case`."""
    sizes = case.length, *case.heads, case.key_dim, case.value_dim
    options = {name: getattr(case, name) for name in ("documents", "decay", "strong", "bonus")}
    return make(*sizes, **options)


def by_token(q, k, v, log_decay, initial, run, bonus, value_log_decay, rank=1):
    state = ops.linear_state(*v.shape[:1], v.shape[2], k.shape[3], v.shape[3])
    state = state._replace(memory=initial, segment_id=jnp.ones(BATCH, jnp.int32))
    ids = None if run is None else run + 1
    output, state = ops.linear_memory(
        q, k, v, log_decay, value_log_decay=value_log_decay, bonus=bonus, scale=SCALE,
        initial_state=state, segment_ids=ids, rank=rank, form="recurrent",
    )  # fmt: skip
    return output, state.memory


def fused(q, k, v, log_decay, **rest):
    return linear_attention(q, k, v, log_decay, scale=SCALE, interpret=gpu_interpreter(), **rest)


def error(actual, expected):
    """Return the RMS of the difference between the arrays `actual` and `expected`, relative to the RMS of
    `expected`.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def assert_alike(
    function, inputs, reference, widened, *, output=OUTPUT_TOLERANCE, gradient=GRADIENT_TOLERANCE
):
    """Assert that the outputs of a function of `inputs`, and its gradients by random cotangents, are those of a reference of the same
    inputs in float32, within two tolerances.
    """
    expected, expected_pull = jax.vjp(reference, widened)
    actual, pull = jax.vjp(function, inputs)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.shape == wanted.shape
        assert error(got, wanted) < output
    rng = np.random.default_rng(1)
    cotangents = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in actual]
    (grads,) = pull(tuple(cotangents))
    (wanted,) = expected_pull(tuple(x.astype(jnp.float32) for x in cotangents))
    for field, got in grads.items():
        if inputs[field] is not None:
            assert got.shape == inputs[field].shape
            assert error(got, wanted[field]) < gradient, field


def assert_equal_with_memories_saved(function, inputs, monkeypatch, *, calls=1):
    """Assert that the results of a memory's kernel, `function(inputs, save_memories=...)`, and all gradients are to the bit the same whether
    the memories are saved or not, and that one kernel less runs in the backward pass if they are saved, for each of the kernel's `calls`.
    """
    kernel, run = plgpu.kernel, []
    monkeypatch.setattr(
        plgpu, "kernel", lambda body, **o: run.append(body.__name__) or kernel(body, **o)
    )

    def results(saves):
        run.clear()
        outputs, pull = jax.vjp(lambda x: function(x, save_memories=saves), inputs)
        forward = list(run)
        rng = np.random.default_rng(1)
        grads = pull(tuple(jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in outputs))
        assert not races_found()
        return (outputs, grads), forward, run[len(forward) :]

    wanted, forward, again = results(False)
    got, forward_saved, rest = results(True)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert forward_saved == forward
    less = Counter(again)
    less.subtract(rest)
    scan = forward[-1]  # the forward pass's last kernel
    assert {name: n for name, n in less.items() if n} == {scan: calls}


def with_two_memories(inputs):
    """Return arguments of a kernel with two memories for each row, of 64 tokens and of the rest."""
    length, initial = inputs["q"].shape[1], inputs["initial"]
    return inputs | dict(
        initial=jnp.concatenate([initial, -2 * initial]),
        run=jnp.broadcast_to(jnp.arange(length) >= 64, (BATCH, length)).astype(jnp.int32),
    )


SAVED = (
    "channels",
    "channels-queries-share-wide",
    "channels-parts",
    "channels-deeper-heads",
    "channels-deeper-odd",
)


@pytest.mark.parametrize(
    "name, memories",
    [("channels", 2)] + [pytest.param(x, 1, marks=pytest.mark.slow) for x in SAVED],
)
def test_saved_memories_are_those_that_are_computed_again(name, memories, monkeypatch):
    if name.endswith("parts"):
        monkeypatch.setattr(row_layout, "_SHORTEST_PART", 128)
    inputs = make_case(HOPPER_INTERPRETED[name])
    inputs = inputs if memories == 1 else with_two_memories(inputs)
    run = inputs.pop("run")
    call = lambda x, **o: fused(**x, run=run, **o)  # noqa: E731
    # If the number of slices of values is odd, each slice of keys is a call of its own.
    calls = 2 if name.endswith("odd") else 1
    assert_equal_with_memories_saved(call, inputs, monkeypatch, calls=calls)


FAST = ("decay", "channels")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in HOPPER_INTERPRETED],
)
def test_equals_the_recurrence_in_value_and_every_gradient(name, monkeypatch):
    if name.endswith("parts"):
        monkeypatch.setattr(row_layout, "_SHORTEST_PART", 128)
    inputs = make_case(HOPPER_INTERPRETED[name])
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs | dict(run=None))
    run = inputs.pop("run"), widened.pop("run")
    assert_alike(
        lambda x: fused(**x, run=run[0]), inputs, lambda x: by_token(**x, run=run[0]), widened
    )
    assert not races_found()


WRITES = {
    "documents": Case((1, 1, 1), 64, 64, 100, True, "token"),
    "memories-share": Case((1, 1, 2), 128, 64, 130, False, "token"),
    "queries-share-wide": Case((2, 1, 1), 64, 128, 65, False, "token"),
    "parts": Case((1, 1, 1), 64, 64, 256, True, "token"),
    "gradients-of-pairs": Case((1, 1, 2), 128, 64, 100, True, "token"),
    "gradients-of-pairs-by-group": Case((2, 1, 4), 128, 64, 65, False, "token", strong=True),
    "gradients-of-pairs-in-parts": Case((1, 1, 2), 128, 64, 256, True, "token"),
    "pairs-in-parts": Case((1, 1, 2), 64, 64, 256, True, "token"),
    "deep": Case((1, 1, 1), 256, 64, 65, False, "token", strong=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(WRITES)]
)
def test_factors_of_writes_and_skips_are_those_of_scaled_values(name, monkeypatch):
    """A memory whose writes have factors e^w, and whose output has a skip, equals the recurrence of the values e^w v, plus the skip, in the
    output, the final memory and every gradient. Some factors are 0.
    """
    if name.endswith("parts"):
        monkeypatch.setattr(row_layout, "_SHORTEST_PART", 128)
    inputs = make_case(WRITES[name])
    run, memories = inputs.pop("run"), inputs["v"].shape[2]
    rng = np.random.default_rng(2)
    shape = (BATCH, WRITES[name].length, memories)
    inputs["log_write"] = jnp.asarray(rng.normal(size=shape) - 1, jnp.float32).at[:, 7].set(-1e3)
    inputs["skip"] = jnp.asarray(rng.normal(size=memories), jnp.float32)
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)

    def scaled(x):
        x = dict(x)
        log_write, skip, v = x.pop("log_write"), x.pop("skip"), x["v"]
        x["v"] = v * jnp.exp(log_write)[..., None]
        output, final = by_token(**x, run=run)
        shared = output.shape[2] // memories
        return output + jnp.repeat(skip[:, None] * v, shared, axis=2), final

    assert_alike(lambda x: fused(**x, run=run), inputs, scaled, widened)
    assert not races_found()


RANKS = {
    "two": (2, Case((1, 1, 1), 64, 64, 96, False, "token")),
    "four-documents": (4, Case((1, 1, 1), 64, 64, 132, True, "token")),
    "four-deep": (4, Case((1, 1, 1), 256, 64, 68, False, "token")),
    "four-no-decay": (4, Case((2, 1, 1), 64, 64, 96, False, None)),
    "eight-strong": (8, Case((1, 1, 2), 64, 64, 136, False, "token", strong=True)),
    "four-parts": (4, Case((1, 1, 1), 64, 64, 256, True, "token")),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(RANKS)]
)
def test_rows_of_a_token_read_after_all_of_them_are_written(name, monkeypatch):
    """The kernel of tokens of several rows equals the recurrence, which adds what rows read from later rows of their token, in the
    output, the final memory and every gradient. A token's decay is that of its first row.
    """
    if name.endswith("parts"):
        monkeypatch.setattr(row_layout, "_SHORTEST_PART", 128)
    rank, case = RANKS[name]
    inputs = make_case(case)
    run = inputs.pop("run")
    if run is not None:  # the document of a token is that of its first row
        run = jnp.repeat(run[:, ::rank], rank, axis=1)

    def with_token_decays(function):
        def call(x):
            first = jnp.arange(case.length) % rank == 0
            decay = x["log_decay"]
            decay = None if decay is None else jnp.where(first[:, None], decay, 0)
            return function(**(x | dict(log_decay=decay)), run=run, rank=rank)

        return call

    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    assert_alike(with_token_decays(fused), inputs, with_token_decays(by_token), widened)
    assert not races_found()


def test_gradients_of_pairs_with_two_memories_per_row_are_those_of_each_head(monkeypatch):
    """With two memories per row, gradients of two heads in one thread block equal those of each head, which XLA adds."""
    inputs = make(192, 1, 1, 2, 128, 64, documents=False, decay="token")
    rng = np.random.default_rng(2)
    run = jnp.asarray(np.repeat([0, 1], [64, 128])[None], jnp.int32)
    inputs |= dict(
        initial=jnp.asarray(rng.normal(size=(2, 2, 128, 64)), jnp.float32) * 0.3,
        log_write=jnp.asarray(rng.normal(size=(BATCH, 192, 2)) - 1, jnp.float32),
        skip=jnp.asarray(rng.normal(size=2), jnp.float32), run=run,
    )  # fmt: skip
    given = {n: inputs.pop(n) for n in ("run", "bonus", "value_log_decay")}

    def gradients(pairs):
        monkeypatch.setattr(scalar_decay, "GRADIENTS_OF_PAIRS", pairs)
        outputs, pull = jax.vjp(lambda x: fused(**x, **given), inputs)
        drawn = np.random.default_rng(1)
        return pull(tuple(jnp.asarray(drawn.normal(size=x.shape), x.dtype) for x in outputs))[0]

    got, wanted = gradients(True), gradients(False)
    for name, x in got.items():
        assert error(x, wanted[name]) < GRADIENT_TOLERANCE, name
    assert not races_found()


@pytest.mark.parametrize("heads, calls", [((1, 1, 4), 3), ((4, 4, 4), 4), ((1, 1, 3), 4)], ids=str)
def test_heads_that_share_q_and_k_have_two_scans_of_gradients(heads, calls):
    """For an H200, the gradients of pairs of heads that share q and k are two kernels, whose sums over heads of dq and dk have half as many
    heads, and other heads' gradients are three. A gradient of the final memories also requires the forward pass's kernel, which computes
    them. One more kernel computes the sums of decays.
    """
    struct = jax.ShapeDtypeStruct
    *key_heads, memories = heads
    q, k = (struct((2, 1024, h, 128), jnp.bfloat16) for h in key_heads)
    v, by_head = (2, 1024, memories, 64), struct((2, 1024, memories), jnp.float32)
    arrays = q, k, struct(v, jnp.bfloat16), by_head, by_head, struct((memories,), jnp.float32)

    def gradients(results, *arrays):
        def total(q, k, v, log_decay, log_write, skip):
            initial = jnp.zeros((2, memories, 128, 64))
            given = dict(log_write=log_write, skip=skip, initial=initial, scale=SCALE)
            found = linear_attention(q, k, v, log_decay, **given)[:results]
            return sum(jnp.sum(x.astype(jnp.float32)) for x in found)

        return jax.grad(total, argnums=tuple(range(6)))(*arrays)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    for results in (1, 2):
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            traced = jax.jit(functools.partial(gradients, results)).trace(*arrays)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 1 + calls - 2 + results
        assert ("2x1024x2x128xbf16" in text) == (calls == 3)


def test_sums_by_a_product_in_bfloat16_have_the_precision_of_float32():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3, 256)) * 10.0 ** rng.integers(-6, 6, size=(3, 256))).astype(np.float32)
    mask = np.tril(np.ones((256, 256), bool))
    wanted = x.astype(np.float64) @ mask
    got = np.asarray(jax.jit(row_layout.exact_sums)(x, mask), np.float64)
    bound = 256 * 2.0**-24 * (np.abs(x).astype(np.float64) @ mask)
    assert (np.abs(got - wanted) <= bound).all()
    ones = np.asarray(row_layout.exact_sums(x, np.eye(256, dtype=bool)))
    np.testing.assert_array_equal(ones, x)


# Factors of the inputs, so large or small that rows are out of the range of `AllPairs`, or that a product could overflow.
SIZES = {
    "large-gradients-of-large-queries": dict(q=1e18, d_output=1e5),
    "small-gradients": dict(d_output=1e-30),
    "small-keys-of-large-queries": dict(q=1e25, k=1e-25),
    "large-keys-of-small-queries": dict(q=1e-25, k=1e25),
    "small-keys": dict(k=1e-30),
    "large-values": dict(v=1e25),
    "no-keys": dict(k=0.0),
}


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(SIZES)],
)
def test_channels_of_any_size_are_finite_and_right(name, bonus):
    sizes = dict(dict(q=1.0, k=1.0, v=1.0, d_output=1.0), **SIZES[name])
    inputs = make(64, 1, 1, 1, 64, 64, documents=bonus, decay="channel", bonus=bonus)
    for n in "qkv":
        inputs[n] = (inputs[n].astype(jnp.float32) * sizes[n]).astype(jnp.bfloat16)
    inputs["initial"] *= sizes["k"] * sizes["v"]
    run = inputs.pop("run")
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    actual, pull = jax.vjp(lambda x: fused(**x, run=run), inputs)
    expected, expected_pull = jax.vjp(lambda x: by_token(**x, run=run), widened)
    rng = np.random.default_rng(1)
    size = sizes["d_output"] * np.array([1, sizes["q"]])
    given = [
        jnp.asarray(rng.normal(size=x.shape) * n, x.dtype)
        for x, n in zip(actual, size, strict=True)
    ]
    (grads,) = pull(tuple(given))
    (wanted,) = expected_pull(tuple(x.astype(jnp.float32) for x in given))
    pairs = [("output", actual[0], expected[0]), ("final", actual[1], expected[1])]
    pairs += [(n, grads[n], wanted[n]) for n, x in inputs.items() if x is not None]
    for n, got, want in pairs:
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.isfinite(got).all(), n
        if not want.any():
            assert not got.any(), n
        else:
            assert error(got, want) < (
                OUTPUT_TOLERANCE if n in ("output", "final") else GRADIENT_TOLERANCE
            ), n


@pytest.mark.parametrize(
    "decay, bonus",
    [
        (True, False),
        ("channel", False),
        pytest.param("channel", True, marks=pytest.mark.slow),
    ],
)
def test_causal_to_the_bit(decay, bonus):
    inputs = make(128, 1, 1, 1, 64, 64, documents=bonus, decay=decay, bonus=bonus)
    changed = dict(inputs)
    for name in ("q", "k", "v"):
        changed[name] = inputs[name].at[:, 77:].multiply(2)
    # Decays and keys that are out of the range of `AllPairs`, so that these pairs of rows are computed level by level.
    changed["log_decay"] = inputs["log_decay"].at[:, 77:].multiply(100)
    changed["k"] = changed["k"].at[:, 100:].multiply(1e30)
    np.testing.assert_array_equal(fused(**inputs)[0][:, :77], fused(**changed)[0][:, :77])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("width", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_lowers_for_the_card(width, channels):
    struct = jax.ShapeDtypeStruct
    wide = struct((2, 4090, 4, width), jnp.bfloat16)
    shapes = (
        wide, wide, wide, struct((2, 4090, 4, *[width] * channels), jnp.float32), struct((2, 4, width, width), jnp.float32),
        struct((2, 4090), jnp.int32),
    )  # fmt: skip

    def step(*inputs):
        def total(q, k, v, log_decay, initial, run):
            output, final = linear_attention(
                q, k, v, log_decay, initial=initial, run=run, scale=SCALE
            )
            return jnp.sum(output.astype(jnp.float32)) + jnp.sum(final)

        return jax.grad(total, argnums=(0, 1, 2, 3, 4))(*inputs)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    # Sums of decays, one forward scan, three backward scans, and two scans that add up the writes of parts. With a decay per channel:
    # chunk_forward, two scans of the backward pass, chunk_backward, and the same two; the output is not computed, since no gradient requires it.
    assert text.count("custom_call @mosaic_gpu") == (6 if channels else 7)


def test_names_the_unmet_requirement():
    inputs = make(64, 1, 1, 1, 64, 64, documents=False, decay=True)

    def why(inputs):
        names = ("q", "k", "v", "log_decay", "bonus", "value_log_decay")
        return unsupported("mosaic_gpu", **{n: inputs[n] for n in names if n in inputs})

    assert why(inputs) is None
    bonus = jnp.ones((1, 64))
    assert "log_decay [B, T, G, K] alone" in why(inputs | dict(bonus=bonus))
    channels = make(64, 1, 1, 1, 64, 64, documents=False, decay="channel", bonus=True)
    assert why(channels) is None
    values = make(64, 1, 1, 1, 64, 64, documents=False, decay="value channel")
    assert why(values) is None
    both = values | dict(log_decay=inputs["log_decay"])
    assert why(both) == "log_decay or value_log_decay, not both"
    odd = make(64, 1, 1, 1, 192, 64, documents=False, decay="channel")
    assert why(odd) == "K of 64 or a multiple of 128, not 192"
    inputs["q"] = inputs["q"].astype(jnp.float32)
    with pytest.raises(
        NotImplementedError, match="requires q, k and v in bfloat16, not q in float32"
    ):
        linear_attention(**inputs, scale=SCALE)
    with pytest.raises(ValueError, match="implementation='cutile'; accepted are"):
        linear_attention(**inputs, scale=SCALE, implementation="cutile")


def test_maps_over_one_more_axis():
    """`jax.vmap` of the linear attention kernel over two inputs returns, to the bit, the results of two
    single calls.
    """
    case = make(64, 1, 1, 1, 64, 64, documents=False, decay=True)
    arrays = {n: jnp.stack([x, x[:, ::-1]]) for n, x in case.items() if n in "qkv"}
    rest = {n: x for n, x in case.items() if n not in arrays}

    def run(x):
        return linear_attention(**x, **rest, scale=SCALE, interpret=gpu_interpreter())

    one_by_one = [run({n: x[i] for n, x in arrays.items()}) for i in range(2)]
    for got, *expected in zip(jax.vmap(run)(arrays), *one_by_one, strict=True):
        np.testing.assert_array_equal(got, jnp.stack(expected))
