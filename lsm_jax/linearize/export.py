"""Export a tuned run in the format of its pretrained model.

    python -m lsm_jax.linearize.export --workdir=runs/liger --out=liger-8b

Adapters are merged; the tensors have the pretrained model's names, shapes and dtypes. Parameters that a run froze in bfloat16
(Liger's) are exported rounded to bfloat16. The format cannot describe gates, windows, and the weights of window and memory: they
are in lsm_jax.json beside config.json, which an import reads. Other programs load the folder as the softmax model in its
config.json.

`--format=liger` writes the config.json of the checkpoints of Liger's authors, with which their code loads the folder as the Liger
model; models that their code does not compute raise an error. `--format=peft` writes only the adapters, as PEFT loads them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lsm_jax import programs
from lsm_jax.convert import export
from lsm_jax.linearize.peft import write_adapters
from lsm_jax.linearize.pretrained import Pretrained
from lsm_jax.linearize.recipes import base_model
from lsm_jax.linearize.released import describe, open_pretrained, transformer_type
from lsm_jax.mixers import merge_adapters
from lsm_jax.models import ModelConfig, abstract
from lsm_jax.training import TrainConfig, load_run
from lsm_jax.training.partition import leaves_of
from lsm_jax.training.run_files import read_config
from lsm_jax.training.runs import starting_runs
from lsm_jax.training.step import params_of

FORMATS = ("huggingface", "liger", "peft")


def export_run(
    workdir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    format: str = "huggingface",
    source: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the parameters of a tuned run, adapters merged, in the format of the pretrained model that the
    run started from.

    Args:
        workdir: the run's directory.
        out: the folder to write; it must not exist yet.
        step: the training step of the checkpoint to export; None is the newest.
        format: "huggingface", the format of the pretrained model; "liger", that of the checkpoints of Liger's authors; or "peft",
            adapters alone.
        source: path of the pretrained model whose tensor names, files and tokenizer the result has; None is the one that the run
            started from. Required for runs that were imported, which did not start from a pretrained model.

    Returns:
        The path of the folder.

    Raises:
        ValueError: the run or checkpoint does not exist; the run did not start from a pretrained model; `format` cannot describe
            the model, or has no place for some of its parameters; or `out` exists.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}; accepted are {', '.join(FORMATS)}")
    target = Path(out).expanduser().absolute()
    if target.exists() or target.is_symlink():
        raise ValueError(f"out={str(out)!r} exists already; accepted is a new folder")
    config = read_config(workdir)
    path = str(source) if source is not None else _pretrained_path(workdir, config)
    base = base_model(config.model)
    _check_parameters(config.model, base)
    fields = None
    if format == "liger":
        fields = describe(config.model, transformer_type(open_pretrained(path).config))
    if format == "peft":
        if config.trainable != ("lora",):
            raise ValueError(
                f"format='peft': the run trains {', '.join(config.trainable) or 'all parameters'}; accepted are runs that train "
                "adapters alone, trainable=('lora',)"
            )
        return write_adapters(
            load_run(workdir, step=step).params,
            config.model,
            target,
            base=path,
            described=Pretrained(path=path).config(),
        )
    run = load_run(workdir, step=step)
    merged = merge_adapters(run.params, config.model.lora)
    model = dataclasses.replace(config.model, lora=None)
    return export(merged, model, open_pretrained(path), target, config_fields=fields)


def _pretrained_path(workdir: str | os.PathLike[str], config: TrainConfig) -> str:
    """Return the path of the pretrained model from which a run started, or, if the run started from another run
    (`init_from`), from which the first run of this chain started.

    Raises:
        ValueError: the run did not start from a pretrained model, or a run of the chain is not where `init_from` says, or
            started from itself.
    """
    *_, first = (config, *starting_runs(workdir, config))
    if not isinstance(first.base, Pretrained):
        raise ValueError(
            f"workdir={str(workdir)!r}: the run did not start from a pretrained model (config.base); accepted are runs "
            "such as those of configs/liger.py, and others with source"
        )
    return first.base.path


def _check_parameters(model: ModelConfig, base: ModelConfig) -> None:
    """Check that all parameters of a run's model can be exported in the format of its pretrained model.

    Args:
        model: the config of the run's model.
        base: the config of the pretrained model.

    Raises:
        ValueError: the run's model has parameters, other than adapters, that the pretrained model does not have.
    """
    tuned, pretrained = (leaves_of(params_of(abstract(m))) for m in (model, base))
    surplus = sorted(name for name in tuned if name not in pretrained and ".lora." not in name)
    if surplus:
        raise ValueError(
            f"the run cannot be exported, since its pretrained model has no such parameters: {', '.join(surplus)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Export the run that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog=programs.shown_name("python -m lsm_jax.linearize.export"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", required=True, help="the run's directory")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument(
        "--format",
        default=FORMATS[0],
        help="huggingface, liger or peft; with `lsm export` also fox or released",
    )
    parser.add_argument(
        "--source", help="the pretrained model whose names and files the result has"
    )
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    options = parser.parse_args(arguments)
    try:
        folder = export_run(
            options.workdir,
            options.out,
            step=options.step,
            format=options.format,
            source=options.source,
        )
    except (ValueError, OSError) as error:
        name = programs.shown_name("lsm_jax.linearize.export")
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    print(f"wrote the model to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
