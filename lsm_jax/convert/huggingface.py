"""Import pretrained models as runs.

    python -m lsm_jax.convert.huggingface --source=Llama-3.2-1B --workdir=runs/llama

The source is a folder that Hugging Face's transformers wrote (config.json, safetensors, tokenizer.json), the id of such a model
on the Hugging Face hub (OWNER/NAME[@REVISION], downloaded to its cache), or a GGUF file, with a
Llama, Mistral, Qwen2 or Qwen3; a folder with a model of `lsm_jax.convert.families` (docs/released_models.md); or a .pth file of
RWKV-7's authors. The run can be evaluated (`eval.py --workdir=runs/llama`), and other runs can start from it
(`train.py --init_from=runs/llama`). It cannot be resumed, since it has no optimizer state.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import Progress

from lsm_jax import hub
from lsm_jax.convert.checkpoint import INDEX, Checkpoint, Tensors
from lsm_jax.convert.families import MODEL_TYPES, family_of
from lsm_jax.convert.fields import check_fields
from lsm_jax.convert.gguf_file import GGUF
from lsm_jax.convert.layout import Layout, Names, layout_of, prefixed
from lsm_jax.convert.load import load_tree
from lsm_jax.convert.published import model_of
from lsm_jax.convert.recipe import with_recipe
from lsm_jax.convert.runs import command, name_of, new_run, save_run
from lsm_jax.convert.rwkv_file import RWKVFile
from lsm_jax.convert.tokenizer import check_companions, tokenizer_files, write_files
from lsm_jax.data import DataConfig
from lsm_jax.data.tokenizers import load_tokenizer
from lsm_jax.files import inside
from lsm_jax.models import ModelConfig
from lsm_jax.training import TrainConfig

Source = str | os.PathLike[str] | Tensors

_HEAD = "lm_head.weight"
_TOP = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "lm_head.kernel": _HEAD,
}
_LAYER = {
    "mixer_norm.scale": "input_layernorm.weight",
    "feedforward_norm.scale": "post_attention_layernorm.weight",
    "feedforward.gate_proj.kernel": "mlp.gate_proj.weight",
    "feedforward.up_proj.kernel": "mlp.up_proj.weight",
    "feedforward.down_proj.kernel": "mlp.down_proj.weight",
    "mixer.q_proj.kernel": "self_attn.q_proj.weight",
    "mixer.k_proj.kernel": "self_attn.k_proj.weight",
    "mixer.v_proj.kernel": "self_attn.v_proj.weight",
    "mixer.o_proj.kernel": "self_attn.o_proj.weight",
    "mixer.q_proj.bias": "self_attn.q_proj.bias",
    "mixer.k_proj.bias": "self_attn.k_proj.bias",
    "mixer.v_proj.bias": "self_attn.v_proj.bias",
    "mixer.q_norm.scale": "self_attn.q_norm.weight",
    "mixer.k_norm.scale": "self_attn.k_norm.weight",
}
IGNORED = (".rotary_emb.inv_freq",)  # saved by old versions; follows from rope_theta


def open_source(source: Source) -> Tensors:
    """Open a pretrained model for reading: a Hugging Face folder, a GGUF file, or a model of the Hugging Face hub by its id,
    OWNER/NAME[/FILE][@REVISION], which is downloaded to the hub's cache.

    Raises:
        ValueError: the source is neither, or cannot be read.
    """
    if isinstance(source, Tensors):
        return source
    path = hub.local_path(source)
    if path.is_file():
        return RWKVFile(path) if path.suffix == ".pth" else GGUF(path)
    if not os.fspath(source) or not path.is_dir():
        raise ValueError(
            f"source={str(source)!r} does not exist; accepted is a Hugging Face folder, a .gguf or .pth file, or a model of the hub "
            "as OWNER/NAME"
        )
    _check_files(source, path)
    return Checkpoint(path)


def _check_files(source: Source, folder: Path) -> None:
    """Raise ValueError unless a folder has a config.json and safetensors; the message says what to give instead."""
    what, file = f"source={str(source)!r}", f"{source}/FILE"
    if not os.path.lexists(folder / Checkpoint.config_file):
        raise ValueError(
            f"{what} has no {Checkpoint.config_file}; accepted are models with {Checkpoint.config_file} and safetensors, or one "
            f"file, {file}.gguf or {file}.pth"
        )
    if not any(os.path.lexists(folder / name) for name in (Checkpoint.single_file, INDEX)):
        raise ValueError(
            f"{what} has no {Checkpoint.single_file} and no {INDEX}; accepted are tensors in safetensors, not in PyTorch's .bin"
        )


def model_config(source: Source) -> ModelConfig:
    """Return the config of a pretrained model: of config.json or a GGUF file, with the mixers of the recipe that an exported
    Liger model has beside it (`lsm_jax.convert.recipe`).

    Raises:
        ValueError: the source cannot be read, or this library does not support its model or one of its fields, which the message
            names; or the recipe does not fit the model.
    """
    opened = open_source(source)
    return with_recipe(opened, published_config(opened))


def published_config(source: Source) -> ModelConfig:
    """Return the config of the model that a pretrained model's config.json or GGUF file describes, without a recipe.

    Raises:
        ValueError: as `model_config`.
    """
    opened = open_source(source)
    family = family_of(opened.config)
    if family is not None:
        return family.model(opened)
    return model_of(opened, () if isinstance(opened, GGUF) else MODEL_TYPES)


def load_params(
    source: Source,
    config: ModelConfig,
    *,
    shardings: dict[str, Any] | None = None,
    dtype: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Load the tensors of a pretrained model as the parameters of `config`'s model, one at a time, each
    directly to its devices.

    Args:
        source: the folder or file.
        config: `model_config(source)`, or a config with other mixers that have the same parameters.
        shardings: the shardings of the parameters, as from `training.step.param_shardings`; None is the default device.
        dtype: one dtype for all parameters, or a tree with one for each; None is float32.
        progress: called with (numbers loaded so far, all numbers).

    Returns:
        The parameters, a pure dict with the structure of `training.step.params_of`.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape, or the format has no tensor for a parameter of the model
            (the message names them); or the head of a model with tied embeddings differs from its embedding.
    """
    opened = open_source(source)
    layout = checkpoint_layout(opened, config)
    check_tensors(opened, layout, config)
    opened.verify()
    if config.tie_embeddings and _HEAD in opened.shapes:
        (_, embedding), *_ = layout.place(["embedding"], -1)
        _check_tied(opened, embedding.name)
    return load_tree(
        opened,
        layout.params,
        layout.place,
        num_blocks=layout.num_blocks,
        shardings=shardings,
        dtype=dtype,
        progress=progress,
    )


