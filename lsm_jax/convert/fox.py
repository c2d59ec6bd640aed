"""Import the published checkpoints of FoX's paper as runs; `lsm_jax.convert.fox_export` writes them.

    python -m lsm_jax.convert.fox --source=fox-pro-760m-longcrawl64-48b --workdir=runs/fox

A checkpoint is a folder of config.json and safetensors files (github.com/zhixuan-lin/forgetting-transformer at 883f260) with
one of these models: FoX (Pro), FoX (LLaMA), Transformer (Pro), which is FoX without a gate, Transformer (LLaMA), Mamba2, HGRN2 and
DeltaNet. The run can be evaluated (`eval.py --workdir=runs/fox`), and other runs can start from it
(`train.py --init_from=runs/fox`). It cannot be resumed, since it has no optimizer state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import logging

from lsm_jax.convert.checkpoint import Checkpoint
from lsm_jax.convert.fox_json import fox_config
from lsm_jax.convert.fox_layout import HGRN2, LOWER_BOUNDS, fox_layout
from lsm_jax.convert.load import load_tree
from lsm_jax.convert.runs import command, name_of, new_run, save_run
from lsm_jax.data import DataConfig
from lsm_jax.hub import local_path
from lsm_jax.models import ModelConfig
from lsm_jax.training import TrainConfig

__all__ = ["fox_config", "fox_params", "import_fox", "main"]

IGNORED = (".rotary.inv_freq",)
"""Suffixes of tensors that some versions save, and that follow from rope_base."""
# The logit of the first layer in the softmax of HGRN2's learned bounds: all other bounds are then 0.
_NO_BOUNDS = 1e4


def fox_params(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Any]:
    """Load the tensors of a checkpoint of FoX's paper as the parameters of `config`'s model.

    The published code does not apply the lower bounds of HGRN2's forget gates, so the parameters for these
    bounds are set such that all bounds are 0.

    Returns:
        The parameters, a pure dict of float32 arrays.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape (the message names them), or fixed gates differ from the
            config's decay times.
    """
    kind = checkpoint.config["model_type"]
    layout = fox_layout(kind, config)
    expected, mixer = dict(layout.shapes), config.layers["L"].mixer
    fixed = fixed_gates(config)
    expected |= dict.fromkeys(fixed, (getattr(mixer, "num_heads", 0),))
    bounded = kind == HGRN2 and checkpoint.config.get("use_lower_bound", True)
    if bounded:
        expected[LOWER_BOUNDS] = (config.num_layers, config.hidden_size)
    checkpoint.check(expected, ignored=IGNORED)
    checkpoint.verify()
    for name in fixed:
        times = np.log1p(np.exp(-checkpoint.tensor(name).astype(np.float64)))
        if not np.allclose(1 / times, mixer.decay_times(), rtol=1e-3):
            raise ValueError(
                f"{checkpoint.folder}: {name} does not have the decay times that its config.json defines"
            )
    params = load_tree(checkpoint, layout.params, layout.place)
    if kind == HGRN2:
        if bounded and np.any(checkpoint.tensor(LOWER_BOUNDS)):
            logging.warning(
                "%s: %s is not 0, and is not applied: the published code does not apply it",
                checkpoint.folder,
                LOWER_BOUNDS,
            )
        bounds = jnp.zeros((config.num_layers, config.hidden_size)).at[0].set(_NO_BOUNDS)
        params["periods"]["blocks"][0]["mixer"]["lower_bound"] = bounds
    return params


def fixed_gates(config: ModelConfig) -> list[str]:
    """Return the names of the gate tensors with fixed decays in a checkpoint of FoX's paper, one per layer;
    empty if the model has none. They are constants, so this library's model has no parameters for them."""
    if getattr(config.layers["L"].mixer, "forget_gate", None) != "fixed":
        return []
    return [f"model.layers.{i}.attn.fgate_bias" for i in range(config.num_layers)]


def import_fox(
    source: str | os.PathLike[str],
    workdir: str | os.PathLike[str],
    data: DataConfig | None = None,
) -> TrainConfig:
    """Make a run from a published checkpoint of FoX's paper.

    Args:
        source: the checkpoint's folder, or its id on the Hugging Face hub.
        workdir: the directory of the new run; it must not contain a run.
        data: the run's data config; None is that of LongCrawl64 in a folder `longcrawl64`, with its tokenizer, row length
            and order.

    Returns:
        The run's config.

    Raises:
        ValueError: the checkpoint is not of the paper's models, or `workdir` contains a run.
    """
    with new_run(workdir) as target:
        checkpoint = Checkpoint(local_path(source))
        model = fox_config(checkpoint)
        params = fox_params(checkpoint, model)
        data = data or DataConfig(
            path="longcrawl64",
            tokenizer="gpt2",
            json_escape=True,
            sequence_length=2**14,
            shuffle=False,
        )
        config = TrainConfig(name=name_of(checkpoint.folder), model=model, data=data)
        config.validate()
        save_run(target, config, params, checkpoint.folder)
        return config


def main(arguments: Sequence[str] | None = None) -> int:
    """Import the checkpoint of FoX's paper that the option --source names as the run --workdir, and return
    the exit status."""
    return command(
        "lsm_jax.convert.fox",
        __doc__,
        "the checkpoint's folder, or its id on the hub",
        import_fox,
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
