"""The tasks of `eval.py` (perplexity, sampling, needles and others) by name, and the files that each one
writes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.console import RenderableType

from lsm_jax.data import JSONTokenizer, WorldTokenizer, make_eval_iterator
from lsm_jax.data.decoding import decode
from lsm_jax.data.needle import NeedleTask, haystack_tokens, read_texts
from lsm_jax.evaluation.curve import LossCurve
from lsm_jax.evaluation.files import write_arrays, write_json, write_rows, write_text, writing
from lsm_jax.evaluation.generate import Generation, generate
from lsm_jax.evaluation.harness import harness_table, run_harness, write_results
from lsm_jax.evaluation.maps import LayerMaps, layer_maps, plot_maps
from lsm_jax.evaluation.needle import find_needles, length_notes
from lsm_jax.evaluation.perplexity import Evaluation, evaluate
from lsm_jax.evaluation.plots import (
    plot_loss_by_position,
    plot_needle,
    plot_step_times,
    plot_training,
)
from lsm_jax.evaluation.request import (
    Request,
    count_batches,
    heldout_config,
    run_bos_id,
    run_tokenizer,
)
from lsm_jax.evaluation.router import routing, routing_table
from lsm_jax.evaluation.tables import needle_table, perplexity_table
from lsm_jax.files import bounded_json, inside
from lsm_jax.models import Decoder
from lsm_jax.names import did_you_mean
from lsm_jax.parallel import largest_divisor
from lsm_jax.training.run_files import read_config

if TYPE_CHECKING:
    from lsm_jax.training.runs import Run


def perplexity(run: Run, request: Request, folder: Path) -> dict[str, Any]:
    """Measure a run's loss by position. Writes results.json, results.npz and loss_by_position.png; returns
    the content of results.json.

    In a run of attention transfer `val/loss` is the student's; the teacher's is `val/teacher_loss`.
    """
    tokenizer, data = run_tokenizer(run), heldout_config(run, request)
    num_batches = count_batches(data, request.batch_size)
    devices = jax.local_device_count()
    shards = largest_divisor(devices, request.batch_size)
    if idle := -request.batch_size % shards:
        print(
            f"perplexity: batch_size={request.batch_size} leaves {idle * devices // shards} of {devices} devices idle",
            file=sys.stderr,
            flush=True,
        )
    limit = None
    if request.max_tokens is not None:
        limit = math.ceil(request.max_tokens / (request.batch_size * data.sequence_length))
        num_batches = limit if num_batches is None else min(limit, num_batches)

    def measure(model: Decoder) -> Evaluation:
        batches: Iterator[dict[str, np.ndarray]] = make_eval_iterator(
            data,
            tokenizer,
            global_batch_size=request.batch_size,
            vocab_size=run.config.model.vocab_size,
            remainder="pad",
        )
        return evaluate(
            model,
            itertools.islice(batches, limit),
            num_batches=num_batches,
            piece_length=request.piece_length,
        )

    evaluation, teacher = measure(run.model), run.teacher()
    results = {
        **evaluation.curve.summary(),
        "val/row_perplexity": evaluation.row_perplexity,
        "step": run.step,
        "weights": run.weights,
        "data": str(request.data or data.heldout_path or data.mixture or data.path),
        "sequence_length": data.sequence_length,
        "train_length": run.config.data.sequence_length,
        "num_sequences": evaluation.num_sequences,
        "seconds": round(evaluation.seconds, 3),
        "tokens_per_second": round(evaluation.curve.num_tokens / evaluation.seconds, 1),
        "device": jax.devices()[0].device_kind,
    }
    if teacher is not None:
        results["val/teacher_loss"] = measure(teacher).curve.mean
    if tokenizer.name == "bytes" and not tokenizer.json_escape and evaluation.num_byte_labels:
        results["val/bits_per_byte"] = evaluation.bits_per_byte
    with writing(results):
        folder.mkdir(parents=True, exist_ok=True)
        write_arrays(
            folder / "results.npz",
            {
                "val/loss_per_token": evaluation.curve.loss,
                "val/tokens_per_position": evaluation.curve.count,
            },
        )
        plot_loss_by_position(
            evaluation.curve,
            folder / "loss_by_position.png",
            train_length=run.config.data.sequence_length,
            title=f"{run.config.name}: held-out loss by position, step {run.step:,}",
            unit="byte" if "val/bits_per_byte" in results else "token",
        )
        write_json(folder / "results.json", results)
    return results


def sample_text(run: Run, request: Request, folder: Path) -> Generation:
    """Sample a run's continuation of the request's prompt. Writes sample.txt and sample.json."""
    tokenizer = run_tokenizer(run)
    prompt, bos_id, stop_id = request.prompt, run_bos_id(run, tokenizer), None
    if request.chat:
        if not isinstance(tokenizer, JSONTokenizer | WorldTokenizer):
            raise ValueError(f"chat=True: tokenizer {tokenizer.name!r} has no chat template")
        prompt = tokenizer.chat_text([dict(role="user", content=prompt)])
        bos_id, stop_id = None, tokenizer.eos_id
    generation = generate(
        run.model,
        tokenizer,
        prompt,
        num_tokens=request.num_tokens,
        temperature=request.sampling_temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        bos_id=bos_id,
        stop_id=stop_id,
        prefill_chunk=request.piece_length,
    )
    with writing(generation):
        folder.mkdir(parents=True, exist_ok=True)
        settings = {k: getattr(request, k) for k in ("top_k", "top_p", "seed")}
        settings |= {"temperature": request.sampling_temperature}
        write_json(
            folder / "sample.json", {**dataclasses.asdict(generation), **settings, "step": run.step}
        )
        write_text(folder / "sample.txt", generation.prompt + generation.text + "\n")
    return generation


def needle(run: Run, request: Request, folder: Path) -> dict[str, Any]:
    """Measure whether a run's model finds facts (needles) that are hidden in a long text. Writes
    needle.json and needle.png; returns the content of needle.json."""
    tokenizer, data = run_tokenizer(run), heldout_config(run, request)
    train_length, config = run.config.data.sequence_length, request.needle
    task = NeedleTask(config, tokenizer, bos_id=run_bos_id(run, tokenizer))
    lengths = task.lengths(train_length)
    size = task.text_length(lengths[-1])
    num_tokens = size * config.samples
    haystack = haystack_tokens(data, tokenizer, num_tokens, vocab_size=run.config.model.vocab_size)
    notes = length_notes(run.config.model, lengths, train_length)
    if haystack.size < num_tokens:
        notes.append(f"the text has {haystack.size} tokens of {num_tokens} and is repeated")
    for note in notes:
        print(f"needle: {note}", file=sys.stderr, flush=True)
    scores = find_needles(
        run.model,
        task,
        np.resize(haystack, (config.samples, size)),
        lengths,
        batch_size=request.batch_size,
        piece_length=request.piece_length,
    )
    if config.prompt != "own" and config.judge == "containment":
        notes.append("scored by containment, not by the model that judges in the published results")
    results = {
        **scores.summary(),
        **{
            name: getattr(task.config, name)
            for name in ("question", "cue", "answer", "samples", "prompt", "judge")
        },
        "notes": notes,
        "step": run.step,
        "data": str(request.data or data.heldout_path or data.mixture or data.path),
        "tokenizer": tokenizer.name,
        "train_length": train_length,
        "seconds": round(scores.seconds, 3),
        "tokens_per_second": round(scores.num_tokens / scores.seconds, 1),
        "device": jax.devices()[0].device_kind,
    }
    with writing(results):
        folder.mkdir(parents=True, exist_ok=True)
        plot_needle(
            scores,
            folder / "needle.png",
            train_length=train_length,
            title=f"{run.config.name}: needle in a haystack, step {run.step:,}",
        )
        write_json(folder / "needle.json", results)
        if config.judge == "requests":
            # Also a command, and therefore not imported with the package.
            from lsm_jax.evaluation.judge import judge_requests

            messages = read_texts(config.prompt)["judge"]
            write_rows(folder / "needle_judge.jsonl", judge_requests(results, messages))
    return results


def maps(run: Run, request: Request, folder: Path) -> dict[str, Any]:
    """Show the attention weights and gates of a run's layers on the prompt, or on the first held-out row.
    Writes maps.json, and a picture and arrays per layer.

    Returns the content of maps.json: the tokens, and for each layer its method, heads and files.
    """
    tokens = _tokens_to_map(run, request)
    layers: list[dict[str, Any]] = []
    results = {
        "step": run.step,
        "data": "" if request.prompt else str(request.data or run.config.data.path),
        "tokens": tokens.tolist(),
        "text": decode(run_tokenizer(run), tokens),
        "layers": layers,
    }
    with writing(results):
        folder.mkdir(parents=True, exist_ok=True)
        for layer in layer_maps(run.model, tokens, request.maps):
            layers.append(_write_layer(layer, folder, run))
        write_json(folder / "maps.json", results)
    return results


def _write_layer(layer: LayerMaps, folder: Path, run: Run) -> dict[str, Any]:
    """Write the picture and the arrays of one layer's maps; return their entry of maps.json."""
    name = f"maps_layer{layer.layer:02d}"
    arrays = dict(attention=layer.attention, forgetting=layer.forgetting, **layer.gates)
    arrays = {key: value for key, value in arrays.items() if value is not None}
    write_arrays(folder / f"{name}.npz", arrays)
    title = f"{run.config.name}, step {run.step:,}: layer {layer.layer}, {layer.method}"
    plot_maps(layer, folder / f"{name}.png", title=title)
    return {
        "layer": layer.layer,
        "method": layer.method,
        "heads": list(layer.heads),
        "pool": layer.pool,
        "picture": f"{name}.png",
        "arrays": {key: list(value.shape) for key, value in arrays.items()},
    }


