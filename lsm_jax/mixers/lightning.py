"""Lightning attention (TransNormerLLM, arXiv 2307.14995; Lightning Attention-2, arXiv 2401.04658):
`M_t = λ M_{t-1} + φ(k_t)ᵀ v_t`.

λ is a constant of head h and, in the published model, of layer l: `exp(-(8 h / H) (1 - l / L))`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig

DECAYS = ("depth", "alibi", "none")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class LightningConfig(RecurrentConfig):
    """The config of a Lightning attention layer: linear attention with a constant decay for each head and layer.

    Attributes:
        num_heads: number of heads.
        decay: each head's constant rate: "depth" is the published `(8 h / H) (1 - l / L)`, slower in higher layers; "alibi" the
            slopes `2^(-8 (h + 1) / H)` in every layer, as in Linear-MoE (arXiv 2503.05447, its code); "none" does not decay.
        qkv_bias: whether the projections to queries, keys, values and the output gate have biases, as in Linear-MoE.
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 8
    decay: str = "depth"
    qkv_bias: bool = False
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> LightningConfig:
        """Return the config of Lightning attention for a model of width `hidden_size`, with the published proportions:
        heads of 128 channels.
        """
        return cls(num_heads=hidden_size // min(128, hidden_size // 4))

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of Lightning attention is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        self.validate_fields()
        checks.divides(self, "num_heads", self.num_heads, "hidden_size", hidden_size)
        checks.one_of(self, "decay", self.decay, DECAYS)
        checks.positive(self, norm_eps=self.norm_eps)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and per head K
        V to decay the memory and 2 K V each to write and to read.
        """
        return 10.0 * hidden_size**2 + 5.0 * hidden_size**2 / self.num_heads


def alibi_slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slopes (arXiv 2108.12409), `2^(-8 (h + 1) / H)` for H a power of two. For other H: the
    slopes for the largest power of two below H, followed by every second slope for the next power of two.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return slopes + between[: num_heads - power]


class Lightning(Mixer):
    """The layer of Lightning attention: a mixer that maps [B, T, D] to [B, T, D]; `LightningConfig` says what its
    options mean.
    """

    op = ops.linear_memory
    uses_depth = True
    memory_parts = ("k_proj", "v_proj")
    token_parts = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        config: LightningConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
        layer: jax.Array | int = 0,
        num_layers: int = 1,
    ):
        super().__init__(config, hidden_size)
        self.num_layers = num_layers
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std, bias=config.qkv_bias)
        self.q_proj = Dense(hidden_size, hidden_size, **into)
        self.k_proj = Dense(hidden_size, hidden_size, **into)
        self.v_proj = Dense(hidden_size, hidden_size, **into)
        self.g_proj = Dense(hidden_size, hidden_size, **into)
        self.norm = RMSNorm(hidden_size // config.num_heads, eps=config.norm_eps)
        self.o_proj = Dense(
            hidden_size, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def log_decay(self, layer: jax.Array | int | None) -> jax.Array | None:
        """Return the log decay of each head, [H], in the layer with index `layer`, or in the first layer if
        that is None (outside a model). None if the config has no decay.
        """
        heads = self.config.num_heads
        if self.config.decay == "none":
            return None
        if self.config.decay == "alibi":
            return -jnp.array(alibi_slopes(heads), jnp.float32)
        depth = jnp.float32(0 if layer is None else layer) / self.num_layers
        return -8 / heads * (1 - depth) * jnp.arange(heads, dtype=jnp.float32)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], silu(x W_q) cut into heads, and the context."""
        return jax.nn.silu(split_heads(self.q_proj(x), self.config.num_heads)), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys silu(x W_k)
        [B, T, H, K], values [B, T, H, V], and the log decay [H], which is constant in time.
        """
        heads = self.config.num_heads
        return dict(
            k=jax.nn.silu(split_heads(self.k_proj(x), heads)),
            v=split_heads(self.v_proj(x), heads),
            log_decay=self.log_decay(context.layer),
        ), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by silu(x W_g), and project.
        """
        gate = split_heads(self.g_proj(x), self.config.num_heads)
        return self.o_proj(merge_heads(self.norm(o, gate))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        head = self.hidden_size // self.config.num_heads
        return ops.linear_state(batch_size, self.config.num_heads, head, head)


METHOD = Method(
    name="lightning",
    paper="arXiv 2307.14995",
    op="linear_memory",
    gate="exp(-(8h / H)(1 - l / L)), constant for each head and layer",
    write="silu(k)ᵀ v",
    read="silu(q) M",
    state="K × V a head",
    config=LightningConfig,
    module=Lightning,
)
