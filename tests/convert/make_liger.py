"""Make tiny checkpoints in the layout of Liger's authors, and compute their logits in numpy.

    python tests/convert/make_liger.py FOLDER [liger_gla]

`logits` transcribes the forward pass of github.com/OpenSparseLLMs/Linearization at 0b364eb (liger/models/*/modeling_*.py) in float64
and token by token: keys, values and gates repeated to the query heads, the gate from the projected keys before the rotation, softmax
over channels as the feature map, window and memory of 0.5 each. Their rounding of the sum to bfloat16 is left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

ARCHITECTURES = {
    "liger_gla": "LigerGLAForCausalLM",
    "liger_gsa": "LigerGSAForCausalLM",
    "liger_hgrn2": "LigerHGRN2ForCausalLM",
    "liger_mistral_gla": "LigerMistralGLAForCausalLM",
    "liger_qwen2_gla": "LigerQwen2GLAForCausalLM",
}
# The fields of the authors' checkpoints/*/config.json, with small numbers.
LLAMA = dict(
    attention_bias=False, attention_dropout=0.0, expand_k=1, expand_v=1, head_dim=8, hidden_ratio=4, mlp_bias=False, pool_size=4,
    pretraining_tp=1, rope_scaling=None,
)  # fmt: skip
FIELDS = {
    "liger_gla": LLAMA,
    "liger_gsa": LLAMA,
    "liger_hgrn2": LLAMA,
    "liger_mistral_gla": dict(sliding_window=4096),
    "liger_qwen2_gla": dict(
        attention_dropout=0.0, max_window_layers=2, sliding_window=4096, use_mrope=False, use_sliding_window=False
    ),
}  # fmt: skip
WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER, VOCAB = 32, 2, 4, 2, 8, 40, 260


def write_liger(folder: Path, kind: str = "liger_gla", *, seed: int = 0, **changes) -> Path:
    """Write a tiny checkpoint in the layout of Liger's authors, with random float32 weights in two files,
    into `folder`, and return the folder.
    """
    folder.mkdir(parents=True)
    config = dict(
        architectures=[ARCHITECTURES[kind]], model_type=kind, bos_token_id=256, eos_token_id=257, hidden_act="silu",
        hidden_size=WIDTH, initializer_range=0.02, intermediate_size=INNER, max_position_embeddings=256,
        num_attention_heads=HEADS, num_hidden_layers=LAYERS, num_key_value_heads=KV_HEADS, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=False, torch_dtype="float32", transformers_version="4.47.1", use_cache=True, vocab_size=VOCAB,
    ) | FIELDS[kind]  # fmt: skip
    config = {k: v for k, v in (config | changes).items() if v != "absent"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=0.3):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    first = {"model.embed_tokens.weight": draw(VOCAB, WIDTH, scale=1.0)}
    second = {"model.norm.weight": 1 + draw(WIDTH), "lm_head.weight": draw(VOCAB, WIDTH)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        part = first if i == 0 else second
        shapes = dict(q_proj=HEADS * DIM, k_proj=KV_HEADS * DIM, v_proj=KV_HEADS * DIM)
        part |= {f"{at}self_attn.{n}.weight": draw(size, WIDTH) for n, size in shapes.items()}
        if kind == "liger_qwen2_gla":
            part |= {f"{at}self_attn.{n}.bias": draw(size) for n, size in shapes.items()}
        part |= {
            f"{at}self_attn.o_proj.weight": draw(WIDTH, HEADS * DIM),
            f"{at}mlp.gate_proj.weight": draw(INNER, WIDTH),
            f"{at}mlp.up_proj.weight": draw(INNER, WIDTH),
            f"{at}mlp.down_proj.weight": draw(WIDTH, INNER),
            f"{at}input_layernorm.weight": 1 + draw(WIDTH),
            f"{at}post_attention_layernorm.weight": 1 + draw(WIDTH),
        }
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, part in zip(names, (first, second), strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {k: name for name, part in zip(names, (first, second), strict=True) for k in part}
    total = sum(x.nbytes for part in (first, second) for x in part.values())
    text = json.dumps(dict(metadata=dict(total_size=total), weight_map=index), indent=2)
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def logits(folder: Path, tokens: np.ndarray, *, window: int = 65, adapters=None) -> np.ndarray:
    """Compute the logits [T, vocab] that a checkpoint of Liger's authors gives for one row of tokens, in
    numpy.

    Args:
        folder: folder of the checkpoint.
        tokens: token ids of one row, int [T].
        window: keys that a query sees: 65 as flash-attention counts a window of 64 with transformers 4.47.1.
        adapters: PEFT's (scale, tensors by name), added to the projections; None for none.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= {k: v.astype(np.float64) for k, v in load_file(file).items()}
    if adapters is not None:
        scale, tensors = adapters
        for name in [n for n in tensors if n.endswith("lora_A.weight")]:
            a, b = (tensors[name.replace("lora_A", part)].astype(np.float64) for part in ("lora_A", "lora_B"))  # fmt: skip
            module = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            weights[module] = weights[module] + scale * b @ a
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in weights.items()}
        y = _rms(x, layer["input_layernorm.weight"], config)
        x = x + _attention(y, layer, config, window)
        y = _rms(x, layer["post_attention_layernorm.weight"], config)
        gate = y @ layer["mlp.gate_proj.weight"].T
        inner = gate * _sigmoid(gate) * (y @ layer["mlp.up_proj.weight"].T)
        x = x + inner @ layer["mlp.down_proj.weight"].T
    return _rms(x, weights["model.norm.weight"], config) @ weights["lm_head.weight"].T