def _tokens_to_map(run: Run, request: Request) -> np.ndarray:
    tokenizer, length = run_tokenizer(run), request.maps.length
    if request.prompt:
        bos_id = run_bos_id(run, tokenizer)
        ids = [] if bos_id is None else [bos_id]
        tokens = np.array([*ids, *tokenizer.encode(request.prompt)], np.int32)
        source = "the prompt has"
    else:
        data = dataclasses.replace(heldout_config(run, request), num_threads=0)
        vocab_size = run.config.model.vocab_size
        batches = make_eval_iterator(
            data, tokenizer, global_batch_size=1, vocab_size=vocab_size, remainder="pad"
        )
        tokens, source = next(batches)["tokens"][0], "a row of --sequence_length has"
        length = length or min(tokens.size, 1024)
    if length is not None and length > tokens.size:
        raise ValueError(
            f"maps.length={length}: {source} only {tokens.size} tokens; accepted are 1 to {tokens.size}"
        )
    return tokens[:length]


def lm_eval(run: Run, request: Request, folder: Path) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness on a run. Writes lm_eval-1.json, or the next number that is free,
    and with `log_samples` a folder of samples; returns its content."""
    tokenizer = run_tokenizer(run)
    results = run_harness(
        run,
        tokenizer,
        request.lm_eval,
        bos_id=run_bos_id(run, tokenizer),
        batch_size=request.batch_size,
    )
    results["step"] = run.step
    with writing(results):
        folder.mkdir(parents=True, exist_ok=True)
        write_results(folder, results)
    return results


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of `eval.py`: the function that computes and writes its results, and the one that shows them.

    Attributes:
        run: (run, request, folder of the results) -> the results; writes them to the folder.
        report: the results -> lines and tables for a terminal.
    """

    run: Callable[[Run, Request, Path], Any]
    report: Callable[[Any], list[RenderableType]]


