"""Train every method at one small size on one text with one budget.

    python -m benchmarks methods [--methods gla,retnet,kda+lower_bound=-5.0] [--shard 0/4]

Trains `configs/lm.py:<method>-10m` for 8.4 M tokens of the demo's text (the running interpreter's own
library, as bytes), one method after another, through the loop of `train.py`. A row for each method: held-out
loss, tokens/s, parameters, size of the decode state, and the command that trains the same model alone. Behind a method,
`+<field>=<number>` sets a field of its mixer's config.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import one_by_one
from benchmarks.timing import provenance
from benchmarks.training import last_value, median_speed, train_to_end
from configs import lm
from lsm_jax import mixers, models
from lsm_jax.training.metrics import read_rows

BENCHMARK = Benchmark(
    name="methods",
    summary="training every method for 8.4 M tokens of one text",
    key=("method", "tokens"),
    optional_key={"fields": None},
    output="docs/methods.jsonl",
    resume=True,
)

TOKENS, EVERY = 8_388_608, 16


def state_bytes(config: models.ModelConfig) -> int:
    """Return the bytes of a model's decode state for one sequence; for softmax attention with a context of
    1,024 tokens.
    """
    model = models.abstract(config)
    shapes = jax.eval_shape(lambda m: m.init_state(1, 1024), model)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def measure(case: dict[str, Any], size: str, workdir: Path) -> dict:
    """Train a language model of one case's method for its number of tokens of the demo's text, and return the
    benchmark's row.
    """
    tokens = case["tokens"]
    variant = f"{case['method']}-{size}"
    config = lm.get_config(variant)
    for pair in pairs_of(case.get("fields", "")):
        name, _, value = pair.partition("=")
        number = float(value) if "." in value else int(value)
        setattr(config.model.layers["L"].mixer, name, number)
    config.validate()
    config.total_tokens, config.model.remat, config.log_every = tokens, "dots", EVERY
    config.optimizer.warmup_tokens = tokens // 10
    config.eval_every = math.ceil(tokens / (config.batch_size * config.data.sequence_length))
    began = time.perf_counter()
    train_to_end(config, workdir)
    seconds = time.perf_counter() - began
    rows = read_rows(workdir / "metrics.jsonl")
    return dict(
        **case,
        held_out_loss=last_value(rows, "val/loss"),
        train_loss=last_value(rows, "train/loss"),
        tokens_per_second=median_speed(rows),
        parameters=models.count_parameters(config.model)["non_embedding"],
        state_bytes=state_bytes(config.model),
        seconds=round(seconds, 1),
        **provenance(),
        command=command(variant, tokens, config.eval_every, case.get("fields", "")),
    )


def pairs_of(fields: str) -> list[str]:
    """Return the texts `<field>=<number>` of a case's `fields`, which has + between them; none for an empty one."""
    return fields.split("+") if fields else []


def command(variant: str, tokens: int, eval_every: int, fields: str = "") -> str:
    """Return the `train.py` command that trains the config variant alone, with these `fields` of its mixer's config, to the same held-out
    loss as the benchmark does.
    """
    overrides = (f" --config.model.layers.L.mixer.{pair}" for pair in pairs_of(fields))
    return (
        f"python train.py --config=configs/lm.py:{variant} --workdir=runs/{variant} --config.total_tokens={tokens} "
        f"--config.model.remat=dots --config.optimizer.warmup_tokens={tokens // 10} --config.log_every={EVERY} "
        f"--config.eval_every={eval_every}"
    ) + "".join(overrides)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", type=options.words, default=",".join(mixers.METHODS))
    parser.add_argument("--size", default="10m", choices=models.SIZES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options.add_shard(parser)
    options.add_minutes(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [parse(word) | dict(tokens=args.tokens) for word in args.methods]


def parse(word: str) -> dict[str, Any]:
    """Return the case of a word of `--methods`: the method and, if it has any behind, the fields of its mixer's config.

    Raises:
        UsageError: a field is not `<name>=<number>`, or the method has no such field.
        ValueError: there is no such method.
    """
    name, *given = word.split("+")
    config = mixers.get_method(name).config
    names = {field.name for field in dataclasses.fields(config)}
    for field, _, value in (pair.partition("=") for pair in given):
        if field not in names or not re.fullmatch(r"-?\d+(\.\d+)?", value):
            raise UsageError(
                f"--methods={word}: accepted behind a method are +<field>=<number> with fields of {config.__name__}, each once"
            )
        names.remove(field)
    return dict(method=name) | (dict(fields="+".join(given)) if given else {})


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    def measure_case(case):
        with tempfile.TemporaryDirectory() as folder:
            return measure(case, args.size, Path(folder) / case["method"])

    return one_by_one(cases, measure_case, minutes=args.minutes)
