"""Gated slot attention (arXiv 2409.07146): keys and values in M slots that decay, read by a softmax over the
slots.

The output path (norm over silu(o) of all heads together, no gate) and the query's scale of 1 are those of the
authors' published code.
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
from lsm_jax.mixers.gates import log_sigmoid
from lsm_jax.mixers.heads import three_or_four
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, recomputed, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GSAConfig(RecurrentConfig):
    """The config of a layer of gated slot attention: softmax attention to M slots, into which keys and values are
    written.

    Attributes:
        num_heads: number of heads.
        num_slots: number of slots per head (M).
        expand_k: number of key channels of all heads, divided by hidden_size.
        expand_v: number of value channels of all heads, divided by hidden_size.
        gate_temperature: log α = logsigmoid(x W) / gate_temperature.
        norm_eps: epsilon of the norm over all heads' output.
    """

    num_heads: int = 4
    num_slots: int = 64
    expand_k: float = 1.0
    expand_v: float = 1.0
    gate_temperature: float = 8.0
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> GSAConfig:
        """Return the config of gated slot attention for a model of width `hidden_size`, with the published proportions:
        four heads of 64 slots at any width, but three at widths such as 768 and 1,536; fewer slots below width 256.
        """
        return cls(num_heads=three_or_four(hidden_size), num_slots=min(64, hidden_size // 4))

    def head_dims(self, hidden_size: int) -> tuple[int, int]:
        """Return the numbers of key channels and of value channels of one head of gated slot attention in a model of
        width `hidden_size`.
        """
        return (
            checks.expanded(self, "expand_k", self.expand_k, hidden_size, self.num_heads),
            checks.expanded(self, "expand_v", self.expand_v, hidden_size, self.num_heads),
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of gated slot attention is not accepted, or does not fit a model
        of width `hidden_size`.
        """
        self.validate_fields()
        self.head_dims(hidden_size)
        checks.positive(
            self,
            num_slots=self.num_slots,
            gate_temperature=self.gate_temperature,
            norm_eps=self.norm_eps,
        )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and per head 5
        M (K + V) to decay, write and read the two memories, and 4 M for the softmax.
        """
        k, v = self.head_dims(hidden_size)
        slots = self.num_slots
        projections = 2.0 * hidden_size * (2 * k + 2 * v + slots)
        return self.num_heads * (projections + 5 * slots * (k + v) + 4 * slots)


class GSA(Mixer):
    """The layer of gated slot attention: a mixer that maps [B, T, D] to [B, T, D]; `GSAConfig` says what its options
    mean.
    """

    op = ops.slot_memory
    memory_parts = ("k_proj", "v_proj", "decay_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "decay_proj")

    def __init__(
        self, config: GSAConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.key_dim, self.value_dim = config.head_dims(hidden_size)
        heads = config.num_heads
        keys, values = heads * self.key_dim, heads * self.value_dim
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, keys, **into)
        self.k_proj = Dense(hidden_size, keys, **into)
        self.v_proj = Dense(hidden_size, values, **into)
        self.decay_proj = Dense(hidden_size, heads * config.num_slots, **into)
        self.norm = RMSNorm(values, eps=config.norm_eps, axis="heads")
        self.o_proj = Dense(
            values, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], silu(x W_q) cut into heads, and the context."""
        return split_heads(jax.nn.silu(self.q_proj(x)), self.config.num_heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `slot_memory` that update the memory, by name, and the context: keys and
        values after silu, the log decay of each slot [B, T, H, M], and each slot's write strength, 1 minus
        the decay.
        """
        heads = self.config.num_heads
        gate = split_heads(self.decay_proj(x, dtype=jnp.float32), heads)
        temperature = self.config.gate_temperature

        @recomputed
        def decay(gate):
            log_decay = log_sigmoid(gate) / temperature
            return log_decay, -jnp.expm1(log_decay)

        log_decay, strength = decay(gate)
        return dict(
            k=split_heads(jax.nn.silu(self.k_proj(x)), heads),
            v=split_heads(jax.nn.silu(self.v_proj(x)), heads),
            s=strength,
            log_decay=log_decay,
        ), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: apply silu,
        normalise all heads together, and project.
        """
        return self.o_proj(self.norm(jax.nn.silu(merge_heads(o)))), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `slot_memory` that do not depend on the input; the scale is 1, so that
        queries are not scaled.
        """
        return dict(super().options(), scale=1.0)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.SlotState:
        """Return the state before any token: two memories of zeros, for keys [B, H, K, M] and for values [B, H, M, V]
        with M slots, for `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        config = self.config
        return ops.slot_state(
            batch_size, config.num_heads, config.num_slots, self.key_dim, self.value_dim
        )


METHOD = Method(
    name="gsa",
    paper="arXiv 2409.07146",
    op="slot_memory",
    gate="α = sigmoid(x W)^(1/8), each slot",
    write="kᵀ (1 - α) into keys, (1 - α)ᵀ v into values",
    read="softmax(q K) V over slots",
    state="M × (K + V) a head, M slots",
    config=GSAConfig,
    module=GSA,
)
