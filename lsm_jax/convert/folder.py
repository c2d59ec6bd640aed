"""Export parameters as a Hugging Face folder with the names, shapes, dtypes and files of the model they came from."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from lsm_jax.convert import recipe
from lsm_jax.convert.checkpoint import FLOATS, INDEX, SINGLE_FILE, Checkpoint, Tensors
from lsm_jax.convert.huggingface import (
    Source,
    check_tensors,
    checkpoint_layout,
    open_source,
    published_config,
)
from lsm_jax.convert.layout import Layout, check_dtypes
from lsm_jax.convert.new_folder import NewFolder, check_new, new_folder
from lsm_jax.convert.rwkv_file import RWKVFile
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
    its files, which `sha256sum -c` and an import check; and, if the mixers are not those of config.json, such as Liger's, their
    recipe (`lsm_jax.convert.recipe`), which an import uses.

    Args:
        params: the parameters of `config`'s model, adapters merged.
        config: the model, without adapters.
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
    if isinstance(opened, RWKVFile):
        raise ValueError(
            f"source={str(opened.folder)!r}: .pth files are not written; python -m lsm_jax.convert.released_export without "
            "--source writes the model for flash-linear-attention"
        )
    layout = checkpoint_layout(opened, config)
    check_tensors(opened, layout, config)
    opened.verify()
    if isinstance(opened, Checkpoint):
        check_dtypes(opened, layout)
    write, dtypes = layout.writer(params), layout.dtypes(params)
    (_, embedding), *_ = layout.place(["embedding"], -1)

    def values(name: str) -> np.ndarray:
        stored = embedding.name if name == "lm_head.weight" and config.tie_embeddings else name
        if isinstance(opened, Checkpoint):
            if stored not in layout.shapes:
                return opened.stored(name)
            return write(stored, FLOATS[opened.dtypes[name]])
        return write(stored, dtypes[stored])

    fields, mixers = config_fields or {}, recipe.recipe_of(config, published_config(opened))
    with new_folder(out, "out_folder") as folder:
        for file, names in _files(opened, layout, dtypes).items():
            arrays = {name: values(name) for name in names}
            metadata = opened.metadata[file] if isinstance(opened, Checkpoint) else {"format": "pt"}
            folder.write_tensors(file, arrays, metadata)
        if isinstance(opened, Checkpoint):
            changed = {opened.config_file: opened.read_json(opened.config_file) | fields}
            folder.copy_from(opened, _COPIED, changed if fields else {}, skipped=(recipe.FILE,))
        else:
            _write_config(opened, layout, dtypes, folder, fields)
        if mixers is not None:
            folder.write_json(recipe.FILE, mixers)
    return out


def _files(source: Tensors, layout: Layout, dtypes: dict[str, np.dtype]) -> dict[str, list[str]]:
    """Return the names of the tensors that each safetensors file of the exported folder has, by the file's
    name."""
    files: dict[str, list[str]] = {}
    if isinstance(source, Checkpoint):
        for name, file in source.files.items():
            files.setdefault(file, []).append(name)
        return files
    return new_files(layout.shapes, dtypes)


def new_files(
    shapes: dict[str, tuple[int, ...]], dtypes: dict[str, np.dtype]
) -> dict[str, list[str]]:
    """Return the names of tensors in new safetensors files of at most 5 GB, by the file's name, for tensors of these shapes
    and dtypes."""
    groups, size = [[]], 0
    for name, shape in shapes.items():
        bytes_ = math.prod(shape) * dtypes[name].itemsize
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
    source: Tensors,
    layout: Layout,
    dtypes: dict[str, np.dtype],
    folder: NewFolder,
    fields: dict[str, Any],
) -> None:
    """Write the files other than tensors of a model that is exported to a folder from a GGUF file: config.json
    with the further `fields`, the index of tensors by file if there are several files, and the tokenizer."""
    dtype = str(next(iter(dtypes.values())))
    folder.write_json("config.json", source.config | dict(torch_dtype=dtype) | fields)
    write_index(folder, layout.shapes, dtypes)
    for name, content in tokenizer_files(source).items():
        folder.write(name, content)


def write_index(
    folder: NewFolder, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, np.dtype]
) -> None:
    """Write the index of tensors by file, if `new_files` divides them into several files."""
    files = new_files(shapes, dtypes)
    if len(files) > 1:
        total = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
        weight_map = {name: file for file, names in files.items() for name in names}
        folder.write_json(INDEX, dict(metadata=dict(total_size=total), weight_map=weight_map))
