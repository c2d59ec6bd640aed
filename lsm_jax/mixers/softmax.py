"""Softmax attention (arXiv 1706.03762) with rotary positions or none, grouped queries (arXiv 2305.13245) and
an optional window of the last tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.layers import (
    Dense,
    RMSNorm,
    RopeScaling,
    merge_heads,
    rotate,
    split_heads,
)
from lsm_jax.mixers.method import Method
from lsm_jax.ops.core.saved import saved


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class SoftmaxConfig:
    """The config of a softmax attention layer, over all earlier tokens of a document or a window of them.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of `num_heads`; None is `num_heads`.
        head_dim: number of channels of a head, an even number with rotary positions; None is hidden_size /
            num_heads.
        window: number of tokens that a query attends to, itself included; None means all.
        qk_norm: whether queries and keys are RMS-normalised, with learned scales, before the rotation.
        qk_norm_joint: whether the norms of queries and of keys are over the channels of all heads together, as in OLMo 2.
        qkv_bias: whether the projections to queries, keys and values have biases.
        output_bias: whether the projection of the output has a bias, as in Griffin.
        rope_base: base of the rotary embedding; None means no rotary embedding.
        rope_scaling: a reduction of the rotation's frequencies, or None.
        rotary_dim: number of channels of a head that are rotated, the first ones, an even number; None is all.
        scale: multiplies the scores; None is the inverse square root of the channels of a head.
        norm_eps: epsilon of the norms of queries and keys.
        implementation: attention's backend; None lets the op select.
    """

    num_heads: int = 16
    num_kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    qk_norm: bool = False
    qk_norm_joint: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    rope_base: float | None = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    scale: float | None = None
    norm_eps: float = 1e-6
    implementation: str | None = None

    @classmethod
    def for_width(cls, hidden_size: int) -> SoftmaxConfig:
        """Return the config of softmax attention for a model of width `hidden_size`, with the customary proportions:
        heads of 64 channels up to width 1024, of 128 beyond.
        """
        head_dim = min(128 if hidden_size > 1024 else 64, hidden_size // 4)
        return cls(num_heads=hidden_size // head_dim)

    def kv_heads(self) -> int:
        """Return the number of heads of keys and values, each of which several query heads may share: `num_kv_heads`,
        or `num_heads` if that is None.
        """
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def dim(self, hidden_size: int) -> int:
        """Return the number of channels of one head: `head_dim`, or `hidden_size / num_heads` if that is None."""
        return hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of softmax attention is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        checks.fields(self)
        if self.head_dim is None:
            checks.divides(self, "num_heads", self.num_heads, "hidden_size", hidden_size)
        else:
            checks.positive(self, num_heads=self.num_heads, head_dim=self.head_dim)
        if self.rope_base is not None:
            checks.positive(self, rope_base=self.rope_base)
        if self.rope_base is not None and self.rotary_dim is None and self.dim(hidden_size) % 2:
            raise ValueError(
                f"{type(self).__name__}: heads of {self.dim(hidden_size)} channels; rotation needs an even number (rope_base=None rotates nothing)"
            )
        if self.rope_scaling is not None:
            self._check_scaling(self.rope_scaling)
        if self.rotary_dim is not None:
            self._check_rotated(self.rotary_dim, self.dim(hidden_size))
        checks.divides(self, "num_kv_heads", self.kv_heads(), "num_heads", self.num_heads)
        if self.scale is not None:
            checks.positive(self, scale=self.scale)
        if self.qk_norm_joint and (type(self) is not SoftmaxConfig or not self.qk_norm):
            raise ValueError(
                f"{type(self).__name__}.qk_norm_joint=True: accepted in a SoftmaxConfig with qk_norm=True"
            )
        if self.output_bias and type(self) is not SoftmaxConfig:
            raise ValueError(f"{type(self).__name__}.output_bias=True: accepted in a SoftmaxConfig")
        if self.window is not None:
            checks.positive(self, window=self.window)
        checks.positive(self, norm_eps=self.norm_eps)

    def _check_rotated(self, channels: int, head_dim: int) -> None:
        if self.rope_base is None:
            raise ValueError(
                f"{type(self).__name__}.rotary_dim={channels}: without a rope_base no channel is rotated; accepted is rotary_dim=None"
            )
        if channels % 2 or not 2 <= channels <= head_dim:
            raise ValueError(
                f"{type(self).__name__}.rotary_dim={channels}: accepted are even numbers from 2 to the {head_dim} channels of a head"
            )

    def _check_scaling(self, scaling: RopeScaling) -> None:
        if self.rope_base is None:
            raise ValueError(
                f"{type(self).__name__}.rope_scaling={scaling}: without a rope_base no position is rotated; accepted is rope_scaling=None"
            )
        checks.fields(scaling)
        checks.one_of(scaling, "kind", scaling.kind, ("linear", "llama3"))
        checks.positive(
            scaling,
            low_freq_factor=scaling.low_freq_factor,
            original_length=scaling.original_length,
        )
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if scaling.factor < 1 or high <= low:
            raise ValueError(
                f"{type(self).__name__}.rope_scaling: factor={scaling.factor}, low_freq_factor={low}, high_freq_factor={high}; "
                "accepted are a factor from 1 on, and high over low"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and the scores
        and weighted sums over the keys that a query attends to on average.
        """
        dim, heads, kv_heads = self.dim(hidden_size), self.num_heads, self.kv_heads()
        window = seq_len if self.window is None else min(self.window, seq_len)
        seen = window - window * (window - 1) / (2 * seq_len)
        return 4.0 * hidden_size * dim * (heads + kv_heads) + 4 * seen * heads * dim


