"""Export runs of FoX's models as checkpoints that the authors' code loads.

    python -m lsm_jax.convert.fox_export --workdir=runs/fox --out=fox-pro-125m
    python -m lsm_jax.convert.fox_export --workdir=runs/fox --out=fox-tuned --source=fox-pro-760m-longcrawl64-48b

The folder has config.json and model.safetensors in float32, in the layout of github.com/zhixuan-lin/forgetting-transformer at
883f260. With the checkpoint that the run was imported from (`--source`), the folder has its config, files, dtypes and tokenizer:
an unchanged model is exported byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lsm_jax import programs
from lsm_jax.convert.checkpoint import FLOATS, SINGLE_FILE, Checkpoint
from lsm_jax.convert.fox import IGNORED, fixed_gates
from lsm_jax.convert.fox_json import fox_config, json_of
from lsm_jax.convert.fox_layout import HGRN2, LOWER_BOUNDS, fox_layout
from lsm_jax.convert.new_folder import check_new, new_folder
from lsm_jax.hub import local_path
from lsm_jax.models import ModelConfig
from lsm_jax.training import load_run

_COPIED = (".json", ".jinja", ".model", ".txt", ".md", ".py")
# A larger difference of logits makes a share of their softmax less than any gate's resolution in float32.
_NEGLIGIBLE = 80.0


def export_fox(
    params: dict[str, Any],
    config: ModelConfig,
    out_folder: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a model's parameters as a checkpoint that the code of FoX's authors loads.

    Args:
        params: the parameters of `config`'s model, a pure dict.
        config: the model.
        out_folder: the folder to write; it must be empty or not exist.
        source: the checkpoint that the parameters were imported from; None is none. With a source, the result differs from it
            only in the values of the parameters: names, shapes, dtypes, files, config and tokenizer are the same.

    Returns:
        The path of the folder.

    Raises:
        ValueError: the folder is not empty; the published code has no such model; or the model is not the source's.
    """
    out = Path(out_folder).expanduser()
    check_new(out, "out_folder")
    described = json_of(config)
    kind = described["model_type"]
    checkpoint = None if source is None else Checkpoint(local_path(source))
    if kind == HGRN2:
        params = _without_bounds(params)
    layout = fox_layout(kind, config)
    extra = _constants(kind, config)
    if checkpoint is not None:
        if kind == HGRN2 and not checkpoint.config.get("use_lower_bound", True):
            extra = {}
        described = _config_of_source(checkpoint, kind, config)
        shapes = layout.shapes | {name: x.shape for name, x in extra.items()}
        checkpoint.check(shapes, ignored=IGNORED)
    values = layout.writer(params)

    def tensor(name: str) -> np.ndarray:
        if checkpoint is None:
            return extra[name] if name in extra else values(name, np.float32)
        if name in extra or name not in layout.shapes:
            return checkpoint.stored(name)
        return values(name, FLOATS[checkpoint.dtypes[name]])

    files = {SINGLE_FILE: [*layout.shapes, *extra]}
    if checkpoint is not None:
        checkpoint.verify()
        files = {}
        for name, file in checkpoint.files.items():
            files.setdefault(file, []).append(name)
    with new_folder(out, "out_folder") as folder:
        for file, names in files.items():
            metadata = {"format": "pt"} if checkpoint is None else checkpoint.metadata[file]
            folder.write_tensors(file, {name: tensor(name) for name in names}, metadata)
        if checkpoint is None:
            text = json.dumps(described, indent=2, sort_keys=True) + "\n"
            folder.write("config.json", text)
        else:
            folder.copy_from(checkpoint, _COPIED)
    return out


def _config_of_source(checkpoint: Checkpoint, kind: str, config: ModelConfig) -> dict[str, Any]:
    """Return the contents of config.json of the checkpoint from which a run was imported, after checking
    that it describes the model to export.

    Raises:
        ValueError: the source's config.json describes another model.
    """
    given, where = json_of(fox_config(checkpoint)), checkpoint.config_path
    described = json_of(config)
    names = [name for name in described if given.get(name) != described[name]]
    if names:
        different = ", ".join(f"{n}={described[n]!r} (accepted is {given.get(n)!r})" for n in names)
        raise ValueError(f"{where}: the model to export is another: {different}")
    return checkpoint.config


def _without_bounds(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of an HGRN2 model without the logits of the forget gates' lower bounds, which
    the published code of FoX's paper does not apply.

    Raises:
        ValueError: a lower bound is not 0; the published code would compute with 0 instead.
    """
    periods = params["periods"]
    block = periods["blocks"][0]
    mixer = dict(block["mixer"])
    logits = np.asarray(jax.device_get(mixer.pop("lower_bound")))
    if len(logits) > 1 and np.min(logits[0] - np.max(logits[1:], axis=0)) < _NEGLIGIBLE:
        raise ValueError(
            "lower_bound: the forget gates have lower bounds, which the published code of HGRN2 does not apply; "
            "accepted are models without bounds, such as imported ones"
        )
    return params | dict(periods=periods | dict(blocks={0: block | dict(mixer=mixer)}))


def _constants(kind: str, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the arrays of a published checkpoint that are no parameters of this library, by tensor name:
    for HGRN2 the lower bounds of the gates, all 0; for FoX with fixed decays the biases of the forget
    gates."""
    if kind == HGRN2:
        return {LOWER_BOUNDS: np.zeros((config.num_layers, config.hidden_size), np.float32)}
    names = fixed_gates(config)
    if not names:
        return {}
    times = np.array(config.layers["L"].mixer.decay_times(), np.float64)
    return dict.fromkeys(names, (-np.log(np.expm1(1 / times))).astype(np.float32))


def main(arguments: Sequence[str] | None = None) -> int:
    """Export the run --workdir as a checkpoint, in the folder --out, that the code of FoX's authors loads;
    return the exit status."""
    program = "lsm_jax.convert.fox_export"
    parser = argparse.ArgumentParser(
        prog=programs.shown_name(f"python -m {program}"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", required=True, help="directory of the run")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument("--source", help="the checkpoint that the run was imported from")
    parsed = parser.parse_args(arguments)
    try:
        run = load_run(parsed.workdir)
        out = export_fox(run.params, run.config.model, parsed.out, parsed.source)
    except (ValueError, OSError) as error:
        print(f"{programs.shown_name(program)}: {error}", file=sys.stderr)
        return 1
    print(f"wrote the checkpoint of {run.config.name} to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
