"""Make tests/mixers/goldens_layers.npz: whole layers of log-linear attention, MesaNet, PaTH, momentum DeltaNet, NSA, MoBA and
sLSTM with drawn parameters; their outputs, final memories and gradients, computed on a CPU.

    python tests/mixers/make_layer_goldens.py --xlstm=CHECKOUT

CHECKOUT is one of github.com/NX-AI/xlstm at 032a6fb8ee19. The stored goldens were made with fla-core and
flash-linear-attention (FLA) 0.6.0, transformers 5.23.0, torch 2.14.1 and triton 3.8.0 in float32 in one thread; the tests require
none of them. The arrays are those that `tests.mixers.goldens` describes, with parameters by their names in torch.

Layers are FLA's and, for sLSTM, its authors'. Triton's interpreter runs FLA's norms, convolutions and rotations on CPU tensors
(`tests.convert.make_author_goldens` lists what is replaced for that). In place of the kernels of the memories, which are for
16-bit numbers or require a GPU, run:

- `layer_path`, `layer_path_forget`: FLA's `naive_path_attn`. The final keys are products with I - β wᵀ w, token by token.
- `layer_mesa_net`, `layer_mesa_net_gate`: FLA's `naive_mesa_net_exact`, a direct solver.
- `layer_momentum_deltanet`: FLA's `recurrent_momentum_delta_rule_ref`, which the layer itself calls for short rows.
- `layer_nsa`: FLA's `naive_nsa`, with softmax attention in torch for the window.
- `layer_moba`: FLA's `parallel_moba`, with softmax attention in torch in place of the library flash_attn.
- `layer_log_linear_mamba2`: FLA's `naive_log_linear_attn`; the final memories are those of `log_linear_recurrence` below,
  whose output equals it.
- `layer_log_linear_gated_deltanet`, which FLA does not have: its layer of Gated DeltaNet with a projection to the levels'
  weights, softplus(L x W), and `log_linear_recurrence` below, a transcription of the published recurrence.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "convert"))

import make_released_goldens as released  # sets the environment variables of Triton and FLA
import numpy as np
import torch
from make_author_goldens import flash_attention
from torch import nn
from torch.nn import functional

OUT = Path(__file__).with_name("goldens_layers.npz")
BATCH, TOKENS, WIDTH = 2, 19, 16
LEVELS = 6  # log-linear attention; 19 tokens fill them
finals: dict[str, torch.Tensor] = {}
"""The final memories of the layer that ran last, by name: the functions below put them here."""


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(Σ x² + 1e-6) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def path_attention(q, k, v, w, beta, g=None, cu_seqlens=None):
    """Replace FLA's `parallel_path_attn`."""
    naive = importlib.import_module("fla.ops.path_attn.naive").naive_path_attn
    gates = torch.zeros(q.shape[:3]) if g is None else g
    keys = []
    for t in range(k.shape[1]):
        wt, bt = w[:, t], beta[:, t, :, None]
        keys = [key - bt * (key * wt).sum(-1, keepdim=True) * wt for key in keys] + [k[:, t]]
    finals.update(final_keys=torch.stack(keys, 1), final_values=v)
    return naive(q, k, v, w, beta, gates, q.shape[-1] ** -0.5, chunk_size=8), None


def mesa_memory(q, k, v, g, beta, lamb, **_):
    """Replace FLA's `chunk_mesa_net`."""
    naive = importlib.import_module("fla.ops.mesa_net.naive").naive_mesa_net_exact
    o, kk, kv = naive(unit(q), unit(k), v, g, lamb, beta)
    finals.update(final_kk=kk, final_kv=kv)
    return o, None, None


def momentum_memory(function):
    """Return FLA's `fused_recurrent_momentum_delta_rule`, whose final memories are stored."""

    def run(**arguments):
        o, state = function(**arguments | dict(output_final_state=True))
        finals.update(final_memory=state[0], final_momentum=state[1])
        return o, None

    return run


def sparse_attention(q, k, v, **arguments):
    """Replace FLA's `parallel_nsa`."""
    finals.update(final_keys=k, final_values=v)
    return importlib.import_module("fla.ops.nsa.naive").naive_nsa(q, k, v, **arguments)


