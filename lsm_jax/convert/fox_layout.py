"""Where the published checkpoints of FoX's paper store the parameters of a model: the names of their
tensors, and the rows and shapes in them. Import and export use it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from lsm_jax.convert.load import StoredRows, layers_of
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


class Layout(NamedTuple):
    """The layout of a published checkpoint of FoX's paper: in which tensors, and in which of their rows,
    the parameters of a model are.

    Attributes:
        parts: where the values of each parameter are, by (keys, layer); the layer is -1 outside of layers.
        shapes: the shape of each tensor that contains parameters, by name.
        params: the shapes of the parameters that are stored, a tree.
    """

    parts: dict[tuple[tuple[str, ...], int], StoredRows]
    shapes: dict[str, tuple[int, ...]]
    params: Any


def layout_of(kind: str, config: ModelConfig) -> Layout:
    """Return the layout of a checkpoint of FoX's paper: in which tensors, and in which rows of them, it
    stores the parameters of the model `config`. `kind` is the checkpoint's kind of model, the `model_type`
    of its config.json."""
    params = params_of(abstract(config))
    if kind == HGRN2:
        params["periods"]["blocks"][0]["mixer"].pop("lower_bound")
    found: dict[tuple[tuple[str, ...], int], tuple[int, ...]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for keys, layer in layers_of(path, leaf.shape, 1):
            found[tuple(keys), layer] = leaf.shape if layer < 0 else leaf.shape[1:]
    top = _MAMBA2_TOP if kind == MAMBA2 else _TOP
    folder = "backbone.layers" if kind == MAMBA2 else "model.layers"
    parts: dict[tuple[tuple[str, ...], int], StoredRows] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(-1, config.num_layers):
        for key, name in (top if layer < 0 else _TABLES[kind]).items():
            place = tuple(key.split(".")), layer
            if place not in found:
                continue
            if layer >= 0:
                name = f"{folder}.{layer}.{_shifted(name, config.layers['L'].mixer)}"
            (rows, *rest), transposed = stored_shape(key, found[place])
            start = shapes[name][0] if name in shapes else 0
            parts[place] = StoredRows(name, transposed, start, start + rows)
            shapes[name] = (start + rows, *rest)
    assert parts.keys() == found.keys(), found.keys() - parts.keys()
    return Layout(parts, shapes, params)


def stored_shape(key: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Return the shape that a parameter has in the published checkpoints of FoX's paper, and whether its
    axes are transposed there.

    Published kernels are [out, in], weights of convolutions [channels, 1, width], and the norm scales of all heads one vector.
    """
    if key.endswith(".kernel"):
        return shape[::-1], True
    if key.endswith("_conv.weight"):
        return (shape[1], 1, shape[0]), True
    return (shape if key == "embedding" else (int(np.prod(shape)),)), False


def _shifted(name: str, mixer: Any) -> str:
    """Return the published name of a parameter, given its usual published name. It differs only for the key
    or value projection of a layer that shifts keys or values by a token: there the projection is inside the
    shift's module."""
    for letter, field in (("k", "key_shift"), ("v", "value_shift")):
        if name == f"attn.{letter}_proj.weight" and getattr(mixer, field, False):
            return f"attn.{letter}_proj.linear.weight"
    return name
