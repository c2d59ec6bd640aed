"""Tests of FoX's mixer: its attention is compared with numpy, with each optional part (such as the output
gate) on and off; also its forget gates, and the errors of its config.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax import mixers
from lsm_jax.mixers import METHODS, FoXConfig
from lsm_jax.mixers.lightning import alibi_slopes
from tests.mixers.conftest import WIDTH, Small
from tests.mixers.published_fox import attention, shifted, sigmoid
from tests.mixers.test_mixers import close

OFF = dict(qk_norm=False, key_shift=False, value_shift=False, output_norm=False, output_gate=False)


def published(small: Small) -> tuple[dict, dict]:
    """Return the parameters and the config of a small FoX mixer with the names of the published code."""
    mixer, c = small.mixer, small.config
    names = {
        "q_proj.weight": mixer.q_proj, "o_proj.weight": mixer.o_proj, "ogate_proj.weight": mixer.g_proj,
        f"k_proj{'.linear' * c.key_shift}.weight": mixer.k_proj,
        f"v_proj{'.linear' * c.value_shift}.weight": mixer.v_proj,
        "k_proj.shift_proj.weight": mixer.k_shift, "v_proj.shift_proj.weight": mixer.v_shift,
        "fgate_proj.weight": mixer.f_proj,
    }  # fmt: skip
    weights = {n: d.kernel[...].T for n, d in names.items() if d is not None}
    norms = {"q_norm": mixer.q_norm, "k_norm": mixer.k_norm, "output_norm": mixer.norm}
    weights |= {f"{n}.weight": m.scale[...].ravel() for n, m in norms.items() if m is not None}
    if c.forget_gate == "data_dependent":
        weights["fgate_proj.bias"] = mixer.f_proj.bias[...]
    elif c.forget_gate != "none":
        gate = np.exp(np.asarray(mixer.log_forget(small.x), np.float64))
        weights["fgate_bias"] = np.log(gate / (1 - gate))
    config = dict(
        num_heads=c.num_heads, num_kv_heads=c.num_kv_heads, qk_norm=c.qk_norm, qk_norm_eps=c.norm_eps,
        qk_norm_share_param_across_head=not c.qk_norm_per_head, use_rope=c.rope_base is not None, rope_base=c.rope_base,
        use_k_shift=c.key_shift, use_v_shift=c.value_shift, use_output_norm=c.output_norm, norm_eps=c.output_norm_eps,
        use_output_gate=c.output_gate, fgate_type={"data_dependent": "full", "none": "none"}.get(c.forget_gate, "fixed"),
    )  # fmt: skip
    return {n: np.asarray(w, np.float64) for n, w in weights.items()}, config


CASES = {
    "pro": dict(),
    "pro-grouped-per-head": dict(num_heads=4, num_kv_heads=2, qk_norm_per_head=True),
    "transformer-pro": dict(forget_gate="none", rope_base=500000.0),
    "llama": OFF,
    "transformer-llama": dict(OFF, forget_gate="none", rope_base=500000.0),
    "rotated": dict(rope_base=500000.0, output_gate=False),
    "alibi": dict(OFF, forget_gate="alibi", output_norm=True),
    "fixed": dict(forget_gate="fixed", decay_time_min=2.0, decay_time_max=256.0, key_shift=False),
    "learned": dict(forget_gate="data_independent", value_shift=False, output_norm=False),
}
FAST = ("pro-grouped-per-head", "transformer-llama", "alibi")
MARKED = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow, id=n) for n in CASES]


@pytest.mark.parametrize("name", MARKED)
def test_is_the_published_layer(name):
    """FoX's mixer equals the published layer in numpy; the norms have a large epsilon, since a norm with a
    small one would hide a wrong factor.
    """
    fields = dict(norm_eps=1.0, output_norm_eps=1.0) | CASES[name]
    small = Small(METHODS["fox"], stirred=True, **fields)
    close(small()[0][0], attention(*published(small), np.asarray(small.x[0], np.float64)))


def test_shift_is_the_published_one():
    """FoX's token shift of keys, with the keys and the previous token's weights (`share`) of this test, which
    are sines, has the values of a stored float64 reference.
    """
    keys = np.sin(1.3 * np.arange(1, 21) + 0.2).reshape(1, 5, 4)
    share = sigmoid(np.sin(0.8 * np.arange(1, 6) + 0.5))
    expected = np.array([[0.275475, 0.092512, -0.225981, -0.213412], [0.821675, 0.52912, -0.538598, -0.817268]])  # fmt: skip
    np.testing.assert_allclose(shifted(keys[0][:, None], share[:, None])[:2, 0], expected, atol=1e-6)  # fmt: skip
    config = FoXConfig(num_heads=1, **OFF | dict(key_shift=True))
    mixer = mixers.build(config, 4, rngs=nnx.Rngs(0))
    mixer.k_proj.kernel[...] = jnp.eye(4)
    # For each token, the gate's kernel is such that the token has the given share.
    for t, a in enumerate(share[:2]):
        x = jnp.asarray(keys[:, : t + 1], jnp.float32)
        logit = np.log(a / (1 - a))
        mixer.k_shift.kernel[...] = logit * x[0, t][:, None] / jnp.sum(x[0, t] ** 2)
        written, _ = mixer.write(x, mixers.Context())
        np.testing.assert_allclose(written["k"][0, t, 0], expected[t], atol=1e-6)


def initial_gates(**fields):
    mixer = mixers.build(FoXConfig(num_heads=12, **fields), 48, rngs=nnx.Rngs(0))
    return mixer, mixer.log_forget(jnp.zeros((1, 1, 48)))


def test_initial_gates():
    times = dict(decay_time_min=2.0, decay_time_max=256.0)
    mixer, gates = initial_gates(forget_gate="data_independent", **times)
    bias = [0.433, 0.969, 1.470, 1.949, 2.414, 2.871, 3.322, 3.769, 4.215, 4.658, 5.101, 5.543]
    np.testing.assert_allclose(mixer.f_bias[...], bias, atol=5e-4)
    np.testing.assert_allclose(-1 / gates, np.geomspace(2, 256, 12), rtol=1e-4)
    fixed, same = initial_gates(forget_gate="fixed", **times)
    np.testing.assert_allclose(same, gates, rtol=1e-4)
    assert not [p for p in nnx.to_flat_state(nnx.state(fixed, nnx.Param)) if "f_" in str(p[0])]
    for kind in ("data_independent", "data_dependent"):
        np.testing.assert_allclose(np.exp(initial_gates(forget_gate=kind)[1]), 0.5, rtol=1e-6)
    assert initial_gates(forget_gate="none")[1] is None
    np.testing.assert_allclose(initial_gates(forget_gate="alibi")[1], -np.array(alibi_slopes(12)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(forget_gate="full"), "FoXConfig.forget_gate='full': accepted are 'data_dependent'"),
        (dict(forget_gate="fixed"), "accepted with forget_gate='fixed' are two numbers"),
        (dict(decay_time_min=2.0), "decay_time_max=None: accepted are two numbers, or None"),
        (
            dict(decay_time_min=2.0, decay_time_max=4.0),
            "forget_gate='data_dependent' does not use decay times",
        ),
        (
            dict(forget_gate="fixed", decay_time_min=4.0, decay_time_max=2.0),
            "accepted are 0 < decay_time_min <= decay_time_max",
        ),
        (dict(output_norm_eps=0.0), "FoXConfig.output_norm_eps=0.0: it must be greater than 0"),
        (dict(head_dim=3, rope_base=1e4), "FoXConfig: heads of 3 channels; rotation needs"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(FoXConfig.for_width(WIDTH), **fields).validate(WIDTH)


def test_every_head_shares_its_norm_or_has_its_own():
    for per_head, shape in ((False, (8,)), (True, (4, 8))):
        config = FoXConfig(num_heads=4, qk_norm_per_head=per_head)
        mixer = nnx.eval_shape(lambda c=config: mixers.build(c, WIDTH, rngs=nnx.Rngs(0)))
        assert mixer.q_norm.scale.get_value().shape == shape
    assert mixer.norm.scale.get_value().shape == (4, 8)


@pytest.mark.parametrize(
    "name",
    [
        "pro-grouped-per-head",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("fixed", "rotated")),
    ],
)
def test_variants_decode_as_they_prefill(name):
    small = Small(METHODS["fox"], **CASES[name] | dict(window=3))
    whole, _ = small()
    state, outputs = small.state(), []
    for t in range(10):
        y, state = small(small.x[:, t : t + 1], state=state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1), whole)
    assert state.memory.log_forget.high.shape == (2, 3, small.config.num_heads)
    assert jax.tree.leaves(state.tails)
