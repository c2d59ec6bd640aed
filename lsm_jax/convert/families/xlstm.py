"""xLSTM-7B of transformers (`model_type` xlstm): mLSTM and SwiGLU, with a soft cap of the logits."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families.family import Family, the_mixer
from lsm_jax.convert.layout import Names, prefixed
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.mixers import MLSTMConfig
from lsm_jax.models import LayerConfig, ModelConfig

_TOP: Names = {
    "embedding": "backbone.embeddings.weight",
    "norm.scale": "backbone.out_norm.weight",
    "lm_head.kernel": "lm_head.weight",
}
_TABLE: Names = {
    "mixer_norm.scale": "norm_mlstm.weight",
    "feedforward_norm.scale": "norm_ffn.weight",
    **{f"mixer.{x}_proj.kernel": f"mlstm_layer.{x}.weight" for x in "qkv"},
    "mixer.g_proj.kernel": "mlstm_layer.ogate_preact.weight",
    **{
        f"mixer.{x}_proj.{ours}": f"mlstm_layer.{x}gate_preact.{theirs}"
        for x in "if"
        for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
    },
    "mixer.norm.scale": "mlstm_layer.multihead_norm.weight",
    "mixer.o_proj.kernel": "mlstm_layer.out_proj.weight",
    "feedforward.gate_proj.kernel": "ffn.proj_up_gate.weight",
    "feedforward.up_proj.kernel": "ffn.proj_up.weight",
    "feedforward.down_proj.kernel": "ffn.proj_down.weight",
}


def _width(values: dict[str, Any]) -> int:
    """Return the inner width of the feedforwards, rounded as transformers does: less than 1 above a multiple is rounded down."""
    multiple = values["ffn_round_up_to_multiple_of"]
    width = values["hidden_size"] * values["ffn_proj_factor"]
    return int((width + multiple - 1) // multiple * multiple)


_BOTH = (("embedding_dim", "hidden_size"), ("num_blocks", "num_hidden_layers"))
"""Fields of which the released model has the first, and transformers writes both."""


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json with the names that every family has."""
    given = dict(given)
    for name, usual in _BOTH:
        if given.get(usual) is None and given.get(name) is not None:
            given[usual] = given[name]
    return given


def _config(values: dict[str, Any]) -> ModelConfig:
    for name, usual in _BOTH:
        if values[name] not in (None, values[usual]):
            raise ValueError(f"{name}={values[name]}; accepted is {usual}={values[usual]}")
    head = values["v_dim_factor"] * values["hidden_size"] / values["num_heads"]
    for name, usual in (("cell_norm_eps", values["norm_eps"]), ("head_dim", head)):
        if values[name] not in (None, usual):
            raise ValueError(f"{name}={values[name]}; accepted is {usual:g}")
    mixer = MLSTMConfig(
        num_heads=values["num_heads"],
        qk_dim_factor=float(values["qk_dim_factor"]),
        v_dim_factor=float(values["v_dim_factor"]),
        gate_soft_cap=float(values["gate_soft_cap"]),
        normalizer_eps=float(values["eps"]),
        norm_eps=float(values["norm_eps"]),
    )
    inner = SwiGLUConfig(intermediate_size=_width(values))
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        layers={"L": LayerConfig(mixer=mixer, feedforward=inner)},
        tie_embeddings=values["tie_word_embeddings"],
        norm_eps=float(values["norm_eps"]),
        logits_cap=float(values["output_logit_soft_cap"]),
    )


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer = the_mixer(config, MLSTMConfig)
    inner = config.layers[config.letters()[0]].feedforward
    if not isinstance(inner, SwiGLUConfig) or config.logits_cap is None:
        raise ValueError(
            f"model has feedforwards of {type(inner).__name__} and logits_cap={config.logits_cap}; accepted are SwiGLU and a number"
        )
    width = inner.width(config.hidden_size)
    return dict(
        num_heads=mixer.num_heads,
        qk_dim_factor=mixer.qk_dim_factor,
        v_dim_factor=mixer.v_dim_factor,
        gate_soft_cap=mixer.gate_soft_cap,
        eps=mixer.normalizer_eps,
        norm_eps=config.norm_eps,
        output_logit_soft_cap=config.logits_cap,
        ffn_proj_factor=width / config.hidden_size,
        ffn_round_up_to_multiple_of=width,
        weight_mode="single",
        embedding_dim=config.hidden_size,
        num_blocks=config.num_layers,
    )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    return _TOP if layer < 0 else prefixed(f"backbone.blocks.{layer}.", _TABLE)


FAMILY = Family(
    model_type="xlstm",
    architecture="xLSTMForCausalLM",
    library="transformers",
    kinds={
        **dict.fromkeys(("num_heads", "head_dim", "embedding_dim", "num_blocks", "ffn_round_up_to_multiple_of"), "size"),
        **dict.fromkeys(
            (
                "qk_dim_factor", "v_dim_factor", "eps", "norm_eps", "cell_norm_eps", "ffn_proj_factor", "gate_soft_cap",
                "output_logit_soft_cap",
            ),
            "positive",
        ),
    },
    defaults=dict(
        num_heads=8, head_dim=None, cell_norm_eps=None, embedding_dim=None, num_blocks=None, qk_dim_factor=0.5, v_dim_factor=1.0,
        eps=1e-6, norm_eps=1e-6,
        ffn_proj_factor=2.667, ffn_round_up_to_multiple_of=64, gate_soft_cap=15.0, output_logit_soft_cap=30.0,
        tie_word_embeddings=False,
    ),
    only=dict(
        use_bias=(False,), add_out_norm=(True,), weight_mode=("single",), add_embedding_dropout=(False,), add_post_norm=(False,),
        add_qk_norm=(False,), add_post_blocks_norm=(True,), mlstm_round_up_to_multiple_of=(64,), lm_head_bias=(False,),
    ),
    unused=frozenset(
        """
        add_forward_backend_padding autocast_kernel_dtype chunk_size chunkwise_kernel forward_backend_name force_bos_token_insert
        igate_bias_init_range inference_state_dtype max_inference_chunksize mode norm_reduction_force_float32 return_last_states
        sequence_kernel step_kernel
        """.split()
    ),
    sizes=("num_heads", ("qk_dim_factor", "hidden_size"), ("v_dim_factor", "hidden_size")),
    read=_read,
    prefix="backbone.blocks.",
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