def rows_of(cu_seqlens: torch.Tensor) -> list[slice]:
    """Return the slices of packed rows, of which `cu_seqlens` has the ends."""
    ends = cu_seqlens.tolist()
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def attention_scores(q, k, causal: bool, scale: float) -> torch.Tensor:
    """Return the scores [H, T, S] of queries [T, H, K] with keys [S, H, K], -inf where `causal` hides a key."""
    scores = scale * torch.einsum("thk,shk->hts", q, k)
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf
        )
    return scores


def varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **_):
    """Replace flash_attn's `_flash_attn_varlen_forward`: return outputs [T, H, V] and logarithms of sums [H, T]."""
    outputs, sums = [], []
    for rows, keys in zip(rows_of(cu_seqlens_q), rows_of(cu_seqlens_k), strict=True):
        scores = attention_scores(q[rows], k[keys], causal, softmax_scale)
        outputs.append(torch.einsum("hts,shv->thv", scores.softmax(-1), v[keys]))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, 1), None, None


def varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **_
):  # fmt: skip
    """Replace flash_attn's `_flash_attn_varlen_backward`: write gradients to dq, dk and dv, of weights whose logarithms of
    sums are `softmax_lse` [H, T].
    """
    for rows, keys in zip(rows_of(cu_seqlens_q), rows_of(cu_seqlens_k), strict=True):
        scores = attention_scores(q[rows], k[keys], causal, softmax_scale)
        weights = torch.exp(scores - softmax_lse[:, rows, None])
        dv[keys] = torch.einsum("hts,thv->shv", weights, dout[rows])
        mean = (dout[rows] * out[rows]).sum(-1).T[..., None]
        slopes = weights * (torch.einsum("thv,shv->hts", dout[rows], v[keys]) - mean)
        dq[rows] = softmax_scale * torch.einsum("hts,shk->thk", slopes, k[keys])
        dk[keys] = softmax_scale * torch.einsum("hts,thk->shk", slopes, q[rows])


def moba(function):
    """Return FLA's `parallel_moba`, whose keys and values are stored as rows [B, T, ...]."""

    def run(q, k, v, **arguments):
        rows = (BATCH, TOKENS, *k.shape[2:])
        finals.update(final_keys=k.reshape(rows), final_values=v.reshape(rows))
        return function(q, k, v, **arguments)

    return run


