"""Train and evaluate the models of a paper's table on one corpus of real text.

    python -m scripts.make_corpus --out=data/corpus
    python -m benchmarks evidence --table=fox --corpus=data/corpus --output=docs/evidence.jsonl --minutes=9

For each model, one after another: short runs at each learning rate (multiples of the published one, at a tenth of
the tokens, seed 0), a run at the best one, and evaluations: held-out loss at the training length, L(i) and P(l) of
held-out documents to 65,536 tokens, needles, and recall questions with multi-key needles. A row is written as a model
ends, with its command. Model, weight decay, betas and the schedule's shape are those of the config that FILE:VARIANT
names; tokens, rows, steps and warm-up are this benchmark's. With --minutes a call ends after them, with its run saved,
and the same command continues; what is finished is not computed again. It ends later by what cannot be interrupted: the
first compilation of a step, or the evaluations of a model. On another machine, where checkpoints are not, --whole begins
only long runs that will end. With --lock FILE, two of these processes keep one device busy: one trains while the other one
compiles or evaluates. What has a row in --output, or in --skip FILE for any table, is left out.

The learning rates can be chosen by a call of their own, on another corpus, such as the beginning of the same; the rows
of the long runs say on which corpus and from which losses:

    python -m benchmarks evidence --table=fox --corpus=data/first --only_rates --output=rates.jsonl
    python -m benchmarks evidence --table=fox --corpus=data/corpus --rates=rates.jsonl --output=docs/evidence.jsonl

The task `recall` requires files that `python -m lsm_jax.evaluation.recall_corpus --out=CORPUS` makes. The task `harness`
requires the extra [lm-eval], and runs `--harness`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import evidence, evidence_tasks, options
from benchmarks.ahead import Ahead
from benchmarks.evidence_clock import Clock, TimeOver
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import log, one_by_one, read_rows
from lsm_jax import mixers
from lsm_jax.models.config import REMAT
from lsm_jax.ops.backends.registry import backends_of

BENCHMARK = Benchmark(
    name="evidence",
    summary="the models of a paper's table on a corpus of real text: loss, long contexts, needles, recall",
    key=("table", "model", "seed", "tokens", "length", "batch_size", "tasks", "corpus"),
    optional_key={"kind": None, "time_of": None},
    more_files=("docs/evidence.jsonl",),
    resume=True,
)


def _has_kernel(op: str) -> bool:
    return any(backend.name == "mosaic_gpu" for backend in backends_of(op))


LONG_DOCUMENTS = 32
# MoM's inner mixers: the option, and the ratio of the feedforward that gives the inner mixer as many parameters as MoM has
_INNER = dict(gated_deltanet=("", 8), gla=(",inner=gla", 7))
TABLES = {
    "fox": [
        *(f"fox:{name}-125m" for name in ("pro", "llama", "transformer-pro", "transformer-llama")),
        "lm:gated_deltanet-125m",
        "fox:mamba2-125m",
        "fox:hgrn2-125m",
    ],
    # MoM, its inner mixer, that with a memory as large as a token of MoM reads (as published), as large as all memories
    # together, and with as many parameters
    "mom": [
        f"mom:125m{option}{kind}"
        for option, ratio in _INNER.values()
        for kind in (
            "",
            ",baseline=inner",
            ",baseline=expanded",
            ",expanded=5",
            f",baseline=inner,hidden_ratio={ratio}",
        )
    ],
    "moe": [
        f"linear_moe:a-small,{kind}"
        for kind in ("mixer=gla", "mixer=gla,pattern=LLLN", "pattern=N")
    ],
    # Methods of ops without a kernel are slower, and trained on fewer tokens.
    "methods": [f"lm:{name}-125m" for name, row in mixers.METHODS.items() if _has_kernel(row.op)],
    "methods_xla": [
        f"lm:{name}-125m" for name, row in mixers.METHODS.items() if not _has_kernel(row.op)
    ],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--table", choices=TABLES, default="fox", help="whose models to train; default: fox")
    add("--models", nargs="+", metavar="FILE:VARIANT", help="in place of the table's")
    add("--corpus", type=Path, default=Path("data/corpus"), help="default: data/corpus")
    add("--runs", type=Path, default=Path("runs/evidence"), help="default: runs/evidence")
    add("--seeds", type=options.integers, default="0", help="seeds of the long runs; default: 0")
    add("--tokens", type=int, default=300_000_000, help="tokens of a run; default: 300 M")
    add("--length", type=int, default=4096, help="tokens in a row; default: 4096")
    add("--batch_size", type=int, default=64, help="rows in a step; default: 64")
    add("--factors", type=options.floats, default="0.5,1,2", help="learning rates, as multiples of the published one; default: 0.5,1,2")  # fmt: skip
    add("--share", type=float, default=0.1, help="share of the tokens for each rate; default: 0.1")
    add(
        "--only_rates",
        action="store_true",
        help="only choose the learning rates: a row a model, for --rates of a later call",
    )
    add(
        "--rates",
        type=Path,
        metavar="FILE",
        help="rows of --only_rates: take the learning rates from there",
    )
    add(
        "--time_of",
        metavar="FILE:VARIANT",
        help="train each model as long as this one takes for --tokens, by the speeds in --rates",
    )
    add("--warmup", type=float, default=0.1, help="share of a run that warms up; default: 0.1")
    add("--long_length", type=int, default=65_536, help="tokens of a long document; default: 65536")
    add("--long_documents", type=int, help="long documents to evaluate; default: 32, or as many as the corpus has")  # fmt: skip
    add("--needle_lengths", type=options.integers, default="1024,2048,4096,8192,16384")
    add(
        "--tasks",
        type=options.names(evidence_tasks.TASKS),
        default="heldout,long,needle,recall",
        help="evaluations; default: all but harness",
    )
    add("--harness", default="recall_corpus", help="tasks of lm-evaluation-harness, such as recall_corpus,niah_multikey_1")  # fmt: skip
    add("--limit", type=int, help="questions of each recall task; default: all")
    add("--minutes", type=float, default=math.inf, help="end the call after so many minutes; the same command continues")  # fmt: skip
    add(
        "--whole",
        action="store_true",
        help="begin no long run that would not end in --minutes, by the speed of its short runs",
    )
    add(
        "--skip",
        type=Path,
        metavar="FILE",
        help="rows that need not be made again, for whichever table they were made, besides those of --output; such as docs/evidence.jsonl",
    )
    add("--remat", choices=REMAT, help="what the backward pass recomputes; default: what the model's config says")  # fmt: skip
    add("--ahead", type=int, default=2, help="runs whose steps are compiled while another one trains; default: 2")  # fmt: skip
    options.add_lock(parser)
    options.add_shard(parser)


def setting_of(args: argparse.Namespace) -> evidence.Setting:
    """Return what is equal for all models, after checking the options."""
    for name in ("tokens", "length", "batch_size", "long_length", "long_documents", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name}={value}: it must be at least 1")
    for name, least, most in (("seeds", 0, 2**31 - 1), ("needle_lengths", 1, 2**31 - 1)):
        values = getattr(args, name)
        if not values or len(set(values)) < len(values) or not all(least <= value <= most for value in values):  # fmt: skip
            raise UsageError(
                f"--{name}={','.join(map(str, values))}: accepted are different integers from {least} to {most}, at least one"
            )
    for name in ("tasks", "harness"):
        if not getattr(args, name):
            raise UsageError(f"--{name}= is empty: accepted are names, at least one")
    for name, names in (("tasks", args.tasks), ("models", models_of(args))):
        if twice := [one for one in names if names.count(one) > 1]:
            raise UsageError(f"--{name}: {twice[0]!r} is given twice; accepted are different names")
    if args.lock is not None and (args.lock.is_dir() or not args.lock.parent.is_dir()):
        raise UsageError(f"--lock={args.lock}: accepted is a file, which may be new, in a folder that exists")  # fmt: skip
    if not args.minutes >= 0:  # nor NaN
        raise UsageError(f"--minutes={args.minutes:g}: accepted are numbers from 0")
    for name in ("share", "warmup"):
        if not 0 < getattr(args, name) < 1:
            raise UsageError(f"--{name}={getattr(args, name)}: accepted are numbers between 0 and 1")  # fmt: skip
    least, most = evidence.LEAST_FACTOR, evidence.MOST_FACTOR
    # Rows and printed commands have rates of three digits.
    different = len({f"{factor:.3g}" for factor in args.factors}) == len(args.factors) > 0
    if not different or not all(least <= factor <= most for factor in args.factors):
        raise UsageError(
            f"--factors={','.join(f'{factor:g}' for factor in args.factors)}: accepted are numbers from {least:g} to {most:g} that "
            "differ in their first three digits, at least one"
        )
    names = ("corpus", "runs", "tokens", "length", "batch_size", "share", "warmup", "long_length", "harness", "limit", "remat")  # fmt: skip
    if args.ahead < 0:
        raise UsageError(f"--ahead={args.ahead}: it must be at least 0")
    if args.whole and args.minutes == math.inf:
        raise UsageError("--whole requires --minutes")
    if args.only_rates and (args.rates or args.time_of or len(args.factors) < 2):
        raise UsageError(
            "--only_rates requires two or more --factors, and excludes --rates and --time_of"
        )
    if args.time_of and not args.rates:
        raise UsageError("--time_of requires --rates, whose rows have the speeds")
    setting = evidence.Setting(
        **{name: getattr(args, name) for name in names},
        long_documents=args.long_documents or LONG_DOCUMENTS,
        factors=tuple(args.factors),
        needle_lengths=tuple(args.needle_lengths),
        tasks=tuple(args.tasks),
    )
    if not args.rates:
        return setting
    needed = [*models_of(args), *([args.time_of] if args.time_of else ())]
    rows = _rows_of("rates", args.rates)
    try:
        return dataclasses.replace(setting, rates=evidence.chosen_rates(rows, needed, setting))
    except UsageError as error:
        raise UsageError(f"--rates={args.rates}: {error}") from error


def models_of(args: argparse.Namespace) -> list[str]:
    """Return the models that the options name, as FILE:VARIANT."""
    return args.models or TABLES[args.table]


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    setting = setting_of(args)
    for model in models_of(args):
        evidence.base_config(model)
    skipped = {_identity(row) for row in _rows_of("skip", args.skip)}
    common = dict(
        table=args.table,
        length=args.length,
        batch_size=args.batch_size,
        corpus=evidence.corpus_digest(setting),
    )
    return [case for case in _every_case(args, setting, common) if _identity(case) not in skipped]


def _identity(row: dict[str, Any]) -> tuple:
    """Return what is equal for rows of one run, for whichever table it was made."""
    return BENCHMARK.identity(row | dict(table=""))


def _rows_of(option: str, path: Path | None) -> list[dict[str, Any]]:
    """Return the rows of the file that an option names, none without one; raises UsageError if it cannot be read,
    or a row is none of this benchmark."""
    if path is not None and not path.exists():
        raise UsageError(f"--{option}={path}: it does not exist")
    try:
        rows = read_rows(path)
    except UsageError as error:
        raise UsageError(f"--{option}={error}") from error
    for row in rows:
        for name in (*BENCHMARK.key, *BENCHMARK.optional_key):
            if isinstance(row.get(name), list | dict):
                raise UsageError(f"--{option}={path}: a row has {name}={row[name]!r:.40}; accepted are texts and numbers")  # fmt: skip
    return rows


def _every_case(
    args: argparse.Namespace, setting: evidence.Setting, common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the key fields of all rows that the options ask for; `common` are those that all rows have."""
    if args.only_rates:
        more = dict(seed=0, tokens=args.tokens, tasks="", kind="rates")
        return [dict(model=model, **more, **common) for model in models_of(args)]
    more = dict(tasks=",".join(args.tasks), **(dict(time_of=args.time_of) if args.time_of else {}))
    return [
        dict(model=model, seed=seed, tokens=_tokens(model, args, setting), **more, **common)
        for seed in args.seeds
        for model in models_of(args)
    ]


