"""FoX's attention (the Forgetting Transformer, arXiv 2503.02130): softmax attention whose weights are scaled
down by forget gates.

A key's weight is multiplied by the gates of all later tokens up to the query's, so that no positions are
needed. The Pro block also mixes keys and values with those of the token before, normalises queries and keys,
and norms and gates the output; every part is a switch, and without gate and parts it is plain attention.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, TokenShift
from lsm_jax.mixers.layers import (
    Dense,
    RMSNorm,
    merge_heads,
    parameter,
    recomputed,
    split_heads,
)
from lsm_jax.mixers.lightning import alibi_slopes
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.softmax import Softmax, SoftmaxConfig

FORGET_GATES = ("data_dependent", "data_independent", "fixed", "alibi", "none")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class FoXConfig(SoftmaxConfig):
    """The config of FoX: the fields of softmax attention, with `rope_base` None by default, and the parts of
    the Pro block, all on by default.

    Attributes:
        forget_gate: "data_dependent", sigmoid(x W + b) for each query head; "data_independent", the sigmoid
            of a learned number per head; "fixed", the same but not learned; "alibi", constant at ALiBi's
            slopes; "none".
        decay_time_min: -1 / log f of the first head's gate f: of a "fixed" gate, or of the initial value of a
            "data_independent" one. None means an initial f of 1/2.
        decay_time_max: the same for the last head; the logarithms of the other heads' numbers are spaced
            evenly between the two.
        qk_norm_per_head: each head has learned scales in the norms of queries and keys; otherwise all heads
            share one.
        key_shift: whether each key becomes `a k_before + (1 - a) k`, with one a = sigmoid(x W) per head.
        value_shift: the same for values, with separate a.
        output_norm: whether each head's output is RMS-normalised, with scales for each head.
        output_norm_eps: epsilon of that norm.
        output_gate: whether each channel of the output is multiplied by sigmoid(x W).
        prune: whether fused kernels skip keys whose weights are negligible because of the gates.
    """

    rope_base: float | None = None
    qk_norm: bool = True
    norm_eps: float = 1e-5
    forget_gate: str = "data_dependent"
    decay_time_min: float | None = None
    decay_time_max: float | None = None
    qk_norm_per_head: bool = False
    key_shift: bool = True
    value_shift: bool = True
    output_norm: bool = True
    output_norm_eps: float = 1e-6
    output_gate: bool = True
    prune: bool = True

    @classmethod
    def for_width(cls, hidden_size: int) -> FoXConfig:
        """Return the config of forgetting attention for a model of width `hidden_size`, with the Pro block, with heads
        of 64 channels and at least four heads.
        """
        return cls(num_heads=hidden_size // min(64, hidden_size // 4))

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of forgetting attention is not accepted, or does not fit a model
        of width `hidden_size`.
        """
        super().validate(hidden_size)
        checks.one_of(self, "forget_gate", self.forget_gate, FORGET_GATES)
        checks.positive(self, output_norm_eps=self.output_norm_eps)
        low, high = self.decay_time_min, self.decay_time_max
        given = f"FoXConfig.decay_time_min={low}, decay_time_max={high}"
        if (low is None) != (high is None):
            raise ValueError(f"{given}: accepted are two numbers, or None for both fields")
        if low is None or high is None:
            if self.forget_gate == "fixed":
                raise ValueError(
                    f"{given}: accepted with forget_gate='fixed' are two numbers, not None"
                )
        elif self.forget_gate not in ("fixed", "data_independent"):
            raise ValueError(
                f"{given}: forget_gate={self.forget_gate!r} does not use decay times; accepted is None for both fields"
            )
        elif not 0 < low <= high:
            raise ValueError(f"{given}: accepted are 0 < decay_time_min <= decay_time_max")

    def decay_times(self) -> list[float] | None:
        """Return each head's decay time -1 / log f in tokens, where f is the head's fixed or initial forget
        gate; None if the config sets no decay times.
        """
        if self.decay_time_min is None or self.decay_time_max is None:
            return None
        low, high = math.log(self.decay_time_min), math.log(self.decay_time_max)
        last = max(1, self.num_heads - 1)
        return [math.exp(low + (high - low) * h / last) for h in range(self.num_heads)]

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: softmax attention, the gates
        and shifts of each head, and the output gate.
        """
        heads, shifted = self.num_heads, self.key_shift + self.value_shift
        projected = heads * (self.forget_gate == "data_dependent") + self.kv_heads() * shifted
        projected += heads * self.dim(hidden_size) * self.output_gate
        mixing = 3.0 * shifted * self.kv_heads() * self.dim(hidden_size)
        return (
            super().flops_per_token(hidden_size, seq_len) + 2.0 * hidden_size * projected + mixing
        )


class FoX(Softmax):
    """The layer of forgetting attention, a mixer that maps [B, T, D] to [B, T, D]; `FoXConfig` says what its options
    mean. Learned biases start at 0, so that a gate that depends on the token starts near 1/2.
    """

    config: FoXConfig

    def __init__(
        self, config: FoXConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        heads, kv_heads, dim = config.num_heads, config.kv_heads(), self.head_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        if config.qk_norm and config.qk_norm_per_head:
            self.q_norm = RMSNorm(dim, eps=config.norm_eps, num_heads=heads)
            self.k_norm = RMSNorm(dim, eps=config.norm_eps, num_heads=kv_heads)
        shift = config.key_shift, config.value_shift
        self.k_before, self.v_before = (
            TokenShift(f"{name}_shift", kv_heads * dim) if on else None
            for name, on in zip("kv", shift, strict=True)
        )
        self.k_shift, self.v_shift = (
            Dense(hidden_size, kv_heads, **into) if on else None for on in shift
        )
        self.forget_heads = None if config.forget_gate == "none" else heads
        kind = config.forget_gate
        self.f_proj = (
            Dense(hidden_size, heads, bias=True, **into) if kind == "data_dependent" else None
        )
        self.f_bias = self._first_bias() if kind == "data_independent" else None
        normed = dict(eps=config.output_norm_eps, num_heads=heads)
        self.norm = RMSNorm(dim, **normed) if config.output_norm else None
        self.g_proj = Dense(hidden_size, heads * dim, **into) if config.output_gate else None

    def _first_bias(self) -> nnx.Param:
        times = self.config.decay_times()
        start = [0.0] * self.config.num_heads
        if times is not None:  # log sigmoid(b) = -1 / t
            start = [-1 / t - math.log(-math.expm1(-1 / t)) for t in times]
        return parameter(jnp.array(start), ("heads",), weight_decay=False)

    def log_forget(self, x: jax.Array) -> jax.Array | None:
        """Return the logarithm of each head's forget gate for tokens x [B, T, D], in float32: [B, T, H], or
        [H] if the gate is constant in time, or None without gates.
        """
        if self.f_proj is not None:
            return jax.nn.log_sigmoid(self.f_proj(x, dtype=jnp.promote_types(x.dtype, jnp.float32)))
        if self.f_bias is not None:
            return jax.nn.log_sigmoid(self.f_bias[...])
        if self.config.forget_gate == "alibi":
            return -jnp.array(alibi_slopes(self.config.num_heads), jnp.float32)
        times = self.config.decay_times()
        return None if times is None else -1 / jnp.array(times, jnp.float32)

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `attention` that update the memory, by name, and the context: keys, values, and the
        log forget gates of each head.
        """
        written, context = super().write(x, context)
        return dict(written, log_forget=self.log_forget(x)), context

    def keys(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the keys of tokens x [B, T, D], [B, T, G * K] with the heads side by side, each mixed with the keys of
        the token before if the config says so.
        """
        keys, context = super().keys(x, context)
        return self._mixed(keys, x, self.k_shift, self.k_before, context)

    def values(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the values of tokens x [B, T, D], [B, T, G * K] with the heads side by side, each mixed with the
        values of the token before if the config says so.
        """
        values, context = super().values(x, context)
        return self._mixed(values, x, self.v_shift, self.v_before, context)

    def _mixed(
        self,
        y: jax.Array,
        x: jax.Array,
        share: Dense | None,
        before: TokenShift | None,
        context: Context,
    ) -> tuple[jax.Array, Context]:
        if share is None or before is None:
            return y, context
        wide = jnp.promote_types(x.dtype, jnp.float32)
        heads = self.config.kv_heads()

        @recomputed
        def mixed(own, earlier, a):
            own, earlier = (split_heads(z.astype(wide), heads) for z in (own, earlier))
            a = jax.nn.sigmoid(a)[..., None]
            return merge_heads(a * earlier + (1 - a) * own).astype(y.dtype)

        earlier, context = before(y, context)
        return mixed(y, earlier, share(x, dtype=wide)), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head and multiply by the gate sigmoid(x W_g), if the config has them, and project.
        """
        y = merge_heads(o if self.norm is None else self.norm(o))
        return self.o_proj(
            y if self.g_proj is None else y * jax.nn.sigmoid(self.g_proj(x))
        ), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `attention` that do not depend on the input: those of softmax attention, and
        whether to prune.
        """
        return dict(super().options(), prune=self.config.prune)


METHOD = Method(
    name="fox",
    paper="arXiv 2503.02130",
    op="attention",
    gate="sigmoid(x W + b), each head, on attention weights; or constant (ALiBi), or none",
    write="k, v, each mixed with the token before",
    read="softmax(q Kᵀ + sums of log gates) V",
    state="k, v and the gates' sum of every token, or of a window; a token of k, v",
    forms=(),
    config=FoXConfig,
    module=FoX,
    note="the memory grows with the sequence: no other forms",
)
