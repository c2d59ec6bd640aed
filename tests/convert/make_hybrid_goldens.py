"""Make those folders of tests/convert/released_goldens/ that have hybrids of Mamba-2, short convolutions or mLSTM with attention:
Granite-4.0-H, Bamba, Nemotron-H, Falcon-H1, LFM2 and xLSTM, and RecurrentGemma, saved by Hugging Face's transformers.

    python tests/convert/make_hybrid_goldens.py
    python tests/convert/make_hybrid_goldens.py --names=transformers-bamba

Their files are those of `make_released_goldens`, made with the same versions (RecurrentGemma's with torch 2.13.0). `e_score_correction_bias`, a buffer of routers, is
drawn like the parameters, and has no gradient.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from make_released_goldens import OUT, write

MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
GRANITE = (
    MAMBA
    | HEADS
    | dict(
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.25,
        logits_scaling=0.5,
    )
)
NEMOTRON = HEADS | dict(
    head_dim=8, mamba_num_heads=6, mamba_head_dim=8, ssm_state_size=8, n_groups=2, intermediate_size=24, num_hidden_layers=None,
)  # fmt: skip
FALCON = MAMBA | HEADS | dict(
    mamba_d_ssm=64, intermediate_size=24, lm_head_multiplier=1.2, embedding_multiplier=2.0, mlp_multipliers=[0.7, 1.5],
    key_multiplier=0.6, attention_out_multiplier=0.9, attention_in_multiplier=1.25, ssm_multipliers=[0.9, 1.1, 0.7, 0.8, 1.2],
    ssm_in_multiplier=1.3, ssm_out_multiplier=0.85, head_dim=8,
)  # fmt: skip
# name: (module, class, fields of its config)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "transformers-granitemoehybrid": (
        "transformers", "GraniteMoeHybrid",
        GRANITE | dict(
            num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"], num_local_experts=0, shared_intermediate_size=24,
            tie_word_embeddings=True, position_embedding_type="nope", logits_scaling=6.0,
        ),
    ),
    "transformers-granitemoehybrid-moe": (
        "transformers", "GraniteMoeHybrid",
        GRANITE | dict(
            layer_types=["linear_attention", "full_attention"], num_local_experts=4, num_experts_per_tok=2, intermediate_size=12,
            shared_intermediate_size=16, position_embedding_type="rope",
        ),
    ),
    "transformers-bamba": (
        "transformers", "Bamba", MAMBA | HEADS | dict(intermediate_size=24, num_hidden_layers=3, attn_layer_indices=[1]),
    ),
    "transformers-nemotron_h": (
        "transformers", "NemotronH", NEMOTRON | dict(hybrid_override_pattern="M-M*-"),
    ),
    "transformers-nemotron_h-moe": (
        "transformers", "NemotronH",
        NEMOTRON | dict(
            hybrid_override_pattern="MEM*E", n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, n_group=4,
            moe_shared_expert_intermediate_size=16, topk_group=2, routed_scaling_factor=2.5,
        ),
    ),
    "transformers-falcon_h1": ("transformers", "FalconH1", FALCON),
    "transformers-falcon_h1-norm": (
        "transformers", "FalconH1", FALCON | dict(mamba_rms_norm=True, mamba_d_ssm=48, mamba_n_heads=6, mamba_d_head=8),
    ),
    "transformers-lfm2": (
        "transformers", "Lfm2",
        HEADS | dict(
            num_hidden_layers=3, intermediate_size=36, block_multiple_of=8, layer_types=["conv", "full_attention", "conv"],
        ),
    ),
    "transformers-xlstm": (
        "transformers", "xLSTM", dict(num_heads=2, ffn_proj_factor=1.3, ffn_round_up_to_multiple_of=8),
    ),
    "transformers-recurrent_gemma": (
        "transformers", "RecurrentGemma",
        dict(
            num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=1, lru_width=48, intermediate_size=72,
            attention_window_size=6, pad_token_id=None,  # whose embedding has no gradient in torch
        ),
    ),
}  # fmt: skip
GRADIENTS = (
    "transformers-granitemoehybrid-moe",
    "transformers-nemotron_h-moe",
    "transformers-recurrent_gemma",
)


def main() -> int:
    """Write the goldens that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", help="names of goldens, separated by commas; default: all")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder that is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.names.split(",") if arguments.names else MODELS:
        seed, gradients = list(MODELS).index(name), name in GRADIENTS
        write(name, MODELS[name], seed, arguments.out, gradients=gradients)
    return 0


if __name__ == "__main__":
    sys.exit(main())
