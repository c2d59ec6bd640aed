"""Compute maps of selected layers on one text: attention weights, forget gates and decays, as arrays and
pictures.

The maps show the inputs of a layer's op, which a mixer's `read` and `write` return; nothing else of a mixer
is used. Attention weights exist if the op is `ops.attention`; a gate is any entry of `write` that `GATES`
names.
"""

# No `from __future__ import annotations`: config flags read the fields' types as objects.
import dataclasses
import functools
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from lsm_jax import ops
from lsm_jax.evaluation.plots import new_figure, save_figure
from lsm_jax.evaluation.progress import EvaluationProgress
from lsm_jax.mixers import Context
from lsm_jax.models import Decoder

GATES = ("log_forget", "log_decay", "value_log_decay", "log_momentum")
PIXELS = 512  # side of a picture; longer texts are pooled to it
_LEAST = 1e-6  # the smallest decay and weight that differ in colour


@dataclasses.dataclass(kw_only=True)
class MapsConfig:
    """The config of the task `maps`: for which layers and heads to show attention weights and gates.

    Attributes:
        layers: numbers of the layers, from 0; empty selects all.
        heads: numbers of the heads, from 0; empty selects the first four, or all if there are fewer.
        length: number of tokens shown, from the start; None is the length of a row, at most 1,024.
    """

    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    length: int | None = None

    def validate(self) -> None:
        """Raise ValueError if a number of a layer or head, or the number of tokens, is out of range."""
        for name in ("layers", "heads"):
            values = getattr(self, name)
            if any(not isinstance(n, int) or n < 0 for n in values) or len(set(values)) < len(
                values
            ):
                raise ValueError(f"maps.{name}={values}; accepted are different integers from 0")
        if self.length is not None and self.length < 2:
            raise ValueError(f"maps.length={self.length}; it must be at least 2")


@dataclasses.dataclass(frozen=True)
class LayerMaps:
    """The attention weights and gates of one layer on a text; P = ceil(T / pool) rows and columns.

    Attributes:
        layer: number of the layer.
        method: the name of the mixer's class.
        heads: the heads shown.
        pool: positions per row or column of the pictures, which show the largest value of these positions.
        attention: softmax weights [heads, P, P], query by key; None unless the op is attention.
        forgetting: the product of the forget gates between key and query, [heads, P, P]; None without forget
            gates.
        gates: log gates of all heads by name, nats, float32 [T, H], or [T, H, K] with one gate per channel;
            gates that do not depend on the token are repeated.
    """

    layer: int
    method: str
    heads: tuple[int, ...]
    pool: int
    attention: Float[np.ndarray, "h P P"] | None
    forgetting: Float[np.ndarray, "h P P"] | None
    gates: dict[str, Float[np.ndarray, "T H ..."]]


def layer_maps(
    model: Decoder, tokens: Int[np.ndarray, " T"], config: MapsConfig, *, progress: bool = True
) -> list[LayerMaps]:
    """Compute the attention weights and gates of the selected layers on a text.

    Args:
        model: the decoder.
        tokens: int [T], one document from its first token.
        config: numbers of the layers and heads to compute.
        progress: show a bar.

    Returns:
        One entry per selected layer that has attention weights or gates. The device's memory must have room
        for the activations of one layer and T x 512 weights per head.

    Raises:
        ValueError: a layer or head does not exist, a layer of `config.layers` has neither attention weights
            nor gates, or no layer has any.
    """
    config.validate()
    blocks = model.periods.blocks
    depth = model.num_periods * len(blocks)
    if config.layers and max(config.layers) >= depth:
        raise ValueError(f"maps.layers={config.layers}; the model's layers are 0 to {depth - 1}")
    selected = config.layers or range(depth)
    length, all_maps = len(tokens), []
    with EvaluationProgress("maps", max(selected) + 1, unit="layers", show=progress) as bar:
        for layer, inputs, _ in run_layers(model, tokens, selected):
            mixer = blocks[layer % len(blocks)].mixer
            maps = _maps(mixer, layer, inputs, length, config) if layer in selected else None
            if maps is not None:
                all_maps.append(maps)
            elif layer in config.layers:
                raise ValueError(
                    f"maps.layers={config.layers}: layer {layer} is a {type(mixer).__name__}, which has "
                    "neither attention weights nor gates"
                )
            bar.advance(length)
    if not all_maps:
        raise ValueError("maps: no layer of the model has attention weights or gates")
    return all_maps


