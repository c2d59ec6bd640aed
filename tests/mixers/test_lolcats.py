"""LoLCATs' attention is compared with numpy; and the first stage of its training, attention transfer, is
tested.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax.mixers import METHODS, OpConfig, build
from tests.mixers.conftest import LENGTH, Small
from tests.mixers.test_liger import rotated, softmax
from tests.mixers.test_linear_memories import wide
from tests.mixers.test_mixers import close
from tests.mixers.test_variants import dense

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 8, 3


@functools.cache
def small(**fields) -> Small:
    fields = dict(num_heads=HEADS, num_kv_heads=KV_HEADS, window=WINDOW) | fields
    return Small(METHODS["lolcats"], stirred=True, **fields)


def reference(mixer, x):
    """Return the output of LoLCATs' attention for x and that of softmax attention, both [T, H, V], computed
    in numpy for each pair of query and key.
    """
    q, k, v = (
        dense(getattr(mixer, f"{n}_proj"), x).reshape(LENGTH, h, DIM)
        for n, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    outputs, teacher = np.zeros(q.shape), np.zeros(q.shape)

    def features(y, kernel):
        y = y @ kernel
        return np.concatenate([softmax(y), softmax(-y)])

    for h in range(HEADS):
        g = h // (HEADS // KV_HEADS)
        queries, keys = rotated(q[:, h]), rotated(k[:, g])
        maps = wide(mixer.q_map.kernel)[h], wide(mixer.k_map.kernel)[g]
        factor = 1 / (1 + np.exp(-wide(mixer.window_factor)[h]))
        for t in range(LENGTH):
            scores = keys[: t + 1] @ queries[t] / np.sqrt(DIM)
            teacher[t, h] = softmax(scores) @ v[: t + 1, g]
            first = max(0, t + 1 - WINDOW)
            weights = np.array([
                factor * np.exp(scores[j] - scores[first:].max())
                if j >= first
                else features(queries[t], maps[0]) @ features(keys[j], maps[1])
                for j in range(t + 1)
            ])  # fmt: skip
            outputs[t, h] = weights @ v[: t + 1, g] / weights.sum()
    return outputs, teacher


def test_a_layer_and_its_first_stage_equal_numpy():
    mixer, x = small().mixer, np.asarray(small().x[0], np.float64)
    own, teacher = reference(mixer, x)
    close(small()()[0][0], dense(mixer.o_proj, own.reshape(LENGTH, -1)))

    stage = small(transfer_weight=500.0)
    y, _, aux = jax.jit(lambda mixer, x: mixer(x))(stage.mixer, stage.x[:1])
    close(y[0], dense(mixer.o_proj, teacher.reshape(LENGTH, -1)))
    wanted = 500 * np.square(own - teacher).mean()
    np.testing.assert_allclose(aux["attention_transfer_loss"], wanted, rtol=1e-4)


def test_no_array_has_more_than_a_window_of_keys_a_token():
    config = METHODS["lolcats"].config(num_heads=1, head_dim=4, window=8, feature_dim=4, op=OpConfig(chunk_size=8))  # fmt: skip
    mixer, length = build(config, 4, rngs=nnx.Rngs(0)), 256

    def loss(mixer, x):
        return jnp.sum(mixer(x)[0])

    lowered = jax.jit(jax.grad(loss)).lower(mixer, jax.ShapeDtypeStruct((1, length, 4), jnp.float32))  # fmt: skip
    sizes = re.findall(r"tensor<([\dx]+)x[fi]\d+>", lowered.as_text())
    assert max(math.prod(map(int, size.split("x"))) for size in sizes) <= length * 2 * 8 * 4


def test_gradients_are_those_of_the_function():
    # The window's largest score scales only one of the two sums, so that it has a gradient.
    with jax.enable_x64(True):
        mixer, x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (small().mixer, small().x))
        loss = jax.jit(lambda mixer: jnp.sum(jnp.sin(mixer(x)[0])))
        towards = jax.tree.map(
            lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), mixer
        )
        ahead, behind = (
            loss(jax.tree.map(jnp.add, mixer, jax.tree.map((step * 1e-5).__mul__, towards)))
            for step in (jnp.float64(1), jnp.float64(-1))
        )
        found = jax.tree.map(lambda a, b: jnp.sum(a * b), jax.grad(loss)(mixer), towards)
        np.testing.assert_allclose(sum(jax.tree.leaves(found)), (ahead - behind) / 2e-5, rtol=1e-6)


@pytest.mark.slow
def test_the_first_stage_reaches_maps_and_factors_alone():
    case = small(transfer_weight=1.0)
    loss = lambda mixer, x: mixer(x)[2]["attention_transfer_loss"]  # noqa: E731
    found = jax.jit(jax.grad(loss))(case.mixer, case.x)
    for name in ("q_map", "k_map"):
        assert (getattr(found, name).kernel[...] != 0).any()
    assert (found.window_factor[...] != 0).all()
    assert not (found.o_proj.kernel[...] != 0).any()


@pytest.mark.slow
def test_prefill_and_decoding_equal_one_call_under_left_padding():
    case = small()
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [1] * 7 + [2] * 3], jnp.int32)
    whole, final = case(segment_ids=ids, state=case.state())
    y, state = case(case.x[:, :4], segment_ids=ids[:, :4], state=case.state())
    outputs = [y]
    for t in range(4, LENGTH):
        y, state = case(case.x[:, t : t + 1], segment_ids=ids[:, t : t + 1], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1)[ids != 0], whole[ids != 0])
    close(state.memory, final.memory)


def test_fields_that_do_not_fit_are_told():
    config = METHODS["lolcats"].config
    for message, fields in {
        "window=None: accepted are integers from 1": dict(window=None),
        "transfer_weight=-1.0: it must be at least 0": dict(transfer_weight=-1.0),
        "feature_dim=0": dict(feature_dim=0),
    }.items():
        with pytest.raises(ValueError, match=message):
            config(num_heads=4, **fields).validate(32)
    with pytest.raises(
        ValueError, match="a layer with a transfer loss has no state; accepted here is 0"
    ):
        Small(METHODS["lolcats"], transfer_weight=1.0).state()
