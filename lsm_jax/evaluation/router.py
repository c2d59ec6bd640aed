"""Report on routers: load and entropy over training, and which tokens go to which memory of a
Mixture-of-Memories."""

from __future__ import annotations

import itertools
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
from lsm_jax.evaluation.files import write_json, writing
from lsm_jax.evaluation.plots import colours, label_axes, new_figure, save_figure
from lsm_jax.evaluation.request import Request, heldout_config, run_tokenizer
from lsm_jax.models import Decoder
from lsm_jax.training.metrics import read_rows

if TYPE_CHECKING:
    from lsm_jax.training.runs import Run

LEAST = 8  # a token is listed only if it occurs at least so often
NAMED = 12  # tokens listed per memory


def count_routes(
    model: Decoder, batches: Iterable[Mapping[str, np.ndarray]]
) -> list[Int[np.ndarray, "M V"]]:
    """Count how often the router selected each memory of a Mixture-of-Memories for each token of the
    vocabulary: one array [M, V] per layer that has memories.

    Args:
        model: the decoder, some of whose layers are a Mixture-of-Memories.
        batches: tokens [B, T], with segment_ids and positions if the data has them.

    Raises:
        ValueError: no layer is a Mixture-of-Memories, or there is no batch.
    """
    graph, params = nnx.split(model)

    @jax.jit
    def routed(params, batch):
        _, _, aux = nnx.merge(graph, params).hidden(
            batch["tokens"], **{n: batch[n] for n in ("segment_ids", "positions") if n in batch}
        )
        routed_to = by_layer(aux, "mom/tokens/routed")
        if not routed_to:
            raise ValueError("no layer of the model is a Mixture-of-Memories")
        return routed_to  # each [B, T, M], False on padding

    counts: list[np.ndarray] = []
    for batch in batches:
        layers = routed(params, {n: jnp.asarray(x) for n, x in batch.items()})
        tokens = np.asarray(batch["tokens"])
        counts = counts or [np.zeros((x.shape[2], model.vocab_size), np.int64) for x in layers]
        for layer_counts, routed_to in zip(counts, map(np.asarray, layers), strict=True):
            for memory in range(len(layer_counts)):
                routed_tokens = tokens[routed_to[..., memory]]
                layer_counts[memory] += np.bincount(routed_tokens, minlength=model.vocab_size)
    if not counts:
        raise ValueError("there is no batch to count")
    return counts


def by_layer(statistics: Mapping[str, Any], name: str) -> list[Any]:
    """Return the values of one statistic, such as a router's load, as a list with one entry per layer that
    reports it, in the order of layers.

    `statistics` has the values of all these layers under `name`; or, if their shapes differ between layers,
    under `name/0`, `name/1`, ..., one key for each place in the pattern's period, with one entry per
    period.
    """
    if isinstance(statistics.get(name), list | np.ndarray | jax.Array):
        return list(statistics[name])
    places = [key.removeprefix(f"{name}/") for key in statistics if key.startswith(f"{name}/")]
    places = sorted((place for place in places if place.isdecimal()), key=int)
    periods = zip(*(statistics[f"{name}/{place}"] for place in places), strict=True)
    return [layer for period in periods for layer in period]


def information(counts: Int[np.ndarray, "M V"]) -> float:
    """Return the mutual information in bits of a token's id and the memory to which it is routed: 0 if
    routing ignores the id, log2 M at most."""
    joint = counts / max(counts.sum(), 1)
    independent = joint.sum(0) * joint.sum(1, keepdims=True)
    nonzero = joint > 0
    return float(np.sum(joint[nonzero] * np.log2(joint[nonzero] / independent[nonzero])))


def specialisation(
    counts: Sequence[Int[np.ndarray, "M V"]], spell: Any, *, top_k: int | Sequence[int] = 1
) -> list[dict[str, Any]]:
    """Return what each layer's memories specialise in: the load of each memory, the mutual information of
    token and memory (`information`), and the tokens of which each memory gets the largest share.

    Args:
        counts: how often each token was routed to each memory, [M, V] per layer, the result of `count_routes`.
        spell: function from a token id to the token's text.
        top_k: number of memories that each token is routed to, for all layers or per layer; shares are of a
            token's occurrences.
    """
    layers = []
    for index, (layer_counts, layer_top_k) in enumerate(
        zip(counts, np.broadcast_to(top_k, len(counts)).tolist(), strict=True)
    ):
        seen = layer_counts.sum(0)
        load = layer_counts.sum(1) / max(layer_counts.sum(), 1)
        share = layer_counts / np.maximum(seen, 1)
        memories = []
        for memory in range(len(layer_counts)):
            candidates = np.flatnonzero(
                (seen >= LEAST * layer_top_k) & (share[memory] > load[memory])
            )
            best = candidates[
                np.lexsort((-layer_counts[memory, candidates], -share[memory, candidates]))
            ][:NAMED]
            named = [
                dict(
                    token=spell(int(i)),
                    id=int(i),
                    share=round(layer_top_k * float(share[memory, i]), 4),
                    count=int(layer_counts[memory, i]),
                )
                for i in best
            ]
            memories.append(dict(load=round(float(load[memory]), 5), tokens=named))
        layers.append(
            dict(
                layer=index, information_bits=round(information(layer_counts), 5), memories=memories
            )
        )
    return layers


