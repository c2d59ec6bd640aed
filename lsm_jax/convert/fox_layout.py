"""Where the published checkpoints of FoX's paper store the parameters of a model: the names of their
tensors, and the rows and shapes in them. Import and export use it."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.layout import Layout, Names, layout_of
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training.step import params_of

FOX, TRANSFORMER, MAMBA2, HGRN2, DELTANET = KINDS = (
    "forgetting_transformer-project_fox",
    "transformer-project_fox",
    "mamba2-project_fox",
    "hgrn2-project_fox",
    "delta_net-project_fox",
)
"""The `model_type` of each kind of model."""
LOWER_BOUNDS = "model.lower_bounds"
"""A tensor of HGRN2's checkpoints, which the published code neither trains nor applies."""

# Published names, by the names here. Parameters with one published name are consecutive rows of one tensor, in this order.
_TOP = {
    "embedding": "model.embeddings.weight",
    "norm.scale": "model.norm.weight",
    "lm_head.kernel": "lm_head.weight",
}
_BLOCK = {
    "mixer_norm.scale": "attn_norm.weight",
    "feedforward_norm.scale": "mlp_norm.weight",
    "feedforward.gate_proj.kernel": "mlp.gate_proj.weight",
    "feedforward.up_proj.kernel": "mlp.gate_proj.weight",
    "feedforward.down_proj.kernel": "mlp.down_proj.weight",
    "mixer.q_proj.kernel": "attn.q_proj.weight",
    "mixer.o_proj.kernel": "attn.o_proj.weight",
}
_ATTENTION = _BLOCK | {
    "mixer.k_proj.kernel": "attn.k_proj.weight",
    "mixer.v_proj.kernel": "attn.v_proj.weight",
    "mixer.q_norm.scale": "attn.q_norm.weight",
    "mixer.k_norm.scale": "attn.k_norm.weight",
    "mixer.k_shift.kernel": "attn.k_proj.shift_proj.weight",
    "mixer.v_shift.kernel": "attn.v_proj.shift_proj.weight",
    "mixer.f_proj.kernel": "attn.fgate_proj.weight",
    "mixer.f_proj.bias": "attn.fgate_proj.bias",
    "mixer.f_bias": "attn.fgate_bias",
    "mixer.norm.scale": "attn.output_norm.weight",
    "mixer.g_proj.kernel": "attn.ogate_proj.weight",
}
_HGRN2 = _BLOCK | {
    "mixer.f_proj.kernel": "attn.f_proj.weight",
    "mixer.i_proj.kernel": "attn.i_proj.weight",
    "mixer.norm.scale": "attn.g_norm.weight",
}
_DELTANET = _BLOCK | {
    "mixer.k_proj.kernel": "attn.k_proj.weight",
    "mixer.v_proj.kernel": "attn.v_proj.weight",
    "mixer.beta_proj.kernel": "attn.b_proj.weight",
    "mixer.g_proj.kernel": "attn.g_proj.weight",
    "mixer.q_conv.weight": "attn.q_conv1d.weight",
    "mixer.k_conv.weight": "attn.k_conv1d.weight",
    "mixer.v_conv.weight": "attn.v_conv1d.weight",
    "mixer.norm.scale": "attn.o_norm.weight",
}
_MAMBA2_TOP = {
    "embedding": "backbone.embeddings.weight",
    "norm.scale": "backbone.norm_f.weight",
    "lm_head.kernel": "lm_head.weight",
}
_MAMBA2 = {
    "mixer_norm.scale": "norm.weight",
    **{f"mixer.{x}_proj.kernel": "mixer.in_proj.weight" for x in ("z", "x", "b", "c", "dt")},
    **{f"mixer.{x}_conv.weight": "mixer.conv1d.weight" for x in "xbc"},
    **{f"mixer.{x}_conv.bias": "mixer.conv1d.bias" for x in "xbc"},
    "mixer.dt_bias": "mixer.dt_bias",
    "mixer.a_log": "mixer.A_log",
    "mixer.skip": "mixer.D",
    "mixer.norm_scale": "mixer.norm.weight",
    "mixer.o_proj.kernel": "mixer.out_proj.weight",
}
_TABLES = {FOX: _ATTENTION, TRANSFORMER: _ATTENTION, HGRN2: _HGRN2, DELTANET: _DELTANET, MAMBA2: _MAMBA2}  # fmt: skip


def fox_layout(kind: str, config: ModelConfig) -> Layout:
    """Return the layout of a checkpoint of FoX's paper: in which tensors, and in which rows of them, it
    stores the parameters of the model `config`. `kind` is the checkpoint's kind of model, the `model_type`
    of its config.json."""
    params = params_of(abstract(config))
    if kind == HGRN2:
        params["periods"]["blocks"][0]["mixer"].pop("lower_bound")
    top = _MAMBA2_TOP if kind == MAMBA2 else _TOP
    folder = "backbone.layers" if kind == MAMBA2 else "model.layers"
    mixer = config.layers["L"].mixer

    def names(layer: int) -> Names:
        if layer < 0:
            return top
        table = _TABLES[kind]
        return {key: f"{folder}.{layer}.{_shifted(name, mixer)}" for key, name in table.items()}

    return layout_of(config, names, params)


def _shifted(name: str, mixer: Any) -> str:
    """Return the published name of a parameter, given its usual published name. It differs only for the key
    or value projection of a layer that shifts keys or values by a token: there the projection is inside the
    shift's module."""
    for letter, field in (("k", "key_shift"), ("v", "value_shift")):
        if name == f"attn.{letter}_proj.weight" and getattr(mixer, field, False):
            return f"attn.{letter}_proj.linear.weight"
    return name
