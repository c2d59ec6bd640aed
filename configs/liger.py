"""Liger, as published: `--config=configs/liger.py:<model>[,source=PATH][,gate=gsa][,hybrid=8][,ablation=...][,data=text]`.

Reproduces: arXiv 2503.01496 and github.com/OpenSparseLLMs/Linearization. In each layer of a pretrained transformer, a gated
memory and softmax attention in a window of 64 replace softmax attention. LoRA adapters (rank 8, alpha 8, of the query, key and
value projections) are tuned on 0.02 B tokens of cleaned Alpaca.
Command: python train.py --config=configs/liger.py:llama3-8b,source=Meta-Llama-3-8B --workdir=runs/liger --config.data.path=alpaca.jsonl
Hardware: one GPU of 80 GB for 8 B parameters; a CPU for smollm2-135m.
Expected: docs/results/liger.md has the measurements.

<model> is one of `MODELS`, or `auto` for any pretrained model in `source`. Options:

    source           the pretrained model: a Hugging Face folder, a .gguf file, or OWNER/NAME[@REVISION] on the hub
    tokenizer        a tokenizer.json to use instead of the source's, or the id of a model on the hub
    gate             gla (default), mamba2, mlstm, gated_retention, hgrn2, rwkv6, gsa or none (no decay)
    lower_bound      γ of gate=hgrn2 in all layers but the first (default: 0, as in the published code)
    hybrid           8: the last of every eight layers remains softmax attention; 0 (default): no layer does
    window           tokens in the window (default: 64)
    method           liger (default); window: only attention in the window, the baseline; softmax: the pretrained model;
                     lolcats_transfer, lolcats and lolcats_lora: see below
    recipe           of LoLCATs: authors (default); liger: as the code of Liger's paper trains this baseline
    ablation         the paper's: random_gate, feature_map, no_lora or no_window; and no_gate (the memory does not decay) and
                     no_memory (only the window, which equals method=window)
    data             alpaca (default): predict the answers of an instruction file; text: predict every token of plain text
    lr               learning rate
    rank             rank of the adapters; alpha is proportional to it
    memory_weight, window_weight    weights of the two branches with method=liger (default: 0.5 each)
    learned_weights  1: each layer learns its two weights; 0 (default): they are constant
    temperature      divides the logarithm of the gate with method=liger

The optimizer is AdamW (0.9, 0.999, weight decay 0.01) with a constant rate of 1e-3. A step has 8 rows of 1,024 tokens. The
published code divides the rate by 10 after 10 evaluations, 200 steps apart, without improvement; its runs have fewer
evaluations, so this config has no such rule.

LoLCATs (arXiv 2410.10254) is trained in two runs, as by its authors: method=lolcats_transfer learns feature maps and window
factors from the outputs of softmax attention with a rate of 1e-2; then method=lolcats with --init_from=FIRST_RUN tunes adapters
(rank 8, alpha 16, of q, k, v and o) with 1e-4. A LoLCATs model cannot be exported, since the pretrained format has no feature
maps. The rows of Liger's Table 2 are: "Attn. Trf.", the run of method=lolcats_transfer, which is evaluated as its student; "LoRA
Only", method=lolcats_lora, which tunes adapters beside feature maps and window factors at their initial values; and LoLCATs,
both runs. With recipe=liger, maps have as many columns as a head has channels, window factors are not trained, and adapters have
alpha 8 on q, k and v, as in the code of Liger's paper.

Different from the published code: rows are packed with complete documents, which are independent of each other; gradients are
clipped to a norm of 1, which the published config sets but its trainer ignores; the window has 64 tokens, not 65.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from absl import logging

from configs.variants import Option, listed, parse_variant
from lsm_jax.convert.recipe import FILE as RECIPE
from lsm_jax.convert.recipe import with_recipe
from lsm_jax.convert.tokenizer import tokenizer_files
from lsm_jax.convert.tokenizer_path import tokenizer_path
from lsm_jax.data import DataConfig, JSONTokenizer
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.hub import local_path, reference, tokenizer_folder
from lsm_jax.linearize import Pretrained, liger_model, lolcats_model, window_model
from lsm_jax.linearize.released import open_pretrained
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


# The pretrained models. If `source` is given, its config is used instead.
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
# For each ablation the changed fields of the mixer, and the modules that are trained.
ABLATIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "": ({}, ("lora",)),
    "random_gate": (dict(gate_projection=True), ("lora", "memory_gate")),
    "feature_map": (dict(feature_map="t2r"), ("lora", "q_map", "k_map")),
    "no_lora": ({}, ("q_proj", "k_proj", "v_proj")),
    "no_window": (dict(memory_weight=1.0, window_weight=0.0), ("lora",)),
    "no_gate": (dict(gate="none"), ("lora",)),
    "no_memory": (dict(memory_weight=0.0, window_weight=1.0), ("lora",)),
}
METHODS = ("liger", "window", "softmax", "lolcats_transfer", "lolcats", "lolcats_lora")
LOLCATS_MAPS = ("q_map", "k_map", "window_factor")
OPTIONS = dict(
    source=Option(),
    tokenizer=Option(),
    gate=Option(choices=GATES),
    hybrid=Option(kind=int),
    window=Option(kind=int),
    method=Option(choices=METHODS),
    recipe=Option(choices=("authors", "liger")),
    ablation=Option(choices=ABLATIONS),
    data=Option(choices=("alpaca", "text")),
    lr=Option(kind=float, positive=True),
    rank=Option(kind=int),
    memory_weight=Option(kind=float),
    window_weight=Option(kind=float),
    temperature=Option(kind=float),
    lower_bound=Option(kind=float),
    learned_weights=Option(kind=bool),
)
DEFAULTS = dict(
    source="",
    tokenizer="",
    gate="gla",
    hybrid=0,
    window=64,
    method="liger",
    recipe="authors",
    ablation="",
    data="alpaca",
)
# Options that set a field of LigerConfig, with the field's name.
MIXER_NUMBERS = dict(
    memory_weight="memory_weight",
    window_weight="window_weight",
    temperature="gate_temperature",
    lower_bound="gate_lower_bound",
    learned_weights="learned_weights",
)
ONE_BRANCH = ("no_window", "no_memory")


def get_config(variant: str = "smollm2-135m") -> TrainConfig:
    """Return the training config of the Liger run that the variant `<model>[,option=value...]` names.

    Raises:
        ValueError: the model, an option or a value does not exist, or the source is not accepted.
    """
    name, options = _options(variant)
    source = options["source"]
    if source and reference(source) is None:
        source = str(Path(source).expanduser().absolute())
    base, tokenizer, add_bos = _base(variant, name, source, options["tokenizer"])
    config = tuning_config(variant, base)
    config.base = Pretrained(path=source)
    config.data.tokenizer, config.data.add_bos = tokenizer, add_bos
    return config


def _options(variant: str) -> tuple[str, dict[str, Any]]:
    """Parse a variant of the Liger config: return the model's name, and the values of all options, given or
    default.

    Raises:
        ValueError: the variant has an unknown option or value, or two options that exclude each other.
    """
    name, given = parse_variant(variant, OPTIONS)
    options: dict[str, Any] = DEFAULTS | given
    for key, met, requirement in (
        ("gate", options["method"] == "liger", "method=liger"),
        ("hybrid", options["method"] == "liger", "method=liger"),
        ("ablation", options["method"] == "liger", "method=liger"),
        ("recipe", options["method"].startswith("lolcats"), "a method of LoLCATs"),
        ("window", options["method"] != "softmax" and options["ablation"] != "no_window", "a method with a window"),
        ("rank", options["ablation"] != "no_lora" and options["method"] != "lolcats_transfer", "adapters"),
        ("tokenizer", bool(options["source"]), "source=PATH"),
    ):  # fmt: skip
        if key in given and not met:
            raise ValueError(f"variant {variant!r}: {key} requires {requirement}")
    if "gate" in given and options["ablation"] in ("no_gate", "no_memory"):
        raise ValueError(
            f"variant {variant!r}: ablation={options['ablation']} has no gate, so the option gate is not accepted"
        )
    if given.keys() & MIXER_NUMBERS.keys() and (
        options["method"] != "liger" or options["ablation"] in ONE_BRANCH
    ):
        raise ValueError(
            f"variant {variant!r}: {', '.join(MIXER_NUMBERS)} require method=liger, without ablation={' or '.join(ONE_BRANCH)}"
        )
    return name, options


def tuning_config(variant: str, base: ModelConfig) -> TrainConfig:
    """Return the training config of the Liger run that `variant` names, but for the softmax model `base` in
    place of the one that it names.

    The run still lacks the pretrained parameters: set `base` or `init_from`, and `data.tokenizer`.

    Raises:
        ValueError: an option or a value does not exist.
    """
    _, options = _options(variant)
    mixer = {name: options[key] for key, name in MIXER_NUMBERS.items() if key in options}
    changes, trainable = ABLATIONS[options["ablation"]]
    rank = options.get("rank", LoRAConfig().rank)
    lora = None if options["ablation"] == "no_lora" else LoRAConfig(rank=rank, alpha=float(rank))
    window, frozen_initial = options["window"], ()
    optimizer = OptimizerConfig(peak_lr=1e-3, end_lr_ratio=1.0, b2=0.999, weight_decay=0.01)
    if options["method"] == "liger":
        model = liger_model(
            base, hybrid=options["hybrid"], lora=lora, **dict(gate=options["gate"], window=window) | changes | mixer
        )  # fmt: skip
        trainable += ("branch_weights",) if options.get("learned_weights") else ()
    elif options["method"] == "window":
        model = window_model(base, window=window, lora=lora)
    elif options["method"].startswith("lolcats"):
        model, trainable, frozen_initial = _lolcats(
            base, options["method"], options["recipe"], rank=rank, window=window
        )
        transfer = options["method"] == "lolcats_transfer"
        optimizer.peak_lr = 1e-2 if transfer else 1e-4
        optimizer.weight_decay = 0.0 if transfer else optimizer.weight_decay
    else:
        model = dataclasses.replace(base, lora=lora)
    optimizer.peak_lr = options.get("lr", optimizer.peak_lr)
    answers = options["data"] == "alpaca"
    return TrainConfig(
        name=variant,
        model=model,
        data=DataConfig(
            format=options["data"],
            sequence_length=1024,
            predict_end=answers,
            packing="first_fit" if answers else "concat",
            heldout_fraction=0.004 if answers else 0.01,
        ),
        optimizer=optimizer,
        batch_size=8,
        total_tokens=20_000_000,
        trainable=trainable,
        frozen_initial=frozen_initial,
        eval_every=200,
        checkpoint_every=200,
    )


def _lolcats(
    base: ModelConfig, method: str, recipe: str, *, rank: int, window: int
) -> tuple[ModelConfig, tuple[str, ...], tuple[str, ...]]:
    """Return, for a run of LoLCATs, the model's config, the names of the trained parameters (`trainable`)
    and of those that keep their initial values (`frozen_initial`).
    """
    as_liger = recipe == "liger"
    fields: dict[str, Any] = dict(window=window)
    if as_liger:
        (head_dim,) = {x.mixer.dim(base.hidden_size) for x in base.layers.values()}
        fields["feature_dim"] = head_dim
    if method == "lolcats_transfer":
        model = lolcats_model(base, transfer=True, **fields)
        return (model, LOLCATS_MAPS[:2], LOLCATS_MAPS[2:]) if as_liger else (model, LOLCATS_MAPS, ())  # fmt: skip
    targets = ("q_proj", "k_proj", "v_proj", *(() if as_liger else ("o_proj",)))
    lora = LoRAConfig(targets=targets, rank=rank, alpha=(1.0 if as_liger else 2.0) * rank)
    model = lolcats_model(base, lora=lora, **fields)
    return model, ("lora",), LOLCATS_MAPS if method == "lolcats_lora" else ()


def _base(variant: str, name: str, source: str, given: str) -> tuple[ModelConfig, str, bool]:
    """Find the pretrained model that a variant of the Liger config starts from, and its tokenizer.

    Args:
        variant: the config's complete variant, for messages.
        name: name of the pretrained model, such as "smollm2-135m" or "auto".
        source: absolute path of the pretrained model, its id on the Hugging Face hub, or "".
        given: path or id of the tokenizer that the option `tokenizer` states, or "".

    Returns:
        The softmax model, the path or id of its tokenizer, and whether the tokenizer adds BOS. The tokenizer of a .gguf file is
        written into a folder next to the file.
    """
    if name not in (*MODELS, "auto") or (name == "auto" and not source):
        raise ValueError(
            f"variant {variant!r}: model {name!r}; {listed(MODELS)}, and auto with source=PATH"
        )
    if not source:
        return MODELS[name], "tokenizer.json", True
    path = local_path(source)
    model = Pretrained(path=source).config()
    if with_recipe(open_pretrained(path), model) != model:
        logging.warning(
            "%s: %s has the mixers of an exported model, in whose place this config makes those of its own options; "
            "configs/finetune.py tunes the exported model", source, RECIPE,
        )  # fmt: skip
    if name != "auto":
        sizes = [(m.hidden_size, m.num_layers, m.vocab_size) for m in (MODELS[name], model)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"variant {variant!r}: source={source} has (width, layers, vocabulary) {sizes[1]}, but {name} has "
                f"{sizes[0]}; use auto instead of {name}"
            )
    model.dtype = "bfloat16"
    if given and reference(given) is not None:
        tokenizer_files(path, given)
        return model, given, _adds_bos(given)
    if not given and reference(source) is not None and path.is_dir():
        return model, source, _adds_bos(source)
    tokenizer = tokenizer_path(path, given or None)
    return model, str(tokenizer), JSONTokenizer(tokenizer).adds_bos


def _adds_bos(tokenizer: str) -> bool:
    """Return whether the tokenizer of a model on the hub adds BOS."""
    folder = tokenizer_folder(tokenizer)
    assert folder is not None
    return JSONTokenizer(folder).adds_bos