def _attention(x, layer, config, window):
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]

    def project(name, count):
        y = x @ layer[f"self_attn.{name}.weight"].T + layer.get(f"self_attn.{name}.bias", 0.0)
        return y.reshape(len(x), count, -1)

    q = project("q_proj", heads)
    k, v = (np.repeat(project(n, groups), heads // groups, axis=1) for n in ("k_proj", "v_proj"))
    kind = config["model_type"]
    outputs = np.zeros_like(q)
    for h in range(heads):
        memory = _memory(kind, q[:, h], k[:, h], v[:, h], config)
        queries, keys = (_rotate(y[:, h], config["rope_theta"]) for y in (q, k))
        for t in range(len(x)):
            first = max(0, t + 1 - window)
            scores = _softmax(keys[first : t + 1] @ queries[t] / np.sqrt(q.shape[-1]))
            outputs[t, h] = 0.5 * scores @ v[first : t + 1, h] + 0.5 * memory[t]
    return outputs.reshape(len(x), -1) @ layer["self_attn.o_proj.weight"].T


def _memory(kind, q, k, v, config):
    outputs, state = [], np.zeros((k.shape[1], v.shape[1]))
    if kind == "liger_gsa":
        slots = config["pool_size"]
        g = np.log(_sigmoid(k.reshape(len(k), slots, -1).mean(-1))) / 16
        keys, values = np.zeros((k.shape[1], slots)), np.zeros((slots, v.shape[1]))
        for t in range(len(q)):
            s = 1 - np.exp(g[t])
            keys = keys * np.exp(g[t]) + np.outer(k[t], s)
            values = np.exp(g[t])[:, None] * values + np.outer(s, v[t])
            outputs.append(_softmax(q[t] @ keys) @ values)
        return np.array(outputs)
    g, written = np.log(_sigmoid(k)) / 16, _softmax(k)
    if kind == "liger_hgrn2":
        g, written = np.log(_sigmoid(k)), 1 - _sigmoid(k)
    for t in range(len(q)):
        state = np.exp(g[t])[:, None] * state + np.outer(written[t], v[t])
        outputs.append(_softmax(q[t]) @ state)
    return np.array(outputs)


def _rotate(y, theta):
    half = y.shape[-1] // 2
    angles = np.arange(len(y))[:, None] * theta ** (-np.arange(half) / half)
    a, b = y[:, :half], y[:, half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
    )


def _rms(x, weight, config):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


if __name__ == "__main__":
    print(write_liger(Path(sys.argv[1]), *sys.argv[2:]))
