"""flash-linear-attention's language models and its Mixture-of-Memories layer, as `benchmarks.peers.fla_worker` runs them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

VOCABULARY = 32000
MODELS: dict[str, dict[str, Any]] = {
    "gla-340m": dict(num_hidden_layers=24, num_heads=4),
    "gated_deltanet-340m": dict(num_hidden_layers=24, num_heads=3, head_dim=256, expand_v=2.0),
    "mamba2-340m": dict(num_hidden_layers=48),
    "mamba3-340m": dict(num_hidden_layers=48),
    "comba-340m": dict(num_hidden_layers=24, num_heads=3, head_dim=256, expand_v=2.0),
    "gated_deltaproduct-340m": dict(
        num_hidden_layers=24, num_heads=3, head_dim=256, expand_v=2.0,
        num_householder=2, use_forget_gate=True, allow_neg_eigval=True,
    ),
    "gated_deltanet2-340m": dict(num_hidden_layers=24, num_heads=8, head_dim=128, expand_v=1.0),
    "gla-1.3b": dict(num_hidden_layers=24, num_heads=4),
    "gated_deltanet-1.3b": dict(num_hidden_layers=24, num_heads=6, head_dim=256, expand_v=2.0),
    "kda-1.3b": dict(num_hidden_layers=24, num_heads=16, head_dim=128, expand_v=1.0),
    "mamba2-1.3b": dict(num_hidden_layers=48),
    "rwkv7-1.3b": dict(
        num_hidden_layers=24, head_dim=64, decay_low_rank_dim=128, gate_low_rank_dim=224,
        a_low_rank_dim=128, v_low_rank_dim=64,
    ),
    "softmax-1.3b": dict(num_hidden_layers=24, num_heads=16),
}  # fmt: skip
"""The fields of its models' configs, by variants of `configs/lm.py`."""
PACKAGES = {"gated_deltanet2": "gated_deltanet", "softmax": "transformer"}
"""The folders in `fla.models` of models that have another name there."""
WIDTHS = {"340m": 1024, "1.3b": 2048}
MOM = dict(num_memories=4, topk=2, shared_mem=True, num_heads=4, head_dim=256, expand_v=1.0)


@contextlib.contextmanager
def _normal_for_orthogonal() -> Iterator[None]:
    """Let `torch.nn.init.orthogonal_` draw from a normal distribution of the same variance. The peer's RWKV7 of 1.3B parameters would
    decompose some 500 matrices on the CPU, which lasts minutes, and a speed does not depend on them.
    """
    import torch  # pyrefly: ignore[missing-import]

    orthogonal = torch.nn.init.orthogonal_

    def normal(tensor, gain=1, generator=None):
        return torch.nn.init.normal_(tensor, std=gain * max(tensor.shape) ** -0.5)

    torch.nn.init.orthogonal_ = normal
    try:
        yield
    finally:
        torch.nn.init.orthogonal_ = orthogonal


