"""SmolLM2-135M made linear, in the order of the paper's tables: `python -m benchmarks.liger --source=SmolLM2.gguf --store=STORE`.

A row a model: held-out cross-entropy in nats over all positions, over those beyond 256, and by position, before or after its
adapters (or what its ablation trains) have learned from the store's rows, with the trainer's own step. STORE holds train.zarr and
heldout.zarr, rows of 1,024 tokens of documents put end to end (`python -m lsm_jax.data.tokenize --pack`). Rows are appended
to the output as they are done, and those already there are left out. The next rows are compiled while one trains.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.timing import append_row, provenance
from configs import liger
from lsm_jax.data import DataConfig, make_eval_iterator, make_train_iterator
from lsm_jax.linearize import Pretrained, base_model
from lsm_jax.models import abstract, next_token_loss
from lsm_jax.parallel import MeshConfig, batch_sharding, make_mesh
from lsm_jax.training import TrainConfig, make_program
from lsm_jax.training.partition import join, leaves_of, like, split, targets
from lsm_jax.training.step import params_of

# Name, options of configs/liger.py, millions of tokens (0: as converted), seed. The recipe is the published one; TUNED has
# the weights with the least loss while training on 1.6 M tokens, and a rate better for the window alone too.
RATE, WEIGHTS = ",lr=3e-3", ",memory_weight=0.03,window_weight=1"
TUNED = "Liger-GLA, weights 0.03 and 1"
ROWS: tuple[tuple[str, str, float, int], ...] = (
    ("original", "method=softmax", 0, 0),
    ("window, untuned", "method=window", 0, 0),
    ("Liger-GLA, untuned", "gate=gla", 0, 0),
    ("original", "method=softmax", 5, 0),
    ("window", "method=window", 5, 0),
    ("LoLCATs", "method=lolcats", 5, 0),  # of each stage
    ("Liger-GLA", "gate=gla", 5, 0),
    ("Liger-HGRN2", "gate=hgrn2", 5, 0),
    ("Liger-GSA", "gate=gsa", 5, 0),
    ("Liger-Mamba2", "gate=mamba2", 5, 0),
    ("Liger-mLSTM", "gate=mlstm", 5, 0),  # and gated retention, the same function
    ("Liger-RWKV6", "gate=rwkv6", 5, 0),
    ("Liger-GLA, one softmax layer in ten", "gate=gla,hybrid=10", 5, 0),
    ("Liger-GLA, random gate", "ablation=random_gate", 5, 0),
    ("Liger-GLA, learned feature map", "ablation=feature_map", 5, 0),
    ("Liger-GLA, no LoRA", "ablation=no_lora", 5, 0),
    ("Liger-GLA, no window", "ablation=no_window", 5, 0),
    ("Liger-mLSTM, temperature 64", "gate=mlstm,temperature=64", 5, 0),
    ("window", f"method=window{RATE}", 20, 0),
    ("window", f"method=window{RATE}", 20, 1),
    (TUNED, f"gate=gla{RATE}{WEIGHTS}", 20, 0),
    (TUNED, f"gate=gla{RATE}{WEIGHTS}", 20, 1),
    (f"{TUNED}, one softmax layer in ten", f"gate=gla,hybrid=10{RATE}{WEIGHTS}", 20, 1),
    ("window", "method=window,lr=1e-2", 5, 0),
    (TUNED, f"gate=gla,lr=1e-2{WEIGHTS}", 5, 0),
    ("window", "method=window,lr=1e-2", 5, 1),
    (TUNED, f"gate=gla,lr=1e-2{WEIGHTS}", 5, 1),
)
TRANSFER = "method=lolcats_transfer"
EDGES = (0, 64, 128, 256, 512, 1024)


@dataclasses.dataclass
class Job:
    """A row, compiled."""

    config: TrainConfig
    program: Any
    init: Any
    train: Any
    score: Any
    compile_seconds: float


_started = time.perf_counter()


def say(text: str) -> None:
    """Tell what goes on, and when."""
    print(f"{time.perf_counter() - _started:.1f} s: {text}", file=sys.stderr, flush=True)


def config_of(options: str, args: argparse.Namespace) -> TrainConfig:
    """The run of a row."""
    config = liger.get_config(f"{args.model},source={args.source},data=text,{options}")
    config.data = DataConfig(
        path=str(args.store),
        tokenizer=args.tokenizer,
        sequence_length=1024,
        add_bos=False,
        shuffle_blocks=2,
    )
    config.batch_size, config.seed = args.batch_size, 0
    config.model.remat = "none"  # a small model: what the backward pass needs fits
    return config


def compiled(options: str, args: argparse.Namespace, mesh: Any, tune: bool) -> Job:
    """The step and the score of a row's config, which takes no device memory."""
    began = time.perf_counter()
    config = config_of(options, args)
    config.total_tokens = 1 << 40  # the rate is constant: no step depends on it
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        graph = nnx.graphdef(abstract(config.model))
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(program.init), program.shardings,
        )  # fmt: skip
        every = targets(
            params_of(abstract(config.model)), program.param_shardings, config.trainable
        )
        rows, shape = batch_sharding(mesh), (config.batch_size, config.data.sequence_length)
        batch = {
            name: jax.ShapeDtypeStruct(shape, kind, sharding=rows)
            for name, kind in (("tokens", jnp.int32), ("labels", jnp.int32), ("loss_mask", jnp.float32))
        }  # fmt: skip

        def score(params, batch):
            model = nnx.merge(graph, params)
            hidden, _, _ = model.hidden(batch["tokens"])
            nll = next_token_loss(hidden, model.head(), batch["labels"], batch["loss_mask"])
            return nll.sum(0), batch["loss_mask"].sum(0)

        frozen = split(every, config.trainable)[1]
        scored = jax.jit(score).lower(every, batch).compile()
        init = program.init.lower().compile()
        train = program.train_step.lower(state, batch, frozen).compile() if tune else None
    seconds = time.perf_counter() - began
    say(f"{options}: compiled in {seconds:.1f} s")
    return Job(config, program, init, train, scored, seconds)


