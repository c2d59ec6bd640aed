"""What chosen layers do with one text: attention weights, forget gates and decays, as arrays and pictures.

Nothing is asked of a mixer but its contract: what `read` and `write` give its op is all there is to show. Attention is any op
that has queries and keys and no memory (`ops.attention`); a gate is any entry of `write` that `GATES` names.
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
from lsm_jax.evaluation.plots import _figure, _save
from lsm_jax.evaluation.progress import EvaluationProgress
from lsm_jax.mixers import Context
from lsm_jax.models import Decoder

GATES = ("log_forget", "log_decay", "value_log_decay", "log_momentum")
_PIXELS = 512  # of a picture's side; longer texts are pooled to it
_LEAST = 1e-6  # the smallest decay and weight that colours tell apart


@dataclasses.dataclass(kw_only=True)
class MapsConfig:
    """Which layers and heads to show.

    Attributes:
        layers: their numbers from 0; empty: all.
        heads: their numbers from 0; empty: the first four, or all of fewer.
        length: tokens shown, from the start; None is a row's, 1,024 at most.
    """

    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    length: int | None = None

    def validate(self) -> None:
        """Raise ValueError where a number is out of range."""
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
    """One layer's maps; P = ceil(T / pool) rows and columns.

    Attributes:
        layer: its number.
        method: the name of its mixer's class.
        heads: those shown.
        pool: positions that share a row or column of the pictures; the largest of them is shown.
        attention: softmax weights [heads, P, P], query by key; None unless the op is attention.
        forgetting: the product of the forget gates between key and query, [heads, P, P]; None without them.
        gates: log gates of all heads by name, nats, float32 [T, H], or [T, H, K] with a gate for each channel; constant ones
            are repeated.
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
    """The maps of a text's layers.

    Args:
        model: the decoder.
        tokens: int [T], one document from its start.
        config: which layers and heads.
        progress: show a bar.

    Returns:
        One entry for each layer that has any; memory is that of one layer and T x 512 weights a head.

    Raises:
        ValueError: a layer or head that there is not, a chosen layer that has nothing to show, or none that has.
    """
    config.validate()
    blocks = model.periods.blocks
    depth = model.num_periods * len(blocks)
    if config.layers and max(config.layers) >= depth:
        raise ValueError(f"maps.layers={config.layers}; the model's layers are 0 to {depth - 1}")
    chosen = config.layers or range(depth)
    length, found = len(tokens), []
    with EvaluationProgress("maps", max(chosen) + 1, unit="layers", show=progress) as bar:
        for layer, inputs, _ in walk(model, tokens, chosen):
            mixer = blocks[layer % len(blocks)].mixer
            maps = _maps(mixer, layer, inputs, length, config) if layer in chosen else None
            if maps is not None:
                found.append(maps)
            elif layer in config.layers:
                raise ValueError(
                    f"maps.layers={config.layers}: layer {layer} is a {type(mixer).__name__}, which has "
                    "neither attention weights nor gates of its own"
                )
            bar.advance(length)
    if not found:
        raise ValueError("maps: no layer of the model has attention weights or gates")
    return found


