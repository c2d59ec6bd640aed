"""Import FoX's published checkpoints as runs.

    python -m lsm_jax.convert.fox --source=fox-pro-760m-longcrawl64-48b --workdir=runs/fox

A checkpoint is a folder of config.json and safetensors files (github.com/zhixuan-lin/forgetting-transformer at 883f260) with
one of these models: FoX (Pro), FoX (LLaMA), Transformer (Pro), which is FoX without a gate, and Transformer (LLaMA). The run can
be evaluated (`eval.py --workdir=runs/fox`), and other runs can start from it (`train.py --init_from=runs/fox`). It cannot be
resumed, since it has no optimizer state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from lsm_jax.convert.checkpoint import Checkpoint
from lsm_jax.convert.load import StoredRows, layers_of, load_tree
from lsm_jax.convert.runs import command, new_workdir, save_run
from lsm_jax.data import DataConfig
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import FoXConfig
from lsm_jax.models import LayerConfig, ModelConfig, abstract
from lsm_jax.training import TrainConfig
from lsm_jax.training.step import params_of

_FOX, _TRANSFORMER = "forgetting_transformer-project_fox", "transformer-project_fox"
# Fields for which the published code implements one value; it ignores or refuses others.
_ONLY: dict[str, dict[str, Any]] = {
    _FOX: dict(
        hidden_act="swish", ogate_act="sigmoid", attention_bias=False, window_size=None, num_kv_heads=None
    ),
    _TRANSFORMER: dict(hidden_act="swish", attention_bias=False, qk_norm=False, use_rope=True),
}  # fmt: skip
_GATES = {"full": "data_dependent", "bias_only": "data_independent", "fixed": "fixed", "none": "none"}  # fmt: skip

_READ = frozenset(
    """
    model_type vocab_size hidden_size num_hidden_layers num_heads num_kv_heads window_size use_rope rope_base qk_norm
    qk_norm_share_param_across_head fgate_type decay_time_min decay_time_max use_k_shift use_v_shift use_output_norm use_output_gate
    ogate_act hidden_act attention_bias norm_eps hidden_ratio intermediate_size tie_word_embeddings
    """.split()
)
# Fields about initialisation, loading and decoding, which do not change the model's outputs.
_HOUSEKEEPING = frozenset(
    """
    architectures auto_map bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version _name_or_path use_cache
    initializer_range fgate_bias_init max_position_embeddings fuse_norm fuse_cross_entropy return_dict output_attentions output_hidden_states
    """.split()
)

_TOP = {
    "embedding": "model.embeddings.weight",
    "norm.scale": "model.norm.weight",
    "lm_head.kernel": "lm_head.weight",
}
_LAYER = {
    "mixer_norm.scale": "attn_norm.weight",
    "feedforward_norm.scale": "mlp_norm.weight",
    "feedforward.gate_proj.kernel": "mlp.gate_proj.weight",  # the first half of the rows; up_proj is the second
    "feedforward.up_proj.kernel": "mlp.gate_proj.weight",
    "feedforward.down_proj.kernel": "mlp.down_proj.weight",
    "mixer.q_proj.kernel": "attn.q_proj.weight",
    "mixer.k_proj.kernel": "attn.k_proj.weight",
    "mixer.v_proj.kernel": "attn.v_proj.weight",
    "mixer.o_proj.kernel": "attn.o_proj.weight",
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


def fox_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return the model that the config.json of a published checkpoint describes.

    Raises:
        ValueError: the model is of another kind, a field is missing, or the published code does not implement its value.
    """
    given, where = checkpoint.config, checkpoint.folder / "config.json"
    kind = given.get("model_type")
    if kind not in _ONLY:
        raise ValueError(f"{where}: model_type={kind!r}; accepted are {', '.join(_ONLY)}")
    for name, value in _ONLY[kind].items():
        if given.get(name, value) != value:
            raise ValueError(f"{where}: {name}={given[name]!r}; accepted is {value!r}")
    required = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads")
    if missing := [name for name in required if name not in given]:
        raise ValueError(f"{where}: missing fields: {', '.join(missing)}")
    gate = given.get("fgate_type", "full") if kind == _FOX else "none"
    if gate not in _GATES:
        raise ValueError(f"{where}: fgate_type={gate!r}; accepted are {', '.join(_GATES)}")
    rotated = given.get("use_rope", kind == _TRANSFORMER)
    for name in (*required, "norm_eps", *(["rope_base"] if rotated else [])):
        if not isinstance(value := given.get(name, 1), int | float) or isinstance(value, bool):
            raise ValueError(f"{where}: {name}={value!r}; accepted is a number")
    hidden_size, num_heads, eps = (
        given["hidden_size"], given["num_heads"], given.get("norm_eps", 1e-6),
    )  # fmt: skip
    # In older checkpoints the config does not say whether heads share the norm's weights, but the weights' length does.
    length = checkpoint.shapes.get("model.layers.0.attn.q_norm.weight")
    mixer = FoXConfig(
        num_heads=num_heads,
        num_kv_heads=given.get("num_kv_heads"),
        window=given.get("window_size"),
        rope_base=given.get("rope_base", 500000.0) if rotated else None,
        qk_norm=given.get("qk_norm", False),
        qk_norm_per_head=not given.get("qk_norm_share_param_across_head", length != (hidden_size,)),
        forget_gate=_GATES[gate],
        decay_time_min=given.get("decay_time_min"),
        decay_time_max=given.get("decay_time_max"),
        key_shift=given.get("use_k_shift", False),
        value_shift=given.get("use_v_shift", False),
        output_norm=given.get("use_output_norm", False),
        output_norm_eps=eps,
        output_gate=given.get("use_output_gate", False),
    )
    inner = SwiGLUConfig(
        hidden_ratio=given.get("hidden_ratio") or 4.0,
        intermediate_size=given.get("intermediate_size"),
    )
    config = ModelConfig(
        vocab_size=given["vocab_size"],
        hidden_size=hidden_size,
        num_layers=given["num_hidden_layers"],
        layers={"L": LayerConfig(mixer=mixer, feedforward=inner)},
        tie_embeddings=given.get("tie_word_embeddings", False),
        norm_eps=eps,
    )
    try:
        config.validate()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
    return config


