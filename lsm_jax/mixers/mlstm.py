"""mLSTM (xLSTM, arXiv 2405.04517) as in xLSTM-7B's block (arXiv 2503.13427):
`C_t = f_t C_{t-1} + i_t k_tᵀ v_t`, i exponential.

`n_t = f_t n_{t-1} + i_t k_t` normalises, `o_t = q_t C_t / max(|q_t n_t|, 1)`, all of it stabilised by the op.
This block has no convolution and no projection up, and is followed by SwiGLU; xLSTM's first block (arXiv
2405.04517) had both.
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
from lsm_jax.mixers.layers import Dense, HeadNorm, OrthogonalDense, merge_heads, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import OpConfig, RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class MLSTMConfig(RecurrentConfig):
    """The config of an mLSTM layer: linear attention with an exponential input gate, a forget gate and a normaliser.

    Attributes:
        num_heads: number of heads.
        qk_dim_factor: number of query and of key channels of all heads, divided by hidden_size.
        v_dim_factor: number of value channels of all heads, divided by hidden_size.
        gate_soft_cap: the gates' pre-activations x become cap · tanh(x / cap).
        normalizer_eps: added to the normaliser.
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 8
    qk_dim_factor: float = 0.5
    v_dim_factor: float = 1.0
    gate_soft_cap: float = 15.0
    normalizer_eps: float = 1e-6
    norm_eps: float = 1e-6
    # Chunks of 128 train 5 to 10 % faster than chunks of 64 on a GPU (340M).
    op: OpConfig = dataclasses.field(default_factory=lambda: OpConfig(chunk_size=128))

    @classmethod
    def for_width(cls, hidden_size: int) -> MLSTMConfig:
        """Return the config of mLSTM for a model of width `hidden_size`, with the published proportions: value heads of
        512 channels, and at least four heads.
        """
        return cls(num_heads=max(4, hidden_size // 512))

    def head_dims(self, hidden_size: int) -> tuple[int, int]:
        """Return the numbers of key channels and of value channels of one head of mLSTM in a model of width
        `hidden_size`.
        """
        return (
            checks.expanded(self, "qk_dim_factor", self.qk_dim_factor, hidden_size, self.num_heads),
            checks.expanded(self, "v_dim_factor", self.v_dim_factor, hidden_size, self.num_heads),
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of mLSTM is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        self.head_dims(hidden_size)
        checks.positive(
            self,
            gate_soft_cap=self.gate_soft_cap,
            normalizer_eps=self.normalizer_eps,
            norm_eps=self.norm_eps,
        )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and per head K
        V to decay the memory, 2 K V each to write and to read, and 5 K for the normaliser.
        """
        k, v = self.head_dims(hidden_size)
        return self.num_heads * (2.0 * hidden_size * (2 * k + 3 * v + 2) + 5 * k * v + 5 * k)


class MLSTM(Mixer):
    """The layer of mLSTM: a mixer that maps [B, T, D] to [B, T, D]; `MLSTMConfig` says what its options mean.

    The gates start as in the published code, independent of the token: input gate at -10, forget gates from 3
    to 6 across the heads, ahead of soft cap and activation.
    """

    op = ops.linear_memory
    memory_parts = ("k_proj", "v_proj", "i_proj", "f_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "i_proj", "f_proj")

    def __init__(
        self, config: MLSTMConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        heads = config.num_heads
        self.key_dim, self.value_dim = config.head_dims(hidden_size)
        keys, values = heads * self.key_dim, heads * self.value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.g_proj = Dense(hidden_size, values, **into)
        gate = dict(gain=0, axes=("embed", "heads"), rngs=rngs)
        self.i_proj = OrthogonalDense(hidden_size, heads, bias=jnp.full(heads, -10.0), **gate)
        self.f_proj = OrthogonalDense(hidden_size, heads, bias=jnp.linspace(3, 6, heads), **gate)
        self.norm = HeadNorm(heads, self.value_dim, eps=config.norm_eps, bias=False)
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _gate(self, projection: Dense, x: jax.Array) -> jax.Array:
        cap = self.config.gate_soft_cap
        return cap * jnp.tanh(projection(x, dtype=jnp.float32) / cap)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], x W_q cut into heads, and the context."""
        return split_heads(self.q_proj(x), self.config.num_heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys, values, and
        the logarithms of each head's forget gate and input gate [B, T, H].
        """
        heads = self.config.num_heads
        return dict(
            k=split_heads(self.k_proj(x), heads),
            v=split_heads(self.v_proj(x), heads),
            log_decay=jax.nn.log_sigmoid(self._gate(self.f_proj, x)),
            log_input_gate=self._gate(self.i_proj, x),
        ), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by sigmoid(x W_g), and project.
        """
        y = merge_heads(self.norm(o))
        return self.o_proj(y * jax.nn.sigmoid(self.g_proj(x))), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `linear_memory` that do not depend on the input, with the epsilon of the
        normaliser.
        """
        return dict(super().options(), normalize=self.config.normalizer_eps)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory [B, H, K, V] and a normaliser of zeros, and their stabiliser, for
        `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        return ops.linear_state(
            batch_size,
            self.config.num_heads,
            self.key_dim,
            self.value_dim,
            normalize=True,
            stabilize=True,
        )


METHOD = Method(
    name="mlstm",
    paper="arXiv 2503.13427",
    op="linear_memory",
    gate="sigmoid(x W + b), each head",
    write="exp(x W + b) kᵀ v",
    read="q C over max(|q n|, 1)",
    state="K × V, K and the largest exponent a head",
    config=MLSTMConfig,
    module=MLSTM,
)