def walk(
    model: Decoder, tokens: Int[np.ndarray, " T"], chosen: Collection[int]
) -> Iterator[tuple[int, dict[str, Any], jax.Array]]:
    """Each layer up to the last chosen one: its number, what its op was given (if chosen), and x [1, T, D] after it."""
    ids = jnp.asarray(tokens, jnp.int32)[None]
    positions = jnp.arange(ids.shape[1])[None]
    x = model.embedding[...][ids].astype(model.dtype)
    shared = model.init_shared(x)
    splits = [nnx.split(block) for block in model.periods.blocks]
    for layer in range(max(chosen) + 1):
        period, place = divmod(layer, len(splits))
        graphdef, params = splits[place]
        params = jax.tree.map(lambda leaf, i=period: leaf[i], params)
        x, shared, inputs = _run_layer(
            graphdef, layer in chosen, params, x, shared, jnp.int32(layer), positions
        )
        yield layer, inputs, x


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_layer(graphdef, record, params, x, shared, layer, positions):
    """One layer: x and `shared` after it, and what its op was given."""
    block = nnx.merge(graphdef, params)
    inputs = {}
    if record and block.mixer.innermost() is block.mixer:
        context = Context(layer, dict(shared), None, positions, None, {})
        normed = block.mixer_norm(x)
        query, inputs = block.mixer.read(normed, context), block.mixer.write(normed, context)
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
    attends = inputs.get("q") is not None
    if not gates and not attends:
        return None
    number = [gate.shape[1] for gate in gates.values()]
    if attends:
        number = [max(inputs["q"].shape[2], inputs["k"].shape[2])]
    heads = config.heads or tuple(range(min(4, *number)))
    if max(heads) >= min(number):
        raise ValueError(
            f"maps.heads={heads}; the heads of layer {layer} are 0 to {min(number) - 1}"
        )
    pool = -(-length // _PIXELS)
    attention = forgetting = None
    if attends:
        options = mixer.options()
        total = number[0]
        # A sum over many tokens as a pair of float32 numbers, so that differences of sums keep their digits.
        gate = gates.get("log_forget", np.zeros((length, 1), np.float32))
        picked = gate[:, np.array(heads) * gate.shape[1] // total]
        sums = np.cumsum(picked, axis=0, dtype=np.float64).T
        high = sums.astype(np.float32)
        pair = np.stack([high, (sums - high).astype(np.float32)])
        weights, kept = _weights(
            heads, pool, options.get("window"), options.get("scale"), inputs["q"], inputs["k"], pair
        )
        attention = np.asarray(weights)
        forgetting = np.asarray(kept) if "log_forget" in gates else None
    return LayerMaps(layer, type(mixer).__name__, heads, pool, attention, forgetting, gates)


def _by_token(gate: jax.Array, length: int) -> jax.Array:
    """A log gate [H], [1, T, H] or [1, T, H, K] as [T, H] or [T, H, K]."""
    return jnp.broadcast_to(gate, (length, gate.shape[0])) if gate.ndim == 1 else gate[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _weights(heads, pool, window, scale, q, k, sums):
    """Softmax weights and products of forget gates, [heads, P, P] each, from q, k [1, T, H, K] and sums [2, heads, T]."""
    length, total = q.shape[1], max(q.shape[2], k.shape[2])
    index = jnp.array(heads)
    # Float32, and one head of keys for a group of queries.
    q, k = (x[0, :, index * x.shape[2] // total].astype(jnp.float32) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    count = -(-length // pool)
    padding = (0, count * pool - length)
    place = jnp.arange(count * pool)
    k = jnp.pad(k, [(0, 0), padding, (0, 0)])
    keys = jnp.pad(sums, [(0, 0), (0, 0), padding])

    def rows(first):
        at = jnp.minimum(first + jnp.arange(pool), length - 1)
        distance = at[:, None] - place
        seen = (distance >= 0) & (place < length)
        if window is not None:
            seen &= distance < window
        forget = jnp.where(seen, jnp.sum(sums[:, :, at, None] - keys[:, :, None], axis=0), 0)
        scores = scale * jnp.einsum("hqk,hsk->hqs", q[:, at], k, precision="highest") + forget
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        both = weights, jnp.where(seen, jnp.exp(forget), 0)
        return [x.reshape(len(heads), pool, count, pool).max((1, 3)) for x in both]

    return [jnp.moveaxis(x, 0, 1) for x in jax.lax.map(rows, pool * jnp.arange(count))]


def plot_maps(maps: LayerMaps, path: str | os.PathLike[str], *, title: str = "") -> Path:
    """One layer's maps as a PNG: a row of panels for the attention weights, one for the products of forget gates, one a gate.

    Colours are logarithmic. A gate is shown as its decay, -log f, in nats a token: heads, or a head's channels, by position.
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
    figure, axes = _figure(title or f"layer {maps.layer}", columns=columns, rows=rows)
    for (name, value, kind, limits), ax in zip(panels, axes, strict=False):
        square = kind == "key"
        high, wide = value.shape
        extent = (
            (0, wide * maps.pool, high * maps.pool, 0)
            if square
            else (0, wide * maps.pool, high - 0.5, -0.5)
        )
        image = ax.imshow(
            np.maximum(value, limits[0]), aspect="auto", interpolation="nearest", cmap="magma",
            norm=LogNorm(*limits), extent=extent,
        )  # fmt: skip
        ax.set_title(name, fontsize=9)
        ax.set(
            xlabel="key position" if square else "position",
            ylabel="query position" if square else kind,
        )
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=ax)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    return _save(figure, path)
