"""MesaNet (arXiv 2506.05233): the memory is the ridge regression of values on keys, solved for each query by conjugate
gradients: `o_t = q_t (S_t + diag Λ)⁻¹ M_t`, with S_t and M_t the decayed sums of β kᵀ k and β kᵀ v.

The layer is flash-linear-attention's (fla/layers/mesa_net.py): values go through no convolution and no activation, the
regulariser is Λ = softplus(λ) + 0.25 and starts at 1, and the output is normalised and, unless asked for, not gated.
There, q and k are in float16 while the system is solved, and decoding starts the solver elsewhere than training does; here
both start from 0 in float32, so that decoding equals training for any number of steps. Its denominators have an epsilon of 1e-5,
with which 30 steps stall at an error of 4e-4; here none. It ignores its own `use_short_conv` and always convolves q and k; here
`conv_size=1` is no convolution.
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
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, parameter, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class MesaNetConfig(RecurrentConfig):
    """The config of a MesaNet layer.

    Attributes:
        num_heads: heads of queries, keys and values.
        head_dim: channels of a head.
        conv_size: width of the short convolutions on q and k; 1 means no convolution, only the SiLU that follows it.
        steps: steps of conjugate gradients for each token.
        least_regularizer: the smallest value of Λ.
        output_gate: whether the output is multiplied by silu(x W_g).
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 16
    head_dim: int = 128
    conv_size: int = 4
    steps: int = 30
    least_regularizer: float = 0.25
    output_gate: bool = False
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> MesaNetConfig:
        """Return the config of MesaNet for a model of width `hidden_size`, with the published proportions: heads of 128
        channels (smaller ones below width 512), as many channels in all heads as the width, and 30 steps, or as many as
        a head's channels if they are fewer: more change nothing but rounding.
        """
        head_dim = min(128, hidden_size // 4)
        heads = max(1, hidden_size // head_dim)
        return cls(head_dim=head_dim, num_heads=heads, steps=min(30, head_dim))

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of MesaNet is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.positive(
            self, num_heads=self.num_heads, head_dim=self.head_dim, steps=self.steps,
            least_regularizer=self.least_regularizer, norm_eps=self.norm_eps,
        )  # fmt: skip
        if self.least_regularizer >= 1:
            raise ValueError(
                f"MesaNetConfig.least_regularizer={self.least_regularizer}: accepted are numbers below 1, at which Λ starts"
            )
        checks.convolution_width(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and convolutions, and per
        head 3 K² to update each memory, 2 K² to read, and 2 K² for each step of conjugate gradients.
        """
        inner = self.num_heads * self.head_dim
        projections = 2.0 * hidden_size * ((4 + self.output_gate) * inner + 2 * self.num_heads)
        convolutions = 2 * checks.convolution_taps(self) * 2 * inner
        return projections + convolutions + (8 + 2 * self.steps) * inner * self.head_dim


class MesaNet(Mixer):
    """The layer of MesaNet: a mixer that maps [B, T, D] to [B, T, D]; `MesaNetConfig` says what its options mean."""

    op = ops.mesa_memory
    memory_parts = ("k_proj", "v_proj", "beta_proj", "decay_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "beta_proj", "decay_proj")

    def __init__(
        self, config: MesaNetConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        heads, inner = config.num_heads, config.num_heads * config.head_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, inner, **into)
        self.k_proj = Dense(hidden_size, inner, **into)
        self.v_proj = Dense(hidden_size, inner, **into)
        self.g_proj = Dense(hidden_size, inner, **into) if config.output_gate else None
        self.beta_proj = Dense(hidden_size, heads, **into, bias=True)
        self.decay_proj = Dense(hidden_size, heads, **into, bias=True)
        one = math.log(math.expm1(1 - config.least_regularizer))  # Λ = 1
        self.regularizer = parameter(
            jnp.full((heads, config.head_dim), one, jnp.float32), ("heads", None), weight_decay=False
        )  # fmt: skip
        convolution = dict(width=config.conv_size, rngs=rngs, axis="heads")
        self.q_conv = short_convolution("q", inner, **convolution)
        self.k_conv = short_convolution("k", inner, **convolution)
        self.norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self.o_proj = Dense(
            inner, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], x W_q after the short convolution, each of unit
        length, and the context.
        """
        q, context = self.q_conv(self.q_proj(x), context, self.config.head_dim)
        return split_heads(q, self.config.num_heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `mesa_memory` that update the memories, by name, and the context: keys of unit length
        after the short convolution, values x W_v, the strength β and the log decay of each head [B, T, H], and the
        regulariser Λ [H, K].
        """
        config = self.config
        k, context = self.k_conv(self.k_proj(x), context, config.head_dim)
        written = dict(
            k=split_heads(k, config.num_heads),
            v=split_heads(self.v_proj(x), config.num_heads),
            beta=jax.nn.sigmoid(self.beta_proj(x, dtype=jnp.float32)),
            log_decay=jax.nn.log_sigmoid(self.decay_proj(x, dtype=jnp.float32)),
            regularizer=jax.nn.softplus(self.regularizer[...]) + config.least_regularizer,
        )
        return written, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by silu(x W_g) if the config says so, and project.
        """
        if self.g_proj is None:
            return self.o_proj(merge_heads(self.norm(o))), context
        gate = split_heads(self.g_proj(x), self.config.num_heads)
        return self.o_proj(merge_heads(self.norm(o, gate))), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `mesa_memory` that do not depend on the input."""
        return dict(super().options(), steps=self.config.steps)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.MesaState:
        """Return the state before any token: memories of zeros [B, H, K, K] and [B, H, K, V] in float32 for `batch_size`
        rows; `max_length` and `dtype` do not affect it.
        """
        config = self.config
        return ops.mesa_state(batch_size, config.num_heads, config.head_dim, config.head_dim)


METHOD = Method(
    name="mesa_net",
    paper="arXiv 2506.05233",
    op="mesa_memory",
    gate="α, each head, of both memories",
    write="β kᵀ k to S, β kᵀ v to M",
    read="q (S + Λ)⁻¹ M, by conjugate gradients",
    state="K × K and K × V a head; 3 tokens of q, k",
    config=MesaNetConfig,
    module=MesaNet,
)
