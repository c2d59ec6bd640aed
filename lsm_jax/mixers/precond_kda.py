"""Preconditioned Kimi Delta Attention (arXiv 2604.21100): KDA, written at keys whose channels are scaled against the
energy that earlier keys have had in them; see `lsm_jax.mixers.precond_gated_deltanet`.

The layer is flash-linear-attention's: KDA's, whose step bias of the decay starts at 0, with a preconditioner for each head
of values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers.base import Context
from lsm_jax.mixers.kda import KDA, KDAConfig
from lsm_jax.mixers.layers import Dense, log_uniform_rate, log_uniform_step_bias, parameter
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.precond_gated_deltanet import (
    PrecondState,
    check_squash,
    preconditioned_memory,
)


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class PrecondKDAConfig(KDAConfig):
    """The config of a layer of preconditioned KDA: the fields of KDA, and

    Attributes:
        squash: the largest factor s of a key's channel, from 1 to 2; the smallest is 1 / s. Beyond 2 the rule can diverge.
    """

    squash: float = 1.5

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of preconditioned KDA is not accepted, or does not fit a model of
        width `hidden_size`.
        """
        super().validate(hidden_size)
        check_squash(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: those of KDA, the two gates of the
        preconditioner, and 4 for each of its numbers.
        """
        extra = self.value_heads() * (4.0 * hidden_size + 4 * self.head_dim)
        return super().flops_per_token(hidden_size, seq_len) + extra


class PrecondKDA(KDA):
    """The layer of preconditioned KDA: a mixer that maps [B, T, D] to [B, T, D]; `PrecondKDAConfig` says what its options
    mean.
    """

    op = ops.dplr_memory
    memory_parts = (*KDA.memory_parts, "energy_decay_proj", "energy_beta_proj")
    token_parts = (*KDA.token_parts, "energy_decay_proj", "energy_beta_proj")
    memories_in_place = False

    def __init__(
        self,
        config: PrecondKDAConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
    ):
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        heads = config.value_heads()
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        self.dt_bias = parameter(jnp.zeros(heads * config.head_dim, jnp.float32), **fixed)
        self.energy_decay_proj = Dense(hidden_size, heads, **into)
        self.energy_beta_proj = Dense(hidden_size, heads, **into)
        self.energy_dt_bias = parameter(log_uniform_step_bias(rngs, heads), **fixed)
        self.energy_a_log = parameter(log_uniform_rate(rngs, heads, low=1.0, high=16.0), **fixed)
        self.threshold = parameter(jnp.full(heads, -0.2, jnp.float32), **fixed)

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `preconditioned_memory` that update the memory, by name: those of KDA, and the
        preconditioner's log decay and strength of each head of values [B, T, G]; and the context.
        """
        written, context = super().write(x, context)
        gate = self.energy_decay_proj(x, dtype=jnp.float32) + self.energy_dt_bias[...]
        energy = dict(
            energy_log_decay=-jnp.exp(self.energy_a_log[...]) * jax.nn.softplus(gate),
            energy_beta=jax.nn.sigmoid(self.energy_beta_proj(x, dtype=jnp.float32)),
            threshold=self.threshold[...],
        )
        return written | energy, context

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Return the output [B, T, G, V] of `preconditioned_memory` and its final state."""
        return preconditioned_memory(query, **written, squash=self.config.squash, **call)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> Any:
        """Return the state before any token: a memory of zeros [B, G, K, V] and energies of zeros [B, G, K] in float32
        for `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        memory = super().init_memory(batch_size, max_length, dtype)
        energy = jnp.zeros(memory.memory.shape[:-1], jnp.float32)
        return PrecondState(memory.memory, energy, memory.segment_id)


METHOD = Method(
    name="precond_kda",
    paper="arXiv 2604.21100",
    op="dplr_memory",
    gate="(I - β k̃ᵀ k) diag(α), α each key channel; k̃ = π ⊙ k, π of the energy of earlier keys",
    write="β k̃ᵀ v",
    read="q M",
    state="K × V and K a head; 3 tokens of q, k, v",
    config=PrecondKDAConfig,
    module=PrecondKDA,
    note="the energies of keys by `selective_memory`",
)
