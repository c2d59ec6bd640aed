"""Where routers send tokens: load and entropy over training, and which tokens go to which memory of a Mixture-of-Memories."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int
from matplotlib.ticker import StrMethodFormatter
from rich.console import RenderableType
from rich.table import Table

from lsm_jax.data import make_eval_iterator
from lsm_jax.evaluation import tasks
from lsm_jax.evaluation.plots import _colours, _figure, _label, _save
from lsm_jax.models import Decoder

if TYPE_CHECKING:
    from lsm_jax.training.runs import Run

LEAST = 8  # occurrences of a token that may be named
NAMED = 12  # tokens named a memory


def count_routes(
    model: Decoder, batches: Iterable[Mapping[str, np.ndarray]]
) -> list[Int[np.ndarray, "M V"]]:
    """How often each memory was chosen for each token of the vocabulary, one entry a layer that has memories.

    Args:
        model: the decoder.
        batches: tokens [B, T], with segment_ids and positions where the data has them.

    Raises:
        ValueError: no layer is a Mixture-of-Memories, or there is no batch.
    """
    graph, params = nnx.split(model)

    @jax.jit
    def routed(params, batch):
        _, _, aux = nnx.merge(graph, params).hidden(batch["tokens"], **{n: batch[n] for n in ("segment_ids", "positions") if n in batch})  # fmt: skip
        chosen = by_layer(aux, "mom/tokens/routed")
        if not chosen:
            raise ValueError("no layer of the model is a Mixture-of-Memories")
        return chosen  # each [B, T, M], False on padding

    counts: list[np.ndarray] = []
    for batch in batches:
        layers = routed(params, {n: jnp.asarray(x) for n, x in batch.items()})
        tokens = np.asarray(batch["tokens"])
        counts = counts or [np.zeros((x.shape[2], model.vocab_size), np.int64) for x in layers]
        for own, chosen in zip(counts, map(np.asarray, layers), strict=True):
            for memory in range(len(own)):
                of = tokens[chosen[..., memory]]
                own[memory] += np.bincount(of, minlength=model.vocab_size)
    if not counts:
        raise ValueError("there is no batch to count")
    return counts


def by_layer(statistics: Mapping[str, Any], name: str) -> list[Any]:
    """A statistic of each layer that has it, in order; layers of several shapes have entries `name/place`, one a place of the period."""
    if isinstance(statistics.get(name), list | np.ndarray | jax.Array):
        return list(statistics[name])
    places = [key.removeprefix(f"{name}/") for key in statistics if key.startswith(f"{name}/")]
    places = sorted((place for place in places if place.isdecimal()), key=int)
    periods = zip(*(statistics[f"{name}/{place}"] for place in places), strict=True)
    return [layer for period in periods for layer in period]


def information(counts: Int[np.ndarray, "M V"]) -> float:
    """Bits that a token's identity tells of its memory: 0 where routing ignores it, log2 M at most."""
    joint = counts / max(counts.sum(), 1)
    apart = joint.sum(0) * joint.sum(1, keepdims=True)
    some = joint > 0
    return float(np.sum(joint[some] * np.log2(joint[some] / apart[some])))


def specialisation(
    counts: Sequence[Int[np.ndarray, "M V"]], spell: Any, *, top_k: int | Sequence[int] = 1
) -> list[dict[str, Any]]:
    """One entry a layer: load of each memory, `information`, and the tokens each memory gets most of.

    Args:
        counts: of `count_routes`.
        spell: (token id) -> its text.
        top_k: memories each token was counted for, of all layers or of each; a token's share is of its occurrences.
    """
    layers = []
    for index, (own, often_counted) in enumerate(
        zip(counts, np.broadcast_to(top_k, len(counts)).tolist(), strict=True)
    ):
        seen = own.sum(0)
        load = own.sum(1) / max(own.sum(), 1)
        share = own / np.maximum(seen, 1)
        memories = []
        for memory in range(len(own)):
            often = np.flatnonzero((seen >= LEAST * often_counted) & (share[memory] > load[memory]))
            best = often[np.lexsort((-own[memory, often], -share[memory, often]))][:NAMED]
            named = [
                dict(
                    token=spell(int(i)),
                    id=int(i),
                    share=round(often_counted * float(share[memory, i]), 4),
                    count=int(own[memory, i]),
                )
                for i in best
            ]
            memories.append(dict(load=round(float(load[memory]), 5), tokens=named))
        layers.append(dict(layer=index, information_bits=round(information(own), 5), memories=memories))  # fmt: skip
    return layers


