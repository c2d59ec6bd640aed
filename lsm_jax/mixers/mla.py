"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, equations 9 to 19): softmax attention whose keys and values are
products of one latent per token, so that decoding remembers the latent alone.

With c = norm(x W_c), of `latent_dim` channels, and r = x W_r, of `rope_dim` channels, head h has the keys [c W_k | r], of which all
heads share r, and the values c W_v; queries are x W_q. r and the last `rope_dim` channels of the queries are rotated.

| layer | rotation | queries | output gate | config |
|---|---|---|---|---|
| DeepSeek-V2-Lite | pairs of neighbours | x W_q | none | the default |
| DeepSeek-V2, DeepSeek-V3 | pairs of neighbours | norm(x W) W_q | none | `query_rank=1536` |
| Kimi-Linear-48B-A3B | none | x W_q | none | `rope_base=None` |
| Ling-3.0-Flash | pairs of neighbours | x W_q | one number a head | `output_gate=True, rope_base=6e6` |

The layer has two forms, which differ by rounding alone. *Expanded*: keys and values of all heads are computed from the latents.
*Absorbed*: W_k multiplies the queries instead, and W_v the output, so that all heads attend to one head with the keys [c | r] and
the values c. A call without a state is expanded. A call with a state, of T tokens, has the form of fewer multiplications: absorbed for
one token, expanded for long pieces, in which keys and values of all stored tokens exist during the call.