def routing(run: Run, request: Request, folder: Path) -> dict[str, Any]:
    """Count which tokens of the held-out data are routed to which memory. Writes routing.json, and the
    router's load and entropy over training as routing.png."""
    tokenizer, data = run_tokenizer(run), heldout_config(run, request)
    batches = make_eval_iterator(
        data,
        tokenizer,
        global_batch_size=request.batch_size,
        vocab_size=run.config.model.vocab_size,
        remainder="pad",
    )
    max_tokens = request.max_tokens or 2**20
    batches = itertools.islice(
        batches, math.ceil(max_tokens / (request.batch_size * data.sequence_length))
    )
    counts = count_routes(run.model, batches)
    model = run.config.model
    top_ks = (getattr(model.layers[letter].mixer, "top_k", None) for letter in model.letters())
    top_k = [k for k in top_ks if k is not None]

    def spell(token: int) -> str:
        if token == tokenizer.bos_id or token >= tokenizer.vocab_size:
            return f"<{token}>"
        return tokenizer.decode([token])

    results = {
        "step": run.step,
        "data": str(request.data or data.heldout_path or data.mixture or data.path),
        "choices": int(counts[0].sum()),
        "layers": specialisation(counts, spell, top_k=top_k),
    }
    with writing(results):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "routing.json", results)
        metrics = folder.parents[1] / "metrics.jsonl"  # folder is workdir/eval/<name>
        if metrics.exists():
            plot_router(metrics, folder / "routing.png", title=f"{run.config.name}: router")
    return results


def routing_table(results: Mapping[str, Any]) -> RenderableType:
    """Return a table for a terminal with one row per layer and memory of the routers' results, from the
    content of routing.json."""
    table = Table(
        "layer",
        "bits",
        "memory",
        "load",
        "tokens it gets most of (share)",
        title="Which tokens go to which memory",
    )
    for layer in results["layers"]:
        for index, memory in enumerate(layer["memories"]):
            named = "  ".join(f"{t['token']!r} {t['share']:.0%}" for t in memory["tokens"][:6])
            first = (
                (str(layer["layer"]), f"{layer['information_bits']:.3f}")
                if index == 0
                else ("", "")
            )
            table.add_row(*first, str(index), f"{memory['load']:.1%}", named.replace("[", "\\["))
    return table


def read_router(path: str | os.PathLike[str], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read a router's statistic, such as "mom/load", from a run's `metrics.jsonl`: return the steps [N] at
    which it was logged, and its values [N, L, ...] at these steps for the L layers that have a router.
    Without the statistic there are no steps.

    Layers with fewer memories than others are padded with NaN.
    """
    rows: dict[int, Any] = {}
    for row in read_rows(path):
        if layers := by_layer(row, name):
            if isinstance(layers[0], list):
                most = max(map(len, layers))
                layers = [layer + [math.nan] * (most - len(layer)) for layer in layers]
            rows[row["step"]] = layers
    steps = sorted(rows)
    return np.array(steps), np.array([rows[step] for step in steps], np.float64)


def plot_router(
    metrics: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    kind: str = "mom",
    title: str = "Router",
) -> Path:
    """Plot a router's load of each memory (or expert) and its entropy by step: means over layers, with the
    range over layers shaded.

    Args:
        metrics: a run's `metrics.jsonl`.
        path: the PNG file to write.
        kind: the kind of router; the names of its statistics begin with it.
        title: text above both plots.

    Returns:
        The path.

    Raises:
        ValueError: the file has no `<kind>/load`.
    """
    steps, load = read_router(metrics, f"{kind}/load")
    if not steps.size:
        raise ValueError(f"{metrics}: there is no {kind}/load; the run has no router of this kind")
    figure, (left, right) = new_figure(title, columns=2)
    shades = colours(load.shape[2])
    for index, colour in enumerate(shades):
        memory_load = load[:, :, index]
        left.plot(steps, np.nanmean(memory_load, axis=1), color=colour, label=f"{index}")
        limits = np.nanmin(memory_load, axis=1), np.nanmax(memory_load, axis=1)
        left.fill_between(steps, *limits, color=colour, alpha=0.12, lw=0)
    for number in set((~np.isnan(load[0])).sum(axis=1).tolist()):
        left.axhline(1 / number, color="#777777", linestyle="--", linewidth=1, zorder=1)
    left.set_ylim(bottom=0)
    steps, entropy = read_router(metrics, f"{kind}/entropy")
    right.plot(steps, entropy.mean(axis=1), color=shades[0])
    right.fill_between(
        steps, entropy.min(axis=1), entropy.max(axis=1), color=shades[0], alpha=0.15, lw=0
    )
    label_axes(left, "step", "load (share of choices)")
    label_axes(right, "step", "entropy of a token's routing (nats)")
    for axes in (left, right):
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return save_figure(figure, path, legend=left if load.shape[2] <= 10 else None)
