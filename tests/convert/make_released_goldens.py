"""Make tests/convert/released_goldens/: tiny random models with linear layers, saved by flash-linear-attention (FLA) and by
Hugging Face's transformers, with the logits and gradients that they compute on a CPU.

    python tests/convert/make_released_goldens.py
    python tests/convert/make_released_goldens.py --names=fla-gla,transformers-mamba2

Each folder has the files of `save_pretrained` (config.json, safetensors) and expected.npz: `tokens_0`, `logits_0`, `tokens_1`,
`logits_1`, two rows of different lengths that are computed one at a time, in float32. Folders of `GRADIENTS` have in addition
`grad.NAME` for each tensor: the gradient of the mean over the tokens of row 0 of the squared logits, divided by 2.

The stored goldens were made with fla-core and flash-linear-attention 0.6.0, transformers 5.23.0, torch 2.14.1 (2.13.0 for
`fla-mla`) and triton 3.8.0 in one thread; the tests require none of them. Triton's interpreter runs FLA's kernels on CPU tensors.
`make_author_goldens` lists what is replaced for that. In addition:

- an autotuned kernel has a benchmark that does nothing, so the first of its configs is used;
- `flash_attn_func`, a CUDA library, is `flash_attention` of `make_author_goldens` (layers of `attn`, multi-head latent attention);
- norms, SwiGLU and the loss are not fused (`fuse_norm=False`), except in `fla-gla-hybrid`, since the fields change names of tensors;
- `torch.compile` is not used (RWKV-7);
- the kernel of MesaNet, which the interpreter does not run, is FLA's direct solution (`naive_mesa_net_exact`);
- the two functions of flash_attn that MoBA calls are `packed_attention`;
- the kernels of ABC and of log-linear Mamba-2, which the interpreter does not run either, are FLA's definitions in torch
  (`naive_recurrent_abc`, `naive_log_linear_attn`);
- log-linear Mamba-2 and Mamba-3 call their functions for CUDA on a CPU too;
- `log1p`, which the interpreter does not run, is the logarithm of 1 + x (LightNet);
- the functions of the package mamba_ssm that Mamba-3 calls are `mamba3_memory`, their definition step by step;
- `Tensor.argsort` is stable (Mixture-of-Memories; see `make_author_goldens`).

rwkv7.pth has the tensors of `fla-rwkv7` by the names of RWKV-7's authors, matrices in bfloat16.

`fla-mamba2` has one group: with several, FLA's path without CUDA assigns B and C to other heads than its CUDA kernels do.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["FLA_CONV_BACKEND"] = "triton"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from make_author_goldens import flash_attention, randomize, replace_aliases, replace_cuda

OUT = Path(__file__).parent / "released_goldens"
LENGTHS = (24, 17)
LONG = {"fla-nsa": (56, 41)}
"""Lengths of rows of models whose kernels need long ones: of seven blocks of eight tokens, four are selected."""
VOCABULARY = 48
SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
FLA = dict(num_heads=2, intermediate_size=24, fuse_norm=False, fuse_swiglu=False, fuse_cross_entropy=False)  # fmt: skip
RWKV = dict(intermediate_size=32, fuse_norm=False, fuse_cross_entropy=False)
LATENT = dict(
    kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, qk_head_dim=12, v_head_dim=6, rope_theta=300.0,
)  # fmt: skip
# name: (module, class, fields of its config)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fla-gla": ("fla.models.gla", "GLA", FLA),
    "fla-gla-hybrid": (
        "fla.models.gla", "GLA",
        FLA | dict(fuse_norm=True, tie_word_embeddings=True, attn=dict(layers=[1], num_heads=4, num_kv_heads=2, window_size=6)),
    ),
    "fla-retnet": ("fla.models.retnet", "RetNet", FLA | dict(feature_map="silu", expand_v=1.5)),
    "fla-linear_attn": ("fla.models.linear_attn", "LinearAttention", FLA),
    "fla-linear_attn-hedgehog": (
        "fla.models.linear_attn", "LinearAttention", FLA | dict(feature_map="hedgehog", norm_feature_map=True),
    ),
    "fla-hgrn2": ("fla.models.hgrn2", "HGRN2", FLA | dict(num_heads=None, expand_ratio=16)),
    "fla-gsa": ("fla.models.gsa", "GSA", FLA | dict(num_slots=8)),
    "fla-delta_net": ("fla.models.delta_net", "DeltaNet", FLA | dict(use_gate=True)),
    "fla-gated_deltanet": (
        "fla.models.gated_deltanet", "GatedDeltaNet", FLA | dict(head_dim=8, num_v_heads=4, allow_neg_eigval=True),
    ),
    "fla-kda": ("fla.models.kda", "KDA", FLA | dict(head_dim=16)),
    "fla-mom": ("fla.models.mom", "Mom", FLA | dict(head_dim=8)),
    "fla-mamba": ("fla.models.mamba", "Mamba", dict(fuse_norm=False, fuse_cross_entropy=False, state_size=8)),
    "fla-mamba2": (
        "fla.models.mamba2", "Mamba2",
        dict(num_heads=4, head_dim=16, state_size=8, fuse_norm=False, fuse_cross_entropy=False),
    ),
    "fla-rwkv6": (
        "fla.models.rwkv6", "RWKV6",
        RWKV | dict(num_heads=2, expand_k=1.0, proj_low_rank_dim=4, gate_low_rank_dim=8),
    ),
    "fla-rwkv7": (
        "fla.models.rwkv7", "RWKV7",
        RWKV | dict(head_dim=16, decay_low_rank_dim=8, gate_low_rank_dim=8, a_low_rank_dim=8, v_low_rank_dim=4),
    ),
    "fla-gated_deltaproduct": (
        "fla.models.gated_deltaproduct", "GatedDeltaProduct",
        FLA | dict(head_dim=8, num_householder=2, use_forget_gate=True, allow_neg_eigval=True),
    ),
    "fla-comba": ("fla.models.comba", "Comba", FLA | dict(head_dim=8, num_v_heads=4)),
    "fla-precond_gated_deltanet": (
        "fla.models.precond_gated_deltanet", "PrecondGatedDeltaNet", FLA | dict(head_dim=8, num_v_heads=4),
    ),
    "fla-precond_kda": ("fla.models.precond_kda", "PrecondKDA", FLA | dict(head_dim=16)),
    "transformers-mamba": ("transformers", "Mamba", dict(state_size=8)),
    "transformers-mamba2": ("transformers", "Mamba2", dict(num_heads=4, head_dim=16, state_size=8, n_groups=2)),
    "fla-kda-bounded": ("fla.models.kda", "KDA", FLA | dict(head_dim=16, expand_v=0.5, safe_gate=True, lower_bound=-5.0)),
    "fla-mesa_net": ("fla.models.mesa_net", "MesaNet", FLA | dict(head_dim=16)),
    "fla-path_attn": ("fla.models.path_attn", "PaTHAttention", FLA | dict(num_kv_heads=1, use_forget_gate=True)),
    "fla-moba": ("fla.models.moba", "MoBA", FLA | dict(moba_chunk_size=5, moba_topk=2, use_output_gate=True)),
    "fla-nsa": (
        "fla.models.nsa", "NSA",
        FLA | dict(num_heads=16, num_kv_heads=1, head_dim=16, block_size=8, block_counts=4, window_size=6),
    ),
    "fla-hgrn": ("fla.models.hgrn", "HGRN", FLA),
    "fla-lightnet": (
        "fla.models.lightnet", "LightNet", FLA | dict(num_heads=None, expand_ratio=16, gate_low_rank_dim=8),
    ),
    "fla-abc": ("fla.models.abc", "ABC", FLA | dict(num_slots=8, clamp_min=-2, clamp_max=2)),
    "fla-mamba3": (
        "fla.models.mamba3", "Mamba3",
        dict(head_dim=16, state_size=16, n_groups=2, fuse_norm=False, fuse_cross_entropy=False),
    ),
    "fla-mamba3-mimo": (
        "fla.models.mamba3", "Mamba3",
        dict(head_dim=16, state_size=8, is_mimo=True, mimo_rank=3, is_outproj_norm=True, rope_fraction=1.0, fuse_norm=False,
             fuse_cross_entropy=False),
    ),
    "fla-precond_kda-bounded": (
        "fla.models.precond_kda", "PrecondKDA", FLA | dict(head_dim=16, expand_v=0.5, safe_gate=True, lower_bound=-5.0),
    ),
    "fla-log_linear_mamba2": (
        "fla.models.log_linear_mamba2", "LogLinearMamba2",
        dict(num_heads=4, head_dim=16, state_size=8, use_bias=True, use_conv_bias=False, fuse_norm=False, fuse_cross_entropy=False),
    ),
    "fla-mla": ("fla.models.mla", "MLA", FLA | LATENT | dict(q_lora_rank=6)),
    "fla-mla-direct": ("fla.models.mla", "MLA", FLA | LATENT | dict(q_lora_rank=None, qk_head_dim=None, v_head_dim=12)),
}  # fmt: skip
GRADIENTS = (
    "fla-gla",
    "fla-delta_net",
    "fla-hgrn2",
    "fla-mla",
    "transformers-mamba",
    "transformers-mamba2",
)


def import_fla() -> None:
    """Import flash-linear-attention so that Triton's interpreter runs its kernels on a CPU."""
    replace_cuda()
    driver = triton.runtime.driver.active
    driver.get_benchmarker = lambda: lambda call, quantiles=None: [1.0] * len(quantiles or [0])
    importlib.import_module("fla.models")
    importlib.import_module("fla.layers.attn").flash_attn_func = flash_attention
    importlib.import_module("fla.layers.mla").flash_attn_func = flash_attention
    importlib.import_module("fla.ops.nsa.parallel").flash_attn_func = flash_attention
    importlib.import_module("fla.layers.mesa_net").chunk_mesa_net = solved_mesa_net
    mamba = importlib.import_module("fla.layers.log_linear_mamba2").LogLinearMamba2
    mamba.forward = lambda self, hidden_states, attention_mask=None, **_: (
        self.cuda_kernels_forward(hidden_states, None, False, attention_mask)[0], None, None,
    )  # fmt: skip
    importlib.import_module("fla.layers.abc").chunk_abc = defined_abc
    importlib.import_module("fla.layers.log_linear_mamba2").chunk_log_linear_attn = (
        lambda q, k, v, g, level_scales, **_: (
            importlib.import_module("fla.ops.log_linear_attn.naive").naive_log_linear_attn(q, k, v, g, level_scales), None,
        )
    )  # fmt: skip
    mamba3 = importlib.import_module("fla.layers.mamba3")
    mamba3.mamba3_siso_combined = mamba3.mamba3_mimo_combined = mamba3_memory
    mamba3.Mamba3.forward = lambda self, hidden_states, **_: (
        self.cuda_kernels_forward(hidden_states)[0], None, None,
    )  # fmt: skip
    moba = importlib.import_module("fla.ops.moba.parallel")
    moba._flash_attn_varlen_forward = packed_attention
    moba.flash_attn_varlen_func = lambda q, k, v, starts_q, starts_k, *_, causal: packed_attention(
        q, k, v, starts_q, starts_k, q.shape[-1] ** -0.5, causal
    )[0]
    importlib.import_module("fla.ops.gsa.gate").logaddexp = interpreted_logaddexp
    replace_aliases()
    argsort = torch.Tensor.argsort
    torch.Tensor.argsort = lambda tensor: argsort(tensor, stable=True)


