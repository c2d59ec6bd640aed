"""The record of one call of a mixer that its methods `read`, `write` and `finish` receive and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Context:
    """The arguments of one call, and the values that its methods have added so far; read-only.

    `read`, `write` and `finish` receive a context and return one: the same, or a copy with more entries (`add`).

    Attributes:
        layer: index of the layer, possibly traced; None outside a model.
        shared: values that travel from layer to layer; a mixer may add entries it declared in `init_shared`. Empty outside
            a model.
        segment_ids: [B, T] or None.
        positions: [B, T]; None unless the mixer uses positions.
        update_mask: [B, T] or None.
        tails: states of short convolutions and token shifts by name; each layer replaces its incoming state by the outgoing one.
        saved: values that one of the three methods computes once for the others; `finish` must compute them again where they are
            missing.
        bypass: [B, T, ...] by name, outputs of `read` and `write` that do not go through the memory; `finish` adds them to the
            memory's output. `finish` treats both alike, linearly and ahead of its norm, so that MoM may sum both over memories.
        contiguous: whether the caller knows that every token between two written tokens of a document is written too.
        aux: losses and statistics by name, for the caller.
    """

    layer: jax.Array | int | None = None
    shared: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    segment_ids: jax.Array | None = None
    positions: Any = None
    update_mask: jax.Array | None = None
    tails: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    saved: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bypass: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    contiguous: bool = False
    aux: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name in _ENTRIES:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def add(self, **entries: Mapping[str, Any]) -> Context:
        """Return a copy with entries added to `shared`, `tails`, `saved`, `bypass` or `aux`: `context.add(aux={"loss": loss})`."""
        return dataclasses.replace(
            self, **{name: {**getattr(self, name), **new} for name, new in entries.items()}
        )


_ENTRIES = ("shared", "tails", "saved", "bypass", "aux")
