"""Export parameters as a Hugging Face folder with the names, shapes, dtypes and files of the model they came from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from lsm_jax.convert.checkpoint import FLOATS, INDEX, SINGLE_FILE, Checkpoint, Tensors
from lsm_jax.convert.huggingface import (
    IGNORED,
    Source,
    open_source,
    published_shape,
    published_tensors,
)
from lsm_jax.convert.tokenizer import tokenizer_of
from lsm_jax.models import ModelConfig

_FILE_BYTES = 5 * 10**9  # size of a file's tensors if the source has no such files; the usual limit
_COPIED = (".json", ".jinja", ".model", ".txt", ".md")


def export(
    params: dict[str, Any],
    config: ModelConfig,
    source: Source,
    out_folder: str | os.PathLike[str],
) -> Path:
    """Write a model's parameters as a Hugging Face folder, with the tensors of one file at a time in the
    host's memory.

    If the source is a folder, the result differs from it only in the values of the tensors: names, shapes, dtypes, each
    tensor's file, config and tokenizer are the same. If the source is a GGUF file, the parameters are written in their
    own dtype, with a config.json made from the file's metadata.

    Args:
        params: the parameters of `config`'s model, adapters merged.
        config: the model.
        source: the folder or file from which the parameters were imported.
        out_folder: the folder to write; it must be empty or not exist.

    Returns:
        The path of the folder.

    Raises:
        ValueError: the parameters do not correspond to the source's tensors, or the folder is not empty.
    """
    opened, out = open_source(source), Path(out_folder).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out_folder={str(out_folder)!r} is not empty; accepted is a new folder")
    tensors = published_tensors(params, config)
    opened.check(
        {name: published_shape(*entry) for name, entry in tensors.items()},
        ignored=(*IGNORED, "lm_head.weight") if config.tie_embeddings else IGNORED,
    )
    out.mkdir(parents=True, exist_ok=True)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])

    def values(name: str) -> np.ndarray:
        if name.endswith(IGNORED) and isinstance(opened, Checkpoint):
            return opened.stored(name)
        keys, row, leaf = head if name == "lm_head.weight" else tensors[name]
        array = np.asarray(jax.device_get(leaf if row is None else leaf[row]))
        dtype = FLOATS[opened.dtypes[name]] if isinstance(opened, Checkpoint) else array.dtype
        return np.ascontiguousarray(array.T if keys[-1] == "kernel" else array, dtype=dtype)

    for file, names in _files(opened, tensors).items():
        arrays = {name: values(name) for name in names}
        metadata = opened.metadata[file] if isinstance(opened, Checkpoint) else {"format": "pt"}
        save_file(arrays, out / file, metadata=metadata)
    if isinstance(opened, Checkpoint):
        for path in sorted(opened.folder.iterdir()):
            if path.suffix in _COPIED and path.is_file():
                shutil.copyfile(path, out / path.name)
    else:
        _write_config(opened, tensors, out)
    return out


def _files(source: Tensors, tensors: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names of the tensors that each safetensors file of the exported folder has, by the file's
    name."""
    files: dict[str, list[str]] = {}
    if isinstance(source, Checkpoint):
        for name, file in source.files.items():
            files.setdefault(file, []).append(name)
        return files
    groups, size = [[]], 0
    for name, (_, row, leaf) in tensors.items():
        bytes_ = leaf.nbytes // (1 if row is None else leaf.shape[0])
        if groups[-1] and size + bytes_ > _FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += bytes_
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    count = len(groups)
    return {f"model-{i + 1:05}-of-{count:05}.safetensors": names for i, names in enumerate(groups)}


def _write_config(source: Tensors, tensors: dict[str, Any], out: Path) -> None:
    """Write the files other than tensors of a model that is exported to the folder `out` from a GGUF file:
    config.json, the index of tensors by file if there are several files, and the tokenizer."""
    leaves = {id(leaf): leaf for _, _, leaf in tensors.values()}.values()
    dtype = str(next(iter(leaves)).dtype)
    _write_json(out / "config.json", source.config | dict(torch_dtype=dtype))
    files = _files(source, tensors)
    if len(files) > 1:
        total = sum(leaf.nbytes for leaf in leaves)
        weight_map = {name: file for file, names in files.items() for name in names}
        _write_json(out / INDEX, dict(metadata=dict(total_size=total), weight_map=weight_map))
    tokenizer_of(source, out)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