The released codes have an epsilon of 1e-6 in both norms, whatever the config of their model says; here it is a field. The released
rotation puts the pairs' first channels before their second ones; here channels stay in place, which changes no score.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.layers import (
    Dense,
    RMSNorm,
    matmul_precision,
    merge_heads,
    recomputed,
    rotate,
    split_heads,
)
from lsm_jax.mixers.lora import adapted_kernel
from lsm_jax.mixers.method import Method


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class MLAConfig:
    """The config of a layer of multi-head latent attention.

    Attributes:
        num_heads: number of heads.
        key_dim: channels of a head's queries and keys that are not rotated.
        rope_dim: channels of a head's queries and keys that are rotated, an even number with a rotation.
        value_dim: channels of a head's values.
        latent_dim: channels of the latent of keys and values.
        query_rank: rank of the projection to the queries, with a norm between its two matrices; None is one matrix.
        output_gate: whether each head's output is multiplied by sigmoid(x W), one number a head.
        rope_base: base of the rotary embedding; None means no rotary embedding.
        rope_interleaved: whether the rotation's pairs are neighbouring channels, instead of halves apart.
        scale: multiplies the scores; None is the inverse square root of key_dim + rope_dim.
        norm_eps: epsilon of the norms of the latent, and of the queries before their second matrix.
        implementation: attention's backend; None lets the op select.
    """

    num_heads: int = 16
    key_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    latent_dim: int = 512
    query_rank: int | None = None
    output_gate: bool = False
    rope_base: float | None = 10000.0
    rope_interleaved: bool = True
    scale: float | None = None
    norm_eps: float = 1e-6
    implementation: str | None = None

    @classmethod
    def for_width(cls, hidden_size: int) -> MLAConfig:
        """Return the config of multi-head latent attention for a model of width `hidden_size`, with the proportions of
        DeepSeek-V2-Lite: heads of 128 + 64 key and 128 value channels, a latent of a quarter of the width, at most 512
        (heads are smaller below width 512).
        """
        dim = min(128, hidden_size // 4)
        return cls(
            num_heads=hidden_size // dim,
            key_dim=dim,
            rope_dim=max(2, dim // 4 * 2),
            value_dim=dim,
            latent_dim=min(512, hidden_size // 4),
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of multi-head latent attention is not accepted."""
        checks.fields(self)
        names = ("num_heads", "key_dim", "rope_dim", "value_dim", "latent_dim", "norm_eps")
        checks.positive(self, **{name: getattr(self, name) for name in names})
        for name in ("query_rank", "rope_base", "scale"):
            if getattr(self, name) is not None:
                checks.positive(self, **{name: getattr(self, name)})
        if self.rope_base is not None and self.rope_dim % 2:
            raise ValueError(
                f"MLAConfig.rope_dim={self.rope_dim}: rotation needs an even number (rope_base=None rotates nothing)"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token in the expanded form: the projections, and the
        scores and weighted sums over the keys that a query attends to on average.
        """
        heads, keys, values = self.num_heads, self.key_dim + self.rope_dim, self.value_dim
        queries = hidden_size * heads * keys
        if self.query_rank is not None:
            queries = self.query_rank * (hidden_size + heads * keys)
        latents = hidden_size * (self.latent_dim + self.rope_dim)
        expand = self.latent_dim * heads * (self.key_dim + values)
        out = hidden_size * heads * (values + self.output_gate)
        attend = heads * (keys + values) * (seq_len + 1) / 2
        return 2.0 * (queries + latents + expand + out + attend)

    def expands(self, length: int) -> bool:
        """Return whether a call of `length` tokens with a state has fewer multiplications per stored token and head in the
        expanded form, R (K + V) + T (K + P + V), than in the absorbed one, T (2 R + P).
        """
        expanded = self.key_dim + self.value_dim
        return length * (2 * self.latent_dim - expanded) > self.latent_dim * expanded


class MLA(Mixer):
    """The layer of multi-head latent attention: a mixer that maps [B, T, D] to [B, T, D]; `MLAConfig` says what its options
    mean.

    Its memory is an `ops.AttentionState` with one head: `keys` are the rotated channels r, and `values` the latents c.
    """

    single_because = "it stores the latents of all tokens, of which no memory is chosen"
    op = ops.attention
    uses_positions = True
    config: MLAConfig

    def __init__(
        self, config: MLAConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        heads, latent, rank = config.num_heads, config.latent_dim, config.query_rank
        queries, eps = heads * (config.key_dim + config.rope_dim), config.norm_eps
        small: dict[str, Any] = dict(axes=("embed", None), rngs=rngs, init_std=init_std)
        if rank is None:
            into: dict[str, Any] = small | dict(axes=("embed", "heads"))
            self.q_proj = Dense(hidden_size, queries, **into)
        else:
            self.q_down = Dense(hidden_size, rank, **small)
            self.q_norm = RMSNorm(rank, eps=eps)
            self.q_up = Dense(rank, queries, axes=(None, "heads"), rngs=rngs, init_std=init_std)
        self.latent_proj = Dense(hidden_size, latent, **small)
        self.rope_proj = Dense(hidden_size, config.rope_dim, **small)
        self.latent_norm = RMSNorm(latent, eps=eps)
        up: dict[str, Any] = small | dict(axes=(None, "heads"))
        self.k_up = Dense(latent, heads * config.key_dim, **up)
        self.v_up = Dense(latent, heads * config.value_dim, **up)
        gate: dict[str, Any] = small | dict(axes=("embed", "heads"))
        self.g_proj = Dense(hidden_size, heads, **gate) if config.output_gate else None
        out: dict[str, Any] = small | dict(axes=("heads", "embed"))
        self.o_proj = Dense(heads * config.value_dim, hidden_size, **out)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K + P] of tokens x [B, T, D], of which the last P = `rope_dim` channels are rotated,
        and the context.
        """
        config = self.config
        if config.query_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_up(self.q_norm(self.q_down(x)))
        q = split_heads(q, config.num_heads)
        if config.rope_base is None:
            return q, context
        still, turned = jnp.split(q, [config.key_dim], axis=-1)
        return jnp.concatenate([still, self._rotated(turned, context)], axis=-1), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `attention` for tokens x [B, T, D] in the expanded form, by name, and the context: keys
        [B, T, H, K + P] and values [B, T, H, V].
        """
        return self.expand(*self.latents(x, context)), context

    def latents(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """Return what the memory stores of tokens x [B, T, D]: the rotated channels [B, T, 1, P], and the latents
        [B, T, 1, R].
        """
        rope = self._rotated(self.rope_proj(x)[:, :, None], context)
        return rope, self.latent_norm(self.latent_proj(x))[:, :, None]

    def expand(self, rope: jax.Array, latent: jax.Array) -> dict[str, jax.Array]:
        """Return the keys [..., H, K + P] and values [..., H, V] of all heads, by name, from rotated channels [..., 1, P] and
        latents [..., 1, R].
        """
        heads, latent = self.config.num_heads, latent[..., 0, :]
        shared = jnp.broadcast_to(rope, (*rope.shape[:-2], heads, rope.shape[-1]))
        k = jnp.concatenate([split_heads(self.k_up(latent), heads), shared], axis=-1)
        return dict(k=k, v=split_heads(self.v_up(latent), heads))

    def through_memory(
        self, x: jax.Array, context: Context, memory: Any
    ) -> tuple[jax.Array, Any, Context]:
        """Attend to the tokens of the memory and of x [B, T, D]; see `Mixer.through_memory`."""
        q, context = self.read(x, context)
        rope, latent = self.latents(x, context)
        rows = dict(segment_ids=context.segment_ids, update_mask=context.update_mask)
        final = ops.store_tokens(rope, latent, initial_state=memory, **rows)
        call = self.options() | rows
        if memory is None or self.config.expands(x.shape[1]):
            state = None
            if memory is not None:
                stored = self.expand(memory.keys.astype(x.dtype), memory.values.astype(x.dtype))
                state = memory._replace(keys=stored["k"], values=stored["v"])
            o, _ = self.apply(q, self.expand(rope, latent), **call, initial_state=state)
        else:
            o = self._attend_to_latents(q, rope, latent, memory, call)
        return o, final, context

    def _attend_to_latents(self, q, rope, latent, memory: ops.AttentionState, call) -> jax.Array:
        """Return the output [B, T, H, V] for queries [B, T, H, K + P] in the absorbed form."""
        config, dtype = self.config, q.dtype
        precision = matmul_precision(dtype)

        def kernel(layer):  # [R, H, channels]
            return split_heads(adapted_kernel(layer).astype(dtype), config.num_heads)

        still, turned = jnp.split(q, [config.key_dim], axis=-1)
        of_latent = jnp.einsum("bthk,rhk->bthr", still, kernel(self.k_up), precision=precision)
        state = memory._replace(keys=jnp.concatenate([memory.values, memory.keys], axis=-1))
        k = jnp.concatenate([latent, rope], axis=-1)
        q = jnp.concatenate([of_latent, turned], axis=-1)
        o, _ = self.apply(q, dict(k=k, v=latent), **call, initial_state=state)
        return jnp.einsum("bthr,rhv->bthv", o, kernel(self.v_up), precision=precision)

    def _rotated(self, x: jax.Array, context: Context) -> jax.Array:
        config = self.config
        if config.rope_base is None:
            return x
        return rotate(
            x, context.positions, base=config.rope_base, interleaved=config.rope_interleaved
        )

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: multiply each head
        by its gate sigmoid(x W), if the config has it, and project the heads together.
        """
        if self.g_proj is None:
            return self.o_proj(merge_heads(o)), context

        @recomputed
        def gated(o, gate):
            return (o * jax.nn.sigmoid(gate)[..., None]).astype(o.dtype)

        wide = jnp.promote_types(x.dtype, jnp.float32)
        return self.o_proj(merge_heads(gated(o, self.g_proj(x, dtype=wide)))), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `attention` that do not depend on the input: the scale, which both forms share, and
        the names of backends.
        """
        config = self.config
        scale = (config.key_dim + config.rope_dim) ** -0.5 if config.scale is None else config.scale
        return dict(scale=scale, implementation=config.implementation)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.AttentionState:
        """Return an empty state with capacity for the rotated channels and latents of `max_length` tokens."""
        config = self.config
        return ops.attention_state(
            batch_size, max_length, 1, config.rope_dim, config.latent_dim, dtype=dtype
        )


METHOD = Method(
    name="mla",
    paper="arXiv 2405.04434",
    op="attention",
    gate="none: latents are stored",
    write="c = norm(x W), k = [c W | r], v = c W",
    read="softmax(q Kᵀ) V",
    state="c and r of every token, for all heads",
    forms=(),
    config=MLAConfig,
    module=MLA,
    note="the memory grows with the sequence: no other forms; with or without rotation, and with a gate of each head",
)
