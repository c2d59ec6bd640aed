"""Export parameters as a Hugging Face folder with the names, shapes, dtypes and files of the model they came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lsm_jax.convert.checkpoint import FLOATS, INDEX, SINGLE_FILE, Checkpoint, Tensors
from lsm_jax.convert.huggingface import (
    IGNORED,
    Source,
    open_source,
    published_shape,
    published_tensors,
)
from lsm_jax.convert.new_folder import NewFolder, check_new, new_folder
from lsm_jax.convert.tokenizer import tokenizer_files
from lsm_jax.models import ModelConfig

_FILE_BYTES = 5 * 10**9  # size of a file's tensors if the source has no such files; the usual limit
_COPIED = (".json", ".jinja", ".model", ".txt", ".md")


def export(
    params: dict[str, Any],
    config: ModelConfig,
    source: Source,
    out_folder: str | os.PathLike[str],
    *,
    config_fields: dict[str, Any] | None = None,
) -> Path:
    """Write a model's parameters as a Hugging Face folder, with the tensors of one file at a time in the
    host's memory.

    If the source is a folder, the result differs from it only in the values of the tensors: names, shapes, dtypes, each
    tensor's file, config and tokenizer are the same. If the source is a GGUF file, the parameters are written in their
    own dtype, with a config.json made from the file's metadata. In addition the folder has SHA256SUMS, the checksums of
    its files, which `sha256sum -c` and an import check.

    Args:
        params: the parameters of `config`'s model, adapters merged.
        config: the model.
        source: the folder or file from which the parameters were imported.
        out_folder: the folder to write; it must be empty or not exist. If the export fails, what it wrote is deleted.
        config_fields: fields of config.json that differ from the source's, and their values.

    Returns:
        The path of the folder.

    Raises:
        ValueError: the parameters do not correspond to the source's tensors, or the folder is not empty.
    """
    opened, out = open_source(source), Path(out_folder).expanduser()
    check_new(out, "out_folder")
    tensors = published_tensors(params, config)
    opened.check(
        {name: published_shape(*entry) for name, entry in tensors.items()},
        ignored=(*IGNORED, "lm_head.weight") if config.tie_embeddings else IGNORED,
    )
    opened.verify()
    if isinstance(opened, Checkpoint):
        for name in tensors:
            if opened.dtypes[name] not in FLOATS:
                raise ValueError(
                    f"{opened.folder}: {name} has dtype {opened.dtypes[name]}; accepted are {', '.join(FLOATS)}"
                )
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])

    def values(name: str) -> np.ndarray:
        if name.endswith(IGNORED) and isinstance(opened, Checkpoint):
            return opened.stored(name)
        keys, row, leaf = head if name == "lm_head.weight" else tensors[name]
        array = np.asarray(jax.device_get(leaf if row is None else leaf[row]))
        dtype = FLOATS[opened.dtypes[name]] if isinstance(opened, Checkpoint) else array.dtype
        return np.ascontiguousarray(array.T if keys[-1] == "kernel" else array, dtype=dtype)

    fields = config_fields or {}
    with new_folder(out, "out_folder") as folder:
        for file, names in _files(opened, tensors).items():
            arrays = {name: values(name) for name in names}
            metadata = opened.metadata[file] if isinstance(opened, Checkpoint) else {"format": "pt"}
            folder.write_tensors(file, arrays, metadata)
        if isinstance(opened, Checkpoint):
            changed = {opened.config_file: opened.read_json(opened.config_file) | fields}
            folder.copy_from(opened, _COPIED, changed if fields else {})
        else:
            _write_config(opened, tensors, folder, fields)
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


def _write_config(
    source: Tensors, tensors: dict[str, Any], folder: NewFolder, fields: dict[str, Any]
) -> None:
    """Write the files other than tensors of a model that is exported to a folder from a GGUF file: config.json
    with the further `fields`, the index of tensors by file if there are several files, and the tokenizer."""
    leaves = {id(leaf): leaf for _, _, leaf in tensors.values()}.values()
    dtype = str(next(iter(leaves)).dtype)
    folder.write_json("config.json", source.config | dict(torch_dtype=dtype) | fields)
    files = _files(source, tensors)
    if len(files) > 1:
        total = sum(leaf.nbytes for leaf in leaves)
        weight_map = {name: file for file, names in files.items() for name in names}
        folder.write_json(INDEX, dict(metadata=dict(total_size=total), weight_map=weight_map))
    for name, content in tokenizer_files(source).items():
        folder.write(name, content)
