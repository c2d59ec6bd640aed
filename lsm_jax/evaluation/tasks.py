"""What `eval.py` does with a run: the tasks by name, and the files each one writes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.console import RenderableType

from lsm_jax.data import (
    DataConfig,
    JSONTokenizer,
    Tokenizer,
    load_tokenizer,
    make_eval_iterator,
)
from lsm_jax.data.needle import NeedleConfig, NeedleTask, haystack_tokens
from lsm_jax.data.sources import open_store
from lsm_jax.evaluation.generate import Generation, decode, generate
from lsm_jax.evaluation.harness import HarnessConfig, harness_table, run_harness
from lsm_jax.evaluation.maps import MapsConfig, layer_maps, plot_maps
from lsm_jax.evaluation.needle import find_needles, limits
from lsm_jax.evaluation.perplexity import evaluate
from lsm_jax.evaluation.plots import plot_loss_by_position, plot_needle, plot_training
from lsm_jax.evaluation.tables import needle_table, perplexity_table
from lsm_jax.parallel import largest_divisor

if TYPE_CHECKING:
    from lsm_jax.training.runs import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to evaluate, and how; the defaults are the run's own.

    Attributes:
        data: a store, or a text or JSONL file or folder; None is the run's held-out data.
        data_as_trained: `data` is of the run's own format, such as instructions; else it is text, or a store.
        sequence_length: tokens of context a row has; None is the run's.
        batch_size: rows read at a time.
        piece_length: tokens of each row computed at a time, the state carried on.
        max_tokens: stop after the batch that reaches so many tokens; None reads all.
        prompt: text to continue, or to map.
        chat: the prompt to continue is what a user says, put into the tokenizer's chat template; EOS ends the answer.
        num_tokens: the most tokens to generate.
        temperature: divides the logits; 0 is greedy.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the smallest set of this probability.
        seed: of sampling.
        needle: what is hidden in the data and asked for.
        maps: which layers and heads to show.
        lm_eval: which tasks of lm-evaluation-harness to do.
    """

    data: str | None = None
    data_as_trained: bool = False
    sequence_length: int | None = None
    batch_size: int = 8
    piece_length: int = 4096
    max_tokens: int | None = None
    prompt: str = ""
    chat: bool = False
    num_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    needle: NeedleConfig = dataclasses.field(default_factory=NeedleConfig)
    maps: MapsConfig = dataclasses.field(default_factory=MapsConfig)
    lm_eval: HarnessConfig = dataclasses.field(default_factory=HarnessConfig)

    def validate(self) -> None:
        """Raise ValueError where a number is out of range, the data is not there or the prompt is not UTF-8."""
        for name in ("sequence_length", "batch_size", "piece_length", "max_tokens", "num_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: accepted are 0 to 2^63 - 1")
        self.needle.validate()
        self.maps.validate()
        self.lm_eval.validate()
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
        if run.config.data.format != "text" and not request.data_as_trained:
            changes |= {"format": "text", "packing": "concat"}
    if request.sequence_length is not None:
        changes["sequence_length"] = request.sequence_length
        # Of text; what a row's length does not allow is left.
        align = math.gcd(run.config.data.align_documents, request.sequence_length)
        changes["align_documents"] = align
    return dataclasses.replace(run.config.data, **changes)


