"""LoLCATs (arXiv 2410.10254): softmax attention in a window, linear attention beyond it, under one
denominator.

`o_t = (Σ_near γ exp(s_tj - m_t) v_j + Σ_far φ(q_t)·φ(k_j) v_j) / (the same without v)`, with "near" the last
`window` tokens of the document and "far" those before them, m_t the largest near score, and γ a learned
factor of each head. Feature maps are applied to queries and keys after the rotation, as in the authors' code.
There keys are mapped once per query head, here once per key head, so that there is one memory per key head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context
from lsm_jax.mixers.feature_maps import HeadDense
from lsm_jax.mixers.layers import parameter
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig
from lsm_jax.mixers.softmax import Softmax, SoftmaxConfig
from lsm_jax.ops.core.segments import read_tokens, select

_LEAST_FEATURE = 1e-12
_FIRST_FACTOR = 0.1


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class LolcatsConfig(RecurrentConfig, SoftmaxConfig):
    """The config of LoLCATs attention. The fields of `SoftmaxConfig` describe the pretrained layer; `op` is
    for the linear part.

    Attributes:
        window: number of tokens with softmax attention, the query's own token included.
        feature_dim: number of columns of a feature map's matrix; the map has twice as many features.
        transfer_weight: 0 for the model itself. Otherwise, for the first stage of training, layers return the
            output of softmax attention, and as a loss this weight times the mean squared difference between
            it and LoLCATs' output. This requires rows from their first token, and returns no state.
            A run of this stage trains so, and is evaluated and generates as the model with 0 (`for_inference`).
    """

    window: int | None = 64
    feature_dim: int = 64
    transfer_weight: float = 0.0

    @classmethod
    def for_width(cls, hidden_size: int) -> LolcatsConfig:
        """Return the config of LoLCATs for a model of width `hidden_size`, with as many query heads as
        `SoftmaxConfig` has at that width, and two query heads for each key head.
        """
        heads = SoftmaxConfig.for_width(hidden_size).num_heads
        size = min(64, hidden_size // heads)
        return cls(num_heads=heads, num_kv_heads=max(1, heads // 2), feature_dim=size)

    def for_inference(self) -> LolcatsConfig:
        """Return the config of the layer after distillation, for evaluation and generation: the same layer
        without its transfer loss, with the same parameters.
        """
        return dataclasses.replace(self, transfer_weight=0.0)

    def teacher(self) -> SoftmaxConfig | None:
        """Return the config of the softmax attention whose outputs this layer learns in the first stage of
        distillation, or None outside that stage.
        """
        if not self.transfer_weight:
            return None
        fields: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(SoftmaxConfig)
        }
        fields["window"] = None
        return SoftmaxConfig(**fields)

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of LoLCATs is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        super().validate(hidden_size)
        self.validate_fields()
        checks.one_of(self, "scale", self.scale, (None,))
        checks.positive(self, feature_dim=self.feature_dim)
        if self.window is None:
            raise ValueError("LolcatsConfig.window=None: accepted are integers from 1")
        if self.transfer_weight < 0:
            raise ValueError(
                f"LolcatsConfig.transfer_weight={self.transfer_weight}: it must be at least 0"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: attention over the window, the
        feature maps, and the memory, with 2 F V per key head to write and 2 F V per query head to read.
        """
        dim, heads, kv_heads = self.dim(hidden_size), self.num_heads, self.kv_heads()
        mapped = 2.0 * (heads + kv_heads) * dim * self.feature_dim
        memory = 4.0 * (heads + kv_heads) * self.feature_dim * dim
        return super().flops_per_token(hidden_size, seq_len) + mapped + memory