def _tokens(model: str, args: argparse.Namespace, setting: evidence.Setting) -> int:
    """Return the tokens of a model's long run: `--tokens`, or as many as it trains in the time of `--time_of`."""
    if not args.time_of:
        return args.tokens
    speeds = [setting.rates[name]["tokens_per_second"] for name in (model, args.time_of)]
    return int(args.tokens * speeds[0] / speeds[1])


def _check_inputs(args: argparse.Namespace, setting: evidence.Setting) -> None:
    """Raise UsageError before anything is trained if an evaluation's input is missing or wrong."""
    try:
        evidence.vocab_size(setting.corpus)
        evidence_tasks.check_inputs(setting, given_documents=args.long_documents)
    except ValueError as error:
        raise UsageError(str(error)) from error


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    setting, clock = setting_of(args), Clock(60 * args.minutes, whole=args.whole, lock=args.lock)
    if args.only_rates:
        setting, function = dataclasses.replace(setting, tasks=("heldout",)), evidence.measure_rates
    else:
        function = evidence.measure
    _check_inputs(args, setting)
    short = args.only_rates or (setting.rates is None and len(setting.factors) > 1)
    with contextlib.closing(Ahead(args.ahead)) as ahead:
        ahead.plan(evidence.planned_configs(cases, setting, short=short))
        try:
            yield from one_by_one(cases, lambda case: function(case, setting, clock, ahead))
        except TimeOver:
            log(f"the {args.minutes:g} minutes are over; the same command continues")