def run_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer the run was trained with."""
    return load_tokenizer(run.config.data.tokenizer, json_escape=run.config.data.json_escape)


def run_bos_id(run: Run, tokenizer: Tokenizer) -> int | None:
    """What the run set in front of documents; None for nothing."""
    data = run.config.data
    bos_id = tokenizer.bos_id if data.bos_id is None else data.bos_id
    return bos_id if data.add_bos else None


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
    devices = jax.local_device_count()
    shards = largest_divisor(devices, request.batch_size)
    if idle := -request.batch_size % shards:
        print(
            f"perplexity: batch_size={request.batch_size} leaves {idle * devices // shards} of {devices} devices idle",
            file=sys.stderr,
            flush=True,
        )
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
    tokenizer = run_tokenizer(run)
    prompt, bos_id, stop_id = request.prompt, run_bos_id(run, tokenizer), None
    if request.chat:
        if not isinstance(tokenizer, JSONTokenizer):
            raise ValueError(f"chat=True: tokenizer {tokenizer.name!r} has no chat template")
        prompt = tokenizer.chat_text([dict(role="user", content=prompt)])
        bos_id, stop_id = None, tokenizer.eos_id
    made = generate(
        run.model,
        tokenizer,
        prompt,
        num_tokens=request.num_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        bos_id=bos_id,
        stop_id=stop_id,
        prefill_chunk=request.piece_length,
    )
    folder.mkdir(parents=True, exist_ok=True)
    settings = {k: getattr(request, k) for k in ("temperature", "top_k", "top_p", "seed")}
    write_json(folder / "sample.json", {**dataclasses.asdict(made), **settings, "step": run.step})
    write_text(folder / "sample.txt", made.prompt + made.text + "\n")
    return made


def needle(run: Run, request: Request, folder: Path) -> dict[str, Any]:
    """Needle in a haystack: needle.json and needle.png; returns what needle.json holds."""
    tokenizer, data = run_tokenizer(run), heldout_config(run, request)
    train_length, config = run.config.data.sequence_length, request.needle
    task = NeedleTask(config, tokenizer, bos_id=run_bos_id(run, tokenizer))
    lengths = task.lengths(train_length)
    size = task.text_length(lengths[-1])
    needed = size * config.samples
    found = haystack_tokens(data, tokenizer, needed, vocab_size=run.config.model.vocab_size)
    notes = limits(run.config.model, lengths, train_length)
    if found.size < needed:
        notes.append(f"the text has {found.size} tokens of {needed} and is repeated")
    for note in notes:
        print(f"needle: {note}", file=sys.stderr, flush=True)
    scores = find_needles(
        run.model,
        task,
        np.resize(found, (config.samples, size)),
        lengths,
        batch_size=request.batch_size,
        piece_length=request.piece_length,
    )
    results = {
        **scores.summary(),
        **{name: getattr(config, name) for name in ("question", "cue", "answer", "samples")},
        "notes": notes,
        "step": run.step,
        "data": str(request.data or data.heldout_path or data.path),
        "tokenizer": tokenizer.name,
        "train_length": train_length,
        "seconds": round(scores.seconds, 3),
        "tokens_per_second": round(scores.num_tokens / scores.seconds, 1),
        "device": jax.devices()[0].device_kind,
    }
    folder.mkdir(parents=True, exist_ok=True)
    plot_needle(
        scores,
        folder / "needle.png",
        train_length=train_length,
        title=f"{run.config.name}: needle in a haystack, step {run.step:,}",
    )
    write_json(folder / "needle.json", results)
    return results


def maps(run: Run, request: Request, folder: Path) -> dict[str, Any]:
    """Attention and gates of the prompt, or of the first held-out row: maps.json, and a layer's picture and arrays each.

    Returns what maps.json holds: the tokens, and for each layer its method, heads and files.
    """
    tokens = _tokens_to_map(run, request)
    folder.mkdir(parents=True, exist_ok=True)
    layers = []
    for found in layer_maps(run.model, tokens, request.maps):
        name = f"maps_layer{found.layer:02d}"
        arrays = dict(attention=found.attention, forgetting=found.forgetting, **found.gates)
        arrays = {key: value for key, value in arrays.items() if value is not None}
        write_arrays(folder / f"{name}.npz", arrays)
        title = f"{run.config.name}, step {run.step:,}: layer {found.layer}, {found.method}"
        plot_maps(found, folder / f"{name}.png", title=title)
        layers.append(
            {
                "layer": found.layer,
                "method": found.method,
                "heads": list(found.heads),
                "pool": found.pool,
                "picture": f"{name}.png",
                "arrays": {key: list(value.shape) for key, value in arrays.items()},
            }
        )
    results = {
        "step": run.step,
        "data": "" if request.prompt else str(request.data or run.config.data.path),
        "tokens": tokens.tolist(),
        "text": decode(run_tokenizer(run), tokens),
        "layers": layers,
    }
    write_json(folder / "maps.json", results)
    return results


def _tokens_to_map(run: Run, request: Request) -> np.ndarray:
    tokenizer, length = run_tokenizer(run), request.maps.length
    if request.prompt:
        bos_id = run_bos_id(run, tokenizer)
        ids = [] if bos_id is None else [bos_id]
        tokens = np.array([*ids, *tokenizer.encode(request.prompt)], np.int32)
        what = "the prompt has"
    else:
        data = dataclasses.replace(heldout_config(run, request), num_threads=0)
        vocab_size = run.config.model.vocab_size
        batches = make_eval_iterator(
            data, tokenizer, global_batch_size=1, vocab_size=vocab_size, remainder="pad"
        )
        tokens, what = next(batches)["tokens"][0], "a row has (see --sequence_length)"
        length = length or min(tokens.size, 1024)
    if length is not None and length > tokens.size:
        raise ValueError(f"maps.length={length}: {what} {tokens.size} tokens")
    return tokens[:length]


def lm_eval(run: Run, request: Request, folder: Path) -> dict[str, Any]:
    """Tasks of lm-evaluation-harness: lm_eval.json; returns what it holds."""
    tokenizer = run_tokenizer(run)
    results = run_harness(
        run,
        tokenizer,
        request.lm_eval,
        bos_id=run_bos_id(run, tokenizer),
        batch_size=request.batch_size,
    )
    results["step"] = run.step
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "lm_eval.json", results)
    return results


TASKS: dict[str, Callable[[Run, Request, Path], Any]] = {
    "perplexity": perplexity,
    "needle": needle,
    "maps": maps,
    "lm_eval": lm_eval,
    "generate": sample_text,
}

# What a task found, as lines and tables for a terminal.
REPORTS: dict[str, Callable[[Any], list[RenderableType]]] = {
    "perplexity": lambda found: [perplexity_table(found)],
    "needle": lambda found: [needle_table(found)],
    "maps": lambda found: [
        f"layer {layer['layer']}, {layer['method']}: {', '.join(layer['arrays'])} in {layer['picture']}"
        for layer in found["layers"]
    ],
    "lm_eval": lambda found: [harness_table(found)],
    "generate": lambda found: [f"\n{found.prompt}{found.text}\n", found.describe()],
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
