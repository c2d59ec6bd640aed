"""Make tests/convert/goldens/: tiny random models saved by Hugging Face's transformers, with the logits that it computes.

    pip install -e ".[hf-parity]"
    python tests/convert/make_goldens.py

Each folder has the files of `save_pretrained` (config.json, safetensors), and expected.npz with `tokens` [B, T] and `logits`
[B, T, vocab], computed in float32 on a CPU. The .gguf files contain the same kinds of models with llama.cpp's names; their logits
are from transformers' own importer. chat.json has conversations formatted by transformers with several templates. The weights
have a large variance, so that every part of the model changes the logits. The stored goldens were made with torch 2.13.0 and
transformers 5.23.0 in one thread; the tests that compare with them require neither.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import gguf
import jinja2
import numpy as np
import torch
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

OUT = Path(__file__).parent / "goldens"
SMALL = dict(
    vocab_size=64, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
    rms_norm_eps=1e-5, max_position_embeddings=128, initializer_range=0.2,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)  # fmt: skip
# name: (model, fields, tokens in a row); rows are longer than original lengths and windows.
KINDS = {
    "llama2": ("Llama", dict(num_key_value_heads=3), 24),
    "llama3": ("Llama", dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)), 24),
    "llama3.1": ("Llama", dict(rope_parameters=LLAMA3 | dict(factor=8.0)), 96),
    "llama3.2": ("Llama", dict(rope_parameters=LLAMA3 | dict(factor=32.0), tie_word_embeddings=True, head_dim=16), 96),
    "llama-linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)), 24),
    "mistral": ("Mistral", dict(sliding_window=7, head_dim=8), 24),
    "mistral-nemo": ("Mistral", dict(sliding_window=None, head_dim=16), 24),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True), 24),
    "qwen2-windows": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1), 24),
    "qwen3": ("Qwen3", dict(head_dim=16, rms_norm_eps=1e-3), 24),
}  # fmt: skip
# The features that templates in use have: loops, blocks and their blank lines, filters, BOS and EOS, exceptions.
TEMPLATES = {
    "marks": "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '[system]Help.[end]\n' }}{% endif %}"
    "{{ '[' + m['role'] + ']' + m['content'] | trim + '[end]' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}",
    "turns": "{{ bos_token }}{% set n = namespace(turns=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set n.turns = n.turns + 1 %}{{ n.turns ~ ': ' ~ m.content }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ raise_exception('no ' + m.role) }}{% endif %}{% endfor %}",
    "blocks": "{%- for m in messages %}\n    {%- if m.role == 'system' %}\n      {% continue %}\n    {%- endif %}\n"
    "    {{ m.content | tojson }}\n    {% set x = 1 %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n<answer>\n{% endif %}\n",
}
TALKS = {
    "one": [dict(role="user", content=" Grüße <b> 'q' ")],
    "more": [
        dict(role="system", content="Be brief."),
        *(dict(role=r, content=f"{r}\n{i}") for i in (1, 2) for r in ("user", "assistant")),
        dict(role="user", content="Last."),
    ],
}
LLAMA32 = LLAMA3 | dict(factor=32.0, rope_theta=5e5, original_max_position_embeddings=8192)
# file: (architecture, model, fields, distance of the positions of successive tokens)
GGUFS = {
    "llama": ("llama", "Llama", dict(tie_word_embeddings=True), 1),
    "llama3.2": ("llama", "Llama", dict(rope_parameters=LLAMA32, num_hidden_layers=1), 17),
    "qwen2": ("qwen2", "Qwen2", {}, 1),
    "qwen3": ("qwen3", "Qwen3", dict(head_dim=16), 1),
}


def build(model: str, fields: dict, seed: int) -> transformers.PreTrainedModel:
    """Return a small Hugging Face transformer of the kind `model` with random float32 weights; `fields` are
    those of its config.
    """
    torch.manual_seed(seed)
    config = getattr(transformers, f"{model}Config")(**(SMALL | fields))
    random_model = getattr(transformers, f"{model}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, value in random_model.named_parameters():
            noise = torch.randn_like(value)
            value.copy_(1 + 0.3 * noise if "norm" in name else noise * 0.25)
    return random_model


def write_logits(
    model: transformers.PreTrainedModel, length: int, path: Path, stride: int = 1
) -> np.ndarray:
    """Compute a transformer's logits of random tokens at the positions 0, stride, 2 stride, ..., and write
    them to the file `path`.
    """
    model.set_attn_implementation("eager")
    tokens = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (1, length))
    positions = stride * np.arange(length)[None]
    with torch.no_grad():
        output = model(torch.tensor(tokens), position_ids=torch.tensor(positions))
    logits = output.logits.float().numpy()
    arrays = dict(tokens=tokens.astype(np.int32), logits=logits)
    if stride > 1:
        arrays["positions"] = positions.astype(np.int32)
    np.savez_compressed(path, **arrays)
    return logits


def write_gguf(model: transformers.PreTrainedModel, kind: str, path: Path) -> None:
    """Write a model as llama.cpp stores it, with the head in float16 and all other matrices in Q8_0."""
    config, blocks = model.config, "model.layers."
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind == "qwen3":
        writer.add_key_length(size)
        writer.add_value_length(size)
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "Ġ", "th", "the", "Ġthe"]
    tokens += [str(i) for i in range(10)]
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if kind == "llama" else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t.startswith("<") else 1 for t in tokens])
    writer.add_token_merges(["t h", "th e", "Ġ the"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    if config.rope_parameters["rope_type"] == "llama3":
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        divisors = plain / model.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", divisors.float().numpy())
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), 2)
    for name, value in model.state_dict().items():
        array = value.numpy()
        heads = {
            "q_proj.weight": config.num_attention_heads,
            "k_proj.weight": config.num_key_value_heads,
        }
        for end, number in heads.items():
            if kind == "llama" and name.startswith(blocks) and name.endswith(end):
                halves = array.reshape(number, 2, size // 2, -1)
                array = halves.swapaxes(1, 2).reshape(array.shape)
        stem, _, ending = name.rpartition(".")
        stored = f"{names.get_name(stem)}.{ending}"
        if array.ndim == 1:
            writer.add_tensor(stored, array)
        elif stem == "lm_head":
            writer.add_tensor(stored, array.astype(np.float16))
        else:
            type_ = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def render(template: str, messages: list[dict], answer: bool) -> str | None:
    """Return the text that a chat template makes of a conversation, or None if the template raises an
    exception for it.
    """
    try:
        return render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=answer, bos_token="<B>", eos_token="<E>"
        )[0][0]  # fmt: skip
    except jinja2.TemplateError:
        return None


def main() -> int:
    """Write all goldens of tests/convert again: tiny models, their logits, and formatted conversations."""
    torch.set_num_threads(1)
    shutil.rmtree(OUT, ignore_errors=True)
    for seed, (name, (model, fields, length)) in enumerate(KINDS.items()):
        random_model, folder = build(model, fields, seed), OUT / name
        # One model is written in several files.
        random_model.save_pretrained(folder, max_shard_size="20KB" if name == "llama2" else "5GB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        logits = write_logits(random_model, length, folder / "expected.npz")
        size = sum(p.numel() for p in random_model.parameters())
        print(f"{name}: {size} parameters, standard deviation of logits {logits.std():.2f}")
    for seed, (name, (kind, model, fields, stride)) in enumerate(GGUFS.items()):
        random_model = build(model, dict(hidden_size=32, num_attention_heads=2) | fields, seed)
        with tempfile.TemporaryDirectory() as folder:
            original = write_logits(random_model, 24, Path(folder) / "x.npz", stride)
        write_gguf(random_model, kind, OUT / f"{name}.gguf")
        quantised = transformers.AutoModelForCausalLM.from_pretrained(
            OUT, gguf_file=f"{name}.gguf", dtype=torch.float32, config=random_model.config
        )
        logits = write_logits(quantised.eval(), 24, OUT / f"{name}.npz", stride)
        error = np.abs(logits - original).max()
        print(
            f"{name}.gguf: quantisation changes logits of std {original.std():.2f} by up to {error:.3f}"
        )
    rendered = [
        dict(template=t, messages=m, answer=a, text=render(t, m, a))
        for t in TEMPLATES.values()
        for m in TALKS.values()
        for a in (True, False)
    ]
    (OUT / "chat.json").write_text(json.dumps(rendered, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
