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
    """Return the token shift of one row: each head of x [T, H, d] mixed with the same head of the token
    before, whose weight is `share`.
    """
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    return share[..., None] * before + (1 - share[..., None]) * x


def attention(weights, config, x):
    """Compute one attention layer of the published FoX for one row: x [T, D] -> [T, D]."""
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


def silu(x):
    return x * sigmoid(x)


def convolved(x, weight, bias=0.0):
    """Return silu of the causal convolution of one row x [T, C] with the weight [C, 1, W] of torch's
    depthwise convolution.
    """
    width = weight.shape[-1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    taps = [padded[j : j + len(x)] * weight[:, 0, j] for j in range(width)]
    return silu(sum(taps) + bias)


def mamba2(weights, config, x):
    """Compute one Mamba2 layer of FoX's published baseline for one row: x [T, D] -> [T, D]."""
    inner = config["expand"] * config["hidden_size"]
    states, count = config["state_size"], config["num_heads"]
    sizes = np.cumsum([inner, inner + 2 * states])
    z, xbc, dt = np.split(x @ weights["in_proj.weight"].T, sizes, axis=-1)
    xbc = convolved(xbc, weights["conv1d.weight"], weights["conv1d.bias"])
    v, b, c = np.split(xbc, [inner, inner + states], axis=-1)
    v, step = heads(v, count), np.log1p(np.exp(dt + weights["dt_bias"]))
    decay = np.exp(-np.exp(weights["A_log"]) * step)
    memory, rows = np.zeros((count, states, inner // count)), []
    for t in range(len(x)):
        write = b[t][None, :, None] * (step[t][:, None] * v[t])[:, None]
        memory = decay[t][:, None, None] * memory + write
        rows.append(np.einsum("n,hnv->hv", c[t], memory) + weights["D"][:, None] * v[t])
    y = np.stack(rows).reshape(len(x), -1) * silu(z)
    return (
        rms(y, weights["norm.weight"], config["layer_norm_epsilon"]) @ weights["out_proj.weight"].T
    )


def hgrn2(weights, config, x):
    """Compute one HGRN2 layer of FoX's published baseline for one row: x [T, D] -> [T, D]. The published
    code passes no lower bounds to it.
    """
    count = config["hidden_size"] // config["expand_ratio"]
    q, f, i = (heads(x @ weights[f"{n}_proj.weight"].T, count) for n in "qfi")
    f, memory, rows = sigmoid(f), 0.0, []
    for t in range(len(x)):
        memory = f[t][..., None] * memory + (1 - f[t])[..., None] * i[t][:, None]
        rows.append(np.einsum("hk,hkv->hv", silu(q[t]), memory))
    y = np.stack(rows).reshape(len(x), -1) * config["expand_ratio"] ** -0.5
    return rms(y, weights["g_norm.weight"], config["norm_eps"]) @ weights["o_proj.weight"].T


def deltanet(weights, config, x):
    """Compute one DeltaNet layer of FoX's published baseline for one row: x [T, D] -> [T, D]."""
    count = config["num_heads"]
    q, k, v = (
        heads(convolved(x @ weights[f"{n}_proj.weight"].T, weights[f"{n}_conv1d.weight"]), count)
        for n in "qkv"
    )
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    beta = sigmoid(x @ weights["b_proj.weight"].T)
    memory, rows = np.zeros((count, k.shape[-1], v.shape[-1])), []
    for t in range(len(x)):
        change = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], memory))
        memory = memory + k[t][..., None] * change[:, None]
        rows.append(np.einsum("hk,hkv->hv", q[t] * k.shape[-1] ** -0.5, memory))
    y = rms(np.stack(rows), weights["o_norm.weight"], config["norm_eps"])
    if config["use_gate"]:
        y = y * silu(heads(x @ weights["g_proj.weight"].T, count))
    return y.reshape(len(x), -1) @ weights["o_proj.weight"].T


MIXERS = {"hgrn2-project_fox": hgrn2, "delta_net-project_fox": deltanet}


def logits(weights, config, tokens):
    """Compute the published FoX model (or a baseline with its layout) for one row: tokens [T] -> logits [T,
    vocab].
    """
    weights = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    if config["model_type"] == "mamba2-project_fox":
        return mamba2_logits(weights, config, tokens)
    mixer = MIXERS.get(config["model_type"], attention)
    x, eps = weights["model.embeddings.weight"][tokens], config["norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        head = f"model.layers.{layer}."
        own = {n.removeprefix(head): w for n, w in weights.items() if n.startswith(head)}
        inner = {n.removeprefix("attn."): w for n, w in own.items() if n.startswith("attn.")}
        x = x + mixer(inner, config, rms(x, own["attn_norm.weight"], eps))
        y = rms(x, own["mlp_norm.weight"], eps) @ own["mlp.gate_proj.weight"].T
        gate, up = np.split(y, 2, axis=-1)
        x = x + (gate * sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T
    return rms(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def mamba2_logits(weights, config, tokens):
    """Compute FoX's published Mamba2 baseline for one row: tokens [T] -> logits [T, vocab]."""
    x, eps = weights["backbone.embeddings.weight"][tokens], config["layer_norm_epsilon"]
    for layer in range(config["num_hidden_layers"]):
        head = f"backbone.layers.{layer}."
        own = {n.removeprefix(head): w for n, w in weights.items() if n.startswith(head)}
        inner = {n.removeprefix("mixer."): w for n, w in own.items() if n.startswith("mixer.")}
        x = x + mamba2(inner, config, rms(x, own["norm.weight"], eps))
    return rms(x, weights["backbone.norm_f.weight"], eps) @ weights["lm_head.weight"].T
