"""Multi-head latent attention of flash-linear-attention (`model_type` mla). Its code rotates the halves of the rotated channels,
scales the scores by the root of all channels of a key, and computes the norms of latents and queries with an epsilon of 1e-5, whatever
`rope_scaling` and `norm_eps` are. It cuts values that are wider than keys, which then do not fit the output's matrix."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.convert.fields import shown
from lsm_jax.convert.layout import Entry, Names
from lsm_jax.mixers import MLAConfig
from lsm_jax.models import ModelConfig

_NORM_EPS = 1e-5
_TABLE: Names = {
    "mixer.q_proj.kernel": "attn.q_proj.weight",
    "mixer.q_down.kernel": "attn.q_proj.0.weight",
    "mixer.q_norm.scale": "attn.q_proj.1.weight",
    "mixer.q_up.kernel": "attn.q_proj.2.weight",
    "mixer.rope_proj.kernel": "attn.k_rope.weight",
    "mixer.latent_proj.kernel": "attn.kv_proj.0.weight",
    "mixer.latent_norm.scale": "attn.kv_proj.1.weight",
    "mixer.o_proj.kernel": "attn.o_proj.weight",
}


def _config(values: dict[str, Any]) -> ModelConfig:
    _check_rotation(values)
    keys = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    if values["qk_head_dim"] not in (None, keys):
        raise ValueError(
            f"qk_head_dim={values['qk_head_dim']}: accepted are null and qk_nope_head_dim + qk_rope_head_dim = {keys}"
        )
    if values["v_head_dim"] > keys:
        raise ValueError(
            f"v_head_dim={values['v_head_dim']}: accepted are numbers to qk_nope_head_dim + qk_rope_head_dim = {keys}"
        )
    mixer = MLAConfig(
        num_heads=values["num_heads"],
        key_dim=values["qk_nope_head_dim"],
        rope_dim=values["qk_rope_head_dim"],
        value_dim=values["v_head_dim"],
        latent_dim=values["kv_lora_rank"],
        query_rank=values["q_lora_rank"],
        rope_base=float(values["rope_theta"]),
        rope_interleaved=False,
        norm_eps=_NORM_EPS,
    )
    return fla.decoder(values, mixer)


def _check_rotation(values: dict[str, Any]) -> None:
    """Raise ValueError if a field describes another rotation than `rope_theta`, the only field that FLA's code reads."""
    plain = dict(rope_type="default", rope_theta=values["rope_theta"])
    for name in ("rope_scaling", "rope_parameters"):
        if (plain | (values[name] or {})) != plain:
            raise ValueError(
                f"{name}={shown(values[name])}; accepted are null and {plain}, the rotation that FLA's mla computes"
            )


def _names(values: dict[str, Any], config: ModelConfig, layer: int) -> Names:
    heads = Entry("attn.kv_proj.2.weight", groups=values["num_heads"])
    table = {**_TABLE, "mixer.k_up.kernel": heads, "mixer.v_up.kernel": heads}
    return fla.names(table)(values, config, layer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, MLAConfig, softmax=False)
    if mixer.rope_base is None:
        raise ValueError("MLAConfig.rope_base=None; accepted for an export is a number")
    return fields | dict(
        num_heads=mixer.num_heads,
        qk_nope_head_dim=mixer.key_dim,
        qk_rope_head_dim=mixer.rope_dim,
        qk_head_dim=mixer.key_dim + mixer.rope_dim,
        v_head_dim=mixer.value_dim,
        kv_lora_rank=mixer.latent_dim,
        q_lora_rank=mixer.query_rank,
        rope_theta=mixer.rope_base,
    )


FAMILY = fla.family(
    "mla",
    "MLAForCausalLM",
    kinds=dict(
        **dict.fromkeys(
            """
            qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim kv_lora_rank q_lora_rank
            """.split(),
            "size",
        ),
        **dict.fromkeys(("rope_scaling", "rope_parameters"), "object"),
        rope_theta="positive",
    ),
    defaults=dict(
        num_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192, v_head_dim=128, kv_lora_rank=512, q_lora_rank=64,
        rope_theta=10000.0, rope_scaling=None, rope_parameters=None,
    ),
    only=dict(attn=(None,), window_size=(None,)),
    null_is_value=frozenset({"qk_head_dim", "q_lora_rank"}),
    sizes=("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", ("num_heads", "v_head_dim")),
    config=_config,
    names=_names,
    describe=_describe,
)  # fmt: skip
