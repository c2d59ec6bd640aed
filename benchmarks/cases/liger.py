"""Make SmolLM2-135M linear, tune it and score it, in the order of the paper's tables.

    python -m benchmarks liger --source SmolLM2.gguf --store STORE --tokenizer tokenizer.json [--rows 0,3,4]

A row for each model: held-out cross-entropy in nats over all positions, over those beyond 256, and by
position, before or after its adapters (or the parameters that its ablation trains) have been trained on the
store's rows, with the trainer's own step. STORE has train.zarr and heldout.zarr, rows of 1,024 tokens of
consecutive documents (`python -m lsm_jax.data.tokenize --pack`); `--text corpus` gives the rows the name of their text, where it is not that
of the first ones (docs/results/liger.md). The next rows are compiled while one trains.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import options
from benchmarks.registry import Benchmark, UsageError
from benchmarks.run import log
from configs import liger
from lsm_jax.data import DataConfig, make_eval_iterator, make_train_iterator
from lsm_jax.linearize import Pretrained, base_model
from lsm_jax.models import abstract, next_token_loss
from lsm_jax.parallel import MeshConfig, batch_sharding, make_mesh
from lsm_jax.training import TrainConfig, make_program
from lsm_jax.training.partition import join, leaves_of, like, split, targets
from lsm_jax.training.step import params_of

BENCHMARK = Benchmark(
    name="liger",
    summary="a pretrained transformer made linear, tuned and scored",
    key=("name", "options", "millions", "seed"),
    optional_key={"text": None},
    output="docs/liger.jsonl",
    more_files=("docs/liger_ablations.jsonl",),
    resume=True,
)

# Each row: name, options of configs/liger.py, millions of tokens (0: as converted), seed. The recipe is the published
# one. The rows of TUNED have the weights with the lowest loss in training on 1.6 M tokens, and a rate that is better
# for the window alone too.
RATE, WEIGHTS = ",lr=3e-3", ",memory_weight=0.03,window_weight=1"
TUNED = "Liger-GLA, weights 0.03 and 1"
ROWS: tuple[tuple[str, str, float, int], ...] = (
    ("original", "method=softmax", 0, 0),
    ("window, untuned", "method=window", 0, 0),
    ("Liger-GLA, untuned", "gate=gla", 0, 0),
    ("original", "method=softmax", 5, 0),
    ("window", "method=window", 5, 0),
    ("LoLCATs", "method=lolcats", 5, 0),  # tokens of each stage
    ("Liger-GLA", "gate=gla", 5, 0),
    ("Liger-HGRN2", "gate=hgrn2", 5, 0),
    ("Liger-GSA", "gate=gsa", 5, 0),
    ("Liger-Mamba2", "gate=mamba2", 5, 0),
    ("Liger-mLSTM", "gate=mlstm", 5, 0),  # gated retention is the same function
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
    ("LoLCATs, adapters only", "method=lolcats_lora", 5, 0),
    ("Liger, no gate", "ablation=no_gate", 5, 0),
    ("Liger, no memory", "ablation=no_memory", 5, 0),
    ("window", "method=window", 20, 0),
    ("window", "method=window", 20, 1),
    ("Liger-GLA", "gate=gla", 20, 0),
    ("Liger-GLA", "gate=gla", 20, 1),
)
TRANSFER = "method=lolcats_transfer"
EDGES = (0, 64, 128, 256, 512, 1024)


@dataclasses.dataclass
class Job:
    """The training config of one row of the Liger table and its compiled programs; `train`, the training
    step, is None if the row's model is scored without training.
    """

    config: TrainConfig
    program: Any
    init: Any
    train: Any
    score: Any
    compile_seconds: float


def config_of(options: str, args: argparse.Namespace) -> TrainConfig:
    """Return the training config of one row of the Liger table; `options` are those of `configs/liger.py`."""
    config = liger.get_config(f"{args.model},source={args.source},data=text,{options}")
    config.data = DataConfig(
        path=str(args.store),
        tokenizer=args.tokenizer,
        sequence_length=1024,
        add_bos=False,
        shuffle_blocks=2,
    )
    config.batch_size, config.seed = args.batch_size, 0
    config.model.remat = "none"  # the model is small, so all residuals fit into memory
    return config


def compile_job(options: str, args: argparse.Namespace, mesh: Any, tune: bool) -> Job:
    """Compile the initialisation, the held-out score and, with `tune`, the training step of one row of the
    Liger table; allocates no device memory.
    """
    began = time.perf_counter()
    config = config_of(options, args)
    config.total_tokens = 1 << 40  # the learning rate is constant, so no step depends on the total
    with jax.set_mesh(mesh):
        program = make_program(config, mesh)
        graph = nnx.graphdef(abstract(config.model))
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(program.init), program.shardings,
        )  # fmt: skip
        all_params = targets(
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

        frozen = split(all_params, config.trainable)[1]
        scored = jax.jit(score).lower(all_params, batch).compile()
        init = program.init.lower().compile()
        train = program.train_step.lower(state, batch, frozen).compile() if tune else None
    seconds = time.perf_counter() - began
    log(f"{options}: compiled in {seconds:.1f} s")
    return Job(config, program, init, train, scored, seconds)


class Base:
    """The pretrained parameters, read once and arranged for each row's pattern of layers."""

    def __init__(self, args: argparse.Namespace):
        pretrained = Pretrained(path=args.source)
        model = base_model(pretrained.config())
        shapes = params_of(abstract(model))
        placement = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement), shapes
        )
        self.params = pretrained.load(model, target)

    def params_for(self, job: Job, more: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the pretrained parameters as the model of a `job` stores them: in its dtypes and shardings,
        and divided into the layers of its period.

        `more` are further parameters by path, such as trained adapters. Parameters of the job's model that
        are neither pretrained nor in `more` are omitted.
        """
        config = job.config
        all_params = targets(
            params_of(abstract(config.model)), job.program.param_shardings, config.trainable
        )
        (block,) = self.params["periods"]["blocks"].values()
        period = len(config.model.period())
        blocks = {p: jax.tree.map(lambda x, p=p: x[p::period], block) for p in range(period)}
        known = join({**self.params, "periods": dict(blocks=blocks)}, more or {})
        return jax.tree.map(
            lambda x, t: jax.device_put(x.astype(t.dtype), t.sharding),
            known,
            like(all_params, known),
        )


def train_job(
    job: Job,
    initial: dict[str, Any],
    millions: list[float],
    seed: int,
    args: argparse.Namespace,
    mesh: Any,
) -> Iterator[tuple[float, dict[str, Any], dict[str, Any]]]:
    """Train the Liger model of a compiled job from the pretrained parameters `initial`; call it inside the
    mesh.

    Yields:
        After each of `millions` of tokens: how many, all parameters, and the fields of the row about
        training.
    """
    config = job.config
    if seed == config.seed:
        state = job.init()
    else:
        state = make_program(dataclasses.replace(config, seed=seed), mesh).init()
    state = dataclasses.replace(state, params=join(state.params, like(initial, state.params)))
    trained = leaves_of(state.params)
    frozen, size = _without(initial, trained), sum(x.size for x in trained.values())
    stops = {int(m * 1e6) // config.tokens_per_step: m for m in sorted(millions)}
    last, losses, seconds = max(stops), [], 0.0
    if not last:
        yield millions[-1], join(initial, state.params), dict(tokens=0)
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
                jax.block_until_ready(losses[-20])  # the host is at most 20 steps ahead
                log(f"step {done} of {last}: loss {float(losses[-20]):.4f}")
                late = seconds + time.perf_counter() - began > args.seconds
            if done in stops or late:
                jax.block_until_ready(state)
                seconds += time.perf_counter() - began
                about = dict(
                    tokens=len(losses) * config.tokens_per_step,
                    trained=size,
                    train_seconds=round(seconds, 1),
                    tokens_per_second=round((len(losses) - 2) * config.tokens_per_step / seconds),
                    first_loss=round(float(losses[0]), 4),
                    last_loss=round(float(np.mean([float(x) for x in losses[-20:]])), 4),
                )
                yield stops.get(done, stops[last]), join(initial, state.params), about
                began = time.perf_counter()
            if late:
                return


def _without(tree: dict[str, Any], names: Any, path: str = "") -> dict[str, Any]:
    """Return a parameter tree without the leaves whose paths are in `names`, and without branches that
    become empty.
    """
    rest = {}
    for key, value in tree.items():
        inner = f"{path}{key}"
        if isinstance(value, dict):
            value = _without(value, names, f"{inner}.")
        if inner not in names and not (isinstance(value, dict) and not value):
            rest[key] = value
    return rest


def score_job(
    job: Job, params: dict[str, Any], tokens: int, mesh: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each position of held-out rows (about `tokens` tokens), the sum of the losses in nats and
    the number of tokens.

    Call it inside the mesh.
    """
    config, rows = job.config, batch_sharding(mesh)
    total, count = np.zeros(config.data.sequence_length), np.zeros(config.data.sequence_length)
    batching = dict(global_batch_size=config.batch_size, vocab_size=config.model.vocab_size)
    with contextlib.closing(
        make_eval_iterator(config.data, remainder="pad", **batching)
    ) as batches:
        for batch in itertools.islice(batches, -(-tokens // config.tokens_per_step)):
            nll, mask = job.score(params, jax.device_put(batch, rows))
            total, count = total + np.asarray(nll, np.float64), count + np.asarray(mask)
    return total, count


def rows_of_case(
    name: str, options: str, millions: float, seed: int, jobs: dict, base: Base, args, mesh, text: str | None = None
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Train the Liger model of one case, and yield its row of held-out losses at each of `args.marks`
    (numbers of training tokens) before the end, and at the end; `text` is the name of the store's text, if it has one.
    """
    job = jobs[options].result()
    marks = [m for m in args.marks if m < millions]
    with jax.set_mesh(mesh):
        if options == "method=lolcats":
            first = jobs[TRANSFER].result()
            stages = train_job(first, base.params_for(first), [millions], seed, args, mesh)
            *_, (_, transferred, _) = stages
            initial = base.params_for(job, transferred)
        else:
            initial = base.params_for(job)
        for so_far, params, about in train_job(job, initial, [*marks, millions], seed, args, mesh):
            total, count = score_job(job, params, args.heldout_tokens, mesh)
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
                **about,
                options=options,
                **({"text": text} if text else {}),
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", required=True, help="a Hugging Face folder or .gguf file")
    parser.add_argument(
        "--store", type=Path, required=True, help="folder of train.zarr and heldout.zarr"
    )
    parser.add_argument("--tokenizer", required=True, help="the tokenizer.json of the store")
    parser.add_argument("--text", type=text_name, help="the name of the store's text in the rows")
    parser.add_argument("--model", default="smollm2-135m", help="of configs/liger.py")
    parser.add_argument(
        "--rows",
        type=options.integers,
        help="numbers of rows of the table in this file; all by default",
    )
    parser.add_argument(
        "--row", action="append", default=[], type=table_row, metavar="NAME:OPTIONS:MILLIONS:SEED",
        help="a row that is not in the table; repeatable",
    )  # fmt: skip
    parser.add_argument("--batch_size", type=int, default=8)
    options.add_seconds(parser, 60, "seconds that a row trains at most")
    parser.add_argument(
        "--marks",
        type=options.floats,
        default="",
        help="score a row after so many million tokens too, as 5,10",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor of every row's tokens")
    parser.add_argument("--heldout_tokens", type=int, default=262_144)
    parser.add_argument("--workers", type=int, default=3, help="rows compiled at a time")


def text_name(text: str) -> str:
    """Return the name of a text.

    Raises:
        argparse.ArgumentTypeError: it is no word.
    """
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}; accepted is a word of letters, digits and _")
    return text


def table_row(text: str) -> tuple[str, str, float, int]:
    """Parse a row of the Liger table from the command line, NAME:OPTIONS:MILLIONS:SEED (MILLIONS of
    training tokens).
    """
    name, options, millions, seed = text.split(":")
    return name, options, float(millions), int(seed)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    if wrong := [number for number in args.rows or () if not 0 <= number < len(ROWS)]:
        raise UsageError(f"--rows {wrong[0]}: accepted are 0 to {len(ROWS) - 1}")
    table = ROWS if args.rows is None and not args.row else ()
    table = [ROWS[i] for i in args.rows] if args.rows else [*table]
    return [
        dict(name=name, options=options, millions=millions * args.scale, seed=seed)
        | ({"text": args.text} if args.text else {})
        for name, options, millions, seed in [*table, *args.row]
    ]


def rows(args: argparse.Namespace, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    log(f"reading {args.source}")
    base = Base(args)
    log("compiling")
    tuned = {case["options"] for case in cases if case["millions"]} | {TRANSFER}
    wanted = list(dict.fromkeys(case["options"] for case in cases))
    if "method=lolcats" in wanted:
        wanted.insert(wanted.index("method=lolcats"), TRANSFER)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        jobs = {
            options: pool.submit(compile_job, options, args, mesh, options in tuned)
            for options in wanted
        }
        for case in cases:
            log(f"{case['name']}: {case['millions']} M tokens")
            try:
                yield from rows_of_case(**case, jobs=jobs, base=base, args=args, mesh=mesh)
            except Exception as error:  # the other cases can still be measured
                failed += 1
                log(f"{case['name']}, {case['options']}: FAILED: {repr(error)[:2000]}")
    if failed:
        raise SystemExit(f"{failed} of {len(cases)} cases failed")
