"""Train and evaluate one model of the benchmark `evidence`, in steps that a later call of the same command continues."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import evidence_recall
from benchmarks.registry import UsageError
from benchmarks.training import last_value, median_speed, train_to_end
from lsm_jax import evaluation, load_run, models
from lsm_jax.data import DataConfig, NeedleConfig
from lsm_jax.data.sources import tokenizer_of
from lsm_jax.evaluation import HarnessConfig, Request
from lsm_jax.files import write_atomically
from lsm_jax.training import TrainConfig
from lsm_jax.training.metrics import read_rows

TASKS = ("heldout", "long", "needle", "recall", "harness")
_BLOCK = 512  # tokens of which L(i) has one mean in a row


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


class TimeOver(BaseException):
    """Raised when the minutes of a call are over; the same command continues. No `Exception`, since it is no failure of the
    model that was measured."""


class Clock:
    """The time of one call. `math.inf` seconds never end."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Raise TimeOver if the time is over."""
        if time.monotonic() >= self._end:
            raise TimeOver

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """End training inside a `with` block, as SIGTERM does, when the time is over: it saves its last step."""
        self.check()
        left = self._end - time.monotonic()

        def over(
            *_: object,
        ) -> None:  # before the first step; after it, training answers the signal itself
            raise TimeOver

        before = signal.signal(signal.SIGTERM, over)
        timer = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        if left < math.inf:
            timer.start()
        try:
            yield
        except InterruptedError as error:
            late = time.monotonic() >= self._end
            raise TimeOver if late else KeyboardInterrupt from error  # which ends the benchmark
        finally:
            timer.cancel()
            signal.signal(signal.SIGTERM, before)


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


def _train(config: TrainConfig, workdir: Path, clock: Clock) -> dict[str, Any]:
    """Train a run to its end and return its held-out loss and speed."""
    with clock.interrupting():
        train_to_end(config, workdir)
    rows = read_rows(workdir / "metrics.jsonl")
    speed, devices = median_speed(rows), len(jax.devices())
    result = dict(
        loss=last_value(rows, "val/loss"),
        tokens_per_second=speed,
        card_seconds=round(devices * config.total_tokens / speed, 1),  # of its steps
        implementations=json.loads((workdir / "implementations.json").read_text()),
    )
    jax.clear_caches()
    return result


def learning_rates(
    model: str, setting: Setting, folder: Path, vocabulary: int, clock: Clock
) -> dict[float, float]:
    """Return the held-out loss of a short run (seed 0) at each learning rate that is tried; one rate alone is not run."""
    losses: dict[float, float] = {}
    for factor in setting.factors if len(setting.factors) > 1 else ():
        tokens = int(setting.share * setting.tokens)
        config = train_config(model, 0, setting, vocabulary=vocabulary, factor=factor, tokens=tokens)  # fmt: skip
        workdir = folder / f"rate-{factor:g}"
        path = workdir / "evidence.json"
        key = config, corpus_digest(setting)
        found = _once(path, key, lambda c=config, w=workdir: _train(c, w, clock))
        loss = found["loss"]
        losses[factor] = loss if loss is not None and math.isfinite(loss) else math.inf
    return losses


def state_bytes(config: models.ModelConfig, context: int) -> int:
    """Return the bytes of a model's decode state for one sequence with a context of so many tokens."""
    model = models.abstract(config)
    shapes = jax.eval_shape(lambda m: m.init_state(1, context), model)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def request_of(task: str, setting: Setting) -> tuple[str, Request]:
    """Return the evaluation's task of `eval.py` and its request, for one of `TASKS`."""
    long = dict(data=str(setting.corpus / "long.zarr"), sequence_length=setting.long_length)
    if task == "heldout":
        return "perplexity", Request(batch_size=8)
    if task == "long":
        tokens = setting.long_documents * setting.long_length
        return "perplexity", Request(**long, batch_size=1, max_tokens=tokens)
    if task == "needle":
        needle = NeedleConfig(lengths=setting.needle_lengths, depths=(0, 25, 50, 75, 100))
        return "needle", Request(data=long["data"], needle=needle, batch_size=11)
    if task == "recall":
        return "recall", Request()
    harness = HarnessConfig(
        tasks=setting.harness, data=str(setting.corpus), max_length=setting.length, limit=setting.limit
    )  # fmt: skip
    return "lm_eval", Request(lm_eval=harness, batch_size=8)


def _evaluate(task: str, workdir: Path, setting: Setting) -> dict[str, Any]:
    """Evaluate a finished run, and return the fields of its row."""
    name, request = request_of(task, setting)
    request.validate()
    folder = workdir / "eval" / f"evidence-{task}"
    began = time.perf_counter()
    if name == "recall":
        run = load_run(workdir)
        found = evidence_recall.measure(run, setting.corpus, max_length=setting.length, limit=setting.limit)  # fmt: skip
        jax.clear_caches()
        return found | dict(seconds=round(time.perf_counter() - began, 1))
    results = evaluation.TASKS[name](load_run(workdir), request, folder)
    jax.clear_caches()
    if name == "perplexity":
        with np.load(folder / "results.npz") as arrays:
            loss = arrays["val/loss_per_token"]
        whole = len(loss) // _BLOCK * _BLOCK
        curve = loss[:whole].reshape(-1, _BLOCK).mean(1)
        prefix = "val/perplexity_len_"
        return dict(
            loss=results["val/loss"],
            perplexity={k.removeprefix(prefix): v for k, v in results.items() if k.startswith(prefix)},
            loss_by_block=dict(block=_BLOCK, loss=[round(float(x), 4) for x in curve]),
            sequences=results["num_sequences"],
            seconds=round(time.perf_counter() - began, 1),
        )  # fmt: skip
    if name == "needle":
        modes = {m: {k: results[m][k] for k in ("found", "nll")} for m in ("easy", "standard")}
        seconds = round(time.perf_counter() - began, 1)
        return dict(lengths=results["lengths"], depths=results["depths"], **modes, seconds=seconds)
    keep = ("averages", "results", "num_documents")
    return {key: results[key] for key in keep if key in results}


