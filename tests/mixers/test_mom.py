"""Tests of Mixture-of-Memories, compared with its definition: in the packed and in the masked form, in one
call and token by token.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.mixers import mom_layout
from lsm_jax.mixers.layers import Dense
from lsm_jax.ops.core import chunk_scans
from tests.mixers.mom_cases import (
    BATCH,
    FORMS,
    INNER,
    LENGTH,
    ROW_CONV,
    WIDTH,
    X,
    build,
    call,
    choices,
    config_of,
    copied,
    definition,
    float_arrays,
    gradient,
    made,
    memory,
    number,
    oracle,
    shared_of,
)
from tests.mixers.test_mixers import close

by_form = pytest.mark.parametrize(
    "form", ["packed", pytest.param("masked", marks=pytest.mark.slow)]
)
by_method = pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ("gated_deltanet", ROW_CONV) else pytest.mark.slow)
        for n in (*INNER, ROW_CONV)
    ],
)
# One method for each class of memory update, and the published ones, for properties that other tests imply
# for all methods.
SOME = ("linear_attention", "gla", "hgrn2", "mamba2", "deltanet", "gated_deltanet", "gsa", "rwkv7")


@functools.cache
def expected_of(name):
    """Return ((gradients of the parameters and of the input, of a weighted sum of outputs), output) of the
    small Mixture-of-Memories with the inner mixer `name`, computed by the definition.
    """
    mixer = made(name)
    chosen = choices(mixer, X)
    assert chosen[..., :4].sum((0, 1)).min() > 0, "every memory has tokens"

    def of(mixer, x):
        y = definition(mixer, x, chosen)
        return number(y), y

    return jax.jit(jax.grad(of, argnums=(0, 1), has_aux=True))(mixer, X)


@by_method
@by_form
def test_each_form_is_the_definition_in_value_and_every_gradient(name, form):
    expected, y = expected_of(name)
    gradients, got = gradient(made(name, execution=form), X)
    close(got, y)
    of_mixer, of_expected = (nnx.to_pure_dict(nnx.state(g[0])) for g in (gradients, expected))
    close(of_mixer, of_expected, 3e-5)
    close(gradients[1], expected[1], 3e-5)


@pytest.mark.slow
def test_products_with_a_memorys_own_tokens_change_nothing(monkeypatch):
    expected, y = expected_of("gated_deltanet")
    calls = []
    monkeypatch.setattr(mom_layout, "supports_segments", lambda *a: calls.append(a) or True)
    gradients, got = gradient(build(config_of(inner=dict(chunk_size=64))), X)
    assert calls
    close(got, y)
    of_mixer, of_expected = (nnx.to_pure_dict(nnx.state(g[0])) for g in (gradients, expected))
    close(of_mixer, of_expected, 3e-5)
    close(gradients[1], expected[1], 3e-5)


@by_method
def test_decoding_and_resuming_equal_one_call(name):
    mixer = made(name)
    whole, final, _ = call(mixer, X)
    fresh = mixer.init_state(BATCH, LENGTH, jnp.float32)
    y, state, _ = call(mixer, X[:, :6], state=fresh)  # packed, from a state
    outputs = [y]
    for t in range(6, LENGTH):
        y, state, _ = call(mixer, X[:, t : t + 1], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), whole)
    close(float_arrays(state), float_arrays(final))
    for tree in (state, final):
        assert jax.tree.map(lambda a: (a.shape, a.dtype), tree) == jax.tree.map(
            lambda a: (a.shape, a.dtype), fresh
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOME, ROW_CONV])
def test_gradients_through_decoding_equal_those_of_one_call(name):
    def decoded(mixer, x):
        state, outputs = mixer.init_state(BATCH, LENGTH, jnp.float32), []
        for t in range(LENGTH):
            y, state, _ = call(mixer, x[:, t : t + 1], state=state)
            outputs.append(y)
        return number(jnp.concatenate(outputs, axis=1))

    expected, _ = gradient(made(name), X)
    got = jax.jit(jax.grad(decoded, argnums=(0, 1)))(made(name), X)
    of_mixer, of_expected = (nnx.to_pure_dict(nnx.state(g[0])) for g in (got, expected))
    close(of_mixer, of_expected, 3e-5)
    close(got[1], expected[1], 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOME, ROW_CONV])
def test_masked_states_equal_packed_ones(name):
    """The masked form of a Mixture-of-Memories has the same final state as the packed form: after one call on
    all tokens, and after a call that continues from a state of the packed form.
    """
    _, final, _ = call(made(name), X)
    masked = made(name, execution="masked")
    close(float_arrays(call(masked, X)[1]), float_arrays(final))
    _, state, _ = call(made(name), X[:, :6])
    close(float_arrays(call(masked, X[:, 6:], state=state)[1]), float_arrays(final))


@by_method
@pytest.mark.parametrize("form", FORMS)
def test_causal_to_the_bit(name, form):
    """No bit of an output of a Mixture-of-Memories depends on later tokens, also if a changed token is
    routed to another memory, which shifts the positions of later memories' tokens.
    """
    mixer = made(name, execution=form)
    y, before = call(mixer, X)[0], choices(mixer, X)
    for t in (1, 4, 9):
        changed = X.at[:, t].multiply(-20.0)
        assert (choices(mixer, changed)[:, t] != before[:, t]).any()
        again = call(mixer, changed)[0]
        assert (again[:, :t] == y[:, :t]).all()
        assert (again[:, t] != y[:, t]).any()


@pytest.mark.parametrize("name", ["retnet", pytest.param("mlstm", marks=pytest.mark.slow)])
def test_causal_to_the_bit_over_many_chunks(name, monkeypatch):
    """No bit of an output of a Mixture-of-Memories depends on later tokens in rows of many chunks either,
    with the XLA form as it runs on an NVIDIA GPU; the number of chunks before those of a memory depends
    on later tokens.
    """
    monkeypatch.setattr(chunk_scans, "by_platform", lambda *x, cuda, default: cuda(*x))
    mixer, x = made(name), jax.random.normal(jax.random.key(1), (1, 160, WIDTH))
    y = call(mixer, x)[0]
    for t in (81, 121):
        again = call(mixer, x.at[:, t].multiply(-20.0))[0]
        assert (again[:, :t] == y[:, :t]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("form", FORMS)
def test_one_memory_without_a_shared_one_is_the_inner_mixer(name, form):
    mixer = made(name, execution=form, num_memories=1, top_k=1, shared_memory=False)
    y, state, _ = call(memory(mixer, 0), X)
    got, own, _ = call(mixer, X)
    close(got, y)
    # The arrays have one more axis, of one memory, except those that all memories share (a token shift's last
    # token).
    own, alone = float_arrays(own), float_arrays(state)
    close(own[: len(alone)], [s.reshape(o.shape) for s, o in zip(alone, own, strict=False)])


def test_only_chosen_memories_are_touched_in_decoding():
    mixer = made()
    _, state, _ = call(mixer, X)
    token = jax.random.normal(jax.random.key(5), (BATCH, 1, WIDTH))
    _, after, _ = call(mixer, token, state=state)
    chosen = choices(mixer, token)[:, 0]
    same = (after.memory.memories.memory == state.memory.memories.memory).all(axis=(2, 3, 4))
    assert (np.asarray(same) == ~chosen).all()
    for name, tail in after.tails.items():
        same = (tail.tail == state.tails[name].tail).all(axis=(2, 3))
        assert (np.asarray(same) == ~chosen).all(), name


@pytest.mark.slow
@by_form
def test_order_of_memories_does_not_matter(form):
    mixer = made(execution=form)
    order = np.array([2, 0, 3, 1, 4])

    def reorder(path, param):
        value = param[...]
        if path[0] == "router":
            return param.replace(value[:, order[:4]])
        own = path[0] == "inner" and path[1] in mixer.inner.memory_parts
        return param.replace(value[order]) if own else param

    state = nnx.map_state(reorder, nnx.state(mixer, nnx.Param))
    other = nnx.merge(nnx.graphdef(mixer), state)
    assert not (other.router.kernel[...] == mixer.router.kernel[...]).all()
    close(call(other, X)[0], call(mixer, X)[0])


@pytest.mark.slow
@by_form
def test_an_empty_memory_and_one_that_gets_every_token(form):
    """A Mixture-of-Memories equals its definition if all tokens are routed to memory 3 and none to memory
    0; channel 0 of the input alone determines the routing.
    """
    mixer = copied(made(execution=form))
    kernel = jnp.zeros((WIDTH, 4)).at[0].set(jnp.array([-9.0, 0.0, 0.1, 9.0]))
    mixer.router.kernel[...] = kernel + 0.05 * made().router.kernel[...] * jnp.array([0, 1, 1, 0])
    x = X.at[..., 0].set(1.0)
    chosen = choices(mixer, x)
    assert not chosen[..., 0].any() and chosen[..., 3].all()
    y, state, aux = call(mixer, x)
    close(y, oracle(mixer, x, chosen))
    assert (state.memory.memories.memory[:, 0] == 0).all()
    assert aux["mom/load"][0] == 0 and aux["mom/load"][3] == 0.5
    for leaf in jax.tree.leaves(gradient(mixer, x)[0]):
        assert jnp.isfinite(leaf).all()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_that_underflows_changes_nothing_else(form):
    """If the weight of a token's second memory is exactly 0 in bfloat16, the token is still written to that
    memory, and its read has weight 0.
    """
    mixer = copied(made(execution=form))
    mixer.router.kernel[...] = 1000 * mixer.router.kernel[...]
    exact, final, _ = call(mixer, X)
    close(exact, oracle(mixer, X, choices(mixer, X)))
    x = X.astype(jnp.bfloat16)
    chosen = choices(mixer, x)
    y, state, _ = call(mixer, x)
    written = (state.memory.memories.memory != 0).any(axis=(2, 3, 4))
    assert (np.asarray(written) == chosen.any(axis=1)).all()
    assert jnp.isfinite(y).all() and jnp.isfinite(exact).all()
    tail = state.tails["k"].tail
    assert ((tail != 0).any(axis=(2, 3)) == chosen.any(axis=1)).all()


@pytest.mark.slow
def test_single_projections_and_no_shared_memory():
    for fields in (dict(single_projections=True), dict(shared_memory=False, top_k=1)):
        for form in FORMS:
            mixer = made(execution=form, **fields)
            close(call(mixer, X)[0], oracle(mixer, X, choices(mixer, X)))
    sizes = {p: nnx.state(made(**f).inner)["k_proj"]["kernel"].get_value().shape for p, f in (
        ("own", {}), ("single", dict(single_projections=True)))}  # fmt: skip
    assert sizes == dict(own=(5, WIDTH, 8), single=(WIDTH, 8))


@pytest.mark.slow
def test_other_forms_of_the_inner_op():
    expected = call(made(), X)[0]
    for form in ("recurrent", "associative"):
        mixer = build(config_of(inner=dict(form=form)))
        y = call(mixer, X)[0]
        close(y, expected)
        again = call(mixer, X.at[:, 7].multiply(-20.0))[0]
        assert (again[:, :7] == y[:, :7]).all()


@jax.jit
def routed(mixer, x=X):
    """Return the statistics (such as the load) that the router of a Mixture-of-Memories reports for the input
    x.
    """
    return mixer._route(x, mixers.Context(1))[1]


def test_balance_loss_and_statistics():
    mixer = made()
    aux = routed(mixer)
    chosen = choices(mixer, X)[..., :4]
    logits = np.asarray(X, np.float64) @ np.asarray(mixer.router.kernel[...], np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    balance = 4 * (chosen.mean((0, 1)) * p.mean((0, 1))).sum()
    np.testing.assert_allclose(aux["mom/balance_loss"], 1e-3 / 2 * balance, rtol=1e-5)
    np.testing.assert_allclose(aux["mom/load"], chosen.mean((0, 1)) / 2, rtol=1e-6)
    np.testing.assert_allclose(aux["mom/entropy"], -(p * np.log(p)).sum(-1).mean(), rtol=1e-5)
    every = build(config_of(num_memories=2, top_k=2))
    np.testing.assert_allclose(routed(every)["mom/balance_loss"], 1e-3 / 2 * 2, rtol=1e-5)
    of_router = jax.jit(jax.grad(lambda m: routed(m)["mom/balance_loss"]))(mixer).router.kernel[...]
    assert jnp.abs(of_router).max() > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            dict(mixer=mixers.S4DConfig()),
            "mixer=.*cannot be one of several memories: its transition.*gla",
        ),
        (dict(balance="joint"), "balance='joint': accepted are 'layer', 'model'"),
        (
            dict(mixer=mixers.SoftmaxConfig()),
            "mixer=.*cannot be one of several memories: it stores.*gla",
        ),
        (dict(mixer=mixers.SLSTMConfig()), "memories: each token's gates read the output before"),
        (dict(mixer=None), "mixer=None cannot be"),
        (dict(num_memories=0), "num_memories=0"),
        (dict(row_conv_size=0), "row_conv_size=0: it must be greater than 0"),
        (dict(top_k=5), "top_k=5: accepted are 1 to num_memories=4"),
        (dict(top_k=1.5), "top_k=1.5: it must be an integer"),
        (dict(shared_memory=1), "shared_memory=1: it must be True or False"),
        (dict(balance_scale=-1.0), "balance_scale=-1.0: it must be at least 0"),
        (dict(execution="dense"), "execution='dense': accepted are 'packed', 'masked'"),
    ],
)
def test_wrong_fields_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(mixers.MoMConfig.for_width(64), **fields).validate(64)


def test_wrong_fields_of_the_inner_mixer_are_refused():
    with pytest.raises(ValueError, match="chunk_size=48.*powers of two"):
        config_of(inner=dict(chunk_size=48)).validate(WIDTH)


def test_state_of_another_mixer_is_refused():
    other = made(num_memories=1, top_k=1, shared_memory=False)
    state = jax.eval_shape(lambda: other.init_state(BATCH, 4, jnp.float32))
    with pytest.raises(ValueError, match="initial_state.memory has shape|state.*shape"):
        jax.eval_shape(lambda m, s: m(X[:, :2], state=s), made(), state)


@pytest.mark.slow
def test_states_that_nobody_asks_for_are_not_computed():
    """In the packed form, a Mixture-of-Memories computes its final states in a separate call of its op, which
    the compiler removes if nothing uses these states.
    """

    def flops(function):
        return jax.jit(function).lower(made(), X).compile().cost_analysis()["flops"]

    with_state = flops(lambda m, x: call(m, x)[:2])
    assert flops(lambda m, x: call(m, x)[0]) < 0.75 * with_state


def test_flops_count_each_routed_memory():
    config = config_of()
    inner = config.mixer.flops_per_token(WIDTH, 8)
    whole = config.flops_per_token(WIDTH, 8)
    assert inner < whole < 3 * inner + 2 * WIDTH * 4
    one = dataclasses.replace(config, num_memories=1, top_k=1, shared_memory=False)
    assert one.flops_per_token(WIDTH, 8) == inner + 2 * WIDTH
    row = dataclasses.replace(one, row_conv_size=4)
    assert row.flops_per_token(WIDTH, 8) == inner + 2 * WIDTH + 2 * 4 * WIDTH


def test_a_convolution_along_the_row_reaches_tokens_of_other_memories():
    """The memories of a token see the tokens before it in the row, whatever their memories, and without the convolution only
    those of their own; the routes are the same."""
    plain = made("gla", shared_memory=False, top_k=1)
    row = copied(made("gla", shared_memory=False, top_k=1, row_conv_size=2))
    chosen = choices(plain, X)
    np.testing.assert_array_equal(chosen, choices(row, X))
    apart = [(b, t) for b in range(BATCH) for t in range(1, LENGTH) if (chosen[b, t] != chosen[b, t - 1]).any()]  # fmt: skip
    assert apart
    b, t = apart[0]
    direction = jnp.cross(jnp.ones(3), jnp.arange(3.0))  # any; it leaves the token's route as it is
    other = X.at[b, t - 1, :3].add(1e-3 * direction)
    np.testing.assert_array_equal(chosen, choices(plain, other))
    for mixer, reached in ((plain, False), (row, True)):
        first, second = call(mixer, X)[0], call(mixer, other)[0]
        assert bool((first[b, t] != second[b, t]).any()) == reached


@pytest.mark.parametrize("name", INNER)
def test_token_parts_are_the_layers_that_act_on_tokens_as_they_come(name, monkeypatch):
    """`Mixer.token_parts` names exactly the projections that a mixer applies to the unchanged input x of the
    layer, rather than to an array computed from x.
    """
    x, seen, expected = X.reshape(-1, X.shape[1], X.shape[2]), set(), set()
    plain = Dense.__call__

    def traced():
        config = config_of(name, single_projections=True)
        mixer = mixers.build(config, WIDTH, rngs=nnx.Rngs(0), layer=1, num_layers=2).inner

        def recorded(self, y, *, dtype=None):
            seen.update(n for n, v in vars(mixer).items() if v is self and y is x)
            return plain(self, y, dtype=dtype)

        monkeypatch.setattr(Dense, "__call__", recorded)
        expected.update(mixer.token_parts)
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        context = mixers.Context(1, shared_of(mixer, x), positions=positions)
        return mixer.through_memory(x, context, None)[0]

    jax.eval_shape(traced)  # computes nothing
    assert seen == expected


def test_rows_that_gpus_share_run_masked(monkeypatch):
    """Fused kernels have one state per row, and a packed row that devices share needs one per memory."""
    monkeypatch.setattr("lsm_jax.mixers.mom.sequence_shards", lambda _: 2)
    x, context = X[:, :10], mixers.Context()
    for platform, inner, packs in (("gpu", {}, False), ("cpu", {}, True), ("gpu", dict(implementation="xla"), True)):  # fmt: skip
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert build(config_of(inner=inner))._packs(x, context, None) is packs
