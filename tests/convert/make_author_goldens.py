"""Make tests/convert/author_goldens/: tiny random checkpoints saved by the papers' own code, with the logits that it
computes on a CPU.

    python tests/convert/make_author_goldens.py fox --repository=forgetting-transformer --mamba=mamba --fla=FLA
    python tests/convert/make_author_goldens.py liger --repository=Linearization --fla=FLA
    python tests/convert/make_author_goldens.py mom --repository=MoM --fla=FLA

The folders are checkouts of the authors' code, and FLA is one of github.com/fla-org/flash-linear-attention, at these commits:

| goldens | repository | flash-linear-attention |
|---|---|---|
| fox | github.com/zhixuan-lin/forgetting-transformer 883f260c636e; for Mamba2 github.com/state-spaces/mamba v2.2.2 | 1c5937eeeb8b, which its REPRODUCE.md names |
| liger | github.com/OpenSparseLLMs/Linearization 0b364eb81d21 | 95a895680065, a submodule until July 2025 |
| liger/liger_qwen2_gla | the same, 0e3cfae33a70: later commits need a newer transformers | 95a895680065 |
| mom | github.com/OpenSparseLLMs/MoM 033057c2f809, which imports the layer from FLA | 1d48579a82e8, of the day of its last change |

Each folder of the result has the files of `save_pretrained` of the authors' class, and expected.npz with `tokens` [1, T] and
`logits` [1, T, vocab] in float32. The stored goldens were made with transformers 4.47.1, torch 2.14.1 and triton 3.9.0 in
one thread; the tests require none of them.

Models, configs and Triton kernels are those of the authors and of FLA. Triton's interpreter runs the kernels on CPU tensors.
These parts are replaced while the script runs:

- an autotuned kernel has only the first of its configs;
- `torch.cuda.device` and `torch.cuda.Event` do nothing, `torch.empty(device="cuda")` makes a CPU tensor, a GPU's properties are
  constants, and `exp`, of which FLA has aliases that the interpreter does not run, is a function that calls it;
- element-wise functions that CUDA compiles at run time (`torch.cuda.jiterator`: SiLU, SwiGLU, gated linear units) are torch's;
- `flash_attn_func`, a CUDA library, is `flash_attention` below (Liger, Transformer (LLaMA)). For Liger, transformers' code
  calls it and computes its window;
- the causal-conv1d library is FLA's path in torch without it (DeltaNet). Mamba2 takes its authors' path in torch, with the norm
  of mamba-ssm;
- `forgetting_attention` and `chunk_delta_rule` refuse float32: the functions that they call are called without that check;
- `Tensor.bfloat16` returns the tensor (Liger): the code rounds the sum of both branches to bfloat16 and multiplies it by a
  matrix, which fails for a matrix of float32;
- `Tensor.argsort` is stable (Mixture-of-Memories): the code sorts tokens by memory and assumes that each memory's tokens stay
  in time order. torch does not promise that without `stable=True`, and on a CPU they do not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl

OUT = Path(__file__).parent / "author_goldens"
LENGTH = 72  # more than a block of keys of the kernels (64) and than Liger's window (65)
SMALL = dict(vocab_size=48, hidden_size=32, num_hidden_layers=2)
PRO = dict(
    hidden_ratio=3.5, intermediate_size=24, num_heads=2, use_output_gate=True, use_output_norm=True, qk_norm=True,
    qk_norm_share_param_across_head=True, use_k_shift=True, use_v_shift=True,
)  # fmt: skip
PARTS = ("use_output_gate", "use_output_norm", "qk_norm", "qk_norm_share_param_across_head", "use_k_shift", "use_v_shift")  # fmt: skip
# name: (folder of the model, class, fields of its config)
FOX: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pro": ("forgetting_transformer", "ForgettingTransformer", PRO),
    "pro-learned-gate": (
        "forgetting_transformer", "ForgettingTransformer",
        PRO | dict(qk_norm_share_param_across_head=False, use_rope=True, fgate_type="bias_only", use_output_gate=False),
    ),
    "llama": ("forgetting_transformer", "ForgettingTransformer", PRO | dict.fromkeys(PARTS, False)),
    "llama-fixed": (
        "forgetting_transformer", "ForgettingTransformer",
        PRO | dict.fromkeys(PARTS, False) | dict(fgate_type="fixed", fgate_bias_init=True, decay_time_min=2.0, decay_time_max=64.0),
    ),
    "transformer-pro": ("forgetting_transformer", "ForgettingTransformer", PRO | dict(use_rope=True, fgate_type="none")),
    "transformer-llama": ("transformer", "Transformer", dict(num_heads=2, intermediate_size=24, use_rope=True)),
    "mamba2": ("mamba2", "Mamba2", dict(num_heads=4, head_dim=16, state_size=16, expand=2, n_groups=1)),
    "hgrn2": ("hgrn2", "HGRN2", dict(num_heads=None, expand_ratio=16, intermediate_size=24)),
    "deltanet": ("delta_net", "DeltaNet", dict(num_heads=2, intermediate_size=24)),
}  # fmt: skip
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=24, max_position_embeddings=256)  # fmt: skip
LLAMA = HEADS | dict(head_dim=16, expand_k=1, expand_v=1, hidden_ratio=4, rms_norm_eps=1e-5)  # fmt: skip
# name, which is the model_type: (class, fields of its config)
LIGER = {
    "liger_gla": ("LigerGLA", LLAMA),
    "liger_gsa": ("LigerGSA", LLAMA | dict(pool_size=8)),
    "liger_hgrn2": ("LigerHGRN2", LLAMA),
    "liger_mistral_gla": ("LigerMistralGLA", HEADS | dict(head_dim=16, rms_norm_eps=1e-5, sliding_window=4096)),
    "liger_qwen2_gla": ("LigerQwen2GLA", HEADS | dict(hidden_size=64)),
}  # fmt: skip
MOM = dict(num_heads=4, head_dim=8, expand_v=1, intermediate_size=24, num_memories=4, topk=2, shared_mem=True)  # fmt: skip


def flash_attention(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), **_):  # fmt: skip
    """Return causal softmax attention as `flash_attn_func` of the library flash_attn defines it.

    Args:
        q: queries [B, T, H, D].
        k: keys [B, T, G, D]; a head of keys and values serves H / G consecutive heads of queries.
        v: values [B, T, G, D].
        dropout_p: must be 0.
        softmax_scale: factor of the scores, by default D^-0.5.
        causal: must be True.
        window_size: (left, right): a query sees `left` keys before the key of its position, -1 for all of them.
    """
    assert causal and dropout_p == 0
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    positions = torch.arange(q.shape[1])
    distance = positions[:, None] - positions
    seen = distance >= 0
    if window_size[0] >= 0:
        seen &= distance <= window_size[0]
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


class Nothing(contextlib.nullcontext):
    """A context that does nothing, whatever its arguments are."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()


