"""Fields of config.json as hybrids were released with them are read, and give models with the published number of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from lsm_jax.convert.families import FAMILIES
from lsm_jax.models import count_parameters

COMMON = dict(torch_dtype="bfloat16", use_cache=True, initializer_range=0.02)
LFM2: dict[str, Any] = COMMON | dict(
    architectures=["Lfm2ForCausalLM"], block_auto_adjust_ff_dim=True, block_dim=2048, block_ff_dim=12288,
    block_ffn_dim_multiplier=1.0, block_mlp_init_scale=1.0, block_multiple_of=256, block_norm_eps=1e-05, block_out_init_scale=1.0,
    block_use_swiglu=True, block_use_xavier_init=True, bos_token_id=1, conv_L_cache=3, conv_bias=False, conv_dim=2048,
    conv_dim_out=2048, conv_use_xavier_init=True, eos_token_id=7, full_attn_idxs=[2, 5, 8, 10, 12, 14], hidden_size=2048,
    max_position_embeddings=128000, model_type="lfm2", norm_eps=1e-05, num_attention_heads=32, num_heads=32, num_hidden_layers=16,
    num_key_value_heads=8, pad_token_id=0, rope_theta=1e6, use_pos_enc=True, vocab_size=65536,
)  # fmt: skip
FALCON: dict[str, Any] = COMMON | dict(
    architectures=["FalconH1ForCausalLM"], attention_bias=False, attention_dropout=0.0, attention_in_multiplier=1.0,
    attention_out_multiplier=0.9375, attn_layer_indices=None, embedding_multiplier=5.656854249492381, head_dim=64,
    hidden_act="silu", hidden_size=1024, intermediate_size=2048, key_multiplier=0.39062499999999994, lm_head_multiplier=0.0390625,
    mamba_chunk_size=128, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_ssm=1536, mamba_d_state=128,
    mamba_expand=2, mamba_n_groups=1, mamba_n_heads=24, mamba_norm_before_gate=False, mamba_proj_bias=False,
    mamba_rms_norm=False, mamba_use_mlp=True, max_position_embeddings=16384, mlp_bias=False,
    mlp_multipliers=[0.8838834764831844, 0.5859375], model_type="falcon_h1", num_attention_heads=8, num_hidden_layers=36,
    num_key_value_heads=2, projectors_bias=False, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1e11, ssm_in_multiplier=1.25,
    ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    ssm_out_multiplier=0.23570226039551587, tie_word_embeddings=False, vocab_size=32784,
)  # fmt: skip
GRANITE: dict[str, Any] = COMMON | dict(
    architectures=["GraniteMoeHybridForCausalLM"], attention_bias=False, attention_dropout=0.0, attention_multiplier=0.0078125,
    embedding_multiplier=12, hidden_act="silu", hidden_size=4096, init_method="mup", intermediate_size=768,
    layer_types=["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)], logits_scaling=16, mamba_chunk_size=256,
    mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=128,
    mamba_proj_bias=False, max_position_embeddings=131072, model_type="granitemoehybrid", normalization_function="rmsnorm",
    num_attention_heads=32, num_experts_per_tok=10, num_hidden_layers=40, num_key_value_heads=8, num_local_experts=72,
    output_router_logits=False, position_embedding_type="nope", residual_multiplier=0.22, rms_norm_eps=1e-05, rope_scaling=None,
    rope_theta=10000, router_aux_loss_coef=0.0, shared_intermediate_size=1536, tie_word_embeddings=True, vocab_size=100352,
)  # fmt: skip
NEMOTRON: dict[str, Any] = COMMON | dict(
    architectures=["NemotronHForCausalLM"], attention_bias=False, attention_dropout=0.0, chunk_size=128, conv_kernel=4, expand=2,
    head_dim=128, hidden_dropout=0.0, hidden_size=2688, intermediate_size=1856, layer_norm_epsilon=1e-05, mamba_head_dim=64,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", mamba_hidden_act="silu", mamba_num_heads=64,
    mamba_proj_bias=False, mamba_ssm_cache_dtype="float32", max_position_embeddings=262144, mlp_bias=False, mlp_hidden_act="relu2",
    model_type="nemotron_h", moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_group=1, n_groups=8,
    n_routed_experts=128, n_shared_experts=1, norm_eps=1e-05, norm_topk_prob=True, num_attention_heads=32, num_experts_per_tok=6,
    num_hidden_layers=52, num_key_value_heads=2, num_logits_to_keep=1, partial_rotary_factor=1.0, rescale_prenorm_residual=True,
    residual_in_fp32=False, rope_theta=10000, routed_scaling_factor=2.5, sliding_window=None, ssm_state_size=128,
    tie_word_embeddings=False, time_step_floor=0.0001, time_step_limit=[0.0, {"__float__": "Infinity"}], time_step_max=0.1,
    time_step_min=0.001, topk_group=1, use_bias=False, use_conv_bias=True, use_mamba_kernels=True, vocab_size=131072,
)  # fmt: skip


def model_of(fields):
    family = FAMILIES[fields["model_type"]]
    config = family.config(family.values(fields, "config.json"))
    config.validate()
    return config


@pytest.mark.parametrize(
    ("fields", "total", "active"),
    [
        pytest.param(LFM2, 1.17e9, 1.17e9, id="LFM2-1.2B"),
        pytest.param(FALCON, 0.521e9, 0.521e9, id="Falcon-H1-0.5B"),
        pytest.param(GRANITE, 32e9, 9e9, id="Granite-4.0-H-Small", marks=pytest.mark.slow),
        pytest.param(NEMOTRON, 31.6e9, 3.6e9, id="Nemotron-3-Nano", marks=pytest.mark.slow),
    ],
)
def test_released_models_have_the_published_number_of_parameters(fields, total, active):
    counts = count_parameters(model_of(fields))
    assert counts["total"] == pytest.approx(total, rel=0.02)
    assert counts["active"] == pytest.approx(active, rel=0.06)


def test_layers_of_released_models():
    assert model_of(GRANITE).period() == "LLLLLNLLLL"
    granite, falcon = model_of(GRANITE), model_of(FALCON)
    assert (granite.embedding_scale, granite.residual_scale, granite.logits_scale) == (12, 0.22, 1 / 16)  # fmt: skip
    assert granite.layers["N"].mixer.scale == 1 / 128
    assert falcon.layers["L"].mixer.second.scale == 0.39062499999999994 / 8
    assert FAMILIES["falcon_h1"].describe_model(falcon)["key_multiplier"] == 0.39062499999999994
    # 23 layers of Mamba-2, 23 of experts and 6 of attention are 29 layers here: a feedforward belongs to the mixer before it.
    assert model_of(NEMOTRON).pattern == "EELFEELFEELFEELFEELFEEELFEEEE"
    assert model_of(LFM2).pattern == "LLNLLNLLNLNLNLNL"
    assert model_of(LFM2).layers["L"].feedforward.width(2048) == 8192
    with_both = LFM2 | dict(intermediate_size=8192)
    assert model_of(with_both).layers["L"].feedforward.width(2048) == 8192


def test_granite_without_mamba_is_read():
    fields = GRANITE | dict(
        layer_types=["attention"] * 40,
        num_local_experts=0,
        position_embedding_type="rope",
        rope_theta=1e7,
    )
    config = model_of(fields)
    assert config.pattern == "N" and config.layers["N"].mixer.rope_base == 1e7
