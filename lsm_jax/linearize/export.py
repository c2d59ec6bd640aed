"""Export a tuned run in the format of its pretrained model.

    python -m lsm_jax.linearize.export --workdir=runs/liger --out=liger-8b

Adapters are merged; the tensors have the pretrained model's names, shapes and dtypes. Frozen parameters were trained with in
bfloat16, so those of a float32 model are exported rounded to bfloat16. The format cannot describe gates, windows and weights:
`configs/liger.py:<model>,source=liger-8b` with the options of the run loads the result as that Liger model, but other programs
load it as the softmax model in its config.json.
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
    """Write a run's parameters, adapters merged, in the format of the pretrained model that the run started from.

    Args:
        workdir: the run's directory.
        out: the folder to write; it must not exist yet.
        step: step of the checkpoint; None is the newest.

    Returns:
        The path of the folder.

    Raises:
        ValueError: the run or checkpoint does not exist, the run did not start from a pretrained model, the pretrained model's
            format cannot contain some of the parameters, or `out` exists.
    """
    target = Path(out).expanduser().absolute()
    if target.exists():
        raise ValueError(f"out={str(out)!r} exists already; accepted is a new folder")
    config = read_config(workdir)
    source = config
    while source.init_from:
        source = read_config(source.init_from, "init_from")
    if not isinstance(source.base, Pretrained):
        raise ValueError(
            f"workdir={str(workdir)!r}: the run did not start from a pretrained model (config.base); accepted are runs "
            "such as those of configs/liger.py"
        )
    base = base_model(config.model)
    _check_parameters(config.model, base)
    run = load_run(workdir, step=step)
    export(merge_adapters(run.params, config.model.lora), base, source.base.path, target)
    return target


def _check_parameters(model: ModelConfig, base: ModelConfig) -> None:
    """Raise ValueError if the run's model has parameters, other than adapters, that its pretrained model does not have."""
    tuned, pretrained = (leaves_of(params_of(abstract(m))) for m in (model, base))
    surplus = sorted(name for name in tuned if name not in pretrained and ".lora." not in name)
    if surplus:
        raise ValueError(
            f"the run cannot be exported, since its pretrained model has no such parameters: {', '.join(surplus)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lsm_jax.linearize.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", required=True, help="the run's directory")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    options = parser.parse_args(arguments)
    try:
        folder = export_run(options.workdir, options.out, step=options.step)
    except (ValueError, OSError) as error:
        print(f"lsm_jax.linearize.export: {error}", file=sys.stderr)
        return 1
    print(f"wrote the model to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
