"""What `eval.py` does with a run: the tasks by name, and the files each one writes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lsm_jax.data import DataConfig, Tokenizer, load_tokenizer, make_eval_iterator
from lsm_jax.data.sources import open_store
from lsm_jax.evaluation.generate import Generation, generate
from lsm_jax.evaluation.perplexity import evaluate
from lsm_jax.evaluation.plots import plot_loss_by_position, plot_training

if TYPE_CHECKING:
    from lsm_jax.training.runs import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to evaluate, and how; the defaults are the run's own.

    Attributes:
        data: a store, or a text or JSONL file or folder; None is the run's held-out data.
        sequence_length: tokens of context a row has; None is the run's.
        batch_size: rows read at a time.
        piece_length: tokens of each row computed at a time, the state carried on.
        max_tokens: stop after the batch that reaches so many tokens; None reads all.
        prompt: text to continue.
        num_tokens: the most tokens to generate.
        temperature: divides the logits; 0 is greedy.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the smallest set of this probability.
        seed: of sampling.
    """

    data: str | None = None
    sequence_length: int | None = None
    batch_size: int = 8
    piece_length: int = 4096
    max_tokens: int | None = None
    prompt: str = ""
    num_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def validate(self) -> None:
        """Raise ValueError where a number is out of range, the data is not there or the prompt is not UTF-8."""
        for name in ("sequence_length", "batch_size", "piece_length", "max_tokens", "num_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}: accepted are 0 (greedy) and positive numbers"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: accepted are numbers in (0, 1]")
        if self.data is not None and not (self.data and Path(self.data).expanduser().exists()):
            raise ValueError(
                f"data={self.data!r} does not exist; accepted is a token store, or a text or JSONL file or folder"
            )
        try:
            self.prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt={self.prompt!a}: not UTF-8 at character {error.start}; accepted is UTF-8 text"
            ) from error

    def folder(self, step: int) -> str:
        """The name of the results' folder: the step, and what differs from the run's own data."""
        parts = [str(step)]
        if self.data is not None:
            path = Path(self.data).absolute()
            # A store is called after its folder, since its own name is nearly always heldout.zarr.
            parts += [path.parent.name] if path.suffix == ".zarr" else []
            parts += [path.stem]
        parts += [f"T{self.sequence_length}"] if self.sequence_length else []
        parts += [f"first{self.max_tokens}"] if self.max_tokens else []
        return "-".join(parts)


def heldout_config(run: Run, request: Request) -> DataConfig:
    """The data config to evaluate with."""
    changes: dict[str, Any] = {}
    if request.data is not None:
        pair = Path(request.data).expanduser() / "heldout.zarr"
        changes["heldout_path"] = str(pair) if pair.is_dir() else request.data
    if request.sequence_length is not None:
        changes["sequence_length"] = request.sequence_length
    return dataclasses.replace(run.config.data, **changes)


def run_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer the run was trained with."""
    return load_tokenizer(run.config.data.tokenizer, json_escape=run.config.data.json_escape)


def perplexity(run: Run, request: Request, folder: Path) -> dict[str, Any]:
    """Loss by position: results.json, results.npz and loss_by_position.png; returns what results.json holds."""
    tokenizer, data = run_tokenizer(run), heldout_config(run, request)
    batches: Iterator[dict[str, np.ndarray]] = make_eval_iterator(
        data,
        tokenizer,
        global_batch_size=request.batch_size,
        vocab_size=run.config.model.vocab_size,
        remainder="pad",
    )
    number = _count_batches(data, request.batch_size)
    if request.max_tokens is not None:
        most = math.ceil(request.max_tokens / (request.batch_size * data.sequence_length))
        batches = itertools.islice(batches, most)
        number = most if number is None else min(most, number)
    found = evaluate(run.model, batches, num_batches=number, piece_length=request.piece_length)
    results = {
        **found.curve.summary(),
        "step": run.step,
        "data": str(request.data or data.heldout_path or data.path),
        "sequence_length": data.sequence_length,
        "train_length": run.config.data.sequence_length,
        "num_sequences": found.num_sequences,
        "seconds": round(found.seconds, 3),
        "tokens_per_second": round(found.curve.num_tokens / found.seconds, 1),
        "device": jax.devices()[0].device_kind,
    }
    if tokenizer.name == "bytes" and not tokenizer.json_escape and found.num_byte_labels:
        results["val/bits_per_byte"] = found.bits_per_byte
    folder.mkdir(parents=True, exist_ok=True)
    write_arrays(
        folder / "results.npz",
        {"val/loss_per_token": found.curve.loss, "val/tokens_per_position": found.curve.count},
    )
    plot_loss_by_position(
        found.curve,
        folder / "loss_by_position.png",
        train_length=run.config.data.sequence_length,
        title=f"{run.config.name}: held-out loss by position, step {run.step:,}",
    )
    write_json(folder / "results.json", results)
    return results


def _count_batches(data: DataConfig, batch_size: int) -> int | None:
    """Of a store; None for text, whose rows are counted only as they are packed."""
    source = open_store(data, heldout=True)
    if source is None:
        return None
    store, _, documents = source
    return math.ceil(documents * (store.length // data.sequence_length) / batch_size)


def sample_text(run: Run, request: Request, folder: Path) -> Generation:
    """A continued prompt: sample.txt and sample.json."""
    tokenizer, data = run_tokenizer(run), run.config.data
    bos_id = tokenizer.bos_id if data.bos_id is None else data.bos_id
    made = generate(
        run.model,
        tokenizer,
        request.prompt,
        num_tokens=request.num_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        bos_id=bos_id if data.add_bos else None,
        prefill_chunk=request.piece_length,
    )
    folder.mkdir(parents=True, exist_ok=True)
    settings = {k: getattr(request, k) for k in ("temperature", "top_k", "top_p", "seed")}
    write_json(folder / "sample.json", {**dataclasses.asdict(made), **settings, "step": run.step})
    write_text(folder / "sample.txt", made.prompt + made.text + "\n")
    return made


TASKS: dict[str, Callable[[Run, Request, Path], Any]] = {
    "perplexity": perplexity,
    "generate": sample_text,
}


def check_tasks(names: list[str]) -> list[str]:
    """The names as given.

    Raises:
        ValueError: a task that does not exist, or none.
    """
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        raise ValueError(f"tasks={','.join(names)!r}, accepted: {', '.join(TASKS)}")
    return names


def plot_run(workdir: str | os.PathLike[str], name: str = "") -> Path:
    """Training curves of a run, as workdir/plots/training.png."""
    workdir = Path(workdir)
    return plot_training(
        {name: workdir}, workdir / "plots" / "training.png", title=name or "Training"
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Indented JSON, whole or not there."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """UTF-8, whole or not there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """A compressed NPZ, whole or not there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(draft, "wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(draft, path)
