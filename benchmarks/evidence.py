"""Train and evaluate one model of the benchmark `evidence`, in steps that a later call of the same command continues."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.ahead import Ahead
from benchmarks.evidence_clock import Clock, counted
from benchmarks.evidence_tasks import evaluate, request_of, side_by_side, state_bytes
from benchmarks.registry import UsageError
from benchmarks.run import log
from benchmarks.training import StepClock, last_value, median_speed, train_to_end
from lsm_jax import load_run, models
from lsm_jax.data import DataConfig
from lsm_jax.data.sources import tokenizer_of
from lsm_jax.evaluation.router import read_router
from lsm_jax.files import write_atomically
from lsm_jax.training import TrainConfig, TrainingDiverged
from lsm_jax.training.metrics import read_rows
from lsm_jax.training.run_files import checkpoint_directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """All that is equal for the models of one table.

    Attributes:
        corpus: folder with train.zarr, heldout.zarr and long.zarr, and recall/ for the task "recall".
        runs: folder of the runs.
        tokens: tokens of a run.
        length: tokens in a row of training.
        batch_size: rows in a step.
        factors: the learning rates that are tried, as multiples of the published one.
        share: share of `tokens` for which each learning rate is tried.
        warmup: share of a run in which the learning rate rises.
        long_length: tokens of the long documents that are evaluated.
        long_documents: number of them.
        needle_lengths: tokens of the needle test's texts.
        tasks: which evaluations to run, of `TASKS`.
        harness: tasks of lm-evaluation-harness that "harness" runs.
        limit: questions of each recall task and of each task of the harness at most; None is all.
        rates: for each model the chosen factor and the losses of its short runs, from an earlier call (`chosen_rates`);
            None chooses here.
        remat: what the backward pass recomputes (`ModelConfig.remat`); None is what the model's config says.
    """

    corpus: Path
    runs: Path
    tokens: int
    length: int
    batch_size: int
    factors: tuple[float, ...]
    share: float
    warmup: float
    long_length: int
    long_documents: int
    needle_lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    harness: str
    limit: int | None
    rates: dict[str, dict[str, Any]] | None = None
    remat: str | None = None


def corpus_digest(setting: Setting) -> str:
    """Return a digest of the corpus' stores, by their attributes, shapes and checksums, and of its recall tasks; "" while the
    corpus is incomplete.
    """
    stores = [setting.corpus / f"{name}.zarr" for name in ("train", "heldout", "long")]
    files = [store / name for store in stores for name in (".zarray", ".zattrs", "checksums.json")]
    files += (
        sorted((setting.corpus / "recall").glob("*.jsonl")) if "recall" in setting.tasks else []
    )
    found = [(str(path.relative_to(setting.corpus)), path.read_bytes()) for path in files if path.is_file()]  # fmt: skip
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16] if found else ""


def vocab_size(corpus: Path) -> int:
    """Return the vocabulary of a corpus: its tokenizer's, rounded up to a multiple of 128.

    Raises:
        UsageError: the folder has no complete corpus.
    """
    for name in ("train.zarr", "heldout.zarr"):
        if not (corpus / name / ".zarray").is_file():
            raise UsageError(
                f"--corpus={corpus}: it has no {name}; make it with python -m scripts.make_corpus --out={corpus}"
            )
    return -(-tokenizer_of(DataConfig(path=str(corpus))).vocab_size // 128) * 128


def base_config(model: str) -> TrainConfig:
    """Return the config that FILE:VARIANT names, such as fox:pro-125m for configs/fox.py.

    Raises:
        ValueError: there is no such file or variant; the message lists what is accepted.
    """
    file, colon, variant = model.partition(":")
    if not colon or not (Path(__file__).parents[1] / "configs" / f"{file}.py").is_file():
        raise ValueError(f"model {model!r}: accepted is FILE:VARIANT, such as fox:pro-125m of configs/fox.py")  # fmt: skip
    return importlib.import_module(f"configs.{file}").get_config(variant)


def of_corpus(data: DataConfig, corpus: Path, length: int) -> DataConfig:
    """Return the data config of a run that reads a corpus in shuffled rows of `length` tokens, its held-out store included."""
    return dataclasses.replace(
        data, path=str(corpus), heldout_path="", tokenizer="auto", json_escape=False, sequence_length=length,
        shuffle=True,
    )  # fmt: skip


def train_config(
    model: str, seed: int, setting: Setting, *, vocabulary: int, factor: float, tokens: int
) -> TrainConfig:
    """Return the config of a run: the published model, weight decay, betas and shape of the schedule; tokens, rows,
    warm-up and seed of the setting; and the published learning rate times `factor`."""
    config = base_config(model)
    config.name, config.seed = model, seed
    config.model.vocab_size = vocabulary
    config.model.remat = setting.remat or config.model.remat
    config.data = of_corpus(config.data, setting.corpus, setting.length)
    config.batch_size, config.total_tokens = setting.batch_size, tokens
    config.optimizer.peak_lr *= factor
    config.optimizer.warmup_tokens = int(setting.warmup * tokens)
    steps = tokens // (setting.batch_size * setting.length)
    if steps < 1:
        raise UsageError(
            f"--tokens: {tokens} tokens of a run are less than a step of {setting.batch_size} rows of {setting.length}"
        )
    # A short run, which tries a learning rate, is evaluated at its end only.
    config.eval_every = config.checkpoint_every = max(1, steps // 4) if tokens == setting.tokens else steps  # fmt: skip
    config.keep_last, config.log_every = 1, max(1, min(20, steps // 10))
    config.validate()
    return config


def _once(path: Path, setting: Any, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results in a file, after computing and writing them unless it is there.

    Raises:
        UsageError: the file's results were computed with another `setting`, a config or a request.
    """
    key = hashlib.sha256(repr(setting).encode()).hexdigest()
    if not path.is_file():
        result = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(dict(setting=key, result=result)))
    stored = json.loads(path.read_text())
    if stored["setting"] != key:
        raise UsageError(f"{path} was computed with other options; give another folder by --runs")
    return stored["result"]


