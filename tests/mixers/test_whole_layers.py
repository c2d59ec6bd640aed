"""Tests that whole layers of log-linear attention, MesaNet, PaTH, momentum DeltaNet, NSA, MoBA and sLSTM are the published
ones: outputs, final memories, and the gradients of all parameters and of the input.

`tests/mixers/make_layer_goldens.py` says what computed the goldens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from lsm_jax import mixers
from tests.mixers import goldens


class Layer(NamedTuple):
    """How a golden's layer is built here.

    Attributes:
        config: the mixer's config.
        parameters: (golden's arrays) -> the mixer's parameters by their paths.
        memory: the fields of the final memory by their names in the golden.
    """

    config: Any
    parameters: Callable[[dict], dict]
    memory: dict[str, str]


def named(kernels: dict[str, str], others: dict[str, str] | None = None) -> Callable[[dict], dict]:
    """Return a function from a golden's arrays to parameters, for torch's modules by ours.

    `kernels` have matrices, biases or convolutions; `others` are arrays that are the same here and there.
    """

    def parameters(g: dict) -> dict:
        result = {ours: g[theirs] for ours, theirs in (others or {}).items()}
        for ours, theirs in kernels.items():
            weight = g[f"{theirs}.weight"]
            if weight.ndim == 3:
                result[f"{ours}/weight"] = weight[:, 0].T
            else:
                result[f"{ours}/kernel"] = weight.T
            if f"{theirs}.bias" in g:
                result[f"{ours}/bias"] = g[f"{theirs}.bias"]
        return result

    return parameters


def mesa_net(g: dict) -> dict:
    convolutions = {f"{n}_conv": f"{n}_conv1d" for n in "qk"}
    gate = dict(g_proj="g_proj") if "g_proj.weight" in g else {}
    kernels = QKVO | convolutions | gate | dict(beta_proj="b_proj", decay_proj="a_proj")
    regularizer = dict(regularizer=g["lambda_params"].reshape(2, 8))
    return named(kernels, {"norm/scale": "o_norm.weight"})(g) | regularizer


def log_linear_mamba2(g: dict) -> dict:
    """Split the joint projection and convolution: z, x, B, C, Δ and the levels' weights."""
    same = {"a_log": "A_log", "skip": "D", "dt_bias": "dt_bias", "level_scales/gain": "L", "norm_scale": "norm.weight"}  # fmt: skip
    result = named({"o_proj": "out_proj"}, same)(g)
    names = ("z_proj", "x_proj", "b_proj", "c_proj", "dt_proj", "level_scales/proj")
    ends = (32, 64, 72, 80, 84)
    for kind, whole in (("kernel", g["in_proj.weight"].T), ("bias", g["in_proj.bias"])):
        parts = jnp.split(whole, ends, axis=-1)
        result |= {f"{name}/{kind}": part for name, part in zip(names, parts, strict=True)}
    convolutions = jnp.split(g["conv1d.weight"][:, 0].T, (32, 40), axis=1)
    return result | {f"{n}_conv/weight": w for n, w in zip("xbc", convolutions, strict=True)}


def slstm(g: dict) -> dict:
    """The authors' parameter `fgate` is that of the gate i, and `igate` that of f."""
    gates = dict(i="fgate", f="igate", z="zgate", o="ogate")
    bias = g["slstm_cell._bias_"].reshape(4, 2, 8)
    result = {f"{n}_bias": b for n, b in zip("ifzo", bias, strict=True)}
    for ours, theirs in gates.items():
        result[f"{ours}_proj/kernel"] = jnp.swapaxes(g[f"{theirs}.weight"], 1, 2)
    recurrent = g["slstm_cell._recurrent_kernel_"].reshape(2, 4, 8, 8)  # head, gate, out, in
    return result | {
        "recurrent/kernel": jnp.transpose(recurrent, (0, 3, 1, 2)),
        "conv/weight": g["conv1d.conv.weight"][:, 0].T,
        "conv/bias": g["conv1d.conv.bias"],
        "norm/scale": 1 + g["group_norm.weight"].reshape(2, 8),
    }


QKVO = {f"{n}_proj": f"{n}_proj" for n in "qkvo"}
CONVOLUTIONS = {f"{n}_conv": f"{n}_conv1d" for n in "qkv"}
NORM = {"norm/scale": "o_norm.weight"}
KEYS = dict(final_keys="keys", final_values="values")
PATH = QKVO | dict(w_conv="w_conv1d", beta_proj="bt_proj")
DELTA = QKVO | CONVOLUTIONS | dict(beta_proj="b_proj", decay_proj="a_proj", g_proj="g_proj")
MOMENTUM = dict(
    dt_bias="dt_bias", a_log="A_log", momentum_bias="mu_bias", momentum_log="Mu_log",
    angle_log="log_factor", correction_log="D_log",
)  # fmt: skip

LAYERS = {
    "layer_path": Layer(
        mixers.PaTHConfig(num_heads=2, head_dim=8),
        named(PATH | dict(w_down="w_proj.0", w_up="w_proj.1")),
        KEYS,
    ),
    "layer_path_forget": Layer(
        mixers.PaTHConfig(
            num_heads=4, num_kv_heads=2, head_dim=4, rank=None, forget_gate=True, qk_norm=True, norm_eps=1e-5,
        ),
        named(
            PATH | dict(w_proj="w_proj", f_proj="g_proj"),
            {"q_norm/scale": "maybe_q_norm.weight", "k_norm/scale": "maybe_k_norm.weight"},
        ),
        KEYS,
    ),
    "layer_mesa_net": Layer(
        mixers.MesaNetConfig(num_heads=2, head_dim=8, norm_eps=1e-5), mesa_net, dict(final_kk="keys", final_kv="values"),
    ),
    "layer_mesa_net_gate": Layer(
        mixers.MesaNetConfig(num_heads=2, head_dim=8, norm_eps=1e-5, output_gate=True), mesa_net,
        dict(final_kk="keys", final_kv="values"),
    ),
    "layer_momentum_deltanet": Layer(
        mixers.MomentumDeltaNetConfig(num_heads=2, head_dim=4),
        named(DELTA | dict(momentum_proj="m_proj", eta_proj="e_proj"), MOMENTUM | NORM),
        dict(final_memory="memory", final_momentum="momentum"),
    ),
    "layer_nsa": Layer(
        mixers.NSAConfig(num_heads=16, num_kv_heads=1, head_dim=8, window=5, block_size=4, num_blocks=4),
        named(QKVO | dict(gate_proj="g_proj")),
        KEYS,
    ),
    "layer_moba": Layer(
        mixers.MoBAConfig(num_heads=2, block_size=4, num_blocks=2),
        named(QKVO | dict(gate_down="g_proj.0", gate_up="g_proj.1"), NORM),
        KEYS,
    ),
    "layer_log_linear_mamba2": Layer(
        mixers.LogLinearMamba2Config(head_dim=8, state_size=8, num_levels=6), log_linear_mamba2, dict(final_memory="memory"),
    ),
    "layer_log_linear_gated_deltanet": Layer(
        mixers.LogLinearGatedDeltaNetConfig(num_heads=2, head_dim=4, num_value_heads=4, num_levels=6),
        named(
            DELTA | {"level_scales/proj": "l_proj"}, NORM | {"dt_bias": "dt_bias", "a_log": "A_log", "level_scales/gain": "L"}
        ),
        dict(final_memory="memory"),
    ),
    "layer_slstm": Layer(
        mixers.SLSTMConfig(num_heads=2), slstm,
        {f"final_{n}": n for n in ("output", "memory", "normalizer", "stabilizer")},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [n if n == "layer_moba" else pytest.param(n, marks=pytest.mark.slow) for n in LAYERS],
)
def test_layers_are_the_published_ones(name):
    layer = LAYERS[name]

    def run(g: dict) -> dict:
        y, memory = goldens.run_layer(layer.config, 16, layer.parameters(g), g["x"], memory=True)
        return {"y": y} | {n: getattr(memory, field) for n, field in layer.memory.items()}

    goldens.check(name, run, dtypes=["float32"])