class LolcatsState(NamedTuple):
    """The state of a LoLCATs layer between calls: the memory of linear attention, and the keys and values of the window
    of softmax attention.

    Attributes:
        linear: the state of the linear part, for all tokens of the document; its last value channel is 1.
        keys: [B, W, G, K], the last W rotated keys of the document, oldest first.
        values: [B, W, G, V].
        held: int32 [B], the number of tokens in `keys` and `values`; they are the last ones of the W.
    """

    linear: ops.LinearState
    keys: jax.Array
    values: jax.Array
    held: jax.Array


class Lolcats(Softmax):
    """The layer of LoLCATs attention: softmax attention in a window joined with linear attention to older tokens;
    `LolcatsConfig` says what its options mean.

    In addition to softmax attention's parameters it has the feature maps and factors that the first stage of
    distillation trains.

    Scores of the window are computed in blocks of its size, so that memory and time grow with the tokens.
    """

    single_because = (
        "it has the projections of a pretrained layer, of which memories have no copies"
    )
    op = ops.linear_memory
    config: LolcatsConfig

    def __init__(
        self, config: LolcatsConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        eye = jnp.eye(self.head_dim, config.feature_dim, dtype=jnp.float32)

        def learned(heads: int) -> HeadDense:
            return HeadDense(jnp.broadcast_to(eye, (heads, *eye.shape)), bias=False)

        self.q_map, self.k_map = learned(config.num_heads), learned(config.kv_heads())
        first = math.log(_FIRST_FACTOR / (1 - _FIRST_FACTOR))
        factors = jnp.full(config.num_heads, first)
        self.window_factor = parameter(factors, ("heads",), weight_decay=False)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the linear attention's op that do not depend on the input; the scale is 1, so
        that queries are not scaled.
        """
        config = self.config
        return dict(
            scale=1.0,
            **config.op.arguments(),
        )

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> Any:
        """Return the state of LoLCATs before any token: an empty memory of linear attention, and an empty window of
        keys and values.
        """
        if self.config.transfer_weight:
            raise ValueError(
                f"LolcatsConfig.transfer_weight={self.config.transfer_weight}: a layer with a transfer loss has no state; accepted here is 0"
            )
        return self._empty(batch_size, dtype)

    def _empty(self, batch_size: int, dtype: Any) -> LolcatsState:
        config, heads, dim = self.config, self.config.kv_heads(), self.head_dim
        linear = ops.linear_state(batch_size, heads, 2 * config.feature_dim, dim + 1)
        ring = jnp.zeros((batch_size, config.window, heads, dim), dtype)
        return LolcatsState(linear, ring, ring, jnp.zeros(batch_size, jnp.int32))

    def through_memory(
        self, x: jax.Array, context: Context, memory: Any
    ) -> tuple[jax.Array, Any, Context]:
        """Return the output [B, T, H, V] of LoLCATs' attention, which joins softmax attention in a window with linear
        attention to older tokens, and the final state; in the first stage of distillation the output is that of softmax
        attention.
        """
        config = self.config
        memory = self._empty(x.shape[0], x.dtype) if memory is None else memory
        q, context = self.read(x, context)
        written, context = self.write(x, context)
        k, v = written["k"], written["v"]
        o, memory = self._window_and_memory(q, k, v, context, memory)
        if not config.transfer_weight:
            return o.astype(x.dtype), memory, context
        rows = dict(segment_ids=context.segment_ids, update_mask=context.update_mask)
        teacher, _ = ops.attention(q, k, v, implementation=config.implementation, **rows)
        missed = jnp.square(o - jax.lax.stop_gradient(teacher).astype(o.dtype)).mean((2, 3))
        real = jnp.ones(x.shape[:2], bool) if context.segment_ids is None else context.segment_ids != 0  # fmt: skip
        mean = jnp.sum(select(real, missed)) / jnp.maximum(jnp.sum(real), 1)
        loss = config.transfer_weight * mean
        return teacher, memory, context.add(aux={"attention_transfer_loss": loss})

    def _window_and_memory(self, q, k, v, context: Context, memory: LolcatsState):
        wide = jnp.promote_types(q.dtype, jnp.float32)
        q, wide_k = q.astype(wide), k.astype(wide)
        q_features, k_features = _features(self.q_map, q), _features(self.k_map, wide_k)
        rows = dict(segment_ids=context.segment_ids, update_mask=context.update_mask)
        ones = jnp.ones((*v.shape[:3], 1), wide)
        far, linear = ops.linear_memory(
            q_features,
            k_features,
            jnp.concatenate([v.astype(wide), ones], axis=-1),
            **self.options(),
            initial_state=memory.linear,
            **rows,
        )
        near = _Near(k, v, context, memory, self.config.window)
        keys, values = near.take(near.keys).astype(wide), near.take(near.values).astype(wide)
        heads = keys.shape[3]

        def pairs(a, b):  # [B, T, H, X], [B, N, S, G, X] -> [B, N, C, G, R, S]
            a = near.cut(a.reshape(*a.shape[:2], heads, -1, a.shape[-1]))
            return jnp.einsum("bncgrx,bnsgx->bncgrs", a, b, precision="highest")

        seen = near.seen[:, :, :, None, None]
        scores = pairs(q, keys) * self.head_dim**-0.5
        top = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)
        # It does not scale the far part, so that it has a gradient.
        top = jnp.where(jnp.isfinite(top), top, 0)
        factor = jax.nn.sigmoid(self.window_factor[...]).reshape(heads, -1, 1)
        # The memory contains the window's tokens too; their part is subtracted.
        weights = factor * jnp.exp(jnp.where(seen, scores - top, 0))
        weights = weights - pairs(q_features, near.take(_features(self.k_map, near.keys.astype(wide))))  # fmt: skip
        weights = jnp.where(seen, weights, 0)
        sums = jnp.einsum("bncgrs,bnsgv->bncgrv", weights, values, precision="highest")
        sums = near.joined(sums).reshape(*far.shape[:3], -1) + far[..., :-1]
        total = near.joined(weights.sum(-1)).reshape(far.shape[:3]) + far[..., -1]
        o = sums / jnp.where(total > 0, total, 1)[..., None]
        real = None if context.segment_ids is None else context.segment_ids != 0
        return select(real, o), near.state(linear)


class _Near:
    """The keys and values of a window of W tokens for each token of a call, and which of them the token
    attends to.

    Queries are divided into N blocks of C tokens, with C the window W or, if smaller, T. The queries of a
    block attend only to W + C - 1 consecutive written tokens.

    Attributes:
        keys: [B, W + T, G, K], the W keys in the state, followed by those of the call's T tokens.
        values: [B, W + T, G, V], the values of the same tokens.
        seen: [B, N, C, W + C - 1], whether a query of a block attends to each of the keys that `take` returns
            for the block.
    """

    def __init__(self, k, v, context: Context, memory: LolcatsState, window: int | None):
        assert window is not None
        self.window = window
        batch, self.length = k.shape[:2]
        tokens = read_tokens(context.segment_ids, context.update_mask, memory.linear.segment_id, None)  # fmt: skip
        shape = (batch, self.length)
        written = jnp.ones(shape, bool) if tokens.written is None else tokens.written
        run = jnp.zeros(shape, jnp.int32) if tokens.run is None else tokens.run
        held = jnp.arange(window) >= window - memory.held[:, None]
        self.keys = jnp.concatenate([memory.keys.astype(k.dtype), k], axis=1)
        self.values = jnp.concatenate([memory.values.astype(v.dtype), v], axis=1)
        self.written = jnp.concatenate([held, written], axis=1)
        self.run = jnp.concatenate([jnp.zeros((batch, window), run.dtype), run], axis=1)
        self.before = memory
        # A token that is not written attends to the same number of written tokens before it.
        rank = jnp.cumsum(
            self.written, axis=1, dtype=jnp.int32
        )  # the number of written tokens up to each
        places = jax.lax.broadcasted_iota(jnp.int32, rank.shape, 1)
        rows = jnp.arange(batch)[:, None]
        ranked = jnp.zeros((batch, rank.shape[1] + 1), jnp.int32)
        ranked = ranked.at[rows, jnp.where(self.written, rank, 0)].set(places)

        self.size = min(window, self.length)
        ours, mine = self.cut(rank[:, window:]), self.cut(self.run[:, window:])  # [B, N, C]
        theirs = ours[..., :1] - window + 1 + jnp.arange(window + self.size - 1)
        inside = (theirs >= 1) & (theirs <= rank[:, -1:, None])
        index = jnp.where(inside, theirs, 0).reshape(batch, -1)
        self.index = jnp.take_along_axis(ranked, index, axis=1)
        run = jnp.take_along_axis(self.run, self.index, axis=1).reshape(theirs.shape)
        theirs, inside, run = theirs[:, :, None], inside[:, :, None], run[:, :, None]
        ours, mine = ours[..., None], mine[..., None]
        self.seen = inside & (run == mine) & (theirs <= ours) & (ours - theirs < self.window)

    def cut(self, x: jax.Array) -> jax.Array:
        """Divide the query tokens x [B, T, ...] into N blocks of C tokens, [B, N, C, ...]; the last block is
        padded with the last token.
        """
        missing = -self.length % self.size
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode="edge")
        return x.reshape(len(x), -1, self.size, *x.shape[2:])

    def joined(self, x: jax.Array) -> jax.Array:
        """Join blocks of C tokens [B, N, C, ...] to rows [B, T, ...], without the padding of the last block."""
        return x.reshape(len(x), -1, *x.shape[3:])[:, : self.length]

    def take(self, x: jax.Array) -> jax.Array:
        """Return, of x [B, W + T, ...] (the last W tokens before a call, and the call's T tokens), the tokens
        to which each block of C query tokens may attend: [B, N, W + C - 1, ...].
        """
        taken = jnp.take_along_axis(x, self.index.reshape(*self.index.shape, *[1] * (x.ndim - 2)), axis=1)  # fmt: skip
        return taken.reshape(len(x), -1, self.window + self.size - 1, *x.shape[2:])

    def state(self, linear: ops.LinearState) -> LolcatsState:
        """Return the state after the call: that of the linear attention (`linear`), and the keys and values of the last
        window of tokens in each row's last document.
        """
        place = jnp.arange(self.run.shape[1])
        mine = self.written & (self.run == self.run[:, -1:])
        last = jax.lax.top_k(jnp.where(mine, place, -1), self.window)[0][:, ::-1]
        index = jnp.maximum(last, 0)[..., None, None]
        keys, values = (
            jnp.where(last[..., None, None] >= 0, jnp.take_along_axis(x, index, axis=1), 0).astype(before.dtype)
            for x, before in ((self.keys, self.before.keys), (self.values, self.before.values))
        )  # fmt: skip
        held = jnp.sum(last >= 0, axis=1, dtype=jnp.int32)
        return LolcatsState(linear, keys, values, held)


def _features(learned: HeadDense, x: jax.Array) -> jax.Array:
    """Return LoLCATs' features [B, T, H, 2 F] of queries or keys x [B, T, H, K]: with y = x W, the softmax of
    y and the softmax of -y, and no feature below a small positive number.
    """
    y = learned(x)
    both = [jax.nn.softmax(y, axis=-1), jax.nn.softmax(-y, axis=-1)]
    return jnp.maximum(jnp.concatenate(both, axis=-1), _LEAST_FEATURE)


METHOD = Method(
    name="lolcats",
    paper="arXiv 2410.10254",
    op="linear_memory",
    gate="1",
    write="φ(k)ᵀ v, φ learned, and k, v into a window",
    read="φ(q) M beyond the window and γ softmax(q Kᵀ) V in it, over one sum of weights",
    state="2 F × (V + 1) a key head for F columns of φ; k and v of a window",
    config=LolcatsConfig,
    module=Lolcats,
)
