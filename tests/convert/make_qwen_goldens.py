"""Make those folders of tests/convert/released_goldens/ that have hybrids of delta rules with attention: Qwen3.5, its mixture of
experts, Qwen3-Next, OLMo-Hybrid, Kimi-Linear and Ling-3.0, saved by Hugging Face's transformers.

    python tests/convert/make_qwen_goldens.py
    python tests/convert/make_qwen_goldens.py --names=transformers-qwen3_next

Their files are those of `make_released_goldens`; the stored ones were made with transformers 5.23.0 and torch 2.14.1 in one thread.
flash-linear-attention is hidden from transformers, which then computes delta rules by its own code in torch. Models with
`text_config` have a vision tower, and read tokens alone. `e_score_correction_bias`, a buffer of routers, is drawn like the
parameters.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_author_goldens import randomize
from safetensors.torch import load_file, save_file

OUT = Path(__file__).parent / "released_goldens"
LENGTHS = (24, 17)
VOCABULARY = 48
SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4)
HEADS = dict(
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=12,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=8, shared_expert_intermediate_size=12, num_experts=4, num_experts_per_tok=2)  # fmt: skip
VISION = dict(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=2, patch_size=2, out_hidden_size=32, num_position_embeddings=4,
)  # fmt: skip
LATENT = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
    kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, moe_intermediate_size=8, num_experts=4,
    num_experts_per_token=2, num_shared_experts=2, num_expert_group=2, topk_group=1, first_k_dense_replace=1, pad_token_id=0,
    bos_token_id=1, eos_token_id=1,
)  # fmt: skip
ROTATION = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
# name: (class, fields of its config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers-qwen3_5_text": (
        "Qwen3_5ForCausalLM",
        SMALL | HEADS | dict(num_hidden_layers=3, full_attention_interval=3, intermediate_size=24, rope_parameters=ROTATION),
    ),
    "transformers-qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        dict(
            text_config=SMALL | HEADS | dict(
                num_hidden_layers=3, full_attention_interval=3, intermediate_size=24, linear_value_head_dim=8,
                rope_parameters=ROTATION | dict(mrope_section=[1, 1, 0], mrope_interleaved=True),
            ),
            vision_config=VISION, tie_word_embeddings=True,
        ),
    ),
    "transformers-qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        dict(
            text_config=SMALL | HEADS | EXPERTS | dict(num_hidden_layers=2, full_attention_interval=2),
            vision_config=VISION,
        ),
    ),
    "transformers-qwen3_next": (
        "Qwen3NextForCausalLM", SMALL | HEADS | EXPERTS | dict(intermediate_size=24, mlp_only_layers=[1]),
    ),
    "transformers-olmo_hybrid": (
        "OlmoHybridForCausalLM",
        SMALL | dict(
            num_attention_heads=4, num_key_value_heads=2, intermediate_size=24, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=16, rope_parameters=dict(rope_theta=None, rope_type="default"),
            pad_token_id=0, bos_token_id=1, eos_token_id=1,
        ),
    ),
    "transformers-kimi_linear": (
        "KimiLinearForCausalLM",
        LATENT | dict(
            linear_attn_config=dict(
                full_attn_layers=[3], kda_layers=[1, 2], num_heads=2, head_dim=8, short_conv_kernel_size=4,
            ),
        ),
    ),
    "transformers-bailing_hybrid": (
        "BailingHybridForCausalLM", LATENT | dict(head_dim=8, layer_group_size=3, num_nextn_predict_layers=0),
    ),
}  # fmt: skip
GRADIENTS = ("transformers-qwen3_5_text",)


def write(name: str, seed: int, out: Path) -> bool:
    """Draw the parameters of a model of `MODELS`, save it, and write its logits and, if it is in `GRADIENTS`, its gradients.

    Returns:
        Whether transformers computes the same logits, within 3e-5, token by token. Where a head's output is nearly 0, its norm
        magnifies the rounding of float32, and such a model is no measure.
    """
    kind, fields = MODELS[name]
    network = getattr(importlib.import_module("transformers"), kind)
    model = network(network.config_class(**fields)).float().eval()
    randomize(model, seed)
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if (
                "qwen" in name
                and parameter.endswith("norm.weight")
                and "linear_attn" not in parameter
            ):
                value.sub_(1)  # these norms multiply by 1 + the weight
        for buffer, value in model.named_buffers():
            if buffer.endswith("e_score_correction_bias"):
                value.copy_(0.25 * torch.randn_like(value))
        if model.config.tie_word_embeddings:  # as the head, it would make logits of size 40
            model.get_input_embeddings().weight.mul_(0.25)
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    if name in AS_RELEASED:
        AS_RELEASED[name](folder)
        again = network.from_pretrained(folder).state_dict()
        assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())
    (folder / "generation_config.json").unlink(missing_ok=True)

    def logits_of(tokens: np.ndarray) -> torch.Tensor:
        positions = torch.arange(len(tokens))[None]
        return model(torch.tensor(tokens)[None], position_ids=positions, use_cache=False).logits

    rng, arrays = np.random.default_rng(seed), {}
    for row, length in enumerate(LENGTHS):
        tokens = rng.integers(0, VOCABULARY, length)
        with torch.no_grad():
            logits = logits_of(tokens).numpy()[0]
            if np.abs(decoded(model, tokens) - logits).max() > 3e-5:
                return False
        arrays |= {f"tokens_{row}": tokens.astype(np.int32), f"logits_{row}": logits}
    if name in GRADIENTS:
        (logits_of(arrays["tokens_0"]).square().sum() / (2 * LENGTHS[0])).backward()
        arrays |= {f"grad.{n}": p.grad.numpy() for n, p in model.named_parameters()}
    np.savez_compressed(folder / "expected.npz", **arrays)
    size = sum(p.numel() for p in model.parameters())
    print(f"{name}: {size} parameters, largest logit {np.abs(arrays['logits_0']).max():.2f}", flush=True)  # fmt: skip
    return True


def decoded(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the logits that a model computes token by token from its cache."""
    cache, logits = None, []
    for i, token in enumerate(tokens):
        given = dict(position_ids=torch.tensor([[i]]), past_key_values=cache, use_cache=True)
        output = model(torch.tensor([[token]]), **given)
        cache = output.past_key_values
        logits.append(output.logits[0, 0].numpy())
    return np.stack(logits)