@triton.jit
def interpreted_logaddexp(a, b):
    """Return log(e^a + e^b) in a kernel."""
    largest = tl.maximum(a, b)
    difference = tl.where(largest == float("-inf"), 0.0, -tl.abs(a - b))
    return largest + tl.log(1 + tl.exp(difference))


def solved_mesa_net(q, k, v, g, beta, lamb, **rest) -> tuple[torch.Tensor, None, None]:
    """Return what FLA's chunked kernel of MesaNet approaches with more steps: FLA's direct solution, of keys and queries of
    unit length."""
    naive = importlib.import_module("fla.ops.mesa_net.naive")
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return naive.naive_mesa_net_exact(q, k, v, g, lamb, beta)[0], None, None


def defined_abc(q, k, v, s, **rest) -> tuple[torch.Tensor, None]:
    """Return what FLA's `chunk_abc` computes, by FLA's definition in torch."""
    naive = importlib.import_module("fla.ops.abc.naive")
    q, k, v, s = (x.transpose(1, 2) for x in (q, k, v, s))
    return naive.naive_recurrent_abc(q, k, v, s)[0].transpose(1, 2), None


def mamba3_memory(
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z=None, MIMO_V=None, MIMO_Z=None, MIMO_Out=None, **rest
) -> torch.Tensor:  # fmt: skip
    """Return what mamba_ssm's `mamba3_siso_combined`, or with weights of ranks `mamba3_mimo`, computes, token by token
    (state-spaces/mamba e9594ce).

    Args:
        Q: [B, T, G, N], of ranks [B, T, R, G, N]; a group G serves neighbouring heads.
        K: likewise.
        V: [B, T, H, P].
        ADT: [B, H, T], logarithms of the decays.
        DT: [B, H, T], the steps.
        Trap: [B, H, T], before the sigmoid.
        Q_bias: [H, N], of ranks [H, R, N].
        K_bias: likewise.
        Angles: [B, T, H, S]; with ranks channels i and i + N / 2 turn together, else neighbours.
        D: [H].
        Z: [B, T, H, P] or None, for the gate.
        MIMO_V: [H, R, P] or None for one rank, and so are `MIMO_Z` and `MIMO_Out`; without `MIMO_Out` the outputs of ranks are
            not summed.
        rest: ignored.
    """
    several = MIMO_V is not None
    if not several:
        Q, K, Q_bias, K_bias = Q[:, :, None], K[:, :, None], Q_bias[:, None], K_bias[:, None]
        MIMO_V = MIMO_Z = MIMO_Out = torch.ones(V.shape[2], 1, V.shape[3])

    def of_ranks(x, weights):
        return torch.einsum("bthp,hrp->btrhp", x, weights)

    turned = (torch.tanh(Angles) * torch.pi * DT.transpose(1, 2)[..., None]).cumsum(1)[:, :, None]

    def rotated(x, bias):
        x = x.repeat_interleave(V.shape[2] // x.shape[3], dim=3) + bias.transpose(0, 1)
        pairs = x.unflatten(-1, (2, -1) if several else (-1, 2))
        first, second = pairs.unbind(-2 if several else -1)
        angle = torch.nn.functional.pad(turned, (0, first.shape[-1] - turned.shape[-1]))
        both = (
            first * angle.cos() - second * angle.sin(),
            first * angle.sin() + second * angle.cos(),
        )
        return torch.stack(both, -2 if several else -1).flatten(-2)

    q, k, v = rotated(Q, Q_bias), rotated(K, K_bias), of_ranks(V, MIMO_V)
    written = torch.einsum("btrhn,btrhp->bthnp", k, v)
    memory, outputs = torch.zeros_like(written[:, 0]), []
    for t in range(V.shape[1]):
        decay, step, share = (x[..., t, None, None] for x in (ADT.exp(), DT, Trap.sigmoid()))
        before = written[:, t - 1] if t else torch.zeros_like(memory)
        memory = decay * (memory + (1 - share) * step * before) + share * step * written[:, t]
        outputs.append(torch.einsum("brhn,bhnp->brhp", q[:, t], memory))
    y = torch.stack(outputs, 1) + D[:, None] * v
    if Z is not None:
        y = y * torch.nn.functional.silu(of_ranks(Z, MIMO_Z))
    return y if MIMO_Out is None else torch.einsum("btrhp,hrp->bthp", y, MIMO_Out)


def packed_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **rest
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """Return softmax attention of sequences one after another as flash_attn's `_flash_attn_varlen_forward` defines it: the
    output [T, H, D], and the logarithms of the sums of exponentials [H, T].

    Args:
        q: queries [T, H, D], of which sequence i has those from `cu_seqlens_q[i]` on.
        k: keys [N, G, D], of which it has those from `cu_seqlens_k[i]` on; G divides H.
        v: values [N, G, D].
        cu_seqlens_q: int [sequences + 1].
        cu_seqlens_k: likewise; with `causal` equal to `cu_seqlens_q`.
        softmax_scale: factor of the scores.
        causal: whether a query sees no later key.
        rest: ignored.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    output, sums = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
    starts, others = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(starts) - 1):
        mine, theirs = slice(*starts[i : i + 2]), slice(*others[i : i + 2])
        scores = softmax_scale * torch.einsum("ihd,jhd->hij", q[mine], k[theirs])
        if causal:
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        output[mine] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[theirs])
        sums[mine] = scores.logsumexp(-1).T
    return output, sums.T.contiguous(), None, None


def write(
    name: str, model: tuple[str, str, dict[str, Any]], seed: int, out: Path, *, gradients: bool
) -> None:
    """Draw the parameters of a model, described as those of `MODELS`, save it, and write its logits and, if `gradients`, its
    gradients."""
    module, kind, fields = model
    package = importlib.import_module(module)
    config = getattr(package, f"{kind}Config")(**(SMALL | fields))
    network = getattr(package, f"{kind}ForCausalLM")(config).float().eval()
    randomize(network, seed)
    for buffer, value in network.named_buffers():
        if buffer.endswith("e_score_correction_bias"):
            value.copy_(0.25 * torch.randn_like(value))
    for parameter, value in network.named_parameters():
        if kind == "MLA" and parameter.endswith(("kv_proj.0.weight", "q_proj.0.weight")):
            value.data *= 0.03  # so that the epsilon of the norm of its products changes logits
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    network.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    rng, arrays = np.random.default_rng(seed), {}
    for row, length in enumerate(LONG.get(name, LENGTHS)):
        tokens = rng.integers(0, VOCABULARY, (1, length))
        with torch.no_grad():
            logits = network(torch.tensor(tokens), use_cache=False).logits.float().numpy()
        arrays |= {f"tokens_{row}": tokens[0].astype(np.int32), f"logits_{row}": logits[0]}
    if gradients:
        network.zero_grad()
        logits = network(torch.tensor(arrays["tokens_0"])[None], use_cache=False).logits.float()
        (logits.square().sum() / (2 * LENGTHS[0])).backward()
        arrays |= {f"grad.{name}": value for name, value in gradients_of(network).items()}
    np.savez_compressed(folder / "expected.npz", **arrays)
    size = sum(p.numel() for p in network.parameters())
    print(f"{name}: {size} parameters, largest logit {np.abs(arrays['logits_0']).max():.2f}", flush=True)  # fmt: skip


def gradients_of(network: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the gradients of a model's parameters by the names, and in the shapes, in which `save_pretrained` stores the
    parameters; they replace the parameters."""
    from safetensors.torch import load_file

    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    buffers = ("e_score_correction_bias",)
    return {name: value.numpy() for name, value in stored.items() if not name.endswith(buffers)}


def write_pth(folder: Path, path: Path) -> None:
    """Write the tensors of an RWKV-7 of FLA by the names of RWKV's authors as a .pth file, matrices in bfloat16."""
    from safetensors.torch import load_file

    names = {
        "model.embeddings.weight": "emb.weight", "lm_head.weight": "head.weight", "model.norm.": "ln_out.", "model.layers.": "blocks.",
        ".pre_norm.": ".ln0.", ".attn_norm.": ".ln1.", ".ffn_norm.": ".ln2.", ".attn.": ".att.", ".g_norm.": ".ln_x.",
        "r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output",
        **{f"{x}_lora.lora.{i}": f"{x}{n}" for x in "wavg" for i, n in (("0.weight", 1), ("2.weight", 2), ("2.bias", 0))},
    }  # fmt: skip
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        for old, new in names.items():
            name = name.replace(old, new)
        if name[-2:] in [f"{x}{n}" for x in "wavg" for n in (1, 2)]:
            value = value.T.contiguous()
        if name[-3:] in ("k_k", "k_a") or name.endswith(("w0", "a0", "v0", "ffn.x_k")):
            value = value.reshape(1, 1, -1)
        tensors[name] = value.bfloat16() if value.ndim == 2 else value
    torch.save(tensors, path)


def main() -> int:
    """Write the goldens that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", help="names of goldens, separated by commas; default: all")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder that is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import_fla()
    names = arguments.names.split(",") if arguments.names else list(MODELS)
    for name in names:
        seed, gradients = list(MODELS).index(name), name in GRADIENTS
        write(name, MODELS[name], seed, arguments.out, gradients=gradients)
    if "fla-rwkv7" in names:
        write_pth(arguments.out / "fla-rwkv7", arguments.out / "rwkv7.pth")
    return 0


if __name__ == "__main__":
    sys.exit(main())