def run_layers(
    model: Decoder, tokens: Int[np.ndarray, " T"], selected: Collection[int]
) -> Iterator[tuple[int, dict[str, Any], jax.Array]]:
    """Compute the layers 0 to max(`selected`) of a model on a text of T tokens, in order. Yield after each
    layer: its number; the inputs of its op by name if the layer is selected, else an empty dict; and the
    activations x [1, T, D] after it."""
    ids = jnp.asarray(tokens, jnp.int32)[None]
    positions = jnp.arange(ids.shape[1])[None]
    x = model.embed(ids)
    shared = model.init_shared(x)
    splits = [nnx.split(block) for block in model.periods.blocks]
    for layer in range(max(selected) + 1):
        period, place = divmod(layer, len(splits))
        graphdef, params = splits[place]
        params = jax.tree.map(lambda leaf, i=period: leaf[i], params)
        x, shared, inputs = _run_layer(
            graphdef, layer in selected, params, x, shared, jnp.int32(layer), positions
        )
        yield layer, inputs, x


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_layer(graphdef, record, params, x, shared, layer, positions):
    """Compute one layer of a model. Return its activations x [1, T, D], the values that it shares with the
    next layer, and, if `record` is true, the inputs of its op by name (queries, keys, log gates; otherwise
    an empty dict)."""
    block = nnx.merge(graphdef, params)
    inputs = {}
    if record and block.mixer.innermost() is block.mixer:
        context = Context(layer, shared, positions=positions)
        normed = block.mixer_norm(x)
        query, context = block.mixer.read(normed, context)
        inputs, _ = block.mixer.write(normed, context)
        if type(block.mixer).op is ops.attention:
            inputs = dict(inputs, q=query)
        elif "delta" in inputs and "A" in inputs:  # mean over a channel's states
            inputs = dict(log_decay=inputs["delta"] * inputs["A"].real.mean(-1))
        inputs = {name: inputs.get(name) for name in ("q", "k", *GATES)}
    x, shared, _, _ = block(
        x, shared, None, layer=layer, segment_ids=None, positions=positions, update_mask=None
    )
    return x, shared, inputs


