"""Call feedforwards that compute each token from itself alone: they have no state, and one signature."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx


class Tokenwise(nnx.Module):
    """The base class of feedforwards that treat each token alone; a subclass has `transform`."""

    uses_depth: ClassVar[bool] = False

    def transform(self, x: jax.Array) -> jax.Array:
        """Return the feedforward's output [B, T, D] for tokens x [B, T, D]."""
        raise NotImplementedError

    def init_state(self, batch_size: int, max_length: int, dtype: Any) -> None:
        """Return None: the feedforward carries no state from call to call."""
        return None

    def __call__(
        self,
        x: jax.Array,
        *,
        layer: jax.Array | int | None = None,
        shared: dict[str, jax.Array] | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        update_mask: jax.Array | None = None,
        contiguous: bool = False,
        state: None = None,
    ) -> tuple[jax.Array, None, dict[str, jax.Array]]:
        """Return the feedforward's output [B, T, D] for tokens x [B, T, D], None as its state, and no statistics; the other
        arguments are those of every layer and are not used.
        """
        return self.transform(x), None, {}
