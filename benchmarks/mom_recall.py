"""Recall of a Mixture-of-Memories beside its inner mixer: `python -m benchmarks.mom_recall --output docs/mom_recall.jsonl`.

Multi-query recall as in `configs/mqar.py` (its model and examples), of more pairs than one small memory can hold, around Gated
DeltaNet or `--inner deltanet` (without an output gate, which could pick the part of a large memory that a query reads). A row a
model: `inner`, the inner mixer; `expanded-5`, one with five times the value channels, so as much state as five memories;
`mom-4-shared`, four memories and a shared one, two a token; `mom-4`, without it. Each is trained at every rate of `--rates` from
every one of `--seeds`, and the best taken. Models that have a row are passed over; `--shard 0/4` takes every fourth, for processes
side by side; `--report` prints the rows as markdown and draws accuracy by state.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import jax

from benchmarks.timing import append_row, provenance
from configs import mqar
from lsm_jax import mixers
from lsm_jax.data import RecallTask
from lsm_jax.training import RecallConfig, read_rows, train_recall

MODELS = "inner,expanded-5,mom-4-shared,mom-4,mom-8-shared,mom-2-shared,mom-1-shared,mom-8,mom-2,mom-1,expanded-9,expanded-3,expanded-2"  # fmt: skip
EPOCHS = 8
SETTING = ("inner", "num_heads", "head_dim", "expand_v", "vocab_size", "form", "batch_size", "balance_scale", "rates", "seeds")  # fmt: skip
Inner = mixers.GatedDeltaNetConfig | mixers.DeltaNetConfig


def mixer_config(name: str, inner: Inner, **fields) -> Inner | mixers.MoMConfig:
    """The mixer a row is named by.

    Raises:
        ValueError: a name of another form.
    """
    kind, *parts = name.split("-")
    if name == "inner":
        return inner
    if not parts or not parts[0].isdecimal() or parts[1:] not in ([], ["shared"]):
        raise ValueError(f"model {name!r}: accepted are {MODELS} and other numbers")
    number = int(parts[0])
    if kind == "expanded" and not parts[1:]:
        return dataclasses.replace(inner, expand_v=inner.expand_v * number)
    if kind != "mom":
        raise ValueError(f"model {name!r}: accepted are {MODELS} and other numbers")
    return mixers.MoMConfig(
        mixer=inner,
        num_memories=number,
        top_k=min(2, number),
        shared_memory=bool(parts[1:]),
        **fields,
    )


def run_config(name: str, args: argparse.Namespace) -> RecallConfig:
    """The run of a row: half of the batches of half the length and pairs, which are learned first."""
    config = mqar.get_config(f"gated_deltanet,width={args.width}")
    config.name = name
    if args.inner == "deltanet":
        whole = args.num_heads * args.head_dim / args.width
        inner = mixers.DeltaNetConfig(
            num_heads=args.num_heads, expand_k=whole, expand_v=whole * args.expand_v
        )
    else:
        inner = mixers.GatedDeltaNetConfig(
            num_heads=args.num_heads, head_dim=args.head_dim, expand_v=args.expand_v
        )
    inner = dataclasses.replace(inner, op=dataclasses.replace(inner.op, form=args.form))
    # Step by step, rows of all tokens are shorter than packed ones.
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
    """Train one model and read its row off the result."""
    found = train_recall(run_config(name, args))
    members = [{k: m[k] for k in ("learning_rate", "seed", "mean")} for m in found["members"]]
    kept = ("width", "train", "learning_rate", "accuracy", "mean", "steps", "seconds", "compile_seconds")  # fmt: skip
    return dict(
        model=name,
        **{key: getattr(args, key) for key in SETTING},
        **{key: found[key] for key in kept},
        memory=found["state_size"]["memory"][-1],
        parameters=found["parameters"]["non_embedding"],
        members=members,
        **provenance(),
    )


def report(path: Path) -> str:
    """The rows as markdown, and beside them accuracy by state as a picture."""
    from matplotlib.figure import Figure

    from lsm_jax.evaluation.plots import COLOURS

    rows = read_rows(path)
    tasks = list(rows[0]["accuracy"])
    lines = [
        "| model | memory, numbers | parameters, K | " + " | ".join(tasks) + " | learning rate | steps | s | date, commit |",
        "|---" * (len(tasks) + 7) + "|",
    ]  # fmt: skip
    for r in sorted(rows, key=lambda r: (r["model"].split("-")[0] != "inner", r["memory"])):
        values = " | ".join(f"{r['accuracy'][task]:.3f}" for task in tasks)
        lines.append(
            f"| `{r['model']}` | {r['memory']:,} | {r['parameters'] / 1e3:.0f} | {values} | {r['learning_rate']:.1e} | "
            f"{r['steps']:,} | {r['seconds']:.0f} | {r['date']}, {r['commit']} |"
        )
    figure = Figure(figsize=(6.4, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    kinds = {
        "one memory, more value channels": lambda n: not n.startswith("mom"),
        "memories": lambda n: n.startswith("mom") and "shared" not in n,
        "memories and a shared one": lambda n: n.endswith("shared"),
    }
    hardest = tasks[-1]
    for colour, (label, own) in zip(COLOURS, kinds.items(), strict=False):
        points = sorted((r["memory"], r["accuracy"][hardest]) for r in rows if own(r["model"]))
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("memory of one sequence (numbers)")
    axes.set_ylabel(f"accuracy at {hardest}")
    axes.set_title(f"Multi-query recall, {rows[0].get('inner', 'gated_deltanet')} inside")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path.with_suffix(".png"))
    return "\n".join(lines)


def main() -> None:
    """Measure what has no row yet, or print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/mom_recall.jsonl"))
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--shard", default="0/1", help="which part of the models, e.g. 0/4")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--inner", default="gated_deltanet", choices=("gated_deltanet", "deltanet"))
    parser.add_argument("--num_heads", type=int, default=1)
    parser.add_argument("--head_dim", type=int, default=16, help="of keys, and so their number")
    parser.add_argument("--expand_v", type=float, default=4.0, help="value channels over head_dim")
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3072)
    parser.add_argument(
        "--form", default="chunk", choices=("chunk", "recurrent"), help="of the op; the same values"
    )
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--balance_scale", type=float, default=1e-3, help="of MoM")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--halves", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rates", default="3e-3,1e-2")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        print(report(args.output))
        return
    index, count = map(int, args.shard.split("/"))
    names = args.models.split(",")[index::count]
    rows = read_rows(args.output) if args.output.exists() else []
    for row in rows:  # a table is of one setting; older rows leave out what was the default
        kept = {key: row.get(key, parser.get_default(key)) for key in SETTING}
        if wrong := [key for key, value in kept.items() if value != getattr(args, key)]:
            other = f"{wrong[0]} ({kept[wrong[0]]})"
            parser.error(f"--output {args.output} has rows of another {other}; give another file")
    measured = [row["model"] for row in rows]
    names = [name for name in names if name not in measured]
    for name in names:
        run_config(name, args)
    for name in names:
        row = measure(name, args)
        append_row(args.output, row)
        print(json.dumps(row), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
