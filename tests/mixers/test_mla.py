"""Multi-head latent attention against the released layers of transformers, and its two forms against each other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers, ops
from lsm_jax.mixers import METHODS, LoRAConfig, MLAConfig, add_adapters
from lsm_jax.mixers.layers import rotate
from tests.mixers import goldens
from tests.mixers.conftest import BATCH, LENGTH, WIDTH, Small
from tests.mixers.test_mixers import close

RELEASED = {
    "layer_kimi_mla": dict(rope_base=None),
    "layer_ling3_mla": dict(output_gate=True),
    "layer_deepseek_mla": dict(query_rank=5),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "layer_deepseek_mla" else pytest.mark.slow) for n in RELEASED],
)  # fmt: skip
def test_released_layers(name):
    fields, golden = dict(RELEASED[name]), goldens.load(name)
    if "rope_base" in golden:
        assert int(golden["rotated_channels"]) == 4
        fields["rope_base"] = float(golden["rope_base"])
    config = MLAConfig(num_heads=2, key_dim=8, rope_dim=4, value_dim=6, latent_dim=6, **fields)

    def run(g):
        down = jnp.split(g["kv_a_proj_with_mqa.weight"].T, [6], axis=1)
        up = jnp.split(g["kv_b_proj.weight"].T.reshape(6, 2, 14), [8], axis=2)
        kernels = dict(
            latent_proj=down[0], rope_proj=down[1], k_up=up[0].reshape(6, -1), v_up=up[1].reshape(6, -1),
        )  # fmt: skip
        same = dict(q_proj="q_proj", q_down="q_a_proj", q_up="q_b_proj", g_proj="g_proj", o_proj="o_proj")  # fmt: skip
        kernels |= {n: g[f"{o}.weight"].T for n, o in same.items() if f"{o}.weight" in g}
        parameters = {f"{n}/kernel": kernel for n, kernel in kernels.items()}
        parameters["latent_norm/scale"] = g["kv_a_layernorm.weight"]
        if "q_a_layernorm.weight" in g:
            parameters["q_norm/scale"] = g["q_a_layernorm.weight"]
        return dict(y=goldens.run_layer(config, 16, parameters, g["x"]))

    goldens.check(name, run, dtypes=["float32"])


@pytest.mark.parametrize("pieces", [(2, 8), pytest.param((8, 1, 1), marks=pytest.mark.slow)])
def test_pieces_of_both_forms_equal_one_call_with_adapters(pieces):
    """A few tokens are computed in the absorbed form, and eight tokens with a state in the expanded one."""
    small = Small(
        METHODS["mla"], key_dim=4, value_dim=4, latent_dim=24, rope_dim=2, output_gate=True
    )
    config = small.config
    assert not config.expands(3) and config.expands(8)
    add_adapters(small.mixer, LoRAConfig(targets=("all",), rank=2), rngs=nnx.Rngs(3))
    for layer in (small.mixer.k_up, small.mixer.v_up, small.mixer.o_proj):
        layer.lora.b[...] = jax.random.normal(jax.random.key(7), layer.lora.b.shape)
    ids = jnp.tile(jnp.array([1, 1, 1, 1, 2, 2, 2, 2, 2, 2], jnp.int32), (BATCH, 1))
    whole = small(segment_ids=ids)[0]
    state, outputs, start = small.state(), [], 0
    for size in pieces:
        part = slice(start, start + size)
        y, state = small(small.x[:, part], segment_ids=ids[:, part], state=state)
        outputs.append(y)
        start += size
    close(jnp.concatenate(outputs, axis=1), whole)
    assert state.memory.keys.shape == (BATCH, LENGTH, 1, 2)
    assert state.memory.values.shape == (BATCH, LENGTH, 1, 24)


def test_neighbouring_pairs_are_rotated():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    positions = jnp.arange(5)[None]
    order = np.r_[0:8:2, 1:8:2]
    apart = rotate(x[..., order], positions, base=100.0)
    y = rotate(x, positions, base=100.0, interleaved=True)
    np.testing.assert_array_equal(y[..., order], apart)
    assert np.abs(y[:, 1:] - rotate(x, positions, base=100.0)[:, 1:]).max() > 0.1


@pytest.mark.parametrize("with_state", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_store_tokens_returns_the_state_of_attention(with_state):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 6, 2, n)) for i, n in enumerate((4, 4, 3)))
    ids = jnp.array([[1, 1, 2, 2, 0, 2], [0, 1, 1, 1, 1, 1]], jnp.int32)
    state = ops.attention_state(2, 4, 2, 4, 3)
    mask = jnp.ones((2, 6)).at[1, 3].set(0)
    initial = state if with_state else None
    rows = dict(segment_ids=ids, update_mask=mask) if with_state else {}
    _, expected = ops.attention(q, k, v, initial_state=initial, **rows)
    stored = ops.store_tokens(k, v, initial_state=initial, **rows)
    jax.tree.map(np.testing.assert_array_equal, stored, expected)
    with pytest.raises(ValueError, match="store_tokens: v has shape"):
        ops.store_tokens(k, v[:, :3])


def test_the_published_proportions():
    config = MLAConfig.for_width(2048)  # DeepSeek-V2-Lite
    assert config == MLAConfig(num_heads=16, key_dim=128, rope_dim=64, value_dim=128, latent_dim=512)  # fmt: skip
    assert not config.expands(170) and config.expands(171)
    memory = jax.eval_shape(lambda: mixers.build(config, 2048).init_memory(1, 1000, jnp.bfloat16))
    assert sum(leaf.size for leaf in (memory.keys, memory.values)) == 1000 * 576


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(rope_dim=3), "MLAConfig.rope_dim=3: rotation needs an even number"),
        (dict(latent_dim=0), "MLAConfig.latent_dim=0"),
        (dict(query_rank=-1), "MLAConfig.query_rank=-1"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(MLAConfig.for_width(WIDTH), **fields).validate(WIDTH)
