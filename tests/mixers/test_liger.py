"""Liger's attention is compared with numpy for every gate and with stored results, and used like softmax
attention (decoding, padding, documents).
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
from lsm_jax.mixers import METHODS
from lsm_jax.mixers.liger import GATES, pool
from tests.mixers.conftest import LENGTH, Small
from tests.mixers.test_linear_memories import sigmoid, wide
from tests.mixers.test_mixers import close
from tests.mixers.test_variants import dense

HEADS, KV_HEADS, DIM, WINDOW, SLOTS = 4, 2, 8, 3, 4


@functools.cache
def small(gate: str, **fields) -> Small:
    fields = dict(gate=gate, window=WINDOW, qk_norm=True, qkv_bias=True) | fields
    if gate == "gsa":
        fields = dict(num_slots=SLOTS) | fields
    return Small(METHODS["liger"], stirred=True, **fields)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def every_gate(*fast):
    rows = [pytest.param(g, marks=() if g in fast else pytest.mark.slow) for g in GATES]
    return pytest.mark.parametrize("gate", rows)


def recurrence(gate, q, k, z, v, num_slots=SLOTS, lower_bound=0.0):
    """Compute one head of Liger's gated memory by the formulas of the paper's table, from q, k [T, K] after
    their norms and without rotation, z [T, K], the keys before the norm, and v [T, V].
    """
    memory, slots = np.zeros((q.shape[1], v.shape[1])), np.zeros((q.shape[1], num_slots))
    values, o = np.zeros((num_slots, v.shape[1])), []
    for t in range(len(q)):
        if gate == "gsa":
            a = sigmoid(z[t].reshape(num_slots, -1).mean(-1)) ** (1 / 16)
            slots = slots * a + np.outer(k[t], 1 - a)
            values = a[:, None] * values + np.outer(1 - a, v[t])
            o.append(softmax(q[t] @ slots) @ values)
            continue
        a, key = np.full(len(z[t]), sigmoid(z[t].mean())), softmax(k[t])
        if gate == "gla":
            a = sigmoid(z[t]) ** (1 / 16)
        elif gate == "hgrn2":
            a = lower_bound + (1 - lower_bound) * sigmoid(z[t])
            key = 1 - a
        elif gate == "mamba2":
            a = np.full(len(z[t]), np.exp(-np.log1p(np.exp(z[t].mean()))))
        elif gate == "rwkv6":
            a = np.exp(-np.exp(z[t]))
        elif gate == "none":
            a = np.ones(len(z[t]))
        memory = a[:, None] * memory + np.outer(key, v[t])
        o.append(softmax(q[t]) @ memory)
    return np.array(o)


def rotated(y, base=10000.0):
    half = y.shape[-1] // 2
    turn = np.arange(len(y))[:, None] * base ** (-np.arange(half) / half)
    z = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * turn)
    return np.concatenate([z.real, z.imag], axis=-1)


def windowed(q, k, v, window=WINDOW):
    o = []
    for t in range(len(q)):
        first = max(0, t + 1 - window)
        weights = softmax(k[first : t + 1] @ q[t] / np.sqrt(q.shape[1]))
        o.append(weights @ v[first : t + 1])
    return np.array(o)


def layer_in_numpy(case, weights=(0.5, 0.5), **fields):
    """Return the output of a small Liger layer for the first row of its input, [T, D], computed in numpy by
    the paper's formulas.
    """
    mixer, x, gate = case.mixer, np.asarray(case.x[0], np.float64), case.config.gate

    def projected(name, heads):
        part = getattr(mixer, f"{name}_proj")
        return (dense(part, x) + wide(part.bias)).reshape(LENGTH, heads, DIM)

    def normed(y, norm):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * wide(norm.scale)

    q, z, v = projected("q", HEADS), projected("k", KV_HEADS), projected("v", KV_HEADS)
    q, k = normed(q, mixer.q_norm), normed(z, mixer.k_norm)
    heads = []
    for h in range(HEADS):
        g = h // (HEADS // KV_HEADS)
        memory = recurrence(gate, q[:, h], k[:, g], z[:, g], v[:, g], **fields)
        window = windowed(rotated(q[:, h]), rotated(k[:, g]), v[:, g])
        heads.append(weights[0] * memory + weights[1] * window)
    return dense(mixer.o_proj, np.concatenate(heads, axis=-1))


@every_gate("gla", "gsa", "none")
def test_a_layer_equals_numpy(gate):
    close(small(gate)()[0][0], layer_in_numpy(small(gate)))


def test_hgrn2s_lower_bound_is_that_of_every_layer_but_the_first():
    case = small("hgrn2", gate_lower_bound=0.3)
    close(case()[0][0], layer_in_numpy(case, lower_bound=0.3))  # the second layer of two
    first, unbounded = (
        jax.jit(lambda mixer, x: mixer(x, layer=0)[0])(c.mixer, c.x) for c in (case, small("hgrn2"))
    )
    np.testing.assert_array_equal(first, unbounded)


def test_learned_weights_start_at_the_fields_and_have_gradients():
    case = small("gla", memory_weight=0.25, window_weight=0.75, learned_weights=True)
    fresh = mixers.build(case.config, case.x.shape[-1], rngs=nnx.Rngs(0))
    assert fresh.branch_weights[...].tolist() == [0.25, 0.75]
    case.mixer.branch_weights[...] = jnp.array([-0.5, 2.0])
    close(case()[0][0], layer_in_numpy(case, weights=(-0.5, 2.0)))
    (gradients, _), _ = case.gradient(case.mixer, case.x)
    assert (gradients.branch_weights[...] != 0).all()


@every_gate("gla")
def test_prefill_and_decoding_equal_one_call_under_left_padding(gate):
    """A Liger layer computes the same in one call and by prefill and decoding. One row has three tokens of
    padding on the left, the other none; both have two documents.
    """
    case = small(gate)
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [1] * 7 + [2] * 3], jnp.int32)
    whole, final = case(segment_ids=ids, state=case.state())
    y, state = case(case.x[:, :4], segment_ids=ids[:, :4], state=case.state())
    outputs = [y]
    for t in range(4, LENGTH):
        y, state = case(case.x[:, t : t + 1], segment_ids=ids[:, t : t + 1], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1)[ids != 0], whole[ids != 0])
    close(state.memory, final.memory)
    alone, _ = case(case.x[:, 3:6])
    close(whole[0, 3:6], alone[0])


@every_gate("mamba2")
def test_a_state_of_key_heads_is_one_of_repeated_heads(gate):
    """A Liger layer with fewer key heads than query heads computes the same outputs as one whose key and
    value heads are repeated for each query head, and its memories are the same, but stored once for each
    key head.
    """
    case = small(gate)
    wider = Small(METHODS["liger"], **dataclasses.asdict(case.config) | dict(num_kv_heads=HEADS))
    for name in ("q_proj", "o_proj", "q_norm", "k_norm"):
        setattr(wider.mixer, name, getattr(case.mixer, name))
    for name in ("k_proj", "v_proj"):
        narrow, part = getattr(case.mixer, name), getattr(wider.mixer, name)
        for field in ("kernel", "bias"):
            value = getattr(narrow, field)[...]
            heads = value.reshape(*value.shape[:-1], KV_HEADS, DIM)
            repeated = jnp.repeat(heads, HEADS // KV_HEADS, axis=-2)
            getattr(part, field)[...] = repeated.reshape(*value.shape[:-1], -1)
    (y, state), (expected, grouped) = wider(), case()
    close(y, expected)
    repeated = jax.tree.map(
        lambda s: jnp.repeat(s, 2, axis=1) if s.ndim > 1 else s, grouped.memory.memory
    )
    close(state.memory.memory, repeated)


def test_parameters_are_softmax_attentions():
    case = small("gla")
    base = mixers.SoftmaxConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, qk_norm=True, qkv_bias=True)
    theirs = mixers.build(base, case.x.shape[-1], rngs=nnx.Rngs(0))
    shapes = [
        {p: v[...].shape for p, v in nnx.to_flat_state(nnx.state(m, nnx.Param))}
        for m in (case.mixer, theirs)
    ]
    assert shapes[0] == shapes[1]


GOLDENS = {
    "gla": [0.031143, -0.072562, -0.121353, -0.078307],
    "hgrn2": [0.014479, -0.27783, -0.359882, -0.169583],
    "gsa": [0.012421, -0.002717, -0.015799, -0.016925],
}


@pytest.mark.parametrize(
    "gate", [pytest.param(g, marks=() if g == "gla" else pytest.mark.slow) for g in GOLDENS]
)
def test_goldens(gate):
    """Outputs of a Liger layer whose queries, keys and values are sines equal stored float64 values, which
    were computed by the Liger paper's formulas without this library.
    """

    def sines(a, b):
        return jnp.asarray(np.sin(a * np.arange(1, 21) + b).reshape(1, 5, 4), jnp.float32)

    config = mixers.LigerConfig(num_heads=1, gate=gate, num_slots=2 if gate == "gsa" else None)
    config.window, config.rope_base = 2, None
    config.memory_weight, config.window_weight = 1.0, 0.0
    mixer = mixers.build(config, 4, rngs=nnx.Rngs(0))
    projections = dict(q_proj=sines(0.7, 0.1), k_proj=sines(1.3, 0.2), v_proj=sines(0.9, 0.3))
    for name, value in projections.items():
        mixer.__dict__[name] = lambda x, value=value: value

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def output(memory, window):
        mixer.config.memory_weight, mixer.config.window_weight = memory, window
        return mixer.through_memory(jnp.zeros((1, 5, 4)), mixers.Context(), None)[0][0, :, 0]

    np.testing.assert_allclose(output(1.0, 0.0)[-1], GOLDENS[gate], atol=2e-6)
    if gate == "gla":
        mixed = [0.125052, 0.226477, 0.156508, -0.031903]
        np.testing.assert_allclose(output(0.5, 0.5)[1], mixed, atol=2e-6)


def test_pooling_takes_overlapping_bins_where_they_do_not_divide():
    x = jnp.arange(5.0)
    np.testing.assert_allclose(pool(x, 2), [1, 3])  # channels 0 to 2 and 2 to 4
    np.testing.assert_allclose(pool(x, 1), [2])
    np.testing.assert_allclose(pool(jnp.arange(6.0), 3), [0.5, 2.5, 4.5])


@pytest.mark.slow
def test_wild_keys_stay_finite():
    """With keys of ±30 in Liger's gate, output and gradients are finite."""
    for gate in ("hgrn2", "rwkv6"):
        case = small(gate, qkv_bias=False, qk_norm=False)
        gradients, _ = case.gradient(case.mixer, case.x * 60)
        assert jax.tree.all(jax.tree.map(lambda g: bool(jnp.isfinite(g).all()), gradients))