def replace_cuda() -> None:
    """Replace the parts of torch and Triton that need a GPU, as the module's docstring lists; call it before the
    authors' code is imported.
    """
    autotune = triton.autotune
    triton.autotune = lambda configs, *args, **kwargs: autotune(configs[:1], *args, **kwargs)
    torch.cuda.device = torch.cpu.device = torch.cuda.Event = Nothing
    torch.cuda.device_of = lambda tensor: None
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    empty = torch.empty

    def empty_on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return empty(*args, device=None if device == "cuda" else device, **kwargs)

    torch.empty = empty_on_cpu
    gpu = dict(multiprocessor_count=1, max_shared_mem=232448)
    target = types.SimpleNamespace(backend="cpu")
    driver = types.SimpleNamespace(
        get_current_target=lambda: target,
        utils=types.SimpleNamespace(get_device_properties=lambda index: gpu),
    )
    triton.runtime.driver.set_active(driver)
    activations = {
        "sigmoid_fwd": torch.sigmoid,
        "swish_fwd": torch.nn.functional.silu,
        "glu_fwd": lambda x, y: torch.sigmoid(x) * y,
        "swiglu_fwd": lambda x, y: torch.nn.functional.silu(x) * y,
    }

    def compiled(code: str) -> Any:
        name = code.split("(")[0].split()[-1]
        return activations.get(name)

    torch.cuda.jiterator._create_jit_fn = compiled


@triton.jit
def interpreted_exp(x):
    """Return e^x in a kernel."""
    return tl.exp(x)


def replace_aliases() -> None:
    """Replace `exp` in all modules of flash-linear-attention: Triton's interpreter runs `tl.exp`, but not an alias of it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.") and tl.core.is_builtin(getattr(module, "exp", None)):
            module.exp = interpreted_exp


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw all parameters of a model anew, with a large variance, so that every part of it changes the logits."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn_like(value)
            scale = 1 + 0.3 * noise if "norm" in name or name.endswith(".D") else 0.25 * noise
            value.copy_(noise if "embed" in name else scale)


def write(model: Any, name: str, seed: int, out: Path, length: int = LENGTH) -> None:
    """Draw a model's parameters, save it with the authors' `save_pretrained`, and write its logits of random
    tokens.

    Args:
        model: the authors' model.
        name: name of the folder.
        seed: seed of the parameters and tokens.
        out: the folder that contains the new folder.
        length: the number of tokens.
    """
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    model = model.float().eval()
    randomize(model, seed)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = np.random.default_rng(seed).integers(0, SMALL["vocab_size"], (1, length))
    with torch.no_grad():
        logits = model(torch.tensor(tokens), use_cache=False).logits.float().numpy()
    np.savez_compressed(folder / "expected.npz", tokens=tokens.astype(np.int32), logits=logits)
    size = sum(p.numel() for p in model.parameters())
    print(f"{name}: {size} parameters, standard deviation of logits {logits.std():.2f}", flush=True)


def make_fox(repository: str, mamba: str, kinds: list[str], out: Path) -> None:
    """Write the goldens of FoX's code: FoX, its transformers and its baselines."""
    sys.path.insert(0, str(Path(repository) / "src"))
    for seed, (name, (module, kind, fields)) in enumerate(FOX.items()):
        if kinds and name not in kinds:
            continue
        package = importlib.import_module(f"forgetting_transformer.model.{module}")
        modeling = importlib.import_module(f"{package.__name__}.modeling_{module}")
        if module == "forgetting_transformer":
            modeling.forgetting_attention = float32_forgetting_attention
        elif module == "transformer":
            modeling.flash_attn_func = flash_attention
        elif module == "mamba2":
            modeling.RMSNormGated = mamba_norm(mamba)
        elif module == "delta_net":
            convolution = importlib.import_module("fla.modules.convolution").ShortConvolution
            initialize = functools.partialmethod(convolution.__init__, use_fast_conv1d=False)
            convolution.__init__ = initialize
            layer = importlib.import_module(f"{package.__name__}.delta_net_layer")
            layer.chunk_delta_rule = float32_delta_rule
        config = getattr(package, f"{kind}Config")(**(SMALL | fields))
        write(getattr(package, f"{kind}ForCausalLM")(config), name, seed, out)