def _maps(mixer: Any, layer: int, inputs: dict[str, Any], length: int, config: MapsConfig):
    gates = {
        name: np.asarray(_by_token(inputs[name], length), np.float32)
        for name in GATES
        if inputs.get(name) is not None
    }
    is_attention = inputs.get("q") is not None
    if not gates and not is_attention:
        return None
    head_counts = [gate.shape[1] for gate in gates.values()]
    if is_attention:
        head_counts = [max(inputs["q"].shape[2], inputs["k"].shape[2])]
    heads = config.heads or tuple(range(min(4, *head_counts)))
    if max(heads) >= min(head_counts):
        raise ValueError(
            f"maps.heads={heads}; the heads of layer {layer} are 0 to {min(head_counts) - 1}"
        )
    pool = -(-length // PIXELS)
    attention = forgetting = None
    if is_attention:
        options = mixer.options()
        num_heads = head_counts[0]
        # Each sum over many tokens is a pair of float32 numbers, so that differences of sums stay exact.
        gate = gates.get("log_forget", np.zeros((length, 1), np.float32))
        head_gates = gate[:, np.array(heads) * gate.shape[1] // num_heads]
        sums = np.cumsum(head_gates, axis=0, dtype=np.float64).T
        high = sums.astype(np.float32)
        sum_pair = np.stack([high, (sums - high).astype(np.float32)])
        weights, remaining = _weights(
            heads,
            pool,
            options.get("window"),
            options.get("scale"),
            inputs["q"],
            inputs["k"],
            sum_pair,
        )
        attention = np.asarray(weights)
        forgetting = np.asarray(remaining) if "log_forget" in gates else None
    return LayerMaps(layer, type(mixer).__name__, heads, pool, attention, forgetting, gates)


def _by_token(gate: jax.Array, length: int) -> jax.Array:
    """Return a layer's log gate, given as [H], [1, T, H] or [1, T, H, K], per token: [T, H] or [T, H, K]."""
    return jnp.broadcast_to(gate, (length, gate.shape[0])) if gate.ndim == 1 else gate[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _weights(heads, pool, window, scale, q, k, sums):
    """Return two maps of an attention layer, float32 [heads, P, P], query by key: the softmax weights, and
    the products of the forget gates between key and query. Each entry is the largest value of pool x pool
    pairs of tokens.

    q, k [1, T, H, K] are the layer's queries and keys. `sums` [2, heads, T] are the sums of the log gates
    up to each token, nats: each is the sum of two float32 numbers, a large one and a small remainder, for
    more precision.
    """
    length, num_heads = q.shape[1], max(q.shape[2], k.shape[2])
    index = jnp.array(heads)
    # In float32; several query heads have one head of keys.
    q, k = (x[0, :, index * x.shape[2] // num_heads].astype(jnp.float32) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    count = -(-length // pool)
    padding = (0, count * pool - length)
    positions = jnp.arange(count * pool)
    k = jnp.pad(k, [(0, 0), padding, (0, 0)])
    key_sums = jnp.pad(sums, [(0, 0), (0, 0), padding])

    def rows(first):
        queries = jnp.minimum(first + jnp.arange(pool), length - 1)
        distance = queries[:, None] - positions
        visible = (distance >= 0) & (positions < length)
        if window is not None:
            visible &= distance < window
        forget = jnp.where(
            visible, jnp.sum(sums[:, :, queries, None] - key_sums[:, :, None], axis=0), 0
        )
        scores = scale * jnp.einsum("hqk,hsk->hqs", q[:, queries], k, precision="highest") + forget
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        maps = weights, jnp.where(visible, jnp.exp(forget), 0)
        return [x.reshape(len(heads), pool, count, pool).max((1, 3)) for x in maps]

    return [jnp.moveaxis(x, 0, 1) for x in jax.lax.map(rows, pool * jnp.arange(count))]


def plot_maps(maps: LayerMaps, path: str | os.PathLike[str], *, title: str = "") -> Path:
    """Plot the maps of one layer as a picture: a row of panels for the attention weights, one for the
    products of forget gates, one per gate.

    Colours are logarithmic. A gate is shown as its decay, -log f, in nats per token: heads, or a head's
    channels, by position.
    """
    panels: list[tuple[str, np.ndarray, str, tuple[float, float]]] = []
    squares = (
        ("attention weight", maps.attention),
        ("gates between key and query", maps.forgetting),
    )
    for name, values in squares:
        for head, value in zip(maps.heads, values if values is not None else (), strict=False):
            panels.append((f"{name}, head {head}", value, "key", (_LEAST, 1.0)))
    for name, gate in maps.gates.items():
        decay = np.pad(
            -gate, [(0, -len(gate) % maps.pool)] + [(0, 0)] * (gate.ndim - 1), mode="edge"
        )
        decay = decay.reshape(-1, maps.pool, *gate.shape[1:]).max(1)
        least = max(float(decay.min()), _LEAST)
        limits = (least, max(float(decay.max()), 2 * least))
        if gate.ndim == 2:
            panels.append((f"-{name} (nats a token)", decay.T, "head", limits))
        else:
            panels += [
                (f"-{name} (nats a token), head {head}", decay[:, head].T, "channel", limits)
                for head in maps.heads
            ]
    columns = min(4, len(maps.heads), len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(title or f"layer {maps.layer}", columns=columns, rows=rows)
    for (name, value, kind, limits), ax in zip(panels, axes, strict=False):
        square = kind == "key"
        height, width = value.shape
        extent = (
            (0, width * maps.pool, height * maps.pool, 0)
            if square
            else (0, width * maps.pool, height - 0.5, -0.5)
        )
        image = ax.imshow(
            np.maximum(value, limits[0]),
            aspect="auto",
            interpolation="nearest",
            cmap="magma",
            norm=LogNorm(*limits),
            extent=extent,
        )
        ax.set_title(name, fontsize=9)
        ax.set(
            xlabel="key position" if square else "position",
            ylabel="query position" if square else kind,
        )
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=ax)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    return save_figure(figure, path)
