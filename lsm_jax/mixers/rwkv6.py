"""RWKV6 (arXiv 2404.05892): `o_t = r_t (M_{t-1} + diag(u) k_tᵀ v_t)`, then
`M_t = diag(w_t) M_{t-1} + k_tᵀ v_t`.

All projections read an interpolation of the token and the token before it, with weights that depend on the
token.
"""

from __future__ import annotations

import dataclasses
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
    matmul_to_float32,
    merge_heads,
    parameter,
    split_heads,
)
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig

_MIXED = ("w", "k", "v", "r", "g")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class RWKV6Config(RecurrentConfig):
    """The config of an RWKV6 layer: linear attention with a decay for each key channel and token, and a bonus for the
    present token.

    Attributes:
        head_dim: number of key and of value channels of a head; there are hidden_size / head_dim heads.
        mix_rank: inner width of the low-rank part of each of the five interpolation weights.
        decay_rank: inner width of the decay's low-rank part.
        norm_eps: epsilon of the norm over each head's output.
    """

    head_dim: int = 64
    mix_rank: int = 32
    decay_rank: int = 64
    norm_eps: float = 64e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> RWKV6Config:
        """Return the config of RWKV6 for a model of width `hidden_size`, with the published proportions: heads of 64
        channels, smaller ones below width 256; ranks of 32 and 64, smaller ones below width 512.
        """
        return cls(
            head_dim=min(64, hidden_size // 4),
            mix_rank=min(32, hidden_size // 16),
            decay_rank=min(64, hidden_size // 8),
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of RWKV6 is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.divides(self, "head_dim", self.head_dim, "hidden_size", hidden_size)
        checks.positive(
            self, mix_rank=self.mix_rank, decay_rank=self.decay_rank, norm_eps=self.norm_eps
        )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and low-rank
        parts, and per head K V to decay the memory, 2 K V each to write and to read, and 5 K for the bonus.
        """
        low_rank = 4.0 * hidden_size * (len(_MIXED) * self.mix_rank + self.decay_rank)
        return 10.0 * hidden_size**2 + low_rank + 5 * hidden_size * (self.head_dim + 1)


class RWKV6(Mixer):
    """The layer of RWKV6, a mixer that maps [B, T, D] to [B, T, D]; `RWKV6Config` says what its options mean.

    Parameters start as in the published code (`init_std` is not used); as there, only the five projections have weight
    decay.
    """

    op = ops.linear_memory
    uses_depth = True
    memory_parts = ("k_proj", "v_proj")

    def __init__(
        self,
        config: RWKV6Config,
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
        place, line = channel / hidden_size, channel / max(1, hidden_size - 1)

        self.shift = TokenShift("shift", hidden_size)
        whole, half = 1 - place**ahead, 1 - place ** (0.5 * ahead)
        fixed = dict(weight_decay=False)
        self.mix_all = parameter(whole, ("embed",), **fixed)
        self.mix = parameter(
            jnp.stack([whole, whole, whole - 0.3 * deep, half, half]), (None, "embed"), **fixed
        )
        count, rank = len(_MIXED), config.mix_rank
        self.mix_down = parameter(jnp.zeros((hidden_size, count * rank)), ("embed", None), **fixed)
        self.mix_up = parameter(
            _small(rngs, count, rank, hidden_size), (None, None, "embed"), **fixed
        )
        self.decay_bias = parameter(-6 + 5 * line ** (0.7 + 1.3 * deep), ("heads",), **fixed)
        self.decay_down = parameter(
            jnp.zeros((hidden_size, config.decay_rank)), ("embed", None), **fixed
        )
        self.decay_up = parameter(
            _small(rngs, config.decay_rank, hidden_size), (None, "heads"), **fixed
        )
        bonus = deep * (1 - line) + 0.1 * ((channel + 1) % 3 - 1)
        self.bonus = parameter(
            bonus.reshape(self.num_heads, config.head_dim), ("heads", None), **fixed
        )
        shape, into = (hidden_size, hidden_size), dict(axes=("embed", "heads"), rngs=rngs)
        self.r_proj = OrthogonalDense(*shape, gain=1.0, **into)
        self.k_proj = OrthogonalDense(*shape, gain=0.1, **into)
        self.v_proj = OrthogonalDense(*shape, gain=1.0, **into)
        self.g_proj = OrthogonalDense(*shape, gain=0.1, **into)
        scale = ((layer + 1) / num_layers) ** 0.7
        self.norm = HeadNorm(self.num_heads, config.head_dim, eps=config.norm_eps, scale=scale)
        self.o_proj = OrthogonalDense(*shape, gain=0, axes=("heads", "embed"), rngs=rngs)

    def _mixed(self, x: jax.Array, context: Context) -> tuple[dict[str, jax.Array], Context]:
        """Return x [B, T, D] interpolated with the token before it, once for each of the five projections, by
        the projection's letter (the paper's ddlerp); and the context.
        """
        if "mixed" not in context.saved:
            before, context = self.shift(x, context)
            before = before - x
            blend = x + before * self.mix_all[...].astype(x.dtype)
            low = jnp.tanh(matmul_to_float32(blend, self.mix_down[...].astype(x.dtype)))
            mixed = {}
            for index, own in enumerate(jnp.split(low.astype(x.dtype), len(_MIXED), axis=-1)):
                up = matmul_to_float32(own, self.mix_up[...][index].astype(x.dtype))
                mixed[_MIXED[index]] = x + before * (self.mix[...][index] + up).astype(x.dtype)
            context = context.add(saved={"mixed": mixed})
        return context.saved["mixed"], context

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], which are the receptance r: a projection of x mixed
        with the token before, and the context.
        """
        mixed, context = self._mixed(x, context)
        return split_heads(self.r_proj(mixed["r"]), self.num_heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys and values [B,
        T, H, K], the log decay -exp(d) of each key channel [B, T, H, K], d a low-rank function of the token, and the
        bonus u.
        """
        mixed, context = self._mixed(x, context)
        down, up = (w[...].astype(x.dtype) for w in (self.decay_down, self.decay_up))
        low = jnp.tanh(matmul_to_float32(mixed["w"], down)).astype(x.dtype)
        rate = self.decay_bias[...] + matmul_to_float32(low, up)
        written = dict(
            k=split_heads(self.k_proj(mixed["k"]), self.num_heads),
            v=split_heads(self.v_proj(mixed["v"]), self.num_heads),
            log_decay=split_heads(-jnp.exp(rate), self.num_heads),
            bonus=self.bonus[...],
        )
        return written, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by silu(g), where g is a projection of x mixed with the token before, and project.
        """
        mixed, context = self._mixed(x, context)
        gate = jax.nn.silu(self.g_proj(mixed["g"]))
        return self.o_proj(merge_heads(self.norm(o)) * gate), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `linear_memory` that do not depend on the input; the scale is 1, so that
        queries are not scaled.
        """
        return dict(super().options(), scale=1.0)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        head_dim = self.config.head_dim
        return ops.linear_state(batch_size, self.num_heads, head_dim, head_dim)


def _small(rngs: nnx.Rngs, *shape: int) -> jax.Array:
    return jax.random.uniform(rngs.params(), shape, jnp.float32, -0.01, 0.01)


METHOD = Method(
    name="rwkv6",
    paper="arXiv 2404.05892",
    op="linear_memory",
    gate="exp(-exp(d)), d low-rank in the token, each key channel",
    write="kᵀ v",
    read="r (M before + diag(u) kᵀ v)",
    state="K × V a head; a token",
    config=RWKV6Config,
    module=RWKV6,
    feedforward="rwkv6_channel_mix",
)