ABLATIONS = {
    "random gate": dict(gate_projection=True),
    "t2r": dict(feature_map="t2r"),
    "hedgehog": dict(feature_map="hedgehog"),
    "no window": dict(window_weight=0.0),
    "no memory": dict(memory_weight=0.0, window_weight=1.0),
    "no gate": dict(gate="none"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", ABLATIONS.values(), ids=ABLATIONS)
def test_ablations_decode_as_they_train_and_use_their_parameters(fields):
    case = small(**dict(gate="gla") | fields)
    whole, final = case(state=case.state())
    y, state = case(case.x[:, :4], state=case.state())
    outputs = [y]
    for t in range(4, LENGTH):
        y, state = case(case.x[:, t : t + 1], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), whole)
    close(state, final)
    (gradients, _), _ = case.gradient(case.mixer, case.x)
    for path, leaf in nnx.to_flat_state(nnx.state(gradients)):
        assert (leaf[...] != 0).any(), path


@pytest.mark.slow
def test_a_window_alone_is_softmax_attention():
    case = small("gla", memory_weight=0.0, window_weight=1.0)
    softmax_config = mixers.SoftmaxConfig(
        num_heads=HEADS, num_kv_heads=KV_HEADS, window=WINDOW, qk_norm=True, qkv_bias=True
    )
    plain = mixers.build(softmax_config, case.x.shape[-1], rngs=nnx.Rngs(0))
    nnx.update(plain, nnx.state(case.mixer))
    close(case()[0], plain(case.x)[0])


def test_fields_that_do_not_fit_are_told():
    for message, fields in {
        "gate='mumba': accepted are 'gla', 'mamba2'": dict(gate="mumba"),
        "gate='comba': its memory is delta_memory's.*accepted are 'gla'": dict(gate="comba"),
        "gate='lightnet': its decay is none that Liger pools": dict(gate="lightnet"),
        "num_slots=4: only gate='gsa' has slots": dict(num_slots=4),
        "gates are pooled from a key's 8 channels; accepted are None and 1 to that number": dict(
            gate="gsa", num_slots=9
        ),
        "gate='hgrn2' maps no keys; accepted is 'softmax'": dict(gate="hgrn2", feature_map="t2r"),
        "at least one must not be 0": dict(memory_weight=0.0, window_weight=0.0),
        "gate_lower_bound=1.0: accepted are numbers from 0": dict(
            gate="hgrn2", gate_lower_bound=1.0
        ),
        "only gate='hgrn2' has a lower bound; accepted is 0": dict(gate_lower_bound=0.5),
        "gate='none' has no gate; accepted are": dict(gate="none", gate_projection=True),
        "gate_temperature=4.0: gate='none' has no gate": dict(gate="none", gate_temperature=4.0),
        "learned_weights=True: memory_weight=0.0, window_weight=1.0; accepted": dict(
            learned_weights=True, memory_weight=0.0, window_weight=1.0
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(METHODS["liger"].config.for_width(32), **fields).validate(32)