def log_linear_recurrence(
    q, k, v, log_decay, scales, beta=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of log-linear attention [B, T, H, V], unscaled, and the final memories [B, H, L, K, V], computed token by
    token (arXiv 2506.04761): with z the zero bits at the end of a token's position, levels 0 to z merge into level z + 1.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        log_decay: [B, T, H].
        scales: [B, T, H, L], the weights of the levels.
        beta: [B, T, H] for the delta rule, or None.
    """
    memories = [torch.zeros(*k[:, 0].shape, v.shape[-1]) for _ in range(scales.shape[-1])]
    outputs = []
    for t in range(q.shape[1]):
        if t:
            merged = (t & -t).bit_length()
            memories[merged] = sum(memories[: merged + 1])
            memories[:merged] = [torch.zeros_like(memories[0])] * merged
        kt, written = k[:, t], k[:, t, :, :, None] * v[:, t, :, None]
        decay = torch.exp(log_decay[:, t])[..., None, None]
        memories = [decay * m for m in memories]
        if beta is not None:
            bt = beta[:, t, :, None, None]
            erase = [torch.einsum("bhk,bhkv->bhv", kt, m)[:, :, None] for m in memories]
            memories = [m - bt * kt[..., None] * e for m, e in zip(memories, erase, strict=True)]
            written = bt * written
        memories[0] = memories[0] + written
        reads = (torch.einsum("bhk,bhkv->bhv", q[:, t], m) for m in memories)
        outputs.append(sum(scales[:, t, :, level, None] * o for level, o in enumerate(reads)))
    return torch.stack(outputs, 1), torch.stack(memories, 2)


def log_linear_attention(q, k, v, g, level_scales, scale, **_):
    """Replace FLA's `chunk_log_linear_attn`."""
    naive = importlib.import_module("fla.ops.log_linear_attn.naive").naive_log_linear_attn
    o = naive(q, k, v, g, level_scales, scale)
    repeated = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    ours, memories = log_linear_recurrence(*repeated, v, g, level_scales)
    torch.testing.assert_close(ours, o, atol=1e-5, rtol=1e-5)
    finals.update(final_memory=memories)
    return o, None


def log_linear_deltanet(fields: dict[str, Any]) -> nn.Module:
    """Return FLA's layer of Gated DeltaNet with log-linear memories."""
    module = importlib.import_module("fla.layers.gated_deltanet")

    class Layer(module.GatedDeltaNet):
        def __init__(self):
            super().__init__(**fields)
            self.l_proj = nn.Linear(WIDTH, self.num_v_heads * LEVELS, bias=False)
            self.L = nn.Parameter(torch.ones(self.num_v_heads, LEVELS))

        def forward(self, x):
            scales = self.l_proj(x).unflatten(-1, self.L.shape)
            module.chunk_gated_delta_rule = self.memory(functional.softplus(self.L * scales))
            return super().forward(x)

        @staticmethod
        def memory(scales):
            def run(q, k, v, g, beta, A_log, dt_bias, **_):  # noqa: N803
                q, k = (unit(x).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
                log_decay = -A_log.exp() * functional.softplus(g + dt_bias)
                o, memories = log_linear_recurrence(q, k, v, log_decay, scales, beta.sigmoid())
                finals.update(final_memory=memories)
                return o, None

            return run

    return Layer()


def slstm(fields: dict[str, Any]) -> nn.Module:
    """Return the authors' layer of sLSTM, which stores its final state."""
    module = importlib.import_module("xlstm.blocks.slstm.layer")
    layer = module.sLSTMLayer(module.sLSTMLayerConfig(**fields))
    forward = layer.forward

    def run(x):
        y, state = forward(x, return_last_state=True)
        names = ("output", "memory", "normalizer", "stabilizer")
        for name, value in zip(names, state["slstm_state"], strict=True):
            finals[f"final_{name}"] = value.reshape(BATCH, fields["num_heads"], -1)
        return (y,)

    layer.forward = run
    return layer


def log_linear_mamba2(fields: dict[str, Any]) -> nn.Module:
    """Return FLA's layer of log-linear Mamba-2, whose `forward` would refuse tensors that are not on a GPU."""
    layer = fla("log_linear_mamba2", "LogLinearMamba2", **fields)
    layer.forward = layer.cuda_kernels_forward
    return layer


def fla(module: str, kind: str, **fields: Any) -> nn.Module:
    """Return a layer of FLA."""
    return getattr(importlib.import_module(f"fla.layers.{module}"), kind)(**fields)


PATH = dict(hidden_size=WIDTH, num_heads=2)
DELTA = dict(hidden_size=WIDTH, num_heads=2, head_dim=4)
MESA = dict(hidden_size=WIDTH, num_heads=2, head_dim=8)
# name: (what computed it, a function that returns the layer)
LAYERS = {
    "layer_path": ("fla:layers/path_attn.py, ops/path_attn/naive.py", lambda: fla("path_attn", "PaTHAttention", **PATH)),
    "layer_path_forget": (
        "fla:layers/path_attn.py, ops/path_attn/naive.py",
        lambda: fla("path_attn", "PaTHAttention", **PATH | dict(num_heads=4, num_kv_heads=2, use_forget_gate=True, use_qk_norm=True, use_low_rank_w=False)),
    ),
    "layer_mesa_net": ("fla:layers/mesa_net.py, ops/mesa_net/naive.py", lambda: fla("mesa_net", "MesaNet", **MESA)),
    "layer_mesa_net_gate": (
        "fla:layers/mesa_net.py, ops/mesa_net/naive.py", lambda: fla("mesa_net", "MesaNet", **MESA, use_output_gate=True),
    ),
    "layer_momentum_deltanet": (
        "fla:layers/momentum_deltanet.py, ops/momentum_delta_rule/naive.py",
        lambda: fla("momentum_deltanet", "MomentumDeltaNet", **DELTA),
    ),
    "layer_nsa": (
        "fla:layers/nsa.py, ops/nsa/naive.py",
        lambda: fla("nsa", "NativeSparseAttention", hidden_size=WIDTH, num_heads=16, num_kv_heads=1, head_dim=8, block_size=4, block_counts=4, window_size=5),
    ),
    "layer_moba": (
        "fla:layers/moba.py, ops/moba/parallel.py, with attention in torch",
        lambda: fla("moba", "MoBA", hidden_size=WIDTH, num_heads=2, moba_chunk_size=4, moba_topk=2, use_output_gate=True),
    ),
    "layer_log_linear_mamba2": (
        "fla:layers/log_linear_mamba2.py, ops/log_linear_attn/naive.py",
        lambda: log_linear_mamba2(dict(hidden_size=WIDTH, num_heads=4, head_dim=8, state_size=8)),
    ),
    "layer_log_linear_gated_deltanet": (
        "fla:layers/gated_deltanet.py, with a transcription of the recurrence of arXiv 2506.04761",
        lambda: log_linear_deltanet(DELTA | dict(num_v_heads=4)),
    ),
    "layer_slstm": (
        "xlstm:xlstm/blocks/slstm/layer.py, vanilla",
        lambda: slstm(dict(embedding_dim=WIDTH, num_heads=2, backend="vanilla", dtype="float32", enable_automatic_mixed_precision=False)),
    ),
}  # fmt: skip


def replace_memories() -> None:
    """Replace the kernels of the memories in FLA's layers, as the module's docstring lists."""
    released.import_fla()
    layers = {n: importlib.import_module(f"fla.layers.{n}") for n in ("path_attn", "mesa_net", "nsa", "moba", "momentum_deltanet", "log_linear_mamba2")}  # fmt: skip
    layers["path_attn"].parallel_path_attn = path_attention
    layers["mesa_net"].chunk_mesa_net = mesa_memory
    layers["nsa"].parallel_nsa = sparse_attention
    momentum = layers["momentum_deltanet"]
    function = momentum.fused_recurrent_momentum_delta_rule
    momentum.fused_recurrent_momentum_delta_rule = momentum_memory(function)
    layers["log_linear_mamba2"].chunk_log_linear_attn = log_linear_attention
    layers["log_linear_mamba2"].MAX_NUM_LEVELS = LEVELS
    layers["moba"].parallel_moba = moba(layers["moba"].parallel_moba)
    importlib.import_module("fla.ops.nsa.naive").flash_attn_func = flash_attention
    parallel = importlib.import_module("fla.ops.moba.parallel")
    parallel.flash_attn_varlen_func = flash_attention  # not called, but asked for
    parallel._flash_attn_varlen_forward = varlen_forward
    parallel._flash_attn_varlen_backward = varlen_backward


def import_xlstm(checkout: Path) -> None:
    """Let `xlstm.blocks.slstm` be imported from a checkout, without the packages that the other models require."""
    for name in ("xlstm", "xlstm.blocks", "xlstm.blocks.slstm"):
        package = types.ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = package


def arrays_of(name: str, seed: int) -> dict[str, np.ndarray]:
    """Return a golden's arrays by their names in the file: draw the layer's parameters and input, and run it forward and
    backward.
    """
    source, build = LAYERS[name]
    torch.manual_seed(seed)
    layer = build().float().eval()
    with torch.no_grad():
        for parameter_name, value in layer.named_parameters():
            noise = torch.randn_like(value)
            near_one = "norm" in parameter_name or parameter_name in ("D", "L")
            value.copy_(1 + 0.3 * noise if near_one else 0.4 * noise)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    finals.clear()
    outputs = {"y": layer(x)[0]} | finals
    cotangents = {n: torch.randn_like(y) for n, y in outputs.items()}
    sum((outputs[n] * c).sum() for n, c in cotangents.items()).backward()
    inputs = {"x": x} | dict(layer.named_parameters())
    arrays = {"source": np.array(source)} | {n: y.detach().numpy() for n, y in outputs.items()}
    arrays |= {f"cotangent_{n}": c.numpy() for n, c in cotangents.items()}
    for n, value in inputs.items():
        assert value.grad is not None, n
        arrays |= {n: value.detach().numpy(), f"grad_{n}": value.grad.numpy()}
    return {f"{name}/{n}": a for n, a in arrays.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--xlstm", type=Path, required=True, help="a checkout of NX-AI/xlstm")
    given = parser.parse_args()
    torch.set_num_threads(1)
    replace_memories()
    import_xlstm(given.xlstm)
    arrays = {}
    for seed, name in enumerate(LAYERS):
        arrays |= arrays_of(name, seed)
        print(f"{name}: {len(arrays)} arrays in all")
    np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
    main()