def published_name(keys: list[str], layer: int) -> str:
    """Return the name of a parameter in transformers' checkpoints: of layer number `layer`, or if that is
    -1 of a parameter outside the layers. "" if transformers has no such parameter."""
    name = ".".join(keys)
    if layer < 0:
        return _TOP.get(name, "")
    return f"model.layers.{layer}.{_LAYER[name]}" if name in _LAYER else ""


def transformers_layout(config: ModelConfig) -> Layout:
    """Return the layout of a checkpoint of a transformer: Llama, Mistral, Qwen2, Qwen3.

    Raises:
        ValueError: the published format has no tensor for some parameters, which the message lists.
    """

    def names(layer: int) -> Names:
        return _TOP if layer < 0 else prefixed(f"model.layers.{layer}.", _LAYER)

    return layout_of(config, names)


def checkpoint_layout(source: Tensors, config: ModelConfig) -> Layout:
    """Return the layout of a pretrained model's tensors: that of its family, or of a transformer.

    Raises:
        ValueError: the format has no tensor for some parameters of `config`'s model, which the message lists.
    """
    family = family_of(source.config)
    if family is None:
        return transformers_layout(config)
    return family.layout(source.config, config, source.config_path, source.shapes)


def check_tensors(source: Tensors, layout: Layout, config: ModelConfig) -> None:
    """Raise ValueError unless a pretrained model has the tensors of a layout, and none that the model does not have; the
    message names them."""
    family = family_of(source.config)
    tied = config.tie_embeddings and _HEAD in source.shapes
    suffixes = (*IGNORED, *([_HEAD] if tied else []))
    prefixes: tuple[str, ...] = ()
    if family is not None:
        prefixes = family.ignored_prefixes(source.config, source.config_path)
    source.check(layout.shapes, suffixes, prefixes)