def measure_rates(case: dict[str, Any], setting: Setting, clock: Clock) -> dict[str, Any]:
    """Train one model for a short time at each learning rate, and return a row that later calls read by `chosen_rates`."""
    vocabulary = vocab_size(setting.corpus)
    folder = run_folder(case["model"], setting)
    losses = learning_rates(case["model"], setting, folder, vocabulary, clock)
    factor = _best(case["model"], losses)
    path = folder / f"rate-{factor:g}" / "evidence.json"
    speed = json.loads(path.read_text())["result"]["tokens_per_second"]
    published = base_config(case["model"]).optimizer.peak_lr
    return case | dict(
        factor=factor, peak_lr=published * factor, short_tokens=int(setting.share * setting.tokens),
        rates=_by_rate(published, losses), tokens_per_second=speed,
    )  # fmt: skip


def chosen_rates(rows: list[dict[str, Any]], models: Iterable[str], setting: Setting) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return the row of `measure_rates` of each model: the newest with the setting's tokens in a row and rows in a step.

    Raises:
        UsageError: a model has none.
    """
    found = {
        row["model"]: row
        for row in rows
        if row.get("kind") == "rates"
        and (row.get("length"), row.get("batch_size")) == (setting.length, setting.batch_size)
    }
    for model in models:
        if model not in found:
            raise UsageError(
                f"--rates: no row of {model} with {setting.batch_size} rows of {setting.length} tokens in a step; make it with "
                f"--only_rates --models {model}; there are {', '.join(found) or 'none'}"
            )
    return found


def run_folder(model: str, setting: Setting) -> Path:
    """Return the folder of a model's runs."""
    name = model.replace(":", "-").replace(",", "-").replace("=", "-")
    return setting.runs / f"{name}-{setting.tokens}"


def _best(model: str, losses: dict[float, float]) -> float:
    if min(losses.values()) == math.inf:
        raise ValueError(f"{model}: no learning rate of {list(losses)} times the published one has a finite loss")  # fmt: skip
    return min(losses, key=lambda f: losses[f])


def _by_rate(published: float, losses: dict[float, float]) -> dict[str, float]:
    return {f"{published * f:.3g}": round(loss, 4) for f, loss in losses.items()}


def _rate(model: str, setting: Setting, vocabulary: int, clock: Clock) -> tuple[float, dict[str, Any]]:  # fmt: skip
    """Return the factor of the learning rate of a model's long runs, and the fields of its row that say how it was chosen."""
    published = base_config(model).optimizer.peak_lr
    if setting.rates is not None:
        row = setting.rates[model]
        return row["factor"], {
            "rates": row["rates"], "rates_tokens": row["short_tokens"], "rates_corpus": row["corpus"]
        }  # fmt: skip
    losses = learning_rates(model, setting, run_folder(model, setting), vocabulary, clock)
    factor = _best(model, losses) if losses else setting.factors[0]
    return factor, dict(rates=_by_rate(published, losses))


def measure(case: dict[str, Any], setting: Setting, clock: Clock) -> dict[str, Any]:
    """Choose the learning rate of one model, train it and evaluate it; return the benchmark's row.

    What an earlier call finished is read from files in the folder of runs. Raises TimeOver when the time is over.
    """
    model, seed = case["model"], case["seed"]
    setting = dataclasses.replace(setting, tokens=case["tokens"])
    vocabulary = vocab_size(setting.corpus)
    factor, rates = _rate(model, setting, vocabulary, clock)
    config = train_config(model, seed, setting, vocabulary=vocabulary, factor=factor, tokens=setting.tokens)  # fmt: skip
    workdir = run_folder(model, setting) / f"seed-{seed}"
    corpus = corpus_digest(setting)
    trained = _once(workdir / "evidence.json", (config, corpus), lambda: _train(config, workdir, clock))  # fmt: skip
    results = {}
    for task in setting.tasks:
        clock.check()
        path = workdir / f"evidence-{task}.json"
        key = (request_of(task, setting), corpus, setting.length, setting.limit)
        results[task] = _once(path, key, lambda t=task: _evaluate(t, workdir, setting))
    return case | dict(
        peak_lr=config.optimizer.peak_lr,
        **rates,
        vocab_size=vocabulary,
        parameters=models.count_parameters(config.model),
        state_bytes=state_bytes(config.model, setting.length),
        **{key: trained[key] for key in ("tokens_per_second", "card_seconds", "implementations")},
        **results,
        command=command(config, model, workdir),
    )


def command(config: TrainConfig, model: str, workdir: Path) -> str:
    """Return the command of `train.py` that trains the same model."""
    file, _, variant = model.partition(":")
    fields = {
        "model.vocab_size": config.model.vocab_size,
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