def _maps_lines(results: dict[str, Any]) -> list[RenderableType]:
    return [
        f"layer {layer['layer']}, {layer['method']}: {', '.join(layer['arrays'])} in {layer['picture']}"
        for layer in results["layers"]
    ]


def _sample_lines(sample: Generation) -> list[RenderableType]:
    return [f"\n{sample.prompt}{sample.text}\n", sample.describe()]


_TASKS = {
    "perplexity": Task(perplexity, lambda results: [perplexity_table(results)]),
    "needle": Task(needle, lambda results: [needle_table(results)]),
    "maps": Task(maps, _maps_lines),
    "lm_eval": Task(lm_eval, lambda results: [harness_table(results)]),
    "generate": Task(sample_text, _sample_lines),
    "routing": Task(routing, lambda results: [routing_table(results)]),
}
TASKS = {name: task.run for name, task in _TASKS.items()}
REPORTS = {name: task.report for name, task in _TASKS.items()}


def check_tasks(names: list[str]) -> list[str]:
    """Check that all `names` are names of tasks of `eval.py`, and return them unchanged.

    Raises:
        ValueError: `names` is empty, or a name is not that of a task.
    """
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        near = did_you_mean(unknown[0], TASKS) if unknown else ""
        raise ValueError(f"tasks={','.join(names)!r}, accepted: {', '.join(TASKS)}{near}")
    return names


def plot_run(workdir: str | os.PathLike[str], name: str = "") -> Path:
    """Plot what a run has recorded: the training curves to plots/training.png, the held-out loss by position to
    plots/loss_by_position.png if it was evaluated during training, and the times of a profiled step to profile/step_times.png.

    Returns:
        The path of the training curves. A link in place of a folder or a file is refused or replaced.
    """
    workdir = Path(workdir)
    inside(workdir, "plots", what="the folder of plots")
    curve, times = workdir / "plots" / "loss_by_position.npz", workdir / "profile/step_times.json"
    unit = "byte" if read_config(workdir).data.tokenizer == "bytes" else "token"
    if curve.is_file():
        plot_loss_by_position(
            LossCurve.load(curve),
            curve.with_suffix(".png"),
            title=f"{name}: held-out loss by position".removeprefix(": "),
            unit=unit,
        )
    if times.is_file():
        inside(workdir, "profile", what="the folder of profiles")
        plot_step_times(bounded_json(times, max_bytes=1 << 30), times.with_suffix(".png"))
    return plot_training(
        {name: workdir}, workdir / "plots" / "training.png", title=name or "Training", unit=unit
    )
