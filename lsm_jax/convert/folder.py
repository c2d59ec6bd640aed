"""Parameters back into a Hugging Face folder: the names, shapes, dtypes and files of the model they came from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from lsm_jax.convert.checkpoint import FLOATS, INDEX, WHOLE, Checkpoint, Tensors
from lsm_jax.convert.huggingface import IGNORED, Source, names_of, open_source, their_shape
from lsm_jax.convert.tokenizer import tokenizer_of
from lsm_jax.models import ModelConfig

_FILE_BYTES = 5 * 10**9  # of tensors in a file where the source does not say; the customary limit
_COPIED = (".json", ".jinja", ".model", ".txt", ".md")


def export(
    params: dict[str, Any],
    config: ModelConfig,
    source: Source,
    out_folder: str | os.PathLike[str],
) -> Path:
    """Write parameters as the folder of a Hugging Face model; the host holds one file's tensors at a time.

    Of a folder, everything but the tensors' values is the source's: names, shapes, dtypes, which file each tensor is in, config,
    tokenizer. A GGUF file's parameters are written in their own dtype, with a config.json made of its metadata.

    Args:
        params: of `config`'s model; adapters already merged.
        config: the model.
        source: what the parameters were imported from.
        out_folder: where to write; must not exist, or be empty.

    Returns:
        The folder.

    Raises:
        ValueError: parameters that are not those of the source's tensors, or a folder that holds something.
    """
    opened, out = open_source(source), Path(out_folder).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out_folder={str(out_folder)!r} is not empty; accepted is a new folder")
    found = names_of(params, config)
    opened.check(
        {name: their_shape(*place) for name, place in found.items()},
        ignored=(*IGNORED, "lm_head.weight") if config.tie_embeddings else IGNORED,
    )
    out.mkdir(parents=True, exist_ok=True)
    tied = found.get("lm_head.weight", found["model.embed_tokens.weight"])

    def values(name: str) -> np.ndarray:
        if name.endswith(IGNORED) and isinstance(opened, Checkpoint):
            return opened.stored(name)
        keys, row, leaf = tied if name == "lm_head.weight" else found[name]
        ours = np.asarray(jax.device_get(leaf if row is None else leaf[row]))
        dtype = FLOATS[opened.dtypes[name]] if isinstance(opened, Checkpoint) else ours.dtype
        return np.ascontiguousarray(ours.T if keys[-1] == "kernel" else ours, dtype=dtype)

    for file, names in _files(opened, found).items():
        written = {name: values(name) for name in names}
        kept = opened.metadata[file] if isinstance(opened, Checkpoint) else {"format": "pt"}
        save_file(written, out / file, metadata=kept)
    if isinstance(opened, Checkpoint):
        for path in sorted(opened.folder.iterdir()):
            if path.suffix in _COPIED and path.is_file():
                shutil.copyfile(path, out / path.name)
    else:
        _describe(opened, found, out)
    return out


def _files(source: Tensors, found: dict[str, Any]) -> dict[str, list[str]]:
    """The tensors of each file."""
    files: dict[str, list[str]] = {}
    if isinstance(source, Checkpoint):
        for name, file in source.files.items():
            files.setdefault(file, []).append(name)
        return files
    groups, size = [[]], 0
    for name, (_, row, leaf) in found.items():
        bytes_ = leaf.nbytes // (1 if row is None else leaf.shape[0])
        if groups[-1] and size + bytes_ > _FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += bytes_
    if len(groups) == 1:
        return {WHOLE: groups[0]}
    of = len(groups)
    return {f"model-{i + 1:05}-of-{of:05}.safetensors": names for i, names in enumerate(groups)}


def _describe(source: Tensors, found: dict[str, Any], out: Path) -> None:
    """config.json, the index of several files, and the tokenizer, of a source that has none of these."""
    leaves = {id(leaf): leaf for _, _, leaf in found.values()}.values()
    dtype = str(next(iter(leaves)).dtype)
    _write(out / "config.json", source.config | dict(torch_dtype=dtype))
    files = _files(source, found)
    if len(files) > 1:
        total = sum(leaf.nbytes for leaf in leaves)
        places = {name: file for file, names in files.items() for name in names}
        _write(out / INDEX, dict(metadata=dict(total_size=total), weight_map=places))
    tokenizer_of(source, out)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
