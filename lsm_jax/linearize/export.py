"""A tuned run as its base model is written: `python -m lsm_jax.linearize.export --workdir=runs/liger --out=liger-8b`.

Adapters are merged; tensors have the base's names, shapes and dtypes. What was frozen went through bfloat16, as it was trained
with: of a float32 base its values are rounded. The format says nothing of gates, windows and weights: `configs/liger.py:<model>,
source=liger-8b` with the run's own options reads the result as that Liger model; other programs read it as the softmax model that
its config.json says.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lsm_jax.convert import export
from lsm_jax.linearize.merge import merge_adapters
from lsm_jax.linearize.pretrained import Pretrained
from lsm_jax.linearize.recipes import base_model
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training import load_run
from lsm_jax.training.partition import leaves_of
from lsm_jax.training.runs import read_config
from lsm_jax.training.step import params_of


def export_run(
    workdir: str | os.PathLike[str], out: str | os.PathLike[str], *, step: int | None = None
) -> Path:
    """Write a run's parameters, adapters merged, as the pretrained model it began with is written.

    Args:
        workdir: the run's directory.
        out: the folder to make.
        step: of the checkpoint; None is the newest.

    Returns:
        The folder.

    Raises:
        ValueError: no such run or checkpoint, one that did not begin with a pretrained model, parameters that this has no place
            for, or a folder that is there already.
    """
    target = Path(out).expanduser().absolute()
    if target.exists():
        raise ValueError(f"out={str(out)!r} is there already; accepted is a new folder")
    config = read_config(workdir)
    source = config
    while source.init_from:
        source = read_config(source.init_from, "init_from")
    if not isinstance(source.base, Pretrained):
        raise ValueError(
            f"workdir={str(workdir)!r}: the run did not begin with config.base, as those of configs/liger.py do"
        )
    base = base_model(config.model)
    _check_room(config.model, base)
    run = load_run(workdir, step=step)
    export(merge_adapters(run.params, config.model.lora), base, source.base.path, target)
    return target


def _check_room(model: ModelConfig, base: ModelConfig) -> None:
    ours, theirs = (leaves_of(params_of(abstract(m))) for m in (model, base))
    surplus = sorted(name for name in ours if name not in theirs and ".lora." not in name)
    if surplus:
        raise ValueError(
            f"the run has parameters that its base has no place for: {', '.join(surplus)}; they cannot be exported"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lsm_jax.linearize.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", required=True, help="the run")
    parser.add_argument("--out", required=True, help="the folder to make")
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest where not given")
    options = parser.parse_args(arguments)
    try:
        folder = export_run(options.workdir, options.out, step=options.step)
    except (ValueError, OSError) as error:
        print(f"lsm_jax.linearize.export: {error}", file=sys.stderr)
        return 1
    print(f"the model is in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
