"""Pretrained transformers as runs: `python -m lsm_jax.convert.huggingface --source=Llama-3.2-1B --workdir=runs/llama`.

The source is a folder as Hugging Face's transformers writes it (config.json, safetensors, tokenizer.json) or a GGUF file, of a
Llama, Mistral, Qwen2 or Qwen3. The run that is made can be evaluated (`eval.py --workdir=runs/llama`) and started from
(`train.py --init_from=runs/llama`), not resumed: there is no optimizer's state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import Progress

from lsm_jax.convert.checkpoint import Checkpoint, Tensors
from lsm_jax.convert.gguf_file import GGUF
from lsm_jax.convert.load import Piece, load_tree, places
from lsm_jax.convert.published import model_of
from lsm_jax.convert.runs import command, new_workdir, save_run
from lsm_jax.convert.tokenizer import tokenizer_files, write_files
from lsm_jax.data import DataConfig
from lsm_jax.data.tokenizers import JSONTokenizer
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training import TrainConfig
from lsm_jax.training.step import params_of

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
IGNORED = (".rotary_emb.inv_freq",)  # what old versions save of rope_theta


def open_source(source: Source) -> Tensors:
    """A Hugging Face folder or a GGUF file, opened.

    Raises:
        ValueError: it is neither, or cannot be read.
    """
    if isinstance(source, Tensors):
        return source
    path = Path(source).expanduser()
    if path.is_file():
        return GGUF(path)
    if not path.is_dir():
        raise ValueError(
            f"source={str(source)!r} does not exist; accepted is a Hugging Face folder or a .gguf file"
        )
    return Checkpoint(path)


def model_config(source: Source) -> ModelConfig:
    """The model a source holds.

    Raises:
        ValueError: a source that cannot be read, or a model or field of it that this library does not compute; it is named.
    """
    return model_of(open_source(source))


def load_params(
    source: Source,
    config: ModelConfig,
    *,
    shardings: dict[str, Any] | None = None,
    dtype: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """A source's tensors as the parameters of `config`'s model, read one at a time, each straight to where it lives.

    Args:
        source: the folder or file.
        config: the model: `model_config(source)`, or one with other mixers in its place that have the same parameters.
        shardings: of the parameters, as `training.step.param_shardings` gives; None is the default device.
        dtype: of all parameters, or a tree of each one's; None is float32.
        progress: called with the numbers read so far and all there are.

    Returns:
        A pure dict, the tree of `training.step.params_of`.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape, or the model has a parameter no tensor stands for; all
            are named. Or a tied model's own head differs from its embedding.
    """
    opened, shapes = open_source(source), params_of(abstract(config))
    wanted = {name: their_shape(*found) for name, found in names_of(shapes, config).items()}
    tied = config.tie_embeddings and _HEAD in opened.shapes
    opened.check(wanted, ignored=(*IGNORED, *([_HEAD] if tied else [])))
    if tied:
        _check_tied(opened)
    return load_tree(
        opened,
        shapes,
        lambda keys, layer: Piece(_name(keys, layer), keys[-1] == "kernel"),
        num_blocks=len(config.period()),
        shardings=shardings,
        dtype=dtype,
        progress=progress,
    )


def _name(keys: list[str], layer: int) -> str:
    """The published name of a parameter; empty where it has none."""
    own = ".".join(keys)
    if layer < 0:
        return _TOP.get(own, "")
    return f"model.layers.{layer}.{_LAYER[own]}" if own in _LAYER else ""


def names_of(
    params: dict[str, Any], config: ModelConfig
) -> dict[str, tuple[list[str], int | None, Any]]:
    """(keys, row of the stack or None, leaf) of every tensor, by its published name.

    Raises:
        ValueError: parameters without a published name; they are listed.
    """
    found, strange, size = {}, [], len(config.period())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for keys, layer in places(path, leaf.shape, size):
            if name := _name(keys, layer):
                found[name] = keys, None if layer < 0 else layer // size, leaf
            else:
                strange.append(f"{'.'.join(keys)} {leaf.shape}")
    if strange:
        raise ValueError(
            "the published format has no tensor for these parameters:\n  "
            + "\n  ".join(dict.fromkeys(strange))
        )
    return found


def their_shape(keys: list[str], row: int | None, leaf: Any) -> tuple[int, ...]:
    """Theirs are [out, in]."""
    shape = leaf.shape if row is None else leaf.shape[1:]
    return shape[::-1] if keys[-1] == "kernel" else shape


def _check_tied(source: Tensors) -> None:
    names = (_HEAD, _TOP["embedding"])
    same, rows = len({source.shapes[name] for name in names}) == 1, source.shapes[names[0]][0]
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
    progress: Callable[[int, int], None] | None = None,
) -> TrainConfig:
    """Make a run of a pretrained transformer; bfloat16 tensors stay bfloat16 in its checkpoint.

    Its data config has the model's own tokenizer, written into the run, sets BOS where the tokenizer does, and reads rows of the
    context the model was trained on, of 8192 tokens at most.

    Args:
        source: the folder or file.
        workdir: the run's directory; there must be no run in it.
        tokenizer: a tokenizer.json or its folder, in place of the source's own.
        progress: as in `load_params`.

    Returns:
        The run's config.

    Raises:
        ValueError: a source that is refused (see `model_config`, `load_params`, `convert.tokenizer_of`), or a run in `workdir`.
    """
    target, opened = new_workdir(workdir), open_source(source)
    model, files = model_config(opened), tokenizer_files(opened, tokenizer)
    narrow = set(opened.dtypes.values()) == {"BF16"}
    params = load_params(
        opened, model, dtype=jax.numpy.bfloat16 if narrow else None, progress=progress
    )
    written = str(write_files(files, target / "tokenizer"))
    data = DataConfig(
        tokenizer=written,
        sequence_length=min(8192, opened.config.get("max_position_embeddings", 8192)),
        add_bos=JSONTokenizer(written).adds_bos,
    )
    name = opened.folder.resolve().name.removesuffix(".gguf")
    config = TrainConfig(name=name, model=model, data=data)
    config.validate()
    save_run(target, config, params)
    return config


def _with_progress(source: str, workdir: str, tokenizer: str | None) -> TrainConfig:
    with Progress(transient=True) as shown:
        task = shown.add_task(f"reading {source}")
        return import_huggingface(
            source,
            workdir,
            tokenizer=tokenizer,
            progress=lambda done, all: shown.update(task, completed=done, total=all),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    source = "a Hugging Face folder or a .gguf file"
    further = dict(tokenizer="a tokenizer.json, where the source's own is missing or not read here")
    return command(
        "lsm_jax.convert.huggingface", __doc__, source, _with_progress, arguments, further
    )


if __name__ == "__main__":
    sys.exit(main())
