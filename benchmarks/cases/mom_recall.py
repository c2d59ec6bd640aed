"""Compare the recall of a Mixture-of-Memories with that of its inner mixer.

    python -m benchmarks mom_recall [--inner deltanet] [--models inner,mom-4]

Multi-query recall as in `configs/mqar.py` (its model and examples), of more pairs than one small memory can
store, around Gated DeltaNet or `--inner deltanet`, which has no output gate; a gate could select the part of
a large memory that a query reads. A row for each model: `inner` is the inner mixer; `expanded-5` has five
times its value channels, so as much state as five memories; `mom-4-shared` has four memories and a shared
one, two per token; `mom-4` has no shared one. Each is trained at every rate of `--rates` from each of
`--seeds` seeds, and the best is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import one_by_one, read_rows
from benchmarks.timing import provenance
from configs import mqar
from lsm_jax import mixers
from lsm_jax.data import RecallTask
from lsm_jax.training import RecallConfig, train_recall

BENCHMARK = Benchmark(
    name="mom_recall",
    summary="recall of a Mixture-of-Memories and of its inner mixer",
    key=("model", "num_heads", "head_dim", "expand_v", "vocab_size"),
    optional_key={
        "inner": "gated_deltanet",
        "form": "chunk",
        "batch_size": 256,
        "balance_scale": 1e-3,
        "rates": "3e-3,1e-2",
        "seeds": 1,
    },
    output="docs/mom_recall.jsonl",
    more_files=("docs/mom_recall_deltanet.jsonl", "docs/mom_recall_deltanet_8192.jsonl"),
    resume=True,
)

MODELS = "inner,expanded-5,mom-4-shared,mom-4,mom-8-shared,mom-2-shared,mom-1-shared,mom-8,mom-2,mom-1,expanded-9,expanded-3,expanded-2"  # fmt: skip
EPOCHS = 8
SETTING = ("inner", "num_heads", "head_dim", "expand_v", "vocab_size", "form", "batch_size", "balance_scale", "rates", "seeds")  # fmt: skip
Inner = mixers.GatedDeltaNetConfig | mixers.DeltaNetConfig


def mixer_config(name: str, inner: Inner, **fields) -> Inner | mixers.MoMConfig:
    """Return the config of a mixer of the recall benchmark by its name, such as "inner", "expanded-5" or
    "mom-4-shared".

    Raises:
        ValueError: `name` has none of these forms.
    """
    kind, *parts = name.split("-")
    if name == "inner":
        return inner
    if not parts or not parts[0].isdecimal() or parts[1:] not in ([], ["shared"]):
        raise ValueError(
            f"model {name!r}: accepted are {MODELS}, and these forms with other numbers"
        )
    number = int(parts[0])
    if kind == "expanded" and not parts[1:]:
        return dataclasses.replace(inner, expand_v=inner.expand_v * number)
    if kind != "mom":
        raise ValueError(
            f"model {name!r}: accepted are {MODELS}, and these forms with other numbers"
        )
    return mixers.MoMConfig(
        mixer=inner,
        num_memories=number,
        top_k=min(2, number),
        shared_memory=bool(parts[1:]),
        **fields,
    )


def run_config(name: str, args: argparse.Namespace) -> RecallConfig:
    """Return the config of the recall sweep that trains the model called `name`, such as "mom-4".

    With the option --halves, half of the training batches have half the length and half the pairs; they come
    first.
    """
    config = mqar.get_config(f"gated_deltanet,width={args.width}")
    config.name = name
    if args.inner == "deltanet":
        expand_k = args.num_heads * args.head_dim / args.width
        inner = mixers.DeltaNetConfig(
            num_heads=args.num_heads, expand_k=expand_k, expand_v=expand_k * args.expand_v
        )
    else:
        inner = mixers.GatedDeltaNetConfig(
            num_heads=args.num_heads, head_dim=args.head_dim, expand_v=args.expand_v
        )
    inner = dataclasses.replace(inner, op=dataclasses.replace(inner.op, form=args.form))
    # The recurrent form runs token by token, and masked rows are shorter than packed ones.
    execution = "packed" if args.form == "chunk" else "masked"
    config.model.mixer = mixer_config(
        name, inner, balance_scale=args.balance_scale, execution=execution
    )
    config.model.vocab_size = args.vocab_size
    config.batch_size = args.batch_size
    number = args.steps // EPOCHS * config.batch_size // (2 if args.halves else 1)
    sizes = [(args.length // 2, args.pairs // 2)] * args.halves + [(args.length, args.pairs)]
    config.train = tuple(RecallTask(length=t, num_pairs=p, num_examples=number) for t, p in sizes)
    config.test = (RecallTask(length=args.length, num_pairs=args.pairs, num_examples=1024),)
    config.learning_rates = tuple(float(rate) for rate in args.rates.split(","))
    config.seeds = tuple(range(args.seeds))
    config.epochs, config.stop_above, config.steps_per_call = EPOCHS, 0.999, 16
    config.validate()
    return config


def measure(name: str, args: argparse.Namespace) -> dict:
    """Train the model `name` on associative recall and return the benchmark's row, with its best accuracy."""
    result = train_recall(run_config(name, args))
    members = [{k: m[k] for k in ("learning_rate", "seed", "mean")} for m in result["members"]]
    fields = ("width", "train", "learning_rate", "accuracy", "mean", "steps", "seconds", "compile_seconds")  # fmt: skip
    return dict(
        model=name,
        **{key: getattr(args, key) for key in SETTING},
        **{key: result[key] for key in fields},
        memory=result["state_size"]["memory"][-1],
        parameters=result["parameters"]["non_embedding"],
        members=members,
        **provenance(),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=options.words, default=MODELS)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--inner", default="gated_deltanet", choices=("gated_deltanet", "deltanet"))
    parser.add_argument("--num_heads", type=int, default=1)
    parser.add_argument("--head_dim", type=int, default=16, help="key channels of a head")
    parser.add_argument("--expand_v", type=float, default=4.0, help="value channels / key channels")
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3072)
    parser.add_argument(
        "--form",
        default="chunk",
        choices=("chunk", "recurrent"),
        help="form of the op; the values are the same",
    )
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument(
        "--balance_scale", type=float, default=1e-3, help="scale of MoM's balancing loss"
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument(
        "--halves", action=argparse.BooleanOptionalAction, default=True,
        help="train half of the batches on half the length and pairs",
    )  # fmt: skip
    parser.add_argument("--rates", default="3e-3,1e-2", help="learning rates")
    options.add_shard(parser)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.steps < EPOCHS or args.steps % EPOCHS:
        raise UsageError(f"--steps {args.steps}: accepted are multiples of {EPOCHS}, the epochs")
    setting = {key: getattr(args, key) for key in SETTING}
    for row in read_rows(args.output):  # a file has the rows of one table, so of one setting
        values = BENCHMARK.optional_key | row
        if wrong := [key for key in SETTING if values[key] != setting[key]]:
            raise UsageError(
                f"--output {args.output} has rows that were measured with another {wrong[0]} ({values[wrong[0]]}); accepted is a file with rows of equal settings, or a new one"
            )
    for name in args.models:
        run_config(name, args)
    return [dict(model=name, **setting) for name in args.models]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    def measure_case(case):
        try:
            return measure(case["model"], args)
        finally:
            jax.clear_caches()

    return one_by_one(cases, measure_case)
