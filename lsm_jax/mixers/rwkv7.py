"""RWKV7 (arXiv 2503.14456): `M_t = (diag(w_t) - (κ_t ⊙ a_t)ᵀ κ_t) M_{t-1} + k̃_tᵀ v_t`, κ of unit length.

w is the decay of each key channel, κ the key that is removed, a the fraction of it that is removed, and k̃
the key that is added.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, TokenShift
from lsm_jax.mixers.layers import (
    HeadNorm,
    OrthogonalDense,
    merge_heads,
    narrow_gradient,
    parameter,
    split_heads,
)
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.normed_product import apart_from_bias
from lsm_jax.mixers.op_config import RecurrentConfig
from lsm_jax.ops.core.saved import convolved, saved
from lsm_jax.ops.rwkv7.xla import RWKV7Gates
from lsm_jax.parallel import shards_of

_MIXED = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""The inputs that mix in the token before, and the power with which the initial share of each falls along the channels."""


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class RWKV7Config(RecurrentConfig):
    """The config of an RWKV7 layer: a memory whose transition is a diagonal decay plus a rank-one removal.

    Attributes:
        head_dim: number of key and of value channels of a head; there are hidden_size / head_dim heads.
        decay_rank: inner width of the decay's two matrices; None is the published 2.5 √hidden_size (for heads
            of 64), rounded to a multiple of 32.
        rate_rank: inner width of the two matrices of the in-context rate a; None means the default of
            `decay_rank`.
        value_rank: inner width of the two matrices of the weight with which the first layer's values are
            mixed in; None means 1.7 √hidden_size, rounded to a multiple of 32.
        gate_rank: inner width of the output gate's two matrices; None means 5 √hidden_size, rounded to a
            multiple of 32.
        norm_eps: epsilon of the norm over each head's output, published as head_dim · 1e-5.
        output_bias: whether the last projection has a bias; the published models have none.
    """

    head_dim: int = 64
    decay_rank: int | None = None
    rate_rank: int | None = None
    value_rank: int | None = None
    gate_rank: int | None = None
    norm_eps: float = 64e-5
    output_bias: bool = False

    @classmethod
    def for_width(cls, hidden_size: int) -> RWKV7Config:
        """Return the config of RWKV7 for a model of width `hidden_size`, with the published proportions: heads of 64
        channels, smaller ones below width 256.
        """
        head_dim = min(64, hidden_size // 4)
        return cls(head_dim=head_dim, norm_eps=head_dim * 1e-5)

    def ranks(self, hidden_size: int) -> dict[str, int]:
        """Return the inner widths of RWKV7's low-rank functions by letter: w the decay, a the rate of removal, v the
        mix with the first layer's values, g the output gate.
        """

        def published(factor: float) -> int:
            return max(32, 32 * round(factor * math.sqrt(hidden_size) / 32))

        by_head = self.head_dim / 64
        default = dict(w=2.5 * by_head, a=2.5 * by_head, v=1.7 * by_head, g=5.0)
        given = dict(w=self.decay_rank, a=self.rate_rank, v=self.value_rank, g=self.gate_rank)
        return {n: published(default[n]) if r is None else r for n, r in given.items()}

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of RWKV7 is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.divides(self, "head_dim", self.head_dim, "hidden_size", hidden_size)
        if self.head_dim < 2:
            raise ValueError(f"RWKV7Config.head_dim={self.head_dim}: it must be at least 2")
        checks.positive(self, norm_eps=self.norm_eps)
        for name in ("decay_rank", "rate_rank", "value_rank", "gate_rank"):
            if getattr(self, name) is not None:
                checks.positive(self, **{name: getattr(self, name)})

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and low-rank
        parts, and per head K V to decay the memory, 4 K V for the read and the write of the removal, and 2 K
        V each to write and to read.
        """
        low_rank = 4.0 * hidden_size * sum(self.ranks(hidden_size).values())
        return 8.0 * hidden_size**2 + low_rank + 9 * hidden_size * self.head_dim


class LowRank(nnx.Module):
    """RWKV7's low-rank function of a token, `f(x A) B (+ b)`, for its decay, rate, value mix or gate: A [D, rank]
    starts at zero, and f is an activation or the identity.
    """

    def __init__(
        self,
        size: int,
        rank: int,
        bias: jax.Array | None,
        activation: Callable | None,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.down = OrthogonalDense(size, rank, gain=0, axes=("embed", None), rngs=rngs)
        self.up = OrthogonalDense(rank, size, gain=0.1, axes=(None, "heads"), rngs=rngs, bias=bias)

    def __call__(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """Return the low-rank function `f(x A) B (+ b)` of tokens x [B, T, D], [B, T, D] in `dtype` (None is x's)."""
        return self.up(self._inner(x), dtype=dtype)

    def apart_from_bias(self, x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
        """Return the low-rank function of tokens x [B, T, D] in `dtype`, and the bias [D] that must still be added to it, or None."""
        return apart_from_bias(self.up, self._inner(x), dtype)

    def _inner(self, x: jax.Array) -> jax.Array:
        inner = self.down(x)
        return inner if self.activation is None else self.activation(inner)


class RWKV7(Mixer):
    """The layer of RWKV7: a mixer that maps [B, T, D] to [B, T, D]; `RWKV7Config` says what its options mean.

    Initial parameters are RWKV7's: `init_std` is not used.
    """

    op = ops.dplr_memory
    uses_depth = True
    memory_parts = ("k_proj", "v_proj", "decay", "rate")
    shared_by_token = ("v_first",)

    def __init__(
        self,
        config: RWKV7Config,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
        layer: jax.Array | int = 0,
        num_layers: int = 1,
    ):
        super().__init__(config, hidden_size)
        self.num_heads = hidden_size // config.head_dim
        deep = layer / max(1, num_layers - 1)  # from 0 to 1
        ahead = 1 - layer / num_layers  # from 1 to nearly 0
        channel = jnp.arange(hidden_size, dtype=jnp.float32)
        line = channel / max(1, hidden_size - 1)
        zigzag = 2 * (channel % config.head_dim) / (config.head_dim - 1) - 1
        zigzag, centred = zigzag * jnp.abs(zigzag), line - 0.5

        self.shift = TokenShift("shift", hidden_size)
        powers = jnp.array(list(_MIXED.values()), jnp.float32)[:, None] * ahead
        self.mix = parameter(
            1 - (channel / hidden_size) ** powers, (None, "embed"), weight_decay=False
        )
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        self.removal = parameter(0.71 - 0.1 * centred, **fixed)
        self.rate_of_key = parameter(jnp.full(hidden_size, 1.02, jnp.float32), **fixed)
        bonus = jnp.full((self.num_heads, config.head_dim), -0.04, jnp.float32)
        self.bonus = parameter(bonus, ("heads", None), weight_decay=False)
        into = dict(axes=("embed", "heads"), rngs=rngs)
        self.r_proj = OrthogonalDense(hidden_size, hidden_size, gain=1.0, **into)
        self.k_proj = OrthogonalDense(hidden_size, hidden_size, gain=0.1, **into)
        self.v_proj = OrthogonalDense(hidden_size, hidden_size, gain=1.0, **into)
        ranks = config.ranks(hidden_size)
        decay = -5.5 + 6 * line ** (1 + deep**0.3) + 2.5 * zigzag
        rate = -0.19 + 0.3 * zigzag + 0.4 * centred
        self.decay = LowRank(hidden_size, ranks["w"], decay, jnp.tanh, rngs)
        self.rate = LowRank(hidden_size, ranks["a"], rate, None, rngs)
        self.first = LowRank(hidden_size, ranks["v"], 0.73 - 0.4 * centred, None, rngs)
        self.gate = LowRank(hidden_size, ranks["g"], None, jax.nn.sigmoid, rngs)
        scale = ((layer + 1) / num_layers) ** 0.7
        self.norm = HeadNorm(self.num_heads, config.head_dim, eps=config.norm_eps, scale=scale)
        bias = jnp.zeros(hidden_size, jnp.float32) if config.output_bias else None
        self.o_proj = OrthogonalDense(
            hidden_size, hidden_size, gain=0, axes=("heads", "embed"), rngs=rngs, bias=bias
        )

    @classmethod
    def init_shared(cls, x: jax.Array, stacks: list[tuple[jax.Array, Any]]) -> dict[str, jax.Array]:
        """Return the entries of `shared` through which RWKV7's layers receive the values of the first RWKV7
        layer: these values, [B, T, D], zeros until that layer sets them, and the index of that layer.
        """
        first = jnp.min(jnp.concatenate([layers for layers, _ in stacks]))
        return {"v_first": jnp.zeros_like(x), "v_first_layer": first}

    def _mixed(self, x: jax.Array, context: Context) -> tuple[dict[str, jax.Array], Context]:
        """Return tokens x [B, T, D], each interpolated with the token before it by learned weights of each channel, once for each
        projection, by the projection's letter (r, w, k, v, a, g); and the context, in which the result is saved, so that one
        call computes it once.
        """
        if "mixed" not in context.saved:
            # Otherwise XLA computes the norm before the layer, and its gradient, in the passes of the mixes.
            x = convolved(jax.lax.optimization_barrier(x))
            fresh = self.shift.name not in context.tails
            before, context = self.shift(x, context)
            if fresh and self.in_rows(context):
                before = None  # its gradient is then part of the pass of x's
            names, twice = list(_MIXED), ()
            if "v_first" in context.shared:
                # The product of the values' share reads a copy of the values' mix.
                names, twice = [*names, "first"], (names.index("v"),)
            mixes = ops.token_mixes(x, before, self.mix[...], twice=twice)
            mixed = dict(zip(names, mixes, strict=True))
            context = context.add(saved={"mixed": mixed})
        return context.saved["mixed"], context

    @staticmethod
    def in_rows(context: Context) -> bool:
        """Return whether the token before each one of a call without a state is the one before it in its row."""
        whole = context.segment_ids is None and context.update_mask is None
        return whole and shards_of("sequence") == 1

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], which are the receptance r: a projection of
        x mixed with the token before; and the context.
        """
        gates, _, context = self._gates(x, context)
        return gates.r, context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `dplr_memory` that update the memory, by name, and the context: the keys to add, the
        values, the vectors a and b [B, T, H, K] of the rank-one removal aᵀ b, and the log decay of each key channel.
        """
        gates, v, context = self._gates(x, context)
        written = dict(k=gates.k, v=v, a=gates.a, b=gates.b, log_decay=gates.log_decay)
        return written, context.add(bypass={"current": gates.current})

    def _gates(self, x: jax.Array, context: Context) -> tuple[RWKV7Gates, jax.Array, Context]:
        """Return the results of `rwkv7_gates` and the values [B, T, H, K] for tokens x [B, T, D], and the context, in which
        both are saved, so that one call computes them once.
        """
        if "gates" not in context.saved:
            mixed, context = self._mixed(x, context)
            v, context = self._values(mixed, context)
            wide = jnp.promote_types(x.dtype, jnp.float32)

            def heads(a):
                return split_heads(a, self.num_heads)

            def by_head(a):
                return a.reshape(self.num_heads, -1)

            v = heads(v)
            r, k = heads(self.r_proj(mixed["r"])), heads(self.k_proj(mixed["k"]))
            rate, rate_bias = self.rate.apart_from_bias(mixed["a"], wide)
            decay, decay_bias = self.decay.apart_from_bias(mixed["w"], wide)
            gates = ops.rwkv7_gates(
                r,
                k,
                v,
                heads(rate),
                heads(decay),
                removal=by_head(self.removal[...]),
                rate_of_key=by_head(self.rate_of_key[...]),
                bonus=self.bonus[...],
                rate_bias=None if rate_bias is None else by_head(rate_bias),
                decay_bias=None if decay_bias is None else by_head(decay_bias),
            )
            context = context.add(saved={"gates": (gates, v)})
        return *context.saved["gates"], context

    def _values(self, mixed: dict[str, jax.Array], context: Context) -> tuple[jax.Array, Context]:
        """Return the values [B, T, D] of tokens that are already interpolated with the token before, given by letter, and the context.
        In later layers of a model the values are mixed with those of the model's first RWKV7 layer.
        """
        v = self.v_proj(mixed["v"])
        if "v_first" not in context.shared:
            return v, context
        is_first = context.layer == context.shared["v_first_layer"]
        first = jnp.where(is_first, v, context.shared["v_first"])
        share = narrow_gradient(self.first(mixed["first"], jnp.float32), v.dtype)
        share = jax.nn.sigmoid(share).astype(v.dtype)
        # One array a layer, so that the backward pass does not mix them again.
        v = saved(v + (first - v) * share)
        return v, context.add(shared={"v_first": first})

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, add the token's value weighted by its receptance and key, multiply by the gate, and project.
        """
        mixed, context = self._mixed(x, context)
        gate = split_heads(self.gate(mixed["g"]), self.num_heads)
        scale, bias = self.norm.scale, self.norm.bias
        assert bias is not None  # `HeadNorm` has one by default
        y = ops.rwkv7_output(
            o,
            context.bypass["current"],
            gate,
            scale=scale[...],
            bias=bias[...],
            eps=self.norm.eps,
        )
        return self.o_proj(merge_heads(y)), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `dplr_memory` that do not depend on the input; the scale is 1, so that
        queries are not scaled.
        """
        return dict(super().options(), scale=1.0)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.DeltaState:
        """Return the state before any token: a memory of zeros [B, H, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        head_dim = self.config.head_dim
        return ops.delta_state(batch_size, self.num_heads, head_dim, head_dim)


METHOD = Method(
    name="rwkv7",
    paper="arXiv 2503.14456",
    op="dplr_memory",
    gate="diag(w) - (κ ⊙ a)ᵀ κ; w each key channel in (0.545, 1), a each key channel",
    write="k̃ᵀ v",
    read="r M, and r · k̃ times v of this token",
    state="K × V a head; a token",
    config=RWKV7Config,
    module=RWKV7,
    feedforward="rwkv7_channel_mix",
)