def routing(run: Run, request: tasks.Request, folder: Path) -> dict[str, Any]:
    """Which tokens of the held-out data go to which memory: routing.json, and routing.png, the router over training."""
    tokenizer, data = tasks.run_tokenizer(run), tasks.heldout_config(run, request)
    batches = make_eval_iterator(
        data,
        tokenizer,
        global_batch_size=request.batch_size,
        vocab_size=run.config.model.vocab_size,
        remainder="pad",
    )
    most = request.max_tokens or 2**20
    batches = itertools.islice(
        batches, math.ceil(most / (request.batch_size * data.sequence_length))
    )
    counts = count_routes(run.model, batches)
    model = run.config.model
    every = (getattr(model.layers[letter].mixer, "top_k", None) for letter in model.letters())
    top_k = [k for k in every if k is not None]

    def spell(token: int) -> str:
        if token == tokenizer.bos_id or token >= tokenizer.vocab_size:
            return f"<{token}>"
        return tokenizer.decode([token])

    results = {
        "step": run.step,
        "data": str(request.data or data.heldout_path or data.path),
        "choices": int(counts[0].sum()),
        "layers": specialisation(counts, spell, top_k=top_k),
    }
    folder.mkdir(parents=True, exist_ok=True)
    tasks.write_json(folder / "routing.json", results)
    metrics = folder.parents[1] / "metrics.jsonl"  # folder is workdir/eval/<name>
    if metrics.exists():
        plot_router(metrics, folder / "routing.png", title=f"{run.config.name}: router")
    return results


def routing_table(results: Mapping[str, Any]) -> RenderableType:
    """A row a layer and memory, from what routing.json holds."""
    table = Table("layer", "bits", "memory", "load", "tokens it gets most of (share)", title="Which tokens go to which memory")  # fmt: skip
    for layer in results["layers"]:
        for index, memory in enumerate(layer["memories"]):
            named = "  ".join(f"{t['token']!r} {t['share']:.0%}" for t in memory["tokens"][:6])
            first = (str(layer["layer"]), f"{layer['information_bits']:.3f}") if index == 0 else ("", "")  # fmt: skip
            table.add_row(*first, str(index), f"{memory['load']:.1%}", named.replace("[", "\\["))
    return table


def read_router(path: str | os.PathLike[str], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps [N], values [N, L, ...]) of a layers' statistic in a `metrics.jsonl`, such as "mom/load"; empty if it has none.

    Layers with fewer memories than others have NaN in place of those they lack.
    """
    rows: dict[int, Any] = {}
    for line in Path(path).read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if layers := by_layer(row, name):
            if isinstance(layers[0], list):
                most = max(map(len, layers))
                layers = [own + [math.nan] * (most - len(own)) for own in layers]
            rows[int(row["step"])] = layers
    steps = sorted(rows)
    return np.array(steps), np.array([rows[step] for step in steps], np.float64)


def plot_router(
    metrics: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    kind: str = "mom",
    title: str = "Router",
) -> Path:
    """Load of each memory (or expert) and entropy by step: means over layers, and the range over layers shaded.

    Args:
        metrics: a run's `metrics.jsonl`.
        path: the PNG.
        kind: of router, what its statistics' names begin with.
        title: above both.

    Returns:
        The path.

    Raises:
        ValueError: the file has no `<kind>/load`.
    """
    steps, load = read_router(metrics, f"{kind}/load")
    if not steps.size:
        raise ValueError(f"{metrics}: there is no {kind}/load; the run has no such router")
    figure, (left, right) = _figure(title, columns=2)
    colours = _colours(load.shape[2])
    for index, colour in enumerate(colours):
        own = load[:, :, index]
        left.plot(steps, np.nanmean(own, axis=1), color=colour, label=f"{index}")
        ends = np.nanmin(own, axis=1), np.nanmax(own, axis=1)
        left.fill_between(steps, *ends, color=colour, alpha=0.12, lw=0)
    for number in set((~np.isnan(load[0])).sum(axis=1).tolist()):
        left.axhline(1 / number, color="#777777", linestyle="--", linewidth=1, zorder=1)
    left.set_ylim(bottom=0)
    steps, entropy = read_router(metrics, f"{kind}/entropy")
    right.plot(steps, entropy.mean(axis=1), color=colours[0])
    right.fill_between(steps, entropy.min(axis=1), entropy.max(axis=1), color=colours[0], alpha=0.15, lw=0)  # fmt: skip
    _label(left, "step", "load (share of choices)")
    _label(right, "step", "entropy of a token's routing (nats)")
    for axes in (left, right):
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return _save(figure, path, legend=left if load.shape[2] <= 10 else None)


tasks.TASKS["routing"] = routing
tasks.REPORTS["routing"] = lambda found: [routing_table(found)]
