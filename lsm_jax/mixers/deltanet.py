"""DeltaNet (arXiv 2406.06484): `M_t = M_{t-1} + k_tᵀ β_t (v_t - k_t M_{t-1})`, keys of unit length."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class DeltaNetConfig(RecurrentConfig):
    """The config of a DeltaNet layer: linear attention whose memory replaces the value at a key instead of adding to
    it.

    Attributes:
        num_heads: heads of queries and keys.
        num_value_heads: heads of values and memories, a multiple of `num_heads`; None is `num_heads`.
        expand_k: number of key channels of all heads, divided by hidden_size.
        expand_v: number of value channels of all value heads, divided by hidden_size.
        conv_size: width of the short convolutions on q, k and v; 1 means no convolution, only the SiLU that follows it.
        allow_negative_eigenvalues: β in (0, 2) instead of (0, 1) (arXiv 2411.12537).
        output_gate: multiply the normed output by silu(x W).
        qkv_silu: whether SiLU follows the convolutions of q, k and v; Linear-MoE (arXiv 2503.05447, its code) has neither.
        qkv_bias: whether the projections to queries, keys, values and the output gate have biases, as in Linear-MoE.
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 4
    num_value_heads: int | None = None
    expand_k: float = 1.0
    expand_v: float = 1.0
    conv_size: int = 4
    allow_negative_eigenvalues: bool = False
    output_gate: bool = False
    qkv_silu: bool = True
    qkv_bias: bool = False
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> DeltaNetConfig:
        """Return the config of DeltaNet for a model of width `hidden_size`, with the published proportions: heads of
        128 channels.
        """
        return cls(num_heads=hidden_size // min(128, hidden_size // 4))

    def value_heads(self) -> int:
        """Return the number of heads of values, each with its own memory: `num_value_heads`, or `num_heads` if that is
        None.
        """
        return self.num_heads if self.num_value_heads is None else self.num_value_heads

    def head_dims(self, hidden_size: int) -> tuple[int, int]:
        """Return the numbers of key channels and of value channels of one head of DeltaNet in a model of width
        `hidden_size`.
        """
        return (
            checks.expanded(self, "expand_k", self.expand_k, hidden_size, self.num_heads),
            checks.expanded(self, "expand_v", self.expand_v, hidden_size, self.value_heads()),
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of DeltaNet is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.value_heads(self)
        self.head_dims(hidden_size)
        checks.positive(self, norm_eps=self.norm_eps)
        checks.convolution_width(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and
        convolutions, and per head 2 K V each to erase, to write and to read.
        """
        k, v = self.head_dims(hidden_size)
        keys, heads = self.num_heads * k, self.value_heads()
        projections = 2 * keys + heads * ((3 if self.output_gate else 2) * v + 1)
        convolution = 2 * checks.convolution_taps(self) * (2 * keys + heads * v)
        return 2.0 * hidden_size * projections + convolution + heads * 6 * k * v


class DeltaNet(Mixer):
    """The layer of DeltaNet: a mixer that maps [B, T, D] to [B, T, D]; `DeltaNetConfig` says what its options mean."""

    op = ops.delta_memory
    memory_parts = ("k_proj", "v_proj", "beta_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "beta_proj")

    def __init__(
        self, config: DeltaNetConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.key_dim, self.value_dim = config.head_dims(hidden_size)
        heads = config.value_heads()
        keys, values = config.num_heads * self.key_dim, heads * self.value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        bias: dict[str, Any] = dict(bias=config.qkv_bias)
        self.q_proj = Dense(hidden_size, keys, **into, **bias)
        self.k_proj = Dense(hidden_size, keys, **into, **bias)
        self.v_proj = Dense(hidden_size, values, **into, **bias)
        self.beta_proj = Dense(hidden_size, heads, **into)
        self.g_proj = Dense(hidden_size, values, **into, **bias) if config.output_gate else None
        convolution = dict(width=config.conv_size, rngs=rngs, axis="heads", silu=config.qkv_silu)
        self.q_conv = short_convolution("q", keys, **convolution)
        self.k_conv = short_convolution("k", keys, **convolution)
        self.v_conv = short_convolution("v", values, **convolution)
        self.norm = RMSNorm(self.value_dim, eps=config.norm_eps)
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], x W_q after the short convolution, each of unit
        length, and the context.
        """
        q, context = self.q_conv(self.q_proj(x), context, self.key_dim)
        return split_heads(q, self.config.num_heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `delta_memory` that update the memory, by name, and the context: keys of unit length
        and values after the short convolutions, and the write strengths β [B, T, G].
        """
        config = self.config
        beta = jax.nn.sigmoid(self.beta_proj(x, dtype=jnp.float32))
        k, context = self.k_conv(self.k_proj(x), context, self.key_dim)
        v, context = self.v_conv(self.v_proj(x), context)
        written = dict(
            k=split_heads(k, config.num_heads),
            v=split_heads(v, config.value_heads()),
            beta=2 * beta if config.allow_negative_eigenvalues else beta,
        )
        return written, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, G, V]: normalise each
        head, multiply by silu(x W_g) if the config has a gate, and project.
        """
        gate = None
        if self.g_proj is not None:
            gate = split_heads(self.g_proj(x), self.config.value_heads())
        return self.o_proj(merge_heads(self.norm(o, gate))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.DeltaState:
        """Return the state before any token: a memory of zeros [B, G, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        heads = self.config.value_heads()
        return ops.delta_state(batch_size, heads, self.key_dim, self.value_dim)


METHOD = Method(
    name="deltanet",
    paper="arXiv 2406.06484",
    op="delta_memory",
    gate="I - β kᵀ k",
    write="β kᵀ v",
    read="q M",
    state="K × V a head; 3 tokens of q, k, v",
    config=DeltaNetConfig,
    module=DeltaNet,
)
