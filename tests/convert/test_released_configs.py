"""The config.json of released models, with fields that no library writes any more, is read; and Ling-3.0 by its released names."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

from lsm_jax.convert import Checkpoint, export, model_config
from lsm_jax.convert.families import FAMILIES
from lsm_jax.convert.huggingface import checkpoint_layout
from lsm_jax.mixers import MLAConfig
from lsm_jax.models import count_parameters
from tests.convert.test_released import GOLDENS, changed, imported

COMMON: dict[str, Any] = dict(torch_dtype="bfloat16", use_cache=True, initializer_range=0.02)
_QWEN_TEXT: dict[str, Any] = dict(
    attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="bfloat16", eos_token_id=248044,
    full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=1024, initializer_range=0.02, intermediate_size=3584,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6, linear_conv_kernel_dim=4, linear_key_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=16, linear_value_head_dim=128, mamba_ssm_dtype="float32",
    max_position_embeddings=262144, mlp_only_layers=[], model_type="qwen3_5_text", mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False, num_attention_heads=8, num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-6,
    rope_parameters=dict(
        mrope_interleaved=True, mrope_section=[11, 11, 10], rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25,
    ),
    tie_word_embeddings=True, use_cache=True, vocab_size=248320,
)  # fmt: skip
_LING: dict[str, Any] = COMMON | dict(
    architectures=["BailingMoeV3ForCausalLM"], attention_dropout=0.0, embedding_dropout=0.0, eos_token_id=156895,
    expert_swiglu_limit_list=[0] * 36 + [4] * 6, first_k_dense_replace=2, gated_attention_proj_granularity_type="head_wise",
    group_norm_size=1, head_dim=128, hidden_act="silu", hidden_size=2560, intermediate_size=6144, kda_lower_bound=-5.0,
    kda_safe_gate=True, kv_lora_rank=512, layer_group_size=6, linear_silu=True, max_position_embeddings=262144,
    model_type="bailing_hybrid", moe_intermediate_size=768, moe_router_enable_expert_bias=True,
    moe_shared_expert_intermediate_size=768, n_group=8, no_kda_lora=True, norm_topk_prob=True, num_attention_heads=32,
    num_experts=512, num_experts_per_tok=8, num_hidden_layers=42, num_key_value_heads=32, num_nextn_predict_layers=1,
    num_shared_experts=1, output_dropout=0.0, partial_rotary_factor=0.5, q_lora_rank=None, qk_head_dim=192, qk_nope_head_dim=128,
    qk_rope_head_dim=64, rms_norm_eps=1e-6, rope_interleave=True, rope_scaling=None, rope_theta=6000000, rotary_dim=64,
    routed_scaling_factor=2.5, router_dtype="fp32", scale_router_input=False, score_function="sigmoid", scoring_func="sigmoid",
    share_expert_swiglu_limit_list=[0] * 36 + [5] * 6, short_conv_kernel_size=4, tie_word_embeddings=False, topk_group=4,
    topk_method="noaux_tc", up_proj_norm=False, use_bias=False, use_kda_lora=False, use_mla_nope=False, use_nGPT=False,
    use_qk_norm=True, use_qkv_bias=False, v_head_dim=128, value_norm=False, vocab_size=157184,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": dict(
        architectures=["Qwen3_5ForConditionalGeneration"], image_token_id=248056, model_type="qwen3_5", text_config=_QWEN_TEXT,
        tie_word_embeddings=True, transformers_version="4.57.0.dev0", video_token_id=248057, vision_config=dict(depth=12),
        vision_end_token_id=248054, vision_start_token_id=248053,
    ),
    "Ling-3.0-Flash": _LING,
    "Ling-3.0-tiny": _LING | dict(
        expert_swiglu_limit_list=None, first_k_dense_replace=1, hidden_size=1536, intermediate_size=4608, layer_group_size=4,
        max_position_embeddings=131072, moe_intermediate_size=512, moe_shared_expert_intermediate_size=512,
        num_attention_heads=16, num_experts=128, num_hidden_layers=24, num_key_value_heads=16, num_nextn_predict_layers=0,
        q_lora_rank=256, share_expert_swiglu_limit_list=None,
    ),
    "xLSTM-7B": COMMON | dict(
        add_out_norm=True, architectures=["xLSTMForCausalLM"], autocast_kernel_dtype="bfloat16", bos_token_id=0, chunk_size=64,
        chunkwise_kernel="chunkwise--triton_xl_chunk", embedding_dim=4096, eos_token_id=2, eps=1e-6, ffn_proj_factor=2.667,
        ffn_round_up_to_multiple_of=64, gate_soft_cap=15.0, head_dim=512, inference_state_dtype="float32",
        max_inference_chunksize=16384, mlstm_round_up_to_multiple_of=64, mode="inference", model_type="xlstm", norm_eps=1e-6,
        norm_reduction_force_float32=True, num_blocks=32, num_heads=8, output_logit_soft_cap=30.0, qk_dim_factor=0.5,
        return_last_states=True, sequence_kernel="native_sequence__triton", step_kernel="triton", tie_word_embeddings=False,
        use_bias=False, v_dim_factor=1.0, vocab_size=50304, weight_mode="single",
    ),
    "mamba-130m-hf": COMMON | dict(
        architectures=["MambaForCausalLM"], bos_token_id=0, conv_kernel=4, d_inner=1536, d_model=768, eos_token_id=0, expand=2,
        fused_add_norm=True, hidden_act="silu", hidden_size=768, initializer_range=0.1, intermediate_size=1536,
        layer_norm_epsilon=1e-5, model_type="mamba", n_layer=24, num_hidden_layers=24, pad_token_id=0, pad_vocab_size_multiple=8,
        rescale_prenorm_residual=False, residual_in_fp32=True, rms_norm=True, ssm_cfg={}, state_size=16, time_step_floor=0.0001,
        time_step_init_scheme="random", time_step_max=0.1, time_step_min=0.001, time_step_rank=48, time_step_scale=1.0,
        use_bias=False, use_conv_bias=True, vocab_size=50280,
    ),
    "Mamba-Codestral-7B": COMMON | dict(
        architectures=["Mamba2ForCausalLM"], bos_token_id=0, chunk_size=256, conv_kernel=4, eos_token_id=0, expand=2, head_dim=64,
        hidden_act="silu", hidden_size=4096, initializer_range=0.1, intermediate_size=8192, layer_norm_epsilon=1e-5,
        model_type="mamba2", n_groups=8, norm_before_gate=True, num_heads=128, num_hidden_layers=64, pad_token_id=0,
        rescale_prenorm_residual=False, residual_in_fp32=True, rms_norm=True, state_size=128, tie_word_embeddings=False,
        time_step_floor=0.0001, time_step_init_scheme="random", time_step_limit=[0.0, float("inf")], time_step_max=0.1,
        time_step_min=0.001, time_step_rank=256, time_step_scale=1.0, use_bias=False, use_conv_bias=True, vocab_size=32768,
    ),
    "Olmo-Hybrid-7B": COMMON | dict(
        architectures=["OlmoHybridForCausalLM"], attention_bias=False, hidden_act="silu", hidden_size=3840,
        intermediate_size=11008, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8, linear_allow_neg_eigval=True,
        linear_conv_kernel_dim=4, linear_key_head_dim=96, linear_num_key_heads=30, linear_num_value_heads=30,
        linear_use_gate=True, linear_value_head_dim=192, max_position_embeddings=32768, model_type="olmo_hybrid",
        num_attention_heads=30, num_hidden_layers=32, num_key_value_heads=30, rms_norm_eps=1e-6, rope_parameters=None,
        rope_theta=None, tie_word_embeddings=False, vocab_size=100352,
    ),
    "Nemotron-Nano-9B-v2": COMMON | dict(
        architectures=["NemotronHForCausalLM"], chunk_size=128, conv_kernel=4, expand=2, head_dim=128, hidden_size=4480,
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", intermediate_size=15680,
        layer_norm_epsilon=1e-5, mamba_head_dim=80, mamba_hidden_act="silu", mamba_num_heads=128, mlp_hidden_act="relu2",
        model_type="nemotron_h", n_groups=8, num_attention_heads=40, num_hidden_layers=56, num_key_value_heads=8,
        rescale_prenorm_residual=True, residual_in_fp32=False, rms_norm_eps=1e-5, ssm_state_size=128, tie_word_embeddings=False,
        time_step_limit=[0.0, float("inf")], time_step_rank=256, use_mamba_kernels=True, vocab_size=131072,
    ),
    "Granite-4.0-H-350M": COMMON | dict(
        architectures=["GraniteMoeHybridForCausalLM"], attention_multiplier=0.015625, embedding_multiplier=12, hidden_act="silu",
        hidden_size=768, intermediate_size=2048, layer_types=["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
        logits_scaling=3, mamba_d_conv=4, mamba_d_head=32, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=48,
        model_type="granitemoehybrid", num_attention_heads=12, num_experts_per_tok=0, num_hidden_layers=32, num_key_value_heads=4,
        num_local_experts=0, position_embedding_type="nope", residual_multiplier=0.246, rms_norm_eps=1e-5,
        shared_intermediate_size=2048, tie_word_embeddings=True, vocab_size=100352,
    ),
}  # fmt: skip
"""Fields as released files have them; where a released file was not at hand, the sizes that its authors state."""
PUBLISHED = {
    "Ling-3.0-Flash": (124e9, 5.1e9), "Ling-3.0-tiny": (7.9e9, 1.3e9), "xLSTM-7B": (6.87e9, None), "mamba-130m-hf": (129e6, None), "Mamba-Codestral-7B": (7.28e9, None),
    "Olmo-Hybrid-7B": (7.43e9, None), "Nemotron-Nano-9B-v2": (8.89e9, None), "Granite-4.0-H-350M": (340e6, None),
}  # fmt: skip
"""Parameters, and those of a token, as the authors state them, who leave out the embedding, or as the files have them."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_released_config_is_read(name):
    fields = CONFIGS[name]
    config = FAMILIES[fields["model_type"]].described(fields, "config.json")
    assert config.num_layers == len(config.letters())


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_released_configs_have_the_published_number_of_parameters(name):
    fields = CONFIGS[name]
    total, active = PUBLISHED[name]
    counts = count_parameters(FAMILIES[fields["model_type"]].described(fields, "config.json"))
    assert counts["total"] == pytest.approx(total, rel=0.01)
    assert active is None or counts["active"] == pytest.approx(active, rel=0.09)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("Ling-3.0-Flash", dict(architectures=["BailingMoeV2_5ForCausalLM"]), "BailingHybridForCausalLM'. or .'BailingMoeV3For"),
        ("Ling-3.0-Flash", dict(moe_shared_expert_intermediate_size=8), "accepted is moe_intermediate_size=768"),
        ("Ling-3.0-Flash", dict(rotary_dim=32), "rotary_dim=32; accepted is qk_rope_head_dim=64"),
        ("Ling-3.0-Flash", dict(no_kda_lora=False), "no_kda_lora=False; accepted is True"),
        ("xLSTM-7B", dict(embedding_dim=None), "missing fields: hidden_size"),
        ("xLSTM-7B", dict(hidden_size=8), "embedding_dim=4096; accepted is hidden_size=8"),
        ("xLSTM-7B", dict(head_dim=64), "head_dim=64; accepted is 512"),
        ("mamba-130m-hf", dict(d_model=8), "d_model=8; accepted is hidden_size=768"),
        ("mamba-130m-hf", dict(ssm_cfg=dict(layer="Mamba2")), "ssm_cfg=.*; accepted is {} or None"),
        ("Mamba-Codestral-7B", dict(intermediate_size=64), "intermediate_size=64; accepted is expand . hidden_size = 8192"),
        ("Olmo-Hybrid-7B", dict(linear_use_gate=False), "linear_use_gate=False; accepted is True"),
    ],
)  # fmt: skip
def test_errors_name_the_field(name, fields, words):
    given = CONFIGS[name] | fields
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        FAMILIES[given["model_type"]].described(given, "config.json")


