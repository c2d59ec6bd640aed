"""PaTH attention of flash-linear-attention (`model_type` path_attn)."""

from __future__ import annotations

from typing import Any

from lsm_jax.convert.families import fla
from lsm_jax.mixers import PaTHConfig
from lsm_jax.models import ModelConfig

_TABLE = {
    **fla.PROJECTIONS,
    "mixer.w_proj.kernel": "attn.w_proj.weight",
    "mixer.w_down.kernel": "attn.w_proj.0.weight",
    "mixer.w_up.kernel": "attn.w_proj.1.weight",
    "mixer.w_conv.weight": "attn.w_conv1d.weight",
    "mixer.beta_proj.kernel": "attn.bt_proj.weight",
    "mixer.beta_proj.bias": "attn.bt_proj.bias",
    "mixer.f_proj.kernel": "attn.g_proj.weight",
    "mixer.f_proj.bias": "attn.g_proj.bias",
}
_RANK, _CONVOLUTION = 32, 3  # FLA's config has no field for them


def _config(values: dict[str, Any]) -> ModelConfig:
    heads, width = values["num_heads"], values["hidden_size"]
    if width % heads:
        raise ValueError(f"num_heads={heads}: accepted is a divisor of hidden_size={width}")
    mixer = PaTHConfig(
        num_heads=heads,
        num_kv_heads=values["num_kv_heads"],
        head_dim=width // heads,
        rank=_RANK if values["use_low_rank_w"] else None,
        conv_size=_CONVOLUTION,
        forget_gate=values["use_forget_gate"],
    )
    return fla.decoder(values, mixer)


def _describe(config: ModelConfig) -> dict[str, Any]:
    mixer, fields = fla.describe(config, PaTHConfig, softmax=False)
    for name, value, accepted in (
        ("rank", mixer.rank, (_RANK, None)),
        ("conv_size", mixer.conv_size, (_CONVOLUTION,)),
        ("qk_norm", mixer.qk_norm, (False,)),
        (
            "num_heads * PaTHConfig.head_dim",
            mixer.num_heads * mixer.head_dim,
            (config.hidden_size,),
        ),
    ):
        if value not in accepted:
            listed = " or ".join(map(repr, accepted))
            raise ValueError(f"PaTHConfig.{name}={value!r}; accepted for an export is {listed}")
    return fields | dict(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        use_low_rank_w=mixer.rank is not None,
        use_forget_gate=mixer.forget_gate,
    )


FAMILY = fla.family(
    "path_attn",
    "PaTHAttentionForCausalLM",
    kinds=dict(num_kv_heads="size", use_low_rank_w="flag", use_forget_gate="flag"),
    defaults=dict(num_heads=32, num_kv_heads=None, use_low_rank_w=True, use_forget_gate=False),
    only=dict(attn=(None,), use_w_shortconv=(True,)),
    sizes=("num_kv_heads",),
    config=_config,
    names=fla.names(_TABLE),
    describe=_describe,
)  # fmt: skip
