"""Preconditioned Gated DeltaNet (arXiv 2604.21100): the gated delta rule, written at keys whose channels are scaled
against the energy that earlier keys have had in them.

For each head of keys, `A_t = α̃_t A_{t-1} + β̃_t k_t²` (each channel), r = log(A_t + 1e-6) - c and
`π_t = s^(-r / (1 + |r|))`, in (1/s, s) for the squash s. Then, with k̃ = π ⊙ k,

    M_t = α_t M_{t-1} + β_t k̃_tᵀ (v_t - k_t α_t M_{t-1}),

which `dplr_memory` computes with a = -β α ⊙ k and b = k̃; `selective_memory` computes A. The memory is read by k and
written at k̃: s = 1 is Gated DeltaNet.

Its reference makes q and k of unit length with an epsilon of 1e-12 beside the norm, its layers with 1e-6 beside the sum of
squares: here as in the layers and in every delta rule.

The layer is flash-linear-attention's: Gated DeltaNet's, with a softplus decay α̃ and a sigmoid β̃ of each head of keys.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context
from lsm_jax.mixers.elementwise import elementwise_memory
from lsm_jax.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from lsm_jax.mixers.layers import Dense, log_uniform_rate, log_uniform_step_bias, parameter
from lsm_jax.mixers.method import Method


class PrecondState(NamedTuple):
    """The state of a preconditioned delta rule between calls.

    Attributes:
        memory: [B, G, K, V], or [B, S, G, K, V] with one state per segment; float32.
        energy: [B, P, K] or [B, S, P, K], A of the P preconditioned heads; float32.
        segment_id: [B], the last nonzero segment id seen, 0 before any.
    """

    memory: Float[Array, ...]
    energy: Float[Array, ...]
    segment_id: Int[Array, " B"]


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class PrecondGatedDeltaNetConfig(GatedDeltaNetConfig):
    """The config of a layer of preconditioned Gated DeltaNet: the fields of Gated DeltaNet, and

    Attributes:
        squash: the largest factor s of a key's channel, from 1 to 2; the smallest is 1 / s. Beyond 2 the rule can diverge.
    """

    squash: float = 1.5

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of preconditioned Gated DeltaNet is not accepted, or does not fit a
        model of width `hidden_size`.
        """
        super().validate(hidden_size)
        check_squash(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: those of Gated DeltaNet, the two gates of
        the preconditioner, and 4 for each of its numbers.
        """
        extra = self.num_heads * (4.0 * hidden_size + 4 * self.head_dim)
        return super().flops_per_token(hidden_size, seq_len) + extra


def check_squash(config: Any) -> None:
    """Raise ValueError unless the field `squash` of a preconditioned delta rule's config is from 1 to 2."""
    checks.positive(config, squash=config.squash)
    if not 1 <= config.squash <= 2:
        name = type(config).__name__
        raise ValueError(f"{name}.squash={config.squash}: accepted are numbers from 1 to 2")


def preconditioned_memory(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array,
    energy_log_decay: jax.Array,
    energy_beta: jax.Array,
    threshold: jax.Array,
    *,
    squash: float,
    initial_state: PrecondState | None = None,
    segment_ids: jax.Array | None = None,
    update_mask: jax.Array | None = None,
    form: str = "chunk",
    implementation: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, PrecondState]:
    """Update and read the memory of a preconditioned delta rule.

    Args:
        q: [B, T, H, K] queries.
        k: [B, T, H, K] keys of unit length.
        v: [B, T, G, V] values.
        beta: [B, T, G], β.
        log_decay: [B, T, G] or [B, T, G, K], log α.
        energy_log_decay: [B, T, P], log α̃, with P = H or P = G heads.
        energy_beta: [B, T, P], β̃.
        threshold: [P], c.
        squash: s.
        initial_state: the state to continue from, or None.
        segment_ids: [B, T] or None.
        update_mask: [B, T] or None.
        form: of both ops.
        implementation: of `dplr_memory`; the preconditioner's op selects its own.
        chunk_size: of both ops.

    Returns:
        The output [B, T, G, V], and the final state.
    """
    call = dict(segment_ids=segment_ids, update_mask=update_mask, form=form, chunk_size=chunk_size)
    memory = energy = None
    if initial_state is not None:
        last_id = initial_state.segment_id
        memory = ops.DeltaState(initial_state.memory, last_id)
        flat = initial_state.energy.reshape(*initial_state.energy.shape[:-2], -1, 1)
        energy = ops.SelectiveState(flat, last_id)
    (batch, length, heads, size), wide = k.shape, log_decay.dtype
    many = jnp.repeat(k, threshold.shape[0] // heads, axis=2)  # of P heads
    keys = many.astype(wide)
    # In the keys' dtype, as the fused kernel requires, and so is the total, which is summed in float32.
    written = (energy_beta[..., None] * keys**2).astype(k.dtype)
    decay = jnp.broadcast_to(energy_log_decay[..., None], written.shape)
    flat = (x.reshape(batch, length, -1) for x in (written, decay))
    total, energy = elementwise_memory(*flat, initial_state=energy, **call)
    r = jnp.log(total.reshape(keys.shape).astype(wide) + 1e-6) - threshold[:, None]
    factor = jnp.exp(-math.log(squash) * r / (1 + jnp.abs(r)))
    groups = v.shape[2] // heads
    forget = jnp.exp(log_decay if log_decay.ndim == 4 else log_decay[..., None])
    strength = beta[..., None]
    o, memory = ops.dplr_memory(
        q,
        k=(b := (factor * keys).astype(k.dtype)),
        v=(strength * v.astype(wide)).astype(v.dtype),
        a=(-strength * forget * jnp.repeat(k, groups, axis=2).astype(wide)).astype(k.dtype),
        b=b,
        log_decay=log_decay,
        initial_state=memory,
        implementation=implementation,
        **call,
    )
    rows = energy.memory.shape[:-2]
    energies = energy.memory.reshape(*rows, keys.shape[2], size)
    return o, PrecondState(memory.memory, energies, memory.segment_id)


class PrecondGatedDeltaNet(GatedDeltaNet):
    """The layer of preconditioned Gated DeltaNet: a mixer that maps [B, T, D] to [B, T, D];
    `PrecondGatedDeltaNetConfig` says what its options mean.
    """

    op = ops.dplr_memory
    memory_parts = (*GatedDeltaNet.memory_parts, "energy_decay_proj", "energy_beta_proj")
    token_parts = (*GatedDeltaNet.token_parts, "energy_decay_proj", "energy_beta_proj")
    memories_in_place = False

    def __init__(
        self,
        config: PrecondGatedDeltaNetConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
    ):
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        heads = config.num_heads
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        fixed = dict(logical_axes=("heads",), weight_decay=False)
        self.energy_decay_proj = Dense(hidden_size, heads, **into)
        self.energy_beta_proj = Dense(hidden_size, heads, **into)
        self.energy_dt_bias = parameter(log_uniform_step_bias(rngs, heads), **fixed)
        self.energy_a_log = parameter(log_uniform_rate(rngs, heads, low=0.0, high=16.0), **fixed)
        self.threshold = parameter(jnp.full(heads, -0.2, jnp.float32), **fixed)

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `preconditioned_memory` that update the memory, by name: those of Gated DeltaNet, and
        the preconditioner's log decay and strength of each head of keys [B, T, H]; and the context.
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
        """Return the state before any token: a memory of zeros [B, G, K, V] and energies of zeros [B, H, K] in float32
        for `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        memory = super().init_memory(batch_size, max_length, dtype)
        heads, size = self.config.num_heads, self.config.head_dim
        energy = jnp.zeros((batch_size, heads, size), jnp.float32)
        return PrecondState(memory.memory, energy, memory.segment_id)


METHOD = Method(
    name="precond_gated_deltanet",
    paper="arXiv 2604.21100",
    op="dplr_memory",
    gate="(I - β k̃ᵀ k) α, α each head; k̃ = π ⊙ k, π of the energy of earlier keys",
    write="β k̃ᵀ v",
    read="q M",
    state="K × V and K a head; 3 tokens of q, k, v",
    config=PrecondGatedDeltaNetConfig,
    module=PrecondGatedDeltaNet,
    note="the energies of keys by `selective_memory`",
)