def fox_params(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Any]:
    """Load a checkpoint's tensors as the parameters of `config`'s model.

    Returns:
        The parameters, a pure dict of float32 arrays.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape (the message names them), or fixed gates differ from the
            config's decay times.
    """
    shapes = params_of(abstract(config))
    mixer = config.layers["L"].mixer
    expected: dict[str, tuple[int, ...]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        for keys, layer in layers_of(path, leaf.shape, 1):
            shape = leaf.shape if layer < 0 else leaf.shape[1:]
            expected[_published_name(keys, layer, mixer)] = _published_shape(keys, shape)
    fixed = [f"model.layers.{i}.attn.fgate_bias" for i in range(config.num_layers)]
    if mixer.forget_gate == "fixed":
        expected |= dict.fromkeys(fixed, (mixer.num_heads,))
    checkpoint.check(
        expected, ignored=(".rotary.inv_freq",)
    )  # saved by some versions; follows from rope_base
    if mixer.forget_gate == "fixed":
        for name in fixed:
            times = np.log1p(np.exp(-checkpoint.tensor(name).astype(np.float64)))
            if not np.allclose(1 / times, mixer.decay_times(), rtol=1e-3):
                raise ValueError(
                    f"{checkpoint.folder}: {name} does not have the decay times that its config.json defines"
                )

    def stored_rows(keys: list[str], layer: int) -> StoredRows:
        name, transposed = _published_name(keys, layer, mixer), keys[-1] == "kernel"
        if keys[-2:-1] not in (["gate_proj"], ["up_proj"]):
            return StoredRows(name, transposed)
        half = checkpoint.shapes[name][0] // 2  # the rows of gate_proj, then those of up_proj
        start = half * (keys[-2] == "up_proj")
        return StoredRows(name, transposed, start, start + half)

    return load_tree(checkpoint, shapes, stored_rows)


def _published_name(keys: list[str], layer: int, mixer: FoXConfig) -> str:
    """Return the published name of a parameter of a layer, or of one outside the layers if `layer` is -1."""
    if layer < 0:
        return _TOP[".".join(keys)]
    name = _LAYER[".".join(keys)]
    for letter, shifted in (("k", mixer.key_shift), ("v", mixer.value_shift)):
        if shifted and name == f"attn.{letter}_proj.weight":
            name = f"attn.{letter}_proj.linear.weight"
    return f"model.layers.{layer}.{name}"


def _published_shape(keys: list[str], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the published shape of a parameter.

    Published kernels are [out, in], those of SwiGLU's gate and up projection one tensor, and the norm scales of all heads one
    vector.
    """
    if keys[-1] != "kernel":
        return shape if keys[-1] == "embedding" else (int(np.prod(shape)),)
    rows = 2 if keys[-2] in ("gate_proj", "up_proj") else 1
    return (rows * shape[1], shape[0])


def import_fox(
    source: str | os.PathLike[str],
    workdir: str | os.PathLike[str],
    data: DataConfig | None = None,
) -> TrainConfig:
    """Make a run from a published checkpoint.

    Args:
        source: the checkpoint's folder.
        workdir: the directory of the new run; it must not contain a run.
        data: the run's data config; None is that of LongCrawl64 in a folder `longcrawl64`, with its tokenizer, row length
            and order.

    Returns:
        The run's config.

    Raises:
        ValueError: the checkpoint is not one of FoX's, or `workdir` contains a run.
    """
    target = new_workdir(workdir)
    checkpoint = Checkpoint(source)
    model = fox_config(checkpoint)
    if unread := sorted(set(checkpoint.config) - _READ - _HOUSEKEEPING):
        logging.warning("config.json has unknown fields, which are ignored: %s", ", ".join(unread))
    params = fox_params(checkpoint, model)
    data = data or DataConfig(
        path="longcrawl64", tokenizer="gpt2", json_escape=True, sequence_length=2**14, shuffle=False
    )
    config = TrainConfig(name=checkpoint.folder.resolve().name, model=model, data=data)
    config.validate()
    save_run(target, config, params)
    return config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return command("lsm_jax.convert.fox", __doc__, "the checkpoint's folder", import_fox, arguments)


if __name__ == "__main__":
    sys.exit(main())
