"""Compare Liger, a random gate and LoLCATs with equally many trained parameters and training tokens.

    python -m scripts.compare_linearized --workdir=runs/compare
    python -m scripts.compare_linearized --workdir=runs/compare --source=$(python -m lsm_jax.convert.smollm2) --data=my_texts --tokens=20000000
    python -m scripts.compare_linearized --counts=llama3-8b

The first command requires a CPU and minutes: it pretrains a model of SmolLM2-135M's proportions with 0.4 M
parameters on the standard library of the running interpreter (`--base_tokens`), and makes it linear by each method.
With `--source` the pretrained transformer is a Hugging Face folder or a .gguf file, and each method has the published
window of 64 and rows of 1,024 tokens.

Every method has the recipe of `configs/liger.py`, but the ranks of its adapters are those with which it trains as many
parameters as the largest of the recipes (`--parameters` states another number). LoLCATs' maps and factors, which its
first stage trains, count, and its two stages have half of the tokens each (`--tokens` is rounded down to whole pairs of
steps). `--counts` prints ranks and parameters for a model of configs/liger.py, and trains nothing.

Rows are printed as a table and written to rows.json in the directory. Given again, the command resumes unfinished runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks.training import train_to_end
from configs import liger
from lsm_jax import convert
from lsm_jax.data import DataConfig, load_tokenizer, make_eval_iterator
from lsm_jax.evaluation import evaluate
from lsm_jax.feedforward import SwiGLUConfig
from lsm_jax.linearize import window_model
from lsm_jax.mixers import SoftmaxConfig
from lsm_jax.models import LayerConfig, ModelConfig, abstract
from lsm_jax.training import OptimizerConfig, TrainConfig, load_run, read_config
from lsm_jax.training.partition import split
from lsm_jax.training.step import params_of

# The options of each method's runs; a run starts from the one before it.
METHODS = {
    "liger": ("method=liger",),
    "random_gate": ("ablation=random_gate",),
    "lolcats": ("method=lolcats_transfer", "method=lolcats"),
    "lolcats_lora": ("method=lolcats_lora",),
    "window": ("method=window",),
    "no_gate": ("ablation=no_gate",),
}
COMPARED = ("liger", "random_gate", "lolcats", "window")
TINY_LENGTH, TINY_WINDOW = 128, 16


def tiny_model() -> ModelConfig:
    """Return a softmax model of bytes in SmolLM2-135M's proportions: three query heads per key head, tied embeddings."""
    return ModelConfig(
        vocab_size=257,
        hidden_size=96,
        num_layers=4,
        layers={
            "L": LayerConfig(
                mixer=SoftmaxConfig(num_heads=3, num_kv_heads=1, rope_base=1e5, norm_eps=1e-5),
                feedforward=SwiGLUConfig(intermediate_size=256),
            )
        },
        norm_eps=1e-5,
        dtype="float32",
        remat="none",
    )


def trained_parameters(config: TrainConfig) -> int:
    """Return the number of parameters that a training run changes, by its config."""
    trained, _ = split(params_of(abstract(config.model)), config.trainable)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained))


def variant(options: str, *, window: int, rank: int | None) -> str:
    """Return the text of the variant of configs/liger.py that one training run of the comparison uses, from
    its options, its window in tokens and its adapter rank; the rank is omitted for a run without adapters.
    """
    rank_option = "" if rank is None or "transfer" in options else f",rank={rank}"
    return f"smollm2-135m,data=text,{options},window={window}{rank_option}"


def runs_of(method: str, base: ModelConfig, *, window: int, rank: int | None) -> list[TrainConfig]:
    """Return the training configs of a method's runs in order (LoLCATs has two), for the pretrained model
    `base`.
    """
    return [
        liger.tuning_config(variant(options, window=window, rank=rank), base)
        for options in METHODS[method]
    ]