class Softmax(Mixer):
    """The layer of softmax attention: a mixer that maps [B, T, D] to [B, T, D]; `SoftmaxConfig` says what its options
    mean.
    """

    single_because = "it stores the keys and values of all tokens, of which no memory is chosen"
    op = ops.attention
    uses_positions = True
    forget_heads: int | None = None

    def __init__(
        self, config: SoftmaxConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.head_dim = config.dim(hidden_size)
        queries, keys = config.num_heads * self.head_dim, config.kv_heads() * self.head_dim
        into: dict[str, Any] = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, queries, bias=config.qkv_bias, **into)
        self.k_proj = Dense(hidden_size, keys, bias=config.qkv_bias, **into)
        self.v_proj = Dense(hidden_size, keys, bias=config.qkv_bias, **into)
        self.q_norm = self._norm(queries) if config.qk_norm else None
        self.k_norm = self._norm(keys) if config.qk_norm else None
        out: dict[str, Any] = into | dict(axes=("heads", "embed"), bias=config.output_bias)
        self.o_proj = Dense(queries, hidden_size, **out)

    def _norm(self, channels: int) -> RMSNorm:
        """Return the norm of queries or keys, which have `channels` channels in all heads."""
        config = self.config
        if config.qk_norm_joint:
            return RMSNorm(channels, eps=config.norm_eps, axis="heads")
        return RMSNorm(self.head_dim, eps=config.norm_eps)

    def _rotated(self, x: jax.Array, norm: RMSNorm | None, context: Context) -> jax.Array:
        config = self.config
        if norm is not None:
            x = norm(merge_heads(x)).reshape(x.shape) if config.qk_norm_joint else norm(x)
        if config.rope_base is None:
            return x
        return rotate(
            x,
            context.positions,
            base=config.rope_base,
            scaling=config.rope_scaling,
            channels=config.rotary_dim,
        )

    def _placed(self, x: jax.Array, norm: RMSNorm | None, context: Context) -> jax.Array:
        """Return what `_rotated` returns; rotated only, it is saved for the backward pass instead of x, which that pass needs for
        nothing but to rotate it again."""
        y = self._rotated(x, norm, context)
        return saved(y) if norm is None and self.config.rope_base is not None else y

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], normalised and rotated by their positions where the
        config says so, and the context.
        """
        q = split_heads(self.q_proj(x), self.config.num_heads)
        return self._placed(q, self.q_norm, context), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `attention` that update the memory, by name, and the context: keys [B, T, G, K],
        normalised and rotated by their positions where the config says so, and values [B, T, G, K].
        """
        heads = self.config.kv_heads()
        keys, context = self.keys(x, context)
        values, context = self.values(x, context)
        k = self._placed(split_heads(keys, heads), self.k_norm, context)
        return dict(k=k, v=split_heads(values, heads)), context

    def keys(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the keys [B, T, G * K] of tokens x [B, T, D] before norm and rotation, with the heads side by side."""
        return self.k_proj(x), context

    def values(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the values [B, T, G * K] of tokens x [B, T, D], with the heads side by side."""
        return self.v_proj(x), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: project the heads
        together.
        """
        return self.o_proj(merge_heads(o)), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `attention` that do not depend on the input: the window, the scale, and the names
        of backends.
        """
        config = self.config
        return dict(window=config.window, scale=config.scale, implementation=config.implementation)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.AttentionState:
        """Return an empty state with capacity for `max_length` keys and values, or for those of the window."""
        capacity = max_length if self.config.window is None else self.config.window
        return ops.attention_state(
            batch_size,
            capacity,
            self.config.kv_heads(),
            self.head_dim,
            self.head_dim,
            forget_heads=self.forget_heads,
            dtype=dtype,
        )


METHOD = Method(
    name="softmax",
    paper="arXiv 1706.03762",
    op="attention",
    gate="none: keys and values are stored",
    write="k, v",
    read="softmax(q Kᵀ) V",
    state="k and v of every token, or of a window",
    forms=(),
    config=SoftmaxConfig,
    module=Softmax,
    note="the memory grows with the sequence: no other forms",
)