class Base:
    """The pretrained parameters, read once and laid out for each row's pattern of layers."""

    def __init__(self, args: argparse.Namespace):
        pretrained = Pretrained(path=args.source)
        model = base_model(pretrained.config())
        shapes = params_of(abstract(model))
        home = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), shapes
        )
        self.params = pretrained.load(model, target)

    def laid_out(self, job: Job, further: dict[str, Any] | None = None) -> dict[str, Any]:
        """In the dtypes, shardings and pattern of a job's parameters; what is neither in the base nor `further` is left out."""
        config = job.config
        every = targets(
            params_of(abstract(config.model)), job.program.param_shardings, config.trainable
        )
        (block,) = self.params["periods"]["blocks"].values()
        period = len(config.model.period())
        blocks = {p: jax.tree.map(lambda x, p=p: x[p::period], block) for p in range(period)}
        ours = join({**self.params, "periods": dict(blocks=blocks)}, further or {})
        return jax.tree.map(
            lambda x, t: jax.device_put(x.astype(t.dtype), t.sharding), ours, like(every, ours)
        )


def learn(
    job: Job,
    started: dict[str, Any],
    millions: list[float],
    seed: int,
    args: argparse.Namespace,
    mesh: Any,
) -> Iterator[tuple[float, dict[str, Any], dict[str, Any]]]:
    """After each of so many million tokens in all: how many, every parameter, and how they were learned; inside the mesh."""
    config = job.config
    if seed == config.seed:
        state = job.init()
    else:
        state = make_program(dataclasses.replace(config, seed=seed), mesh).init()
    state = dataclasses.replace(state, params=join(state.params, like(started, state.params)))
    trained = leaves_of(state.params)
    frozen, size = _without(started, trained), sum(x.size for x in trained.values())
    stops = {int(m * 1e6) // config.tokens_per_step: m for m in sorted(millions)}
    last, losses, seconds = max(stops), [], 0.0
    if not last:
        yield millions[-1], join(started, state.params), dict(tokens=0)
        return
    rows = batch_sharding(mesh)
    batching = dict(global_batch_size=config.batch_size, vocab_size=config.model.vocab_size)
    with contextlib.closing(make_train_iterator(config.data, seed=seed, **batching)) as batches:
        began = time.perf_counter()
        for done in range(1, last + 1):
            state, metrics = job.train(state, jax.device_put(next(batches), rows), frozen)
            losses.append(metrics["train/loss"])
            late = False
            if done == 2:
                jax.block_until_ready(losses)
                began = time.perf_counter()
            elif done % 20 == 0:
                jax.block_until_ready(losses[-20])  # at most so many steps ahead
                say(f"step {done} of {last}: loss {float(losses[-20]):.4f}")
                late = seconds + time.perf_counter() - began > args.seconds
            if done in stops or late:
                jax.block_until_ready(state)
                seconds += time.perf_counter() - began
                how = dict(
                    tokens=len(losses) * config.tokens_per_step,
                    trained=size,
                    train_seconds=round(seconds, 1),
                    tokens_per_second=round((len(losses) - 2) * config.tokens_per_step / seconds),
                    first_loss=round(float(losses[0]), 4),
                    last_loss=round(float(np.mean([float(x) for x in losses[-20:]])), 4),
                )
                yield stops.get(done, stops[last]), join(started, state.params), how
                began = time.perf_counter()
            if late:
                return


def _without(tree: dict[str, Any], names: Any, path: str = "") -> dict[str, Any]:
    """The branches of a tree that lead to other leaves than those named."""
    kept = {}
    for key, value in tree.items():
        inner = f"{path}{key}"
        if isinstance(value, dict):
            value = _without(value, names, f"{inner}.")
        if inner not in names and not (isinstance(value, dict) and not value):
            kept[key] = value
    return kept


def score(job: Job, params: dict[str, Any], most: int, mesh: Any) -> tuple[np.ndarray, np.ndarray]:
    """Summed nats and tokens at each position of held-out rows, of about `most` tokens; called inside the mesh."""
    config, rows = job.config, batch_sharding(mesh)
    total, count = np.zeros(config.data.sequence_length), np.zeros(config.data.sequence_length)
    batching = dict(global_batch_size=config.batch_size, vocab_size=config.model.vocab_size)
    with contextlib.closing(
        make_eval_iterator(config.data, remainder="pad", **batching)
    ) as batches:
        for batch in itertools.islice(batches, -(-most // config.tokens_per_step)):
            nll, mask = job.score(params, jax.device_put(batch, rows))
            total, count = total + np.asarray(nll, np.float64), count + np.asarray(mask)
    return total, count


def run(name: str, options: str, millions: float, seed: int, jobs: dict, base: Base, args, mesh):
    """Train, and a row at each of `args.marks` on the way and at the end."""
    job, started = jobs[options].result(), {}
    marks = [m for m in args.marks if m < millions]
    with jax.set_mesh(mesh):
        if options == "method=lolcats":
            first = jobs[TRANSFER].result()
            *_, (_, started, _) = learn(first, base.laid_out(first), [millions], seed, args, mesh)
            started = base.laid_out(job, started)
        else:
            started = base.laid_out(job)
        for so_far, params, how in learn(job, started, [*marks, millions], seed, args, mesh):
            total, count = score(job, params, args.heldout_tokens, mesh)
            bins = {
                f"{a}-{b}": round(float(total[a:b].sum() / count[a:b].sum()), 4)
                for a, b in zip(EDGES, EDGES[1:], strict=False)
            }
            yield dict(
                name=name,
                millions=so_far,
                seed=seed,
                nats=round(float(total.sum() / count.sum()), 4),
                beyond_256=round(float(total[256:].sum() / count[256:].sum()), 4),
                by_position=bins,
                heldout_tokens=int(count.sum()),
                batch_size=job.config.batch_size,
                compile_seconds=round(job.compile_seconds, 1),
                **how,
                options=options,
            )


def report(path: Path) -> None:
    """Print the rows of a file as a table: those of `ROWS` in its order, then the others."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    order = {
        (name, options, bool(m)): i for i, (name, options, m, _) in reversed([*enumerate(ROWS)])
    }

    def place(row: dict[str, Any]) -> tuple[int, int, int]:
        kind = (row["name"], row["options"], bool(row["tokens"]))
        return order.get(kind, len(order)), row["seed"], row["tokens"]

    bins = [f"{a}-{b}" for a, b in zip(EDGES, EDGES[1:], strict=False)]
    print("| model | options | tokens, M | seed | all positions | beyond 256 |", " | ".join(bins), "|")  # fmt: skip
    print("|---" * (6 + len(bins)) + "|")
    for row in sorted(rows, key=place):
        nats = [row["nats"], row["beyond_256"], *(row["by_position"][name] for name in bins)]
        start = (
            f"| {row['name']} | `{row['options']}` | {row['tokens'] / 1e6:.1f} | {row['seed']} | "
        )
        print(start + " | ".join(f"{x:.3f}" for x in nats) + " |")


def numbers(text: str) -> list[float]:
    """Of a list with commas."""
    return [float(part) for part in text.split(",") if part]


def main() -> None:
    """Print a row a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", help="a Hugging Face folder or .gguf file")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--tokenizer", help="the tokenizer.json of the store")
    parser.add_argument("--report", action="store_true", help="print the output's table instead")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", type=Path, help="append the rows as JSON lines")
    parser.add_argument("--rows", help="numbers of rows, as 0,3,4; all where not given")
    parser.add_argument(
        "--row", action="append", help="another row, as NAME:OPTIONS:MILLIONS:SEED; repeatable"
    )
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60, help="the most a row trains")
    parser.add_argument(
        "--marks",
        help="score a row after so many million tokens too, as 5,10",
        default="",
        type=numbers,
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of every row's tokens")
    parser.add_argument("--heldout_tokens", type=int, default=262_144)
    parser.add_argument("--workers", type=int, default=3, help="rows compiled at a time")
    args = parser.parse_args()
    if args.report and not args.output:
        parser.error("--report takes --output=FILE, whose rows it prints")
    if args.report:
        report(args.output)
        return
    if not (args.source and args.store and args.tokenizer):
        parser.error("--source, --store and --tokenizer are needed")
    further = [row.split(":") for row in args.row or ()]
    chosen = ROWS if args.rows is None and not further else ()
    chosen = [ROWS[int(i)] for i in args.rows.split(",")] if args.rows else [*chosen]
    chosen += [(name, options, float(m), int(seed)) for name, options, m, seed in further]
    there = set()
    if args.output and args.output.exists():
        found = map(json.loads, args.output.read_text().splitlines())
        there = {(row["name"], row["options"], row["millions"], row["seed"]) for row in found}
    chosen = [(n, o, m * args.scale, s) for n, o, m, s in chosen]
    chosen = [row for row in chosen if row not in there]
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    say(f"reading {args.source}")
    base = Base(args)
    say("compiling")
    tuned = {options for _, options, millions, _ in chosen if millions} | {TRANSFER}
    wanted = list(dict.fromkeys(row[1] for row in chosen))
    if "method=lolcats" in wanted:
        wanted.insert(wanted.index("method=lolcats"), TRANSFER)
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        jobs = {
            options: pool.submit(compiled, options, args, mesh, options in tuned)
            for options in wanted
        }
        for name, options, millions, seed in chosen:
            say(f"{name}: {millions} M tokens")
            try:
                for row in run(name, options, millions, seed, jobs, base, args, mesh):
                    row |= provenance()
                    print(json.dumps(row), flush=True)
                    if args.output:
                        append_row(args.output, row)
            except Exception as error:  # one row's failure leaves the others
                print(json.dumps(dict(name=name, options=options, error=repr(error)[:2000])), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
