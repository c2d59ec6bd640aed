"""Fine-tuning of an imported model: `--config=configs/finetune.py:<what>,source=PATH[,targets=q_proj+k_proj][,data=text]...`.

Command: python train.py --config=configs/finetune.py:lora,source=rwkv7-1.5B --workdir=runs/tuned --config.data.path=alpaca.jsonl
Hardware: a GPU; a CPU for models of some 100 million parameters. `python -m lsm_jax.plan --config=...` says what a mesh requires.
Expected: docs/released_models.md says what is tested. These are usual values of the field, not a published recipe.

<what> is lora (adapters of rank 16 on every dense layer; the other parameters are frozen as they are stored) or full (all
parameters, in float32). The source is any model that `python -m lsm_jax.convert.huggingface` imports, with linear layers or
softmax attention, or an exported Liger model. Options:

    source        required for training; without it the config is that of SmolLM2-135M, on paper. A Hugging Face folder,
                  a .gguf file, a .pth file of RWKV's authors, the id of a model on the Hugging Face hub, or the directory of
                  a run
    tokenizer     a tokenizer.json, or RWKV's vocabulary (.txt), to use instead of the source's
    targets       the dense layers that have adapters, joined by +, such as q_proj+k_proj (default: all of mixers and feedforwards)
    rank, alpha   of the adapters (default: 16, and twice the rank)
    data          alpaca (default): predict the answers of an instruction file; text: predict every token of plain text
    lr            learning rate (default: 2e-4 with adapters, 1e-5 for all parameters)
    length        tokens of a row (default: 2048, or the model's context if that is shorter)

Rows are packed with complete documents, which are independent of each other: no convolution, token shift or memory crosses a
border (docs/released_models.md). A step has 16 rows; the rate rises for 3 % of 20 M tokens and falls to a tenth by a cosine. For
rows longer than a device's memory, --config.mesh.sequence=8 divides them over devices.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

from configs.liger import MODELS
from configs.variants import Option, check_head, parse_variant
from lsm_jax.convert import model_config
from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.huggingface import check_tensors, checkpoint_layout
from lsm_jax.convert.tokenizer_path import tokenizer_path
from lsm_jax.data import DataConfig, load_tokenizer
from lsm_jax.hub import local_path, reference
from lsm_jax.linearize import Pretrained
from lsm_jax.linearize.released import Released, open_pretrained
from lsm_jax.mixers import LoRAConfig
from lsm_jax.models import ModelConfig
from lsm_jax.training import OptimizerConfig, TrainConfig, read_config
from lsm_jax.training.partition import is_matrix, leaves_of

KINDS = ("lora", "full")
OPTIONS = dict(
    source=Option(),
    tokenizer=Option(),
    targets=Option(),
    rank=Option(kind=int, least=1),
    alpha=Option(kind=float, positive=True),
    data=Option(choices=("alpaca", "text")),
    lr=Option(kind=float, positive=True),
    length=Option(kind=int, least=1),
)
_ADAPTERS = ("targets", "rank", "alpha")


def get_config(variant: str = "lora") -> TrainConfig:
    """Return the training config that tunes the model which the variant `<what>,source=PATH[,option=value...]` names.

    Raises:
        ValueError: an option or a value does not exist, or the source is not accepted.
    """
    kind, options = parse_variant(variant, OPTIONS)
    check_head(variant, "what", kind, KINDS)
    if kind == "full" and (given := [name for name in _ADAPTERS if name in options]):
        raise ValueError(f"variant {variant!r}: {', '.join(given)} requires lora")
    source = Path(options.get("source", "")).expanduser().absolute()
    if "source" not in options:
        model = copy.deepcopy(MODELS["smollm2-135m"])
        data = DataConfig(tokenizer="tokenizer.json")
        fields: dict[str, Any] = dict(model=model, data=data, base=Pretrained())
    elif not (source / "checkpoints").is_dir():
        fields = _of_pretrained(options["source"], options.get("tokenizer"))
    elif "tokenizer" in options:
        raise ValueError(
            f"variant {variant!r}: tokenizer is not accepted with the directory of a run, which has one"
        )
    else:
        fields = _of_run(source)
    model, data = fields["model"], fields["data"]
    data.sequence_length = options.get("length", min(2048, data.sequence_length))
    answers = options.get("data", "alpaca") == "alpaca"
    data.format, data.packing = ("alpaca", "first_fit") if answers else ("text", "concat")
    rate = 1e-5
    if kind == "lora":
        rank = options.get("rank", 16)
        targets = tuple(options.get("targets", "all").split("+"))
        model.lora = LoRAConfig(targets=targets, rank=rank, alpha=options.get("alpha", 2.0 * rank))
        fields["trainable"], rate = ("lora",), 2e-4
    tokens = 20_000_000
    return TrainConfig(
        name=variant,
        optimizer=OptimizerConfig(
            peak_lr=options.get("lr", rate),
            warmup_tokens=3 * tokens // 100,
            b2=0.999,
            weight_decay=0.0,
        ),
        batch_size=16,
        total_tokens=tokens,
        eval_every=100,
        checkpoint_every=100,
        **fields,
    )


def _of_pretrained(source: str, tokenizer: str | None) -> dict[str, Any]:
    """Return the fields of the training config that a pretrained model on disk or on the Hugging Face hub determines."""
    folder, named = local_path(source), reference(source) is not None
    pretrained = Pretrained(path=source if named else str(folder.absolute()))
    opened = open_pretrained(folder)
    model = opened.model() if isinstance(opened, Released) else model_config(opened)
    whole = named and tokenizer is None and folder.is_dir()
    path = source if whole else str(tokenizer_path(folder.absolute(), tokenizer))
    context = opened.config.get("max_position_embeddings") or 2048
    return dict(
        model=model,
        data=_data(path, context),
        base=pretrained,
        frozen_dtype=_frozen_dtype(opened, model),
    )


def _of_run(source: Path) -> dict[str, Any]:
    """Return the fields of the training config that a run determines, from whose parameters the new run starts."""
    run = read_config(source, "source")
    model: ModelConfig = run.model
    if model.lora is not None:
        raise ValueError(
            f"source={str(source)!r}: the run has adapters; export it with python -m lsm_jax.linearize.export, which merges them, and "
            "give the exported folder"
        )
    data = _data(run.data.tokenizer, run.data.sequence_length)
    data = dataclasses.replace(data, add_bos=run.data.add_bos, bos_id=run.data.bos_id)
    return dict(model=model, data=data, init_from=str(source), frozen_dtype="float32")


def _data(tokenizer: str, context: int) -> DataConfig:
    """Return the data config with a tokenizer and rows of `context` tokens."""
    return DataConfig(
        tokenizer=tokenizer,
        sequence_length=context,
        add_bos=getattr(load_tokenizer(tokenizer), "adds_bos", False),
        heldout_fraction=0.01,
    )


def _frozen_dtype(source: Tensors, model: ModelConfig) -> str:
    """Return the `frozen_dtype` in which every stored tensor is exact."""
    layout = checkpoint_layout(source, model)
    check_tensors(source, layout, model)
    stored = leaves_of(layout.stored_dtypes(source))
    matrices = {str(dtype) for name, dtype in stored.items() if is_matrix(name)}
    return "bfloat16_matrices" if matrices == {"bfloat16"} else "float32"
