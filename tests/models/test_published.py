"""Tests of the papers' baseline models, and of the options of `configs/linear_moe.py` and `configs/mom.py` that reproduce the
published code (such as `as_published`).
"""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import fox, liger, linear_moe, lm, mom, mqar
from lsm_jax import mixers, models
from lsm_jax.feedforward import MoEConfig
from lsm_jax.models import Decoder, LayerConfig, ModelConfig, RecallModelConfig
from lsm_jax.training import from_dict, to_dict
from tests.mixers.test_mixers import close


def test_the_comparison_at_equal_active_parameters():
    """Mixture-of-Memories with a feedforward of ratio 2 and Gated DeltaNet alone have equally many active
    parameters: both "400M" in the paper.
    """
    model = mom.get_config("340m,hidden_ratio=2").model
    assert model.layers["L"].feedforward.hidden_ratio == 2.0
    alone = models.count_parameters(mom.get_config("340m,baseline=inner").model)["active"]
    assert abs(models.count_parameters(model)["active"] / alone - 1) < 0.02


# ---------------------------------------------------------------------------------------------- baselines

INNER = [name for name, method in mixers.METHODS.items() if method.module.memory_parts]


def memory_size(config, width: int) -> int:
    """Return the number of entries that the memory of one row has in a mixer with this config in a model of
    width `width`.
    """
    build = lambda: mixers.build(config, width, rngs=nnx.Rngs(0)).init_memory(1, 1, jnp.float32)  # noqa: E731
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(build)) if x.ndim > 2)


@pytest.mark.parametrize("name", INNER)
def test_every_inner_mixer_has_an_expanded_baseline_or_says_why_not(name):
    alone = mom.get_config(f"340m,inner={name},baseline=inner").model.layers["L"]
    assert type(alone.mixer) is mixers.METHODS[name].config
    assert alone.feedforward.hidden_ratio == 4.0
    variant = f"340m,inner={name},baseline=expanded"
    if name not in mom.WIDENED:
        with pytest.raises(ValueError, match=f"no field of inner={name} makes its memory.*gla"):
            mom.get_config(variant)
        return
    config = mom.get_config(variant).model.layers["L"].mixer
    ratio = memory_size(config, 1024) / memory_size(alone.mixer, 1024)
    # The inner model of TTT-MLP has a bias of the output, and mLSTM a normaliser, that do not become larger.
    assert abs(ratio - 3) < 0.02, ratio