def matched_ranks(
    methods: Iterable[str], base: ModelConfig, *, window: int, parameters: int | None = None
) -> dict[str, tuple[int, int]]:
    """Return, for each method, the rank of its adapters and the number of parameters that it trains with
    it, such that the numbers are as equal as ranks permit.

    Args:
        methods: names of the compared methods, of those in `METHODS`.
        base: the config of the pretrained model.
        window: tokens in the window of softmax attention.
        parameters: number of parameters that each method is to train; None is the largest number of the published
            recipes.

    Raises:
        ValueError: a method trains more than `parameters` even with adapters of rank 1.
    """

    def count(method: str, rank: int | None) -> int:
        return sum(map(trained_parameters, runs_of(method, base, window=window, rank=rank)))

    if parameters is None:
        parameters = max(count(method, None) for method in methods)
    matched = {}
    for method in methods:
        one, two = count(method, 1), count(method, 2)
        if one > parameters:
            raise ValueError(
                f"parameters={parameters}: {method} trains {one} parameters with adapters of rank 1; accepted are {one} or more"
            )
        rank = max(1, round((parameters - one) / (two - one)) + 1)
        matched[method] = rank, one + (rank - 1) * (two - one)
    return matched


def base_run(args: argparse.Namespace) -> Path:
    """Import or pretrain the softmax model that all methods start from, store it as a run, and return the
    run's directory.
    """
    workdir = args.workdir / "base"
    if args.source:
        if not (workdir / "config.json").exists():
            convert.import_huggingface(args.source, workdir)
        return workdir
    library = Path(sysconfig.get_paths()["stdlib"])
    config = TrainConfig(
        name="base",
        model=tiny_model(),
        data=DataConfig(path=str(library / "asyncio"), sequence_length=TINY_LENGTH, num_threads=0, prefetch=0),
        optimizer=OptimizerConfig(peak_lr=3e-3, warmup_tokens=min(args.base_tokens // 10, 200_000)),
        batch_size=16,
        total_tokens=args.base_tokens,
        eval_every=0,
    )  # fmt: skip
    train_to_end(config, workdir)
    return workdir


def run_method(
    method: str, rank: int, base: Path, args: argparse.Namespace
) -> tuple[list[Path], list[TrainConfig]]:
    """Train all runs of a method with adapters of this rank, and return the runs' directories and training
    configs.
    """
    start, tiny = read_config(base), not args.source
    model = dataclasses.replace(start.model, dtype="float32" if tiny else "bfloat16")
    window = TINY_WINDOW if tiny else 64
    folders, configs = [], runs_of(method, model, window=window, rank=rank)
    for number, config in enumerate(configs):
        config.data = dataclasses.replace(
            start.data,
            path=args.data or start.data.path,
            sequence_length=args.length or (TINY_LENGTH if tiny else 1024),
        )
        config.init_from = str(folders[-1] if folders else base)
        config.name = f"{method}, rank {rank}, run {number + 1} of {len(configs)}"
        config.batch_size, config.eval_every, config.seed = args.batch_size, 0, args.seed
        pairs = args.tokens // (2 * config.tokens_per_step)
        if pairs < 1:
            raise ValueError(
                f"tokens={args.tokens}: accepted are numbers from two steps on, {2 * config.tokens_per_step} tokens"
            )
        config.total_tokens = 2 * pairs * config.tokens_per_step // len(configs)
        folders.append(args.workdir / f"{method}-rank{rank}-{number}")
        train_to_end(config, folders[-1])
    return folders, configs


def measure(
    folder: Path, data: DataConfig, args: argparse.Namespace, model: Any = None
) -> dict[str, float]:
    """Return a run's mean held-out loss in nats, over all tokens and over those at positions beyond the
    window; `model` replaces the run's model.
    """
    run = load_run(folder)
    tokenizer = load_tokenizer(data.tokenizer, json_escape=data.json_escape)
    batches = make_eval_iterator(
        data, tokenizer, global_batch_size=args.batch_size, vocab_size=run.config.model.vocab_size, remainder="pad"
    )  # fmt: skip
    limit = max(1, args.heldout_tokens // (args.batch_size * data.sequence_length))
    rows = (batch for batch, _ in zip(batches, range(limit), strict=False))
    evaluation = evaluate(model or run.model, rows, num_batches=limit, progress=False)
    window = 64 if args.source else TINY_WINDOW
    beyond = evaluation.curve.total[window:].sum() / evaluation.curve.count[window:].sum()
    return dict(
        nats=round(evaluation.curve.mean, 4),
        beyond_window=round(float(beyond), 4),
        row_perplexity=round(evaluation.row_perplexity, 4),
    )


def rows_of(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Train and measure each method of the comparison; yields a row for the pretrained model, for the
    untrained model with window attention, and for each method.
    """
    base = base_run(args)
    start = read_config(base)
    window = TINY_WINDOW if not args.source else 64
    ranks = matched_ranks(args.methods, start.model, window=window, parameters=args.parameters)
    length = args.length or (TINY_LENGTH if not args.source else 1024)
    data = dataclasses.replace(
        start.data, path=args.data or start.data.path, sequence_length=length
    )
    untuned = model_with(window_model(start.model, window=window), load_run(base).params)
    yield dict(
        model="pretrained", rank=0, trained=0, tokens=0, seconds=0, **measure(base, data, args)
    )
    yield dict(
        model="window, untuned",
        rank=0,
        trained=0,
        tokens=0,
        seconds=0,
        **measure(base, data, args, untuned),
    )
    for method in args.methods:
        began, (rank, trained) = time.perf_counter(), ranks[method]
        folders, configs = run_method(method, rank, base, args)
        tokens = sum(c.num_steps * c.tokens_per_step for c in configs)
        seconds = round(time.perf_counter() - began, 1)
        measured = measure(folders[-1], data, args)
        yield dict(
            model=method, rank=rank, trained=trained, tokens=tokens, seconds=seconds, **measured
        )


def model_with(config: ModelConfig, params: dict[str, Any]) -> Any:
    """Return the model that a config describes, with the given parameters."""
    return nnx.merge(nnx.graphdef(abstract(config)), params)


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Return the comparison's rows (one for each method) as the text of a table under `title`."""
    names = list(rows[0])
    made = Table(*(name.replace("_", " ") for name in names), title=title)
    for column in made.columns[1:]:
        column.justify = "right"
    for row in rows:
        made.add_row(*(f"{row[n]:,}" if isinstance(row[n], int) else str(row[n]) for n in names))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `python -m scripts.compare_linearized` with the command-line `arguments`, and return
    its exit status.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, help="directory of all runs")
    parser.add_argument(
        "--source",
        help="a Hugging Face folder or .gguf file; default: a tiny model, pretrained here",
    )
    parser.add_argument("--methods", default=",".join(COMPARED), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--data", help="text; default: that of the pretrained model's run")
    parser.add_argument(
        "--tokens", type=int, default=200_000, help="training tokens of each method"
    )
    parser.add_argument(
        "--base_tokens", type=int, default=1_000_000, help="of the tiny model's pretraining"
    )
    parser.add_argument("--parameters", type=int, help="trained parameters of each method")
    parser.add_argument("--length", type=int, help="tokens in a row")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--heldout_tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--counts", help="only print ranks and parameters of this model of configs/liger.py"
    )
    args = parser.parse_args(arguments)
    console = Console(highlight=False, markup=False, width=120)
    args.methods = [name for name in args.methods.split(",") if name]
    try:
        unknown = [name for name in args.methods if name not in METHODS]
        if unknown or not args.methods:
            raise ValueError(f"methods={unknown}; accepted are {', '.join(METHODS)}")
        if args.counts:
            if args.counts not in liger.MODELS:
                raise ValueError(f"counts={args.counts!r}; accepted are {', '.join(liger.MODELS)}")
            ranks = matched_ranks(
                args.methods, liger.MODELS[args.counts], window=64, parameters=args.parameters
            )
            rows = [
                dict(model=name, rank=rank, trained=count) for name, (rank, count) in ranks.items()
            ]
            console.print(table(rows, f"{args.counts}: equal parameters"))
            return 0
        if args.workdir is None:
            raise ValueError("workdir is missing; accepted is the directory of all runs")
        args.workdir = args.workdir.expanduser().absolute()
        rows = []
        for row in rows_of(args):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            args.workdir.mkdir(parents=True, exist_ok=True)
            (args.workdir / "rows.json").write_text(json.dumps(rows, indent=2) + "\n")
    except (ValueError, OSError) as error:
        print(f"compare_linearized: {error}", file=sys.stderr)
        return 1
    console.print(table(rows, "equal parameters and tokens; held-out loss in nats per token"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