def router_of(metrics: Path, points: int = 8) -> dict[str, Any]:
    """Return `router`, the load of each memory in each layer with a Mixture-of-Memories, [L][M], and the entropy of its routing at
    `points` of the steps that were logged, the last one included; nothing for other models."""
    steps, load = read_router(metrics, "mom/load")
    if not steps.size:
        return {}
    some = np.unique(np.linspace(0, len(steps) - 1, points).round().astype(int))
    entropy = read_router(metrics, "mom/entropy")[1]
    return dict(
        router=dict(
            steps=steps[some].tolist(),
            load=load[some].round(4).tolist(),
            entropy=entropy[some].round(4).tolist(),
        )
    )


def _train(
    config: TrainConfig, workdir: Path, clock: Clock, ahead: Ahead, step_seconds: float = 0.0
) -> dict[str, Any]:
    """Train a run to its end and return its held-out loss and speed; `wall_seconds` are those of all calls that trained it, without
    what was compiled before. Its steps are expected to last `step_seconds`.

    Raises:
        TimeOver: the time is over.
        Skipped: the run would not end in the time, and the clock was made with `whole`.
    """
    log(f"{workdir.parent.name}/{workdir.name}: peak_lr={config.optimizer.peak_lr:g}, {config.num_steps} steps")  # fmt: skip
    with clock.interrupting():
        program = ahead.take(config)
        with clock.turn(step_seconds), counted(_seconds_file(workdir)) as seconds:
            progress = StepClock(config.num_steps, math.inf, every=max(1, config.num_steps // 8))
            train_to_end(config, workdir, progress, program=program)
    rows = read_rows(workdir / "metrics.jsonl")
    speed, devices = median_speed(rows), len(jax.devices())
    result = dict(
        loss=last_value(rows, "val/loss"),
        tokens_per_second=speed,
        card_seconds=round(devices * config.total_tokens / speed, 1),  # of its steps
        wall_seconds=seconds(),
        implementations=json.loads((workdir / "implementations.json").read_text()),
        **router_of(workdir / "metrics.jsonl"),
    )
    log(f"{workdir.parent.name}/{workdir.name}: held-out loss {result['loss']:.4f}, {speed:,.0f} tokens/s, {result['wall_seconds']:.0f} s")  # fmt: skip
    if ahead.idle:
        jax.clear_caches()
    return result


def short_config(model: str, setting: Setting, vocabulary: int, factor: float) -> TrainConfig:
    """Return the config of the run that tries a learning rate, the published one times `factor`, with seed 0."""
    tokens = int(setting.share * setting.tokens)
    return train_config(model, 0, setting, vocabulary=vocabulary, factor=factor, tokens=tokens)


def learning_rates(
    model: str, setting: Setting, vocabulary: int, clock: Clock, ahead: Ahead
) -> dict[float, dict[str, Any]]:
    """Return the result of a short run at each learning rate that is tried; one rate alone is not run."""
    found = {}
    for factor in setting.factors if len(setting.factors) > 1 else ():
        config = short_config(model, setting, vocabulary, factor)
        workdir = run_folder(model, setting) / f"rate-{factor:g}"
        key = config, corpus_digest(setting)
        found[factor] = _once(workdir / "evidence.json", key, lambda c=config, w=workdir: _try(c, w, clock, ahead))  # fmt: skip
        shutil.rmtree(
            checkpoint_directory(workdir), ignore_errors=True
        )  # 1.5 GB, which nothing reads
    return found


def _try(config: TrainConfig, workdir: Path, clock: Clock, ahead: Ahead) -> dict[str, Any]:
    """Train a short run; one whose loss is no longer finite has none."""
    try:
        return _train(config, workdir, clock, ahead)
    except TrainingDiverged as error:
        log(f"{workdir.parent.name}/{workdir.name}: this learning rate is left out: {error}")
        return dict(loss=None, wall_seconds=json.loads(_seconds_file(workdir).read_text()))


def _seconds_file(workdir: Path) -> Path:
    return workdir.with_name(f"{workdir.name}-seconds.json")


def measure_rates(
    case: dict[str, Any], setting: Setting, clock: Clock, ahead: Ahead
) -> dict[str, Any]:
    """Train one model for a short time at each learning rate, and return a row that later calls read by `chosen_rates`."""
    found = learning_rates(case["model"], setting, vocab_size(setting.corpus), clock, ahead)
    factor = _best(case["model"], found)
    published = base_config(case["model"]).optimizer.peak_lr
    remat = base_config(case["model"]).model.remat if setting.remat is None else setting.remat
    return case | dict(
        remat=remat, factor=factor, peak_lr=published * factor, short_tokens=int(setting.share * setting.tokens),
        rates=_by_rate(published, found), rates_seconds=_rates_seconds(found),
        tokens_per_second=found[factor]["tokens_per_second"],
    )  # fmt: skip


LEAST_FACTOR, MOST_FACTOR = 1e-4, 1e4  # of the published learning rate
_NUMBER = "a number from {:g} to {:g}"
_FIELDS_OF_RATES: dict[str, tuple[type | tuple[type, ...], tuple[float, float] | None, str]] = {
    "factor": ((int, float), (LEAST_FACTOR, MOST_FACTOR), _NUMBER),
    "rates": (dict, None, "an object of losses by rate"),
    "short_tokens": (int, (1, 1e15), _NUMBER),
    "corpus": (str, None, "a text"),
    "rates_seconds": ((int, float), (0, 1e9), _NUMBER),
    "tokens_per_second": ((int, float), (1, 1e12), _NUMBER),
}
"""The fields that `chosen_rates` reads of a row of learning rates: for each its type, the smallest and the largest accepted number (None of what
is no number), and the words of the error for another value."""


def chosen_rates(rows: list[dict[str, Any]], models: Iterable[str], setting: Setting) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return the row of `measure_rates` of each model: the newest with the setting's tokens in a row and rows in a step.

    Raises:
        UsageError: a model has none, or one that lacks a field or has another value than is accepted there.
    """
    found = {
        row.get("model"): row
        for row in rows
        if row.get("kind") == "rates"
        and (row.get("length"), row.get("batch_size")) == (setting.length, setting.batch_size)
    }
    for model in models:
        if model not in found:
            raise UsageError(
                f"no row of {model} with {setting.batch_size} rows of {setting.length} tokens in a step; make it with "
                f"--only_rates --models {model}; there are {', '.join(map(str, found)) or 'none'}"
            )
        row = found[model]
        if missing := [name for name in _FIELDS_OF_RATES if name not in row]:
            raise UsageError(f"the row of {model} lacks {', '.join(missing)}; accepted are rows of --only_rates")  # fmt: skip
        for name, (kind, bounds, accepted) in _FIELDS_OF_RATES.items():
            value = row[name]
            right = isinstance(value, kind) and not isinstance(value, bool)
            if not right or (bounds and not bounds[0] <= value <= bounds[1]):
                raise UsageError(
                    f"the row of {model} has {name}={value!r:.40}; accepted is {accepted.format(*bounds or ())}"
                )
    return found


def run_folder(model: str, setting: Setting) -> Path:
    """Return the folder of a model's runs."""
    name = model.replace(":", "-").replace(",", "-").replace("=", "-")
    return setting.runs / f"{name}-{setting.tokens}"


def _finite(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _best(model: str, found: dict[float, dict[str, Any]]) -> float:
    losses = {factor: _finite(result["loss"]) for factor, result in found.items()}
    if min(losses.values()) == math.inf:
        raise ValueError(f"{model}: no learning rate of {list(losses)} times the published one has a finite loss")  # fmt: skip
    return min(losses, key=lambda f: losses[f])


def _by_rate(published: float, found: dict[float, dict[str, Any]]) -> dict[str, float | None]:
    """Return the held-out loss of each learning rate, by the rate; None (null in JSON, which has no infinity) where the run diverged."""
    losses = {f"{published * f:.3g}": _finite(result["loss"]) for f, result in found.items()}
    return {rate: round(x, 4) if math.isfinite(x) else None for rate, x in losses.items()}


def _rates_seconds(found: dict[float, dict[str, Any]]) -> float:
    """Return the seconds of all devices that the short runs took together."""
    return round(len(jax.devices()) * sum(result["wall_seconds"] for result in found.values()), 1)


def _rate(
    model: str, setting: Setting, vocabulary: int, clock: Clock, ahead: Ahead
) -> tuple[float, float | None, dict[str, Any]]:
    """Return the factor of the learning rate of a model's long runs, the tokens/s of its short runs (None if there are none),
    and the fields of its row that say how it was chosen."""
    published = base_config(model).optimizer.peak_lr
    if setting.rates is not None:
        row = setting.rates[model]
        return row["factor"], row["tokens_per_second"], {
            "rates": row["rates"], "rates_tokens": row["short_tokens"], "rates_corpus": row["corpus"],
            "rates_seconds": row["rates_seconds"],
        }  # fmt: skip
    found = learning_rates(model, setting, vocabulary, clock, ahead)
    if not found:
        return setting.factors[0], None, dict(rates={}, rates_seconds=0.0)
    factor = _best(model, found)
    fields = dict(
        rates=_by_rate(published, found), rates_tokens=int(setting.share * setting.tokens), rates_seconds=_rates_seconds(found)
    )  # fmt: skip
    return factor, found[factor]["tokens_per_second"], fields


def forget_if_lost(workdir: Path, setting: Setting) -> None:
    """Remove the results of a run that must be trained again: its checkpoint, which stayed on another machine, is required by an
    evaluation that is missing. Whole runs need none."""
    missing = [name for name in setting.tasks if not _result(workdir, name).is_file()]
    folder = checkpoint_directory(workdir)
    if not missing or not (workdir / "evidence.json").is_file() or (folder.is_dir() and any(folder.iterdir())):  # fmt: skip
        return
    log(f"{workdir}: trained again, since it has no checkpoint for {', '.join(missing)}")
    for path in workdir.glob("evidence*.json"):
        path.unlink()


def _result(workdir: Path, task: str) -> Path:
    return workdir / f"evidence-{task}.json"


def planned_configs(
    cases: list[dict[str, Any]], setting: Setting, *, short: bool
) -> Iterator[TrainConfig]:
    """Yield the configs of the runs that the cases require and that are not finished, as far as they are known before a run:
    short runs if they choose learning rates, and long runs if these were chosen."""
    vocabulary = vocab_size(setting.corpus)
    for case in cases:
        model = case["model"]
        setting = dataclasses.replace(setting, tokens=case["tokens"])
        folder = run_folder(model, setting)
        if short and len(setting.factors) > 1:
            for factor in setting.factors:
                if not (folder / f"rate-{factor:g}" / "evidence.json").is_file():
                    yield short_config(model, setting, vocabulary, factor)
        elif not short and not (folder / f"seed-{case['seed']}" / "evidence.json").is_file():
            factor = setting.factors[0] if setting.rates is None else setting.rates[model]["factor"]
            yield train_config(model, case["seed"], setting, vocabulary=vocabulary, factor=factor, tokens=case["tokens"])  # fmt: skip


def measure(case: dict[str, Any], setting: Setting, clock: Clock, ahead: Ahead) -> dict[str, Any]:
    """Choose the learning rate of one model, train it and evaluate it; return the benchmark's row.

    What an earlier call finished is read from files in the folder of runs. A row of evaluations of which some failed has those
    that did not as its `tasks`, so that the same command tries the others again, and the errors in `failed`.

    Raises:
        TimeOver: the time is over.
        Skipped: the run would not end in the time, and the clock was made with `whole`.
        RuntimeError: all evaluations failed.
    """
    model, seed = case["model"], case["seed"]
    setting = dataclasses.replace(setting, tokens=case["tokens"])
    vocabulary = vocab_size(setting.corpus)
    factor, speed, rates = _rate(model, setting, vocabulary, clock, ahead)
    config = train_config(model, seed, setting, vocabulary=vocabulary, factor=factor, tokens=setting.tokens)  # fmt: skip
    workdir = run_folder(model, setting) / f"seed-{seed}"
    corpus = corpus_digest(setting)
    forget_if_lost(workdir, setting)
    step_seconds = 0.0 if speed is None else setting.tokens / speed
    trained = _once(workdir / "evidence.json", (config, corpus), lambda: _train(config, workdir, clock, ahead, step_seconds))  # fmt: skip
    clock.check_evaluations()
    evaluating = time.perf_counter()
    run = None

    def evaluated(task: str) -> dict[str, Any]:
        key = (request_of(task, setting), corpus, setting.length, setting.limit)
        return _once(_result(workdir, task), key, lambda: evaluate(task, run, workdir, setting))

    if not all(_result(workdir, task).is_file() for task in setting.tasks):
        run = load_run(workdir)
    results, failed = side_by_side(list(setting.tasks), evaluated)
    for task in list(failed):  # alone, since side by side they may need too much memory
        again, still = side_by_side([task], evaluated)
        failed = {name: text for name, text in failed.items() if name != task} | still
        results |= again
    results = {task: results[task] for task in setting.tasks if task in results}
    if setting.tasks and not results:
        raise RuntimeError(f"all evaluations failed: {failed}")
    ended = time.perf_counter()
    steps = setting.tokens / trained["tokens_per_second"]
    clock.note_besides(ended - evaluating + max(0.0, trained["wall_seconds"] - steps))
    if ahead.idle:
        jax.clear_caches()
    return case | dict(
        tasks=",".join(results),
        **(dict(failed=failed) if failed else {}),
        peak_lr=config.optimizer.peak_lr,
        remat=config.model.remat,
        **rates,
        vocab_size=vocabulary,
        parameters=models.count_parameters(config.model),
        state_bytes=state_bytes(config.model, setting.length),
        **{key: trained[key] for key in ("tokens_per_second", "card_seconds", "implementations")},
        **({"router": trained["router"]} if "router" in trained else {}),
        training_seconds=round(len(jax.devices()) * trained["wall_seconds"], 1),
        evaluation_seconds=round(len(jax.devices()) * (ended - evaluating), 1),
        **results,
        command=command(config, model, workdir),
    )


def command(config: TrainConfig, model: str, workdir: Path) -> str:
    """Return the command of `train.py` that trains the same model."""
    file, _, variant = model.partition(":")
    fields = {
        "model.vocab_size": config.model.vocab_size,
        "model.remat": config.model.remat,
        "data.path": config.data.path,
        "data.tokenizer": "auto",
        "data.json_escape": False,
        "data.sequence_length": config.data.sequence_length,
        "data.shuffle": True,
        "batch_size": config.batch_size,
        "total_tokens": config.total_tokens,
        "seed": config.seed,
        "optimizer.peak_lr": config.optimizer.peak_lr,
        "optimizer.warmup_tokens": config.optimizer.warmup_tokens,
    }
    flags = " ".join(f"--config.{key}={value}" for key, value in fields.items())
    return f"python train.py --config=configs/{file}.py:{variant} --workdir={workdir} {flags}"
