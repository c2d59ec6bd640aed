"""FoX's published model in numpy, for weights with the names and the layout of its checkpoints: matrices are
[out, in].

`config` is a checkpoint's config.json: arXiv 2503.02130 and github.com/zhixuan-lin/forgetting-transformer at 883f260.
"""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def heads(x, count):
    return x.reshape(len(x), count, -1)


def rotated(x, base):
    half = x.shape[-1] // 2
    turn = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turn)[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def shifted(x, share):
    """Return each head of x [T, H, d] mixed with the same head of the token before."""
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    return share[..., None] * before + (1 - share[..., None]) * x


def attention(weights, config, x):
    """Compute one attention layer: x [T, D] -> [T, D]."""
    count = config["num_heads"]
    groups = config.get("num_kv_heads") or count

    def kv(name):
        if not config.get(f"use_{name}_shift"):
            return heads(x @ weights[f"{name}_proj.weight"].T, groups)
        own = heads(x @ weights[f"{name}_proj.linear.weight"].T, groups)
        return shifted(own, sigmoid(x @ weights[f"{name}_proj.shift_proj.weight"].T))

    q, k, v = heads(x @ weights["q_proj.weight"].T, count), kv("k"), kv("v")
    if config.get("qk_norm"):
        eps, shared = config.get("qk_norm_eps", 1e-5), config["qk_norm_share_param_across_head"]
        size = q.shape[-1]
        q, k = (
            rms(a, w if shared else w.reshape(-1, size), eps)
            for a, w in ((q, weights["q_norm.weight"]), (k, weights["k_norm.weight"]))
        )
    if config["use_rope"]:
        q, k = rotated(q, config["rope_base"]), rotated(k, config["rope_base"])
    k, v = (np.repeat(a, count // groups, axis=1) for a in (k, v))

    kind = config.get("fgate_type", "none")
    gate = np.full((len(x), count), np.inf)
    if kind == "full":
        gate = x @ weights["fgate_proj.weight"].T + weights["fgate_proj.bias"]
    elif kind != "none":
        gate = np.broadcast_to(weights["fgate_bias"], gate.shape)
    gates = sigmoid(gate)
    o = np.zeros_like(q)
    for i in range(len(x)):
        for h in range(count):
            score = k[: i + 1, h] @ q[i, h] * q.shape[-1] ** -0.5
            kept = [np.prod(gates[j + 1 : i + 1, h]) for j in range(i + 1)]
            weight = np.exp(score - score.max()) * kept
            o[i, h] = weight @ v[: i + 1, h] / weight.sum()
    if config.get("use_output_norm"):
        scale = weights["output_norm.weight"].reshape(count, -1)
        o = rms(o, scale, config["norm_eps"])
    o = o.reshape(len(x), -1)
    if config.get("use_output_gate"):
        o = o * sigmoid(x @ weights["ogate_proj.weight"].T)
    return o @ weights["o_proj.weight"].T


def logits(weights, config, tokens):
    """Compute the model: tokens [T] -> logits [T, vocab]."""
    weights = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    x, eps = weights["model.embeddings.weight"][tokens], config["norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        head = f"model.layers.{layer}."
        own = {n.removeprefix(head): w for n, w in weights.items() if n.startswith(head)}
        inner = {n.removeprefix("attn."): w for n, w in own.items() if n.startswith("attn.")}
        x = x + attention(inner, config, rms(x, own["attn_norm.weight"], eps))
        y = rms(x, own["mlp_norm.weight"], eps) @ own["mlp.gate_proj.weight"].T
        gate, up = np.split(y, 2, axis=-1)
        x = x + (gate * sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T
    return rms(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T
