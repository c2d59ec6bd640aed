"""Language models whose answers are known, with a decoder's face."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.models import DecoderState


class CopyOracle(nnx.Module):
    """Goes on as the text went on after the last place, up to `reach` tokens back, where its last 16 tokens stood before.

    Where there is none, every token is as likely.
    """

    def __init__(self, vocab_size: int = 257, *, reach: int = 1 << 20):
        self.vocab_size, self.reach, self.loss_chunk_size = vocab_size, reach, 64

    def init_state(self, batch_size: int, max_length: int) -> DecoderState:
        return DecoderState(
            jnp.full((1, batch_size, max_length), -1, jnp.int32), jnp.zeros(batch_size, jnp.int32)
        )

    def head(self) -> jax.Array:
        return jnp.eye(self.vocab_size)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden

    def hidden(self, tokens, *, state, segment_ids=None):
        real = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        rank = state.clock[:, None] + jnp.cumsum(real, axis=1) - 1
        index = jnp.where(real > 0, rank, state.layers.shape[2])
        seen = jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop"))(
            state.layers[0], index, tokens
        )

        def before(i):  # the token i before each place, -2 where there is none
            return jnp.pad(seen, ((0, 0), (i, 0)), constant_values=-2)[:, : seen.shape[1]]

        place = jnp.arange(seen.shape[1])
        match = (place < rank[..., None]) & (place >= rank[..., None] - self.reach)
        for i in range(16):
            own = jnp.take_along_axis(before(i), jnp.maximum(rank, 0), axis=1)
            match &= (own[..., None] == before(i)[:, None]) & (before(i)[:, None] >= 0)
        last = jnp.where(match, place, -1).max(-1)
        copied = jnp.take_along_axis(seen, jnp.maximum(last + 1, 0), axis=1)
        logits = 8.0 * jax.nn.one_hot(copied, self.vocab_size) * (last >= 0)[..., None]
        after = DecoderState(seen[None], state.clock + real.sum(axis=1))
        return logits, after, {}
