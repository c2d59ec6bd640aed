"""Make a small pretrained transformer of random weights in the proportions of a model of `configs/liger.py`,
and a file of instructions to tune it on: no network is needed.

    python -m tests.linearize.make_pretrained --model=llama3.2-1b --out=data

writes the Hugging Face folder data/llama3.2-1b and the file data/alpaca.json. The model has the original's
numbers of heads, the ratio of its widths, its rotary frequencies, biases, norms and output head, but heads of
eight channels, `--layers` layers, and a vocabulary of bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import tokenizers
from flax import nnx
from safetensors.numpy import save_file

from configs.liger import MODELS
from lsm_jax.convert.huggingface import transformers_layout
from lsm_jax.mixers import SoftmaxConfig
from lsm_jax.models import Decoder, ModelConfig

HEAD_DIM = 8
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def small_model(name: str, layers: int) -> ModelConfig:
    """Return the config of the model `name` of `configs/liger.py` with heads of eight channels, so many
    layers, and a vocabulary of bytes and two special tokens.
    """
    model = MODELS[name]
    layer = model.layers["L"]
    mixer: SoftmaxConfig = dataclasses.replace(layer.mixer, head_dim=HEAD_DIM)
    inner = layer.feedforward.intermediate_size * HEAD_DIM // layer.mixer.dim(model.hidden_size)
    feedforward = dataclasses.replace(layer.feedforward, intermediate_size=inner)
    return dataclasses.replace(
        model,
        vocab_size=256 + len(SPECIAL),
        hidden_size=model.hidden_size * HEAD_DIM // layer.mixer.dim(model.hidden_size),
        num_layers=layers,
        layers={"L": dataclasses.replace(layer, mixer=mixer, feedforward=feedforward)},
    )


def published_config(name: str, model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of transformers for the small model of the name `name`."""
    layer = model.layers["L"]
    mixer, scaling = layer.mixer, layer.mixer.rope_scaling
    kind = "mistral" if name.startswith("mistral") else "llama"
    kind = "qwen2" if mixer.qkv_bias else "qwen3" if mixer.qk_norm else kind
    fields = dict(
        architectures=[ARCHITECTURES[kind]], model_type=kind, vocab_size=model.vocab_size, hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers, num_attention_heads=mixer.num_heads, num_key_value_heads=mixer.num_kv_heads,
        head_dim=HEAD_DIM, intermediate_size=layer.feedforward.intermediate_size, rms_norm_eps=model.norm_eps,
        rope_theta=mixer.rope_base, tie_word_embeddings=model.tie_embeddings, hidden_act="silu", torch_dtype="bfloat16",
        bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    if kind == "mistral":
        fields["sliding_window"] = None
    if scaling is not None:
        fields["rope_scaling"] = dict(
            rope_type="llama3", factor=scaling.factor, low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor, original_max_position_embeddings=scaling.original_length,
        )  # fmt: skip
    return fields


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single bytes, which adds a beginning-of-text token, into a model's folder."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate((*alphabet, *SPECIAL))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # fmt: skip
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    first, last = SPECIAL
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, vocabulary[first])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(bos_token=first, eos_token=last, add_bos_token=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_pretrained(name: str, folder: Path, *, layers: int = 2, seed: int = 0) -> ModelConfig:
    """Write the small model of the name `name` as a Hugging Face folder of bfloat16 tensors, and return its
    config.
    """
    model = small_model(name, layers)
    folder.mkdir(parents=True)
    text = json.dumps(published_config(name, model), indent=2)
    (folder / "config.json").write_text(text + "\n")
    params = nnx.to_pure_dict(nnx.state(Decoder(model, rngs=nnx.Rngs(seed)), nnx.Param))
    layout = transformers_layout(model)
    write = layout.writer(params)
    tensors = {name: write(name, jax.numpy.bfloat16) for name in layout.shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return model


def write_instructions(path: Path, count: int = 256) -> None:
    """Write `count` made-up instructions as a JSON array, in the form of cleaned Alpaca; every other one has
    an input.
    """
    rows = [
        dict(
            instruction=f"Add {i} to the number."
            if i % 2
            else f"Write the number {i} three times.",
            input=str(3 * i) if i % 2 else "",
            output=f"The sum is {4 * i}." if i % 2 else f"{i}, {i}, {i}",
        )
        for i in range(count)
    ]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, choices=MODELS, help="a model of configs/liger.py"
    )
    parser.add_argument("--out", required=True, type=Path, help="the folder to write into")
    parser.add_argument("--layers", type=int, default=2, help="number of layers; default: 2")
    args = parser.parse_args()
    write_pretrained(args.model, args.out / args.model, layers=args.layers)
    write_instructions(args.out / "alpaca.json")
    print(f"wrote {args.out / args.model} and {args.out / 'alpaca.json'}")


if __name__ == "__main__":
    main()