def float32_forgetting_attention(q, k, v, log_fgate, *, head_first, sm_scale, adaptive_threshold):
    """Call the kernel of the authors' `forgetting_attention`, which refuses dtypes of more than 16 bits."""
    from forgetting_transformer.ops.forgetting_attention import ForgettingAttention

    assert head_first
    options = (True, sm_scale, adaptive_threshold, False, False, None, False, False)
    return ForgettingAttention.apply(q, k, v, log_fgate, None, *options)


def float32_delta_rule(q, k, v, beta, BT, initial_state, output_final_state):
    """Call the kernels of FLA's `chunk_delta_rule`, which refuses float32."""
    from fla.ops.delta_rule.chunk import ChunkDeltaRuleFunction

    scale = k.shape[-1] ** -0.5
    return ChunkDeltaRuleFunction.apply(q, k, v, beta, BT, scale, initial_state, output_final_state)


def mamba_norm(mamba: str) -> Any:
    """Return the class of mamba-ssm's gated norm. Only its file is imported, since the package needs compiled CUDA code."""
    path = Path(mamba) / "mamba_ssm/ops/triton/layernorm_gated.py"
    spec = importlib.util.spec_from_file_location("layernorm_gated", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RMSNorm


def make_liger(repository: str, kinds: list[str], out: Path) -> None:
    """Write the goldens of Liger's code: one kind of pretrained transformer or gate a golden."""
    import transformers.modeling_flash_attention_utils as flash
    import transformers.utils

    sys.path.insert(0, repository)
    transformers.utils.is_flash_attn_2_available = lambda: True
    transformers.utils.is_flash_attn_greater_or_equal_2_10 = lambda: True
    flash.flash_attn_func = flash_attention
    flash._flash_supports_window_size = True
    torch.Tensor.bfloat16 = lambda tensor: tensor
    from liger import models

    replace_aliases()

    for seed, (name, (kind, fields)) in enumerate(LIGER.items()):
        if kinds and name not in kinds:
            continue
        config = getattr(models, f"{kind}Config")(**(SMALL | fields))
        write(getattr(models, f"{kind}ForCausalLM")(config), name, seed, out)


def make_mom(repository: str, out: Path) -> None:
    """Write the golden of Mixture-of-Memories' code: Gated DeltaNet inside two of four memories and a shared one."""
    sys.path.insert(0, repository)
    from mom.models.mom.modeling_mom import MomConfig, MomForCausalLM

    replace_aliases()
    argsort = torch.Tensor.argsort
    torch.Tensor.argsort = lambda tensor: argsort(tensor, stable=True)
    config = MomConfig(**(SMALL | MOM))
    write(MomForCausalLM(config), "gated_deltanet", 0, out, length=60)


def main() -> int:
    """Write the goldens of a family that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=("fox", "liger", "mom"))
    parser.add_argument("--repository", required=True, help="a checkout of the authors' code")
    parser.add_argument("--fla", help="a checkout of flash-linear-attention")
    parser.add_argument("--mamba", help="a checkout of mamba, for FoX's Mamba2")
    parser.add_argument("--kinds", help="names of goldens, separated by commas; default: all")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder that is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    replace_cuda()
    if arguments.fla:
        sys.path.insert(0, arguments.fla)
    kinds = arguments.kinds.split(",") if arguments.kinds else []
    out = arguments.out / arguments.family
    if arguments.family == "fox":
        make_fox(arguments.repository, arguments.mamba, kinds, out)
    elif arguments.family == "mom":
        make_mom(arguments.repository, out)
    else:
        make_liger(arguments.repository, kinds, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