def _attention(q: Any, k: Any, v: Any, *, causal: bool, window_size: tuple[int, int]) -> Any:
    """Return what flash_attn's `flash_attn_func` returns, by PyTorch's call of cuDNN: the output [B, T, H, D] of softmax attention.

    Raises:
        ValueError: attention is not causal, or it has a window.
    """
    import torch  # pyrefly: ignore[missing-import]
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyrefly: ignore[missing-import]

    if not causal or window_size != (-1, -1):
        raise ValueError(
            f"causal={causal}, window_size={window_size}: the model's attention is causal, without a window"
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return o.transpose(1, 2)


def language_model(variant: str, **fields: Any) -> Any:
    """Return the peer's language model of a variant such as gla-340m, on the CPU in float32; `fields` override fields of its config.
    Matrices that it initialises as orthogonal are normal, of the same variance.

    The peer has a layer of Gated DeltaNet-2 but no model: the result is its model of Gated DeltaNet with these layers. Its softmax
    attention requires the package flash_attn, which has no wheel: where that is not installed, PyTorch calls cuDNN's.
    """
    import torch  # pyrefly: ignore[missing-import]

    name, _, size = variant.rpartition("-")
    with _normal_for_orthogonal():  # from the import on, in which transformers keeps the function
        module = importlib.import_module(f"fla.models.{PACKAGES.get(name, name)}")
        classes = [
            getattr(module, n) for n in module.__all__ if n.endswith(("Config", "ForCausalLM"))
        ]
        attention = importlib.import_module("fla.layers.attn")
        attention.flash_attn_func = attention.flash_attn_func or _attention
        given = MODELS[variant] | fields
        config = classes[0](
            hidden_size=WIDTHS[size],
            vocab_size=VOCABULARY,
            use_cache=False,
            tie_word_embeddings=True,
            **given,
        )
        torch.manual_seed(0)
        model = classes[1](config)
    if name == "gated_deltanet2":
        layer = importlib.import_module("fla.layers.gdn2").GatedDeltaNet2
        sizes = {n: given[n] for n in ("num_heads", "head_dim", "expand_v")}
        for index, block in enumerate(model.model.layers):
            block.attn = layer(hidden_size=config.hidden_size, layer_idx=index, **sizes)
    return model


def model_of(variant: str, rows: int, length: int, **fields: Any) -> Callable:
    """Return a function that runs the forward and backward pass of the peer's language model of a variant such as gla-340m, with
    parameters and activations in bfloat16. Where the activations do not fit into the card's memory, it computes each layer again in
    the backward pass from the first call on: `remat` is then "layers", else "none".

    `fields` override fields of its config.
    """
    import torch  # pyrefly: ignore[missing-import]

    name = variant.rpartition("-")[0]
    if name == "mamba2" and "mamba_ssm" not in sys.modules:
        raise ModuleNotFoundError(
            "the peer's mamba2 requires the package mamba_ssm, which is not installed"
        )
    model = language_model(variant, **fields).to("cuda", torch.bfloat16).train()
    if (
        name == "mamba3"
        and importlib.import_module("fla.layers.mamba3").mamba3_siso_combined is None
    ):
        raise ModuleNotFoundError(
            "the peer's mamba3 requires the Triton kernels of Mamba-3 in mamba_ssm, which are not installed"
        )
    if name == "mamba2":
        # In training mode its mixers would call the extension of causal_conv1d.
        for layer in model.modules():
            if type(layer).__name__ == "Mamba2":
                layer.training = False
    tokens = torch.randint(0, VOCABULARY, (rows, length), device="cuda")

    def once():
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()

    def both():
        if both.remat == "layers":
            return once()
        try:
            return once()
        except torch.OutOfMemoryError:
            both.remat = "layers"
        torch.cuda.empty_cache()  # after the error, which holds the activations, is gone
        model.gradient_checkpointing_enable()
        once()

    both.parameters = sum(p.numel() for p in model.parameters())  # pyrefly: ignore
    both.remat = "none"  # pyrefly: ignore
    return both


def mom(rows: int, length: int) -> tuple[Callable, Callable]:
    """Return two functions that run the peer's Mixture-of-Memories layer: forward, and forward and
    backward.
    """
    import torch  # pyrefly: ignore[missing-import]
    from fla.layers.mom import MomAttention  # pyrefly: ignore[missing-import]

    from benchmarks import text

    torch.manual_seed(0)
    layer = MomAttention(hidden_size=1024, **MOM).to("cuda", torch.bfloat16).train()
    x = torch.from_numpy(text.activations(rows, length, 1024)).to("cuda", torch.bfloat16)
    x.requires_grad_()

    def forward():
        return layer(x)[0]

    def both():
        x.grad = None
        layer.zero_grad(set_to_none=True)
        forward().float().square().sum().backward()

    return forward, both