def _check_tied(source: Tensors, embedding_name: str) -> None:
    """Raise ValueError unless the stored matrix of the output head is equal to that of the embedding; for
    models whose config says that they are tied."""
    names = (_HEAD, embedding_name)
    same, rows = len({source.shapes[name] for name in names}) == 1, source.shapes[names[1]][0]
    for first in range(0, rows if same else 0, 4096):
        last = min(first + 4096, rows)
        head, embedding = (source.rows(name, first, last) for name in names)
        same = same and np.array_equal(head, embedding)
    if not same:
        raise ValueError(
            f"{source.folder}: {names[0]} differs from {names[1]}, though tie_word_embeddings is true"
        )


def import_huggingface(
    source: Source,
    workdir: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    model: ModelConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TrainConfig:
    """Make a run from a pretrained model. Its checkpoint has the matrices that are stored in bfloat16 in that dtype.

    The model's tokenizer is copied into the run, and the run's data config names it. The config adds BOS if the tokenizer
    does, and has rows as long as the model's context, but at most 8192 tokens.

    Args:
        source: the folder or file.
        workdir: the directory of the new run; it must not contain a run.
        tokenizer: a tokenizer.json or its folder, to use instead of the source's tokenizer; or RWKV's vocabulary, a .txt file.
        model: a model that has the source's parameters, such as a Liger model; None is `model_config(source)`.
        progress: called with (numbers loaded so far, all numbers of the model).

    Returns:
        The run's config.

    Raises:
        ValueError: the source is not accepted (see `model_config`, `load_params`, `convert.tokenizer_of`), or `workdir`
            contains a run.
    """
    with new_run(workdir) as target:
        opened = open_source(source)
        model = model_config(opened) if model is None else model
        check_companions(opened)
        files = tokenizer_files(opened, tokenizer)
        dtypes = _dtypes(opened, model)
        params = load_params(opened, model, dtype=dtypes, progress=progress)
        data = tokenizer_data(opened, target, files)
        name = name_of(opened.folder).removesuffix(".gguf").removesuffix(".pth")
        config = TrainConfig(name=name, model=model, data=data)
        config.validate()
        save_run(target, config, params, opened.folder)
        return config


def _dtypes(source: Tensors, model: ModelConfig) -> Any:
    """Return the dtype of imported parameters, or a tree of dtypes (`Layout.stored_dtypes`). Of a transformer whose tensors are
    all bfloat16, norms and biases are bfloat16 too.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape.
    """
    layout = checkpoint_layout(source, model)
    check_tensors(source, layout, model)
    all_bfloat16 = set(source.dtypes.values()) == {"BF16"}
    if family_of(source.config) is None and all_bfloat16:
        return jax.numpy.bfloat16
    return layout.stored_dtypes(source)


def tokenizer_data(source: Tensors, workdir: Path, files: dict[str, bytes]) -> DataConfig:
    """Write a pretrained model's tokenizer into the directory of a new run, and return the run's data config: with this
    tokenizer, and rows as long as the model's context, but at most 8192 tokens.

    Args:
        source: the pretrained model.
        workdir: the run's directory.
        files: the tokenizer's files, from `tokenizer_files`.

    Raises:
        ValueError: the tokenizer cannot be used, or `workdir` has a link in its place.
    """
    family = family_of(source.config)
    fields = source.config if family is None else family.values(source.config, source.config_path)
    check_fields(fields, source.config_path, dict(max_position_embeddings="size"), source.label)
    existed = workdir.exists()
    folder = inside(workdir, "tokenizer", what=f"workdir={str(workdir)!r}")
    try:
        path = str(write_files(files, folder))
        return DataConfig(
            tokenizer=path,
            sequence_length=min(8192, fields.get("max_position_embeddings") or 8192),
            add_bos=getattr(load_tokenizer(path), "adds_bos", False),
        )
    except BaseException:
        for written in files:
            (folder / written).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
            if not existed:
                workdir.rmdir()
        raise


def _import_with_progress(source: str, workdir: str, tokenizer: str | None) -> TrainConfig:
    with Progress(transient=True) as bar:
        task = bar.add_task(f"reading {source}")
        return import_huggingface(
            source,
            workdir,
            tokenizer=tokenizer,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Import the pretrained transformer that the option --source names as the run --workdir, and return the
    exit status."""
    source = (
        "a Hugging Face folder, a .gguf file, or a model of the hub, OWNER/NAME[/FILE][@REVISION]"
    )
    options = dict(
        tokenizer="a tokenizer.json, if the source has none or one that is not supported; of RWKV's models their vocabulary, a .txt"
    )
    return command(
        "lsm_jax.convert.huggingface", __doc__, source, _import_with_progress, arguments, options
    )


if __name__ == "__main__":
    sys.exit(main())
