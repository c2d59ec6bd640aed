"""Liger, as published: `--config=configs/liger.py:<model>[,source=PATH][,gate=gsa][,hybrid=8][,ablation=...][,data=text]`.

Reproduces: arXiv 2503.01496 and github.com/OpenSparseLLMs/Linearization: a pretrained transformer's layers as gated memories
beside a window of 64, tuned by LoRA (rank 8, alpha 8, on queries, keys and values) on 0.02 B tokens of cleaned Alpaca.
Command: python train.py --config=configs/liger.py:llama3-8b,source=Meta-Llama-3-8B --workdir=runs/liger --config.data.path=alpaca.jsonl
Hardware: 8 B parameters fit one card of 80 GB; smollm2-135m trains on a CPU.
Expected: see docs/results/liger.md for what was measured.

`source` is a Hugging Face folder or a .gguf file, and `auto` in the model's place takes whatever it holds; tokenizer=FILE is a
tokenizer.json in place of the source's own. Options: gate (gla,
mamba2, mlstm, gated_retention, hgrn2, rwkv6, gsa); hybrid=8 keeps the last layer of every eight; window (64); method=window
(a window alone, the baseline), softmax (the model as it is), lolcats_transfer or lolcats (below); ablation=random_gate, feature_map, no_lora or no_window, the
paper's; data=text learns from every token of plain text in place of an instruction file's answers. Where the recipe is to give
way: lr, rank (alpha grows with it), and for method=liger memory_weight and window_weight (0.5 each) and temperature, which
divides the gate's logarithm.

AdamW (0.9, 0.999, weight decay 0.01) at a constant 1e-3, 8 rows of 1,024 tokens a step. The published rate falls to a tenth
where 10 evaluations in a row, 200 steps apart, bring nothing: more than its runs have, so there is no such rule here.
LoLCATs (arXiv 2410.10254), as its authors train it, is two runs: method=lolcats_transfer learns feature maps and window factors
from softmax attention's outputs at a rate of 1e-2, then method=lolcats with --init_from=THE FIRST RUN tunes adapters (rank 8,
alpha 16, on q, k, v and o) at 1e-4. Export writes no LoLCATs model: the pretrained format has no place for its maps.

Different from the published code: rows are packed with whole documents, none of which sees another; gradients are clipped to a
norm of 1, as its config asks and its trainer forgets; the window is 64 tokens, not 65.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from configs.variants import Option, listed, parse_variant
from lsm_jax.convert import tokenizer_of
from lsm_jax.convert.tokenizer import tokenizer_files
from lsm_jax.data import DataConfig, JSONTokenizer
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.linearize import Pretrained, liger_model, lolcats_model, window_model
from lsm_jax.mixers import LoRAConfig, RopeScaling, SoftmaxConfig
from lsm_jax.mixers.liger import GATES
from lsm_jax.models import LayerConfig, ModelConfig
from lsm_jax.training import OptimizerConfig, TrainConfig


def _model(width, layers, heads, kv_heads, inner, vocab, *, theta, tied, head_dim=None, eps=1e-5, **mixer):  # fmt: skip
    softmax = SoftmaxConfig(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_base=theta, norm_eps=eps, **mixer
    )  # fmt: skip
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_layers=layers,
        layers={"L": LayerConfig(mixer=softmax, feedforward=SwiGLUConfig(intermediate_size=inner))},
        tie_embeddings=tied,
        norm_eps=eps,
    )


# The pretrained models; the config of a source takes precedence.
MODELS = {
    "smollm2-135m": _model(576, 30, 9, 3, 1536, 49152, theta=1e5, tied=True),
    "llama3.2-1b": _model(2048, 16, 32, 8, 8192, 128256, theta=5e5, tied=True, rope_scaling=RopeScaling(factor=32.0)),
    "llama3.2-3b": _model(3072, 28, 24, 8, 8192, 128256, theta=5e5, tied=True, rope_scaling=RopeScaling(factor=32.0)),
    "llama3-8b": _model(4096, 32, 32, 8, 14336, 128256, theta=5e5, tied=False),
    "llama3.1-8b": _model(4096, 32, 32, 8, 14336, 128256, theta=5e5, tied=False, rope_scaling=RopeScaling(factor=8.0)),
    "mistral-7b": _model(4096, 32, 32, 8, 14336, 32000, theta=1e4, tied=False),
    "qwen2.5-7b": _model(3584, 28, 28, 4, 18944, 152064, theta=1e6, tied=False, eps=1e-6, qkv_bias=True),
    "qwen3-8b": _model(4096, 36, 32, 8, 12288, 151936, theta=1e6, tied=False, head_dim=128, eps=1e-6, qk_norm=True),
}  # fmt: skip
# By ablation, the changed fields of the mixer, and the modules that train.
ABLATIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "": ({}, ("lora",)),
    "random_gate": (dict(gate_projection=True), ("lora", "memory_gate")),
    "feature_map": (dict(feature_map="t2r"), ("lora", "q_map", "k_map")),
    "no_lora": ({}, ("q_proj", "k_proj", "v_proj")),
    "no_window": (dict(memory_weight=1.0, window_weight=0.0), ("lora",)),
}
METHODS = ("liger", "window", "softmax", "lolcats_transfer", "lolcats")
LOLCATS_MAPS = ("q_map", "k_map", "window_factor")
OPTIONS = dict(
    source=Option(),
    tokenizer=Option(),
    gate=Option(choices=GATES),
    hybrid=Option(kind=int),
    window=Option(kind=int),
    method=Option(choices=METHODS),
    ablation=Option(choices=ABLATIONS),
    data=Option(choices=("alpaca", "text")),
    lr=Option(kind=float, positive=True),
    rank=Option(kind=int),
    memory_weight=Option(kind=float),
    window_weight=Option(kind=float),
    temperature=Option(kind=float),
)
DEFAULTS = dict(
    source="",
    tokenizer="",
    gate="gla",
    hybrid=0,
    window=64,
    method="liger",
    ablation="",
    data="alpaca",
)
# Options of a number, and the fields of LigerConfig they set.
MIXER_NUMBERS = dict(
    memory_weight="memory_weight", window_weight="window_weight", temperature="gate_temperature"
)


def get_config(variant: str = "smollm2-135m") -> TrainConfig:
    """The run `<model>[,option=value...]`.

    Raises:
        ValueError: a model, option or value that does not exist, or a source that is refused.
    """
    name, given = parse_variant(variant, OPTIONS)
    options: dict[str, Any] = DEFAULTS | given
    for key, fits, needs in (
        ("gate", options["method"] == "liger", "method=liger"),
        ("hybrid", options["method"] == "liger", "method=liger"),
        ("ablation", options["method"] == "liger", "method=liger"),
        ("window", options["method"] != "softmax" and options["ablation"] != "no_window", "a method with a window"),
        ("rank", options["ablation"] != "no_lora" and options["method"] != "lolcats_transfer", "adapters"),
        ("tokenizer", bool(options["source"]), "source=PATH"),
    ):  # fmt: skip
        if key in given and not fits:
            raise ValueError(f"variant {variant!r}: {key} requires {needs}")
    mixer = {name: given[key] for key, name in MIXER_NUMBERS.items() if key in given}
    if mixer and (options["method"] != "liger" or options["ablation"] == "no_window"):
        raise ValueError(
            f"variant {variant!r}: {', '.join(MIXER_NUMBERS)} require method=liger, without ablation=no_window"
        )
    source = options["source"] and str(Path(options["source"]).expanduser().absolute())
    base, tokenizer, add_bos = _base(variant, name, source, options["tokenizer"])
    changes, trainable = ABLATIONS[options["ablation"]]
    rank = given.get("rank", LoRAConfig().rank)
    lora = None if options["ablation"] == "no_lora" else LoRAConfig(rank=rank, alpha=float(rank))
    window = options["window"]
    optimizer = OptimizerConfig(peak_lr=1e-3, end_lr_ratio=1.0, b2=0.999, weight_decay=0.01)
    if options["method"] == "liger":
        model = liger_model(
            base, hybrid=options["hybrid"], lora=lora, gate=options["gate"], window=window, **changes | mixer
        )  # fmt: skip
    elif options["method"] == "window":
        model = window_model(base, window=window, lora=lora)
    elif options["method"] == "lolcats_transfer":
        model, trainable = lolcats_model(base, transfer=True, window=window), LOLCATS_MAPS
        optimizer.peak_lr, optimizer.weight_decay = 1e-2, 0.0
    elif options["method"] == "lolcats":
        lora = LoRAConfig(
            targets=("q_proj", "k_proj", "v_proj", "o_proj"), rank=rank, alpha=2.0 * rank
        )
        model = lolcats_model(base, window=window, lora=lora)
        optimizer.peak_lr = 1e-4
    else:
        model = dataclasses.replace(base, lora=lora)
    optimizer.peak_lr = given.get("lr", optimizer.peak_lr)
    answers = options["data"] == "alpaca"
    return TrainConfig(
        name=variant,
        model=model,
        data=DataConfig(
            format=options["data"],
            tokenizer=tokenizer,
            sequence_length=1024,
            add_bos=add_bos,
            predict_end=answers,
            packing="first_fit" if answers else "concat",
            heldout_fraction=0.004 if answers else 0.01,
        ),
        optimizer=optimizer,
        batch_size=8,
        total_tokens=20_000_000,
        base=Pretrained(path=source),
        trainable=trainable,
        eval_every=200,
        checkpoint_every=200,
    )


def _base(variant: str, name: str, source: str, given: str) -> tuple[ModelConfig, str, bool]:
    """The softmax model, its tokenizer's path (a .gguf's is written beside it), and whether that sets BOS."""
    if name not in (*MODELS, "auto") or (name == "auto" and not source):
        raise ValueError(
            f"variant {variant!r}: model {name!r}; {listed(MODELS)}, and auto with source=PATH"
        )
    if not source:
        return MODELS[name], "tokenizer.json", True
    path = Path(source)
    model = Pretrained(path=source).config()
    if name != "auto":
        sizes = [(m.hidden_size, m.num_layers, m.vocab_size) for m in (MODELS[name], model)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"variant {variant!r}: {source} has width, layers and vocabulary {sizes[1]}, {name} has {sizes[0]}; "
                "auto takes any"
            )
    model.dtype = "bfloat16"
    tokenizer = path / "tokenizer.json"
    if given:
        tokenizer = Path(given).expanduser().absolute()
        tokenizer_files(path, tokenizer)
    elif not path.is_dir():
        tokenizer = path.with_name(path.name + ".tokenizer") / "tokenizer.json"
        if tokenizer.is_file():
            tokenizer_files(path, tokenizer)  # the file may have been replaced since
        else:
            tokenizer_of(path, tokenizer.parent)
    return model, str(tokenizer), JSONTokenizer(tokenizer).adds_bos