@pytest.mark.parametrize(("hidden", "width"), [(4096, 10944), (768, 2048), (1024, 2752)])
def test_feedforwards_of_xlstm_have_the_width_of_transformers(hidden, width):
    """768 x 2.667 is 2048.256, which transformers rounds to 2048, a multiple of 64."""
    fields = CONFIGS["xLSTM-7B"] | dict(
        hidden_size=hidden, embedding_dim=hidden, head_dim=hidden // 8
    )
    config = FAMILIES["xlstm"].described(fields, "config.json")
    assert config.layers["L"].feedforward.intermediate_size == width


LING = "transformers-bailing_hybrid"


def released(tensors):
    """Store the output projections of Kimi Delta Attention by the names of released files."""
    for name in [n for n in tensors if n.endswith(".attention.A_log")]:
        prefix = name.removesuffix("A_log")
        tensors[f"{prefix}o_proj.weight"] = tensors.pop(f"{prefix}dense.weight")


def released_ling(folder):
    """Write the golden, which has the names and fields that transformers writes, as released files are; return its folder."""
    fields = dict(architectures=["BailingMoeV3ForCausalLM"], head_dim=8, no_kda_lora=True, q_lora_rank=None)  # fmt: skip
    path = changed(LING, folder, released, **fields)
    given = json.loads((path / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):  # fmt: skip
        del given[name]
    (path / "config.json").write_text(json.dumps(given))
    return path


def test_released_names_of_ling_are_those_of_the_model(tmp_path):
    source = Checkpoint(released_ling(tmp_path))
    config = model_config(source)
    assert config == model_config(GOLDENS / LING)
    assert checkpoint_layout(source, config).shapes == source.shapes


@pytest.mark.slow
def test_both_forms_of_ling_are_one_model(tmp_path):
    expected, folder = imported(GOLDENS / LING), released_ling(tmp_path)
    config, params = imported(folder)
    assert config == expected[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected[1])
    export(params, config, folder, tmp_path / "out")
    written, given = (f / "model.safetensors" for f in (tmp_path / "out", folder))
    assert written.read_bytes() == given.read_bytes()


@pytest.mark.slow
def test_ling_with_queries_of_a_low_rank_is_read(tmp_path):
    def change(tensors):
        released(tensors)
        for name in [n for n in tensors if n.endswith("kv_a_layernorm.weight")]:
            prefix = name.removesuffix("kv_a_layernorm.weight")
            whole = tensors.pop(f"{prefix}q_proj.weight")
            tensors[f"{prefix}q_a_proj.weight"] = whole[:4].copy()
            tensors[f"{prefix}q_a_layernorm.weight"] = np.ones(4, np.float32)
            tensors[f"{prefix}q_b_proj.weight"] = whole[:, :4].copy()

    folder = changed(LING, tmp_path, change, q_lora_rank=4)
    config, params = imported(folder)
    full = next(x.mixer for x in config.layers.values() if isinstance(x.mixer, MLAConfig))
    assert full.query_rank == 4 == model_config(folder).layers["N"].mixer.query_rank
    export(params, config, folder, tmp_path / "out")
    written, given = (f / "model.safetensors" for f in (tmp_path / "out", folder))
    assert written.read_bytes() == given.read_bytes()