def olmo_as_released(folder: Path) -> None:
    """Store an OLMo-Hybrid by the names and shapes that released files have and that `from_pretrained` reads.

    `save_pretrained` of transformers 5.23.0 cuts the weight of the convolutions into three equal parts, and writes the norm after
    attention as if it were that before a feedforward.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in sorted({name.split(".")[2] for name in tensors if name.startswith("model.layers.")}):  # fmt: skip
        prefix = f"model.layers.{layer}."
        if f"{prefix}self_attn.q_proj.weight" in tensors:
            norm = tensors.pop(f"{prefix}feedforward_layer_norm.weight")
            tensors[f"{prefix}post_attention_layernorm.weight"] = norm
            continue
        names = [f"{prefix}linear_attn.{x}_conv1d.weight" for x in "qkv"]
        sizes = [len(tensors[f"{prefix}linear_attn.{x}_proj.weight"]) for x in "qkv"]
        joined = torch.cat([tensors[name] for name in names])
        tensors |= {n: part.clone() for n, part in zip(names, joined.split(sizes), strict=True)}
    save_file(tensors, path, metadata={"format": "pt"})


def kimi_as_released(folder: Path) -> None:
    """Store a Kimi-Linear by the names and fields that released files have and that `from_pretrained` reads.

    `save_pretrained` of transformers 5.23.0 writes the feedforward of the first layers by the name of the others, and the types of
    the layers beside `linear_attn_config`.
    """
    path = folder / "model.safetensors"
    tensors = {
        name.replace(".block_sparse_moe.", ".mlp.")
        if name.startswith("model.layers.0.")
        else name: x
        for name, x in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    for name in (
        "layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "qk_head_dim",
    ):  # fmt: skip
        del fields[name]
    fields |= dict(mla_use_nope=True, moe_router_activation_func="sigmoid", use_grouped_topk=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


AS_RELEASED = {
    "transformers-olmo_hybrid": olmo_as_released,
    "transformers-kimi_linear": kimi_as_released,
}


def main() -> int:
    """Write the goldens that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", help="names of goldens, separated by commas; default: all")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder that is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.modules["fla"] = None  # type: ignore[assignment]
    for name in arguments.names.split(",") if arguments.names else MODELS:
        first = list(MODELS).index(name)
        if not any(write(name, seed, arguments.out) for seed in range(first, 1000, 100)):
            raise ValueError(f"{name}: no seed gives logits that decoding agrees with")
    return 0


if __name__ == "__main__":
    sys.exit(main())
