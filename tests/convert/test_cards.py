"""The cards that a released model fits on, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lsm_jax import hub
from lsm_jax.convert import cards
from lsm_jax.models import count_parameters
from lsm_jax.parallel import MeshConfig
from lsm_jax.training.inference_plan import inference_plan
from tests.convert.test_released import GOLDENS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "released_models.md"
FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI = dict(
    architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", vocab_size=163840, hidden_size=2304, num_hidden_layers=27,
    num_attention_heads=32, num_key_value_heads=32, head_dim=72, intermediate_size=9216, moe_intermediate_size=1024,
    num_experts=256, num_experts_per_token=8, num_shared_experts=1, num_expert_group=1, topk_group=1, use_grouped_topk=True,
    moe_renormalize=True, moe_router_activation_func="sigmoid", moe_layer_freq=1, first_k_dense_replace=1,
    routed_scaling_factor=2.446, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    mla_use_nope=True, rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False,
    num_nextn_predict_layers=0, model_max_length=1048576, dtype="bfloat16",
    linear_attn_config=dict(
        full_attn_layers=FULL, kda_layers=[i for i in range(1, 28) if i not in FULL], head_dim=128, num_heads=32,
        short_conv_kernel_size=4,
    ),
)  # fmt: skip
"""Kimi-Linear-48B-A3B, as its config.json and its paper (arXiv 2510.26692) describe it."""
QWEN = dict(
    architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", vocab_size=151936, hidden_size=2048, num_hidden_layers=48,
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, intermediate_size=5120, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10, decoder_sparse_step=1, norm_topk_prob=True,
    full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=32, partial_rotary_factor=0.25, rope_theta=10000000, rope_scaling=None,
    rms_norm_eps=1e-6, hidden_act="silu", attention_bias=False, attention_dropout=0.0, mlp_only_layers=[],
    output_router_logits=False, router_aux_loss_coef=0.001, use_sliding_window=False, max_position_embeddings=262144,
    tie_word_embeddings=False, torch_dtype="bfloat16",
)  # fmt: skip
"""Qwen3-Next-80B-A3B, likewise."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "billions"), [(QWEN, 79.67), (KIMI, 49.12)], ids=["qwen", "kimi"]
)
def test_the_page_has_the_tables_of_the_command(fields, billions, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    counts = count_parameters(cards.described_model(str(tmp_path)))
    assert counts["total"] / 1e9 == pytest.approx(billions, abs=0.01)
    assert counts["active"] / 1e9 == pytest.approx(3.5, abs=0.6)
    assert cards.main([f"--source={tmp_path}"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed in PAGE.read_text()
    rows = printed.splitlines()[-3:]
    smallest = [int(row.split(" | ")[3].partition(":")[0]) for row in rows]  # of H200
    # Two bytes a number for inference and LoRA, sixteen for full tuning, and no more than the next power of two.
    least = [2 * billions / 140.4, 2 * billions / 140.4, 16 * billions / 140.4]
    assert smallest == sorted(smallest)
    for count, bytes_alone in zip(smallest, least, strict=True):
        assert bytes_alone / 1.08 < count <= 4 * max(1, bytes_alone)


@pytest.mark.slow
def test_parameters_and_states_of_inference_are_counted():
    model = cards.described_model(str(GOLDENS / "transformers-kimi_linear"))
    known = {}
    one = inference_plan(model, MeshConfig(data=1), 1, length=64, known=known)
    total = count_parameters(model)["total"]
    assert 2 * total < one.parameters < 3 * total  # matrices in bfloat16, others in float32
    assert one.working > 0
    # Two memories of 2 heads, their convolutions, and the latents of one layer: 12 + 4 numbers a token.
    memories = 2 * (2 * 8 * 8 * 4 + 3 * 16 * 3 * 2)
    assert 0 <= one.state - memories - 64 * 16 * 2 < 200  # clocks and segment ids
    more = inference_plan(model, MeshConfig(data=1), 1, length=128, known=known)
    assert more.state - one.state == 64 * 16 * 2
    cut = inference_plan(model, MeshConfig(data=1, expert=4), 4, length=64, known=known)
    experts = 2 * 2 * 3 * 4 * 32 * 8  # bytes, layers, matrices, experts
    assert one.parameters - cut.parameters == experts * 3 // 4
    with pytest.raises(ValueError, match="mesh.tensor=2; accepted is 1"):
        inference_plan(model, MeshConfig(tensor=2), 2, length=64)


def test_the_table_has_the_smallest_number_of_cards():
    found = {
        "inference": [cards.Need(1, 90.0, ""), cards.Need(2, 45.5, "expert=2")],
        "LoRA": [cards.Need(n, 1600 / n, f"fsdp={n}") for n in (4, 8, 16)],
        "full": [],
    }
    head, _, *rows = cards.table(found)
    assert head.startswith("| use | L40S 48 GB (45 GiB) | H100 80 GB (79.6 GiB) |")
    assert rows[0].split(" | ")[1:4] == ["more than 64", "2: 45.5 GiB each, expert=2", "1: 90.0 GiB each"]  # fmt: skip
    assert rows[1].split(" | ")[3] == "16: 100.0 GiB each, fsdp=16"
    assert rows[2] == "| full | more than 64 | more than 64 | more than 64 | more than 64 |"


def test_wrong_sources_are_named(tmp_path, capsys):
    path = tmp_path / "config.json"
    for content, words in (
        ('{"model_type": "gpt2"}', "model_type='gpt2'; accepted are abc, bailing_hybrid, "),
        (json.dumps(KIMI | dict(new=1)), "unknown fields, .*: new=1"),
        ("[", "config.json cannot be read"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=words):
            cards.described_model(str(path))
    with pytest.raises(ValueError, match="is no file; accepted is a config.json or its folder"):
        cards.described_model(str(tmp_path / "other.json"))
    assert cards.main([f"--source={path}", "--length=0"]) == 1
    assert capsys.readouterr().err == "plan: --length=0: accepted are numbers from 1 to 2^31 - 1\n"


def test_the_plan_of_a_hub_id_downloads_no_weights(monkeypatch):
    asked = []

    def download(found, argument, patterns):
        asked.append((str(found), patterns))
        return GOLDENS / "transformers-kimi_linear"

    monkeypatch.setattr(hub, "_download", download)
    assert cards.described_model("owner/model").num_layers > 1
    assert asked == [("owner/model", ("config.json",))]


@pytest.mark.parametrize("flag", ["--length", "--train_length"])
def test_lengths_beyond_32_bits_are_refused(flag, capsys):
    assert cards.main([f"--source={GOLDENS / 'transformers-kimi_linear'}", f"{flag}={2**32}"]) == 1
    assert f"{flag}={2**32}: accepted are numbers from 1" in capsys.readouterr().err