def test_wrong_options_of_baselines_are_refused():
    for variant, words in (
        ("340m,baseline=wide", "baseline='wide'; accepted are inner, expanded"),
        ("340m,baseline=expanded,memories=4", "baseline=expanded excludes memories, since it has one memory"),
        ("340m,baseline=inner,expanded=3", "baseline=inner excludes expanded"),
        ("340m,hidden_ratio=0", "hidden_ratio='0'; accepted is a number above 0"),
        ("340m,as_published=yes", "as_published='yes'; accepted are 0 and 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            mom.get_config(variant)


@pytest.mark.parametrize(
    ("config", "variant"),
    [
        (lm, "gla-tiny,pattern=L,pattern=N"),
        (fox, "pro-760m-longcrawl64,tokens=5B,tokens=7B"),
        (liger, "tiny,method=liger,method=liger"),
        (linear_moe, "tiny,mixer=gla,mixer=gla"),
        (mom, "340m,memories=2,memories=4"),
        (mqar, "gla,width=64,width=128"),
    ],
)
def test_options_given_twice_are_refused(config, variant):
    option = variant.rpartition(",")[2].partition("=")[0]
    with pytest.raises(ValueError, match=f"option {option} is given twice"):
        config.get_config(variant)


# ---------------------------------------------------------------------------------------------- as published


def test_linear_moe_as_published():
    for method, fields in linear_moe.PUBLISHED.items():
        for pattern in ("L", "LLLN"):
            variant = f"a0.3b-2b,mixer={method},pattern={pattern},as_published=1"
            config = linear_moe.get_config(variant)
            model = config.model
            assert model.scaled_output_init
            for layer in model.layers.values():
                assert layer.feedforward == MoEConfig(expert_size=896, balance_scale=0.0)
            mixer = model.layers["L"].mixer
            assert all(getattr(mixer, name) == value for name, value in fields.items())
            assert model.layers["N"].mixer.qkv_bias
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    plain = linear_moe.get_config("a0.3b-2b,mixer=gla").model
    assert plain.layers["L"].mixer == mixers.GLAConfig(num_heads=8, expand_k=1.0)
    assert not plain.scaled_output_init
    assert plain.layers["L"].feedforward.balance_scale == 1e-2
    with pytest.raises(ValueError, match="as_published=1 with mixer=rwkv7; accepted are linear_"):
        linear_moe.get_config("a0.3b-2b,mixer=rwkv7,as_published=1")


def test_mom_as_published():
    layers = mom.get_config("340m,hybrid=1,as_published=1").model.layers
    inner = mixers.GatedDeltaNetConfig(num_heads=4, expand_v=1.0, norm_eps=1e-6)
    assert layers["L"].mixer == mixers.MoMConfig(mixer=inner, balance="model")
    assert (layers["L"].mixer_init, layers["N"].mixer_init) == ("xavier", "normal")
    layers = mom.get_config("340m").model.layers
    assert layers["L"].mixer == mixers.MoMConfig.for_width(1024)
    assert layers["L"].mixer_init == "normal"


def small(mixer, pattern="L", depth=2, **fields) -> ModelConfig:
    """Return the config of a small model: its layers L have the given mixer, its layers N softmax attention,
    and all layers have four experts as feedforward.
    """
    inner = MoEConfig(num_experts=4, top_k=2, expert_size=8, shared_size=8, balance_scale=0.0)
    letters = dict(L=mixer, N=mixers.SoftmaxConfig(num_heads=2))
    layers = {
        name: LayerConfig(mixer=config, feedforward=inner) for name, config in letters.items()
    }
    return ModelConfig(
        vocab_size=64, hidden_size=16, num_layers=depth, pattern=pattern, layers=layers, dtype="float32", **fields
    )  # fmt: skip


def test_scaled_output_projections():
    """With the published initialisation, o_proj and down_proj (also of experts) start smaller by the factor 1
    / sqrt(2 depth) than without it; all other parameters are the same to the bit.
    """
    config = small(mixers.GLAConfig(num_heads=2), "LN")
    plain, scaled = (
        nnx.to_flat_state(nnx.state(Decoder(c, rngs=nnx.Rngs(0)), nnx.Param))
        for c in (config, dataclasses.replace(config, scaled_output_init=True))
    )
    outputs = set()
    for (path, a), (_, b) in zip(plain, scaled, strict=True):
        a, b = np.asarray(a.get_value()), np.asarray(b.get_value())
        if "o_proj" in path or "down_proj" in path:
            outputs.add(path)
            np.testing.assert_allclose(b, a / 2, rtol=1e-6)
        else:
            assert (a == b).all(), path
    assert len(outputs) == 6


def test_output_projections_of_every_method_can_be_scaled():
    for method in mixers.METHODS.values():
        config = small(method.config.for_width(16), scaled_output_init=True)
        config.layers["L"].feedforward = None
        models.abstract(config)


def small_mom(**fields):
    inner = mixers.GatedDeltaNetConfig(
        num_heads=2, head_dim=4, expand_v=1.0, op=mixers.OpConfig(chunk_size=8)
    )
    return mixers.MoMConfig(mixer=inner, **fields)  # fmt: skip


def test_xavier_projections_of_memories():
    """As published, the projections of a Mixture-of-Memories start uniform within 2^-2.5 sqrt(6 / (in +
    out)), each memory's matrix by itself; nothing outside the mixer changes.
    """
    config = small(small_mom())
    config.layers["L"].mixer_init = "xavier"
    model = Decoder(config, rngs=nnx.Rngs(0))
    mixer = model.periods.blocks[0].mixer
    for layer, fans in ((mixer.inner.q_proj, 24), (mixer.inner.k_proj, 24), (mixer.router, 20)):
        kernel = np.asarray(layer.kernel[...])
        bound = 2**-2.5 * math.sqrt(6 / fans)
        assert np.abs(kernel).max() <= bound and np.abs(kernel).max() > 0.9 * bound
        np.testing.assert_allclose(kernel.std(), bound / math.sqrt(3), rtol=0.1)
    assert mixer.inner.k_proj.kernel[...].shape == (2, 5, 16, 8)
    assert len(np.unique(mixer.inner.k_proj.kernel[...])) > 2 * 4 * 16 * 8
    gates = model.periods.blocks[0].feedforward.gate_proj[...]
    np.testing.assert_allclose(np.asarray(gates).std(), 0.02, rtol=0.2)
    with pytest.raises(ValueError, match="mixer_init='he': accepted are normal, xavier"):
        LayerConfig(mixer_init="he").validate(64)


@pytest.mark.slow
def test_balance_losses_of_a_hybrid_and_of_all_layers_together():
    """The balance loss of Mixtures-of-Memories is the mean over the layers that have memories
    (balance="layer"), or the loss of those layers' mean routing (balance="model"); in a hybrid model other
    layers do not count.
    """
    tokens = jnp.arange(20).reshape(1, 20) * 7 % 64
    mixer = mixers.MoMConfig(mixer=mixers.LinearAttentionConfig(num_heads=2), balance_scale=1e-3)
    values = {}
    for kind in ("layer", "model"):
        config = small(dataclasses.replace(mixer, balance=kind), "LLN", depth=3, init_std=0.3)
        model = Decoder(dataclasses.replace(config, remat="none"), rngs=nnx.Rngs(0))
        graph, params = nnx.split(model, nnx.Param)

        def loss(params, graph=graph):
            aux = nnx.merge(graph, params).hidden(tokens)[2]
            return aux["mom/balance_loss"], aux

        (values[kind], aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        routers = [
            layer.get_value() for path, layer in nnx.to_flat_state(grads) if "router" in path and "mixer" in path
        ]  # fmt: skip
        assert len(routers) == 2 and all(jnp.abs(grad).max() > 0 for grad in routers)
    load, probability = np.asarray(aux["mom/load"]), np.asarray(aux["mom/probability"])
    assert load.shape == probability.shape == (2, 4)
    by_layer = 4 * (2 * load * probability).sum(1)
    np.testing.assert_allclose(values["layer"], 1e-3 * by_layer.mean(), rtol=1e-5)
    joint = 4 * (2 * load.mean(0) * probability.mean(0)).sum()
    np.testing.assert_allclose(values["model"], 1e-3 * joint, rtol=1e-5)
    assert abs(joint - by_layer.mean()) > 1e-3


def test_the_joint_balance_loss_of_microbatches_is_that_of_each():
    """The one balance loss of all layers is the mean of the losses of a pipeline's microbatches, as in gradient accumulation.
    The loss of the whole batch differs by the covariance, over the microbatches, of load and probability.
    """
    periods, parts, memories, top_k = 2, 3, 4, 2
    mixer = small_mom(balance="model", top_k=top_k)
    model = models.abstract(small(mixer))
    random = jax.random.split(jax.random.key(0))
    load, probability = (
        np.asarray(jax.nn.softmax(jax.random.normal(key, (periods, parts, memories))), np.float64)
        for key in random
    )
    given = {"mom/load": jnp.asarray(load), "mom/probability": jnp.asarray(probability)}
    got = model._statistics_of_microbatches([given | {"rows_count": jnp.ones((periods, parts))}])
    f, p = top_k * load.mean(0), probability.mean(0)  # over the layers
    each = memories * (f * p).sum(-1)
    scale = mixer.balance_scale
    np.testing.assert_allclose(got["mom/balance_loss"], scale * each.mean(), rtol=1e-5)
    covariance = ((f - f.mean(0)) * (p - p.mean(0))).mean(0)
    whole = memories * (f.mean(0) * p.mean(0)).sum()
    np.testing.assert_allclose(whole, each.mean() - memories * covariance.sum(), rtol=1e-10)
    assert abs(whole / each.mean() - 1) > 1e-3
    np.testing.assert_allclose(got["mom/load"], load.mean(1), rtol=1e-6)
    assert got["rows_count"] == periods * parts


def test_joint_balance_needs_equal_layers_of_a_decoder():
    config = small(small_mom(balance="model"), "LM")
    config.layers["M"] = LayerConfig(mixer=small_mom(balance="model", top_k=1))
    with pytest.raises(ValueError, match="accepted are layers with equal MoMConfigs"):
        config.validate()
    with pytest.raises(ValueError, match="mixer.balance='model': accepted for recall is 'layer'"):
        RecallModelConfig(mixer=small_mom(balance="model"), hidden_size=16).validate()


# -------------------------------------------------------------------- the authors' layers, token by token

WIDTH, LENGTH, HEADS = 16, 9, 2


def dense(layer, x):
    y = x @ np.asarray(layer.kernel[...], np.float64)
    return y if layer.bias is None else y + np.asarray(layer.bias[...], np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def rms(x, norm):
    scale = np.asarray(norm.scale[...], np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * scale


def heads(x):
    return x.reshape(len(x), HEADS, -1)


def published(name: str, mixer, x: np.ndarray) -> np.ndarray:
    """Return the output y [T, D] of a layer of Linear-MoE's code for one row x, in float64: `M <- a M + kᵀ
    (v - β k M)`, `o = q M / sqrt(K)`, norm, gate.
    """
    elu = lambda z: np.where(z > 0, z, np.exp(z) - 1) + 1  # noqa: E731
    identity = lambda z: z  # noqa: E731
    activation = dict(linear_attention=elu, deltanet=identity).get(name, silu)
    if name == "hgrn2":
        forget = sigmoid(heads(dense(mixer.f_proj, x)))
        q, k, v = silu(heads(dense(mixer.q_proj, x))), 1 - forget, heads(dense(mixer.i_proj, x))
        decay = forget
    else:
        q, k = (activation(heads(dense(p, x))) for p in (mixer.q_proj, mixer.k_proj))
        v = heads(dense(mixer.v_proj, x))
        v = silu(v) if name == "gated_deltanet" else v
        decay = np.ones((len(x), HEADS, 1))
    head = np.arange(HEADS)
    if name == "lightning":
        decay = decay * np.exp(-(2.0 ** (-8 * (head + 1) / HEADS)))[:, None]
    if name == "retnet":
        decay = decay * (1 - 2.0 ** (-5 - head))[:, None]
    if name == "gla":
        low = dense(mixer.decay_up, dense(mixer.decay_down, x))
        decay = heads(sigmoid(low) ** (1 / 16))
    if name == "gated_deltanet":
        step = np.log1p(np.exp(dense(mixer.decay_proj, x) + np.asarray(mixer.dt_bias[...])))
        decay = np.exp(-np.exp(np.asarray(mixer.a_log[...], np.float64)) * step)[..., None]
    erased = name in ("deltanet", "gated_deltanet")
    beta = np.zeros((len(x), HEADS))
    if erased:
        q, k, beta = unit(q), unit(k), sigmoid(dense(mixer.beta_proj, x))
    memory, outputs = np.zeros((HEADS, q.shape[-1], v.shape[-1])), []
    for t in range(len(x)):
        memory = decay[t][..., None] * memory
        written = v[t]
        if erased:
            written = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], memory))
        memory = memory + k[t][..., None] * written[:, None]
        outputs.append(np.einsum("hk,hkv->hv", q[t], memory) * q.shape[-1] ** -0.5)
    o = np.stack(outputs)
    if name != "gated_deltanet":
        o = rms(o, mixer.norm)
    if name != "hgrn2":
        o = o * silu(heads(dense(mixer.g_proj, x)))
    return dense(mixer.o_proj, o.reshape(len(x), -1))


LAYERS = [name for name in linear_moe.PUBLISHED if name not in ("mamba2", "softmax")]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_as_published_are_their_definition(name):
    """Mixers with `as_published` equal the layers of Linear-MoE's code, in one call, and token by token
    from a state; with biases that are not 0.
    """
    size = dataclasses.replace(linear_moe.SIZES["tiny"], hidden_size=WIDTH, head_dim=WIDTH // HEADS)
    config = linear_moe.mixer_config(name, size, as_published=True)
    config = dataclasses.replace(config, op=mixers.OpConfig(chunk_size=4))
    mixer = mixers.build(config, WIDTH, rngs=nnx.Rngs(0), init_std=0.3, layer=1, num_layers=2)
    for index, (_, param) in enumerate(nnx.to_flat_state(nnx.state(mixer, nnx.Param))):
        if (param[...] == 0).all():
            param[...] = 0.3 * jax.random.normal(jax.random.key(index), param[...].shape)
    biased = [mixer.q_proj, mixer.g_proj] if name != "hgrn2" else []
    assert all(layer.bias is not None and (layer.bias[...] != 0).any() for layer in biased)
    x = jax.random.normal(jax.random.key(1), (1, LENGTH, WIDTH))
    expected = published(name, mixer, np.asarray(x[0], np.float64))
    call = jax.jit(lambda mixer, x, state: mixer(x, layer=1, state=state)[:2])
    state = mixer.init_state(1, LENGTH, jnp.float32)
    close(call(mixer, x, state)[0][0], expected)
    assert not state.tails and state.clock is None
    outputs = []
    for t in range(LENGTH):
        y, state = call(mixer, x[:, t : t + 1], state)
        outputs.append(y)
    close(jnp.concatenate(outputs, axis=1)[0], expected)


def test_other_methods_without_convolutions():
    """A method whose short convolutions have width 1 has no parameters and no state for them, and counts no
    operations.
    """
    for name in ("mamba", "mamba2", "kda", "titans", "ttt_linear"):
        config = mixers.METHODS[name].config.for_width(WIDTH)
        none = dataclasses.replace(config, conv_size=1)
        build = lambda config: mixers.build(config, WIDTH, rngs=nnx.Rngs(0))  # noqa: E731
        mixer = nnx.eval_shape(lambda build=build, none=none: build(none))
        assert not mixer.remembering() and not mixer.init_state(1, 1, jnp.float32).tails
        x = jax.ShapeDtypeStruct((2, 5, WIDTH), jnp.bfloat16)
        assert jax.eval_shape(lambda m, x: m(x)[0], mixer, x).shape == x.shape
        assert none.flops_per_token(WIDTH, 8) < config.flops_per_token(WIDTH, 8)
