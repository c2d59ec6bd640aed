"""HGRN (arXiv 2311.04823): a recurrence of each channel with a forget gate whose lower bound rises from layer to layer.

`h_t = f_t ⊙ h_{t-1} + (1 - f_t) ⊙ silu(x W_i)`, `f = γ + (1 - γ) sigmoid(x W_f)`, with γ learned across layers as in
HGRN2, 0 in the first. The paper's recurrence is complex; this is the real one of flash-linear-attention
(fla/layers/hgrn.py), HGRN2's with one channel for each head.
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
from lsm_jax.mixers.elementwise import elementwise_memory
from lsm_jax.mixers.hgrn2 import forget_and_rest, log_bound, shared_log_bounds
from lsm_jax.mixers.layers import Dense, RMSNorm, parameter, recomputed
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig

_BOUNDS = "hgrn_log_bounds"


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class HGRNConfig(RecurrentConfig):
    """The config of an HGRN layer.

    Attributes:
        lower_bound: γ of every layer of a model but the first; None is learned for each channel.
        norm_eps: epsilon of the norm over all channels.
    """

    lower_bound: float | None = None
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> HGRNConfig:
        """Return the config of HGRN for a model of width `hidden_size`, which has no proportions."""
        return cls()

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of HGRN is not accepted."""
        self.validate_fields()
        checks.positive(self, norm_eps=self.norm_eps)
        if self.lower_bound is not None and not 0 <= self.lower_bound < 1:
            raise ValueError(
                f"HGRNConfig.lower_bound={self.lower_bound}: accepted are None and numbers from 0 to less than 1"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and 3 for each channel's
        number.
        """
        return 8.0 * hidden_size**2 + 3.0 * hidden_size


class HGRN(Mixer):
    """The layer of HGRN: a mixer that maps [B, T, D] to [B, T, D]; `HGRNConfig` says what its options mean."""

    op = ops.selective_memory
    uses_depth = True
    memory_parts = ("f_proj", "i_proj")
    token_parts = ("f_proj", "i_proj")

    def __init__(
        self,
        config: HGRNConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
        layer: jax.Array | int = 0,
        num_layers: int = 1,
    ):
        super().__init__(config, hidden_size)
        self.num_layers = num_layers
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.f_proj = Dense(hidden_size, hidden_size, **into)
        self.i_proj = Dense(hidden_size, hidden_size, **into)
        self.g_proj = Dense(hidden_size, hidden_size, **into)
        zeros = jnp.zeros(hidden_size, jnp.float32)  # logits of the learned bounds
        learned = config.lower_bound is None
        self.lower_bound = parameter(zeros, ("heads",), weight_decay=False) if learned else None
        self.norm = RMSNorm(hidden_size, eps=config.norm_eps)
        self.o_proj = Dense(
            hidden_size, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    @classmethod
    def init_shared(cls, x: jax.Array, stacks: list[tuple[jax.Array, Any]]) -> dict[str, jax.Array]:
        """Return, by name, the logarithms of the lower bounds that a model's HGRN layers learn together, [L, 2, D]; see
        `hgrn2.shared_log_bounds`.
        """
        table = shared_log_bounds(stacks)
        return {} if table is None else {_BOUNDS: table}

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the read vector of `selective_memory`, ones [D, 1], and the context."""
        return jnp.ones((self.hidden_size, 1), jnp.float32), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `elementwise_memory`, by name, and the context: (1 - f) silu(x W_i) and log f, both [B,
        T, D].
        """

        @recomputed
        def gated(gate, value, bounds):
            log_f, rest = forget_and_rest(gate, bounds)
            return dict(u=(rest * jax.nn.silu(value)).astype(x.dtype), log_decay=log_f)

        gate, value = (p(x, dtype=jnp.float32) for p in (self.f_proj, self.i_proj))
        return gated(gate, value, log_bound(self, context, _BOUNDS)), context

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Return the memory [B, T, D] after each token, and the final state."""
        return elementwise_memory(**written, **call)

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory o [B, T, D]: normalise all channels
        together, multiply by silu(x W_g), and project.
        """
        return self.o_proj(self.norm(o, self.g_proj(x))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.SelectiveState:
        """Return the state before any token: zeros [B, D, 1] in float32 for `batch_size` rows; `max_length` and `dtype`
        do not affect it.
        """
        return ops.selective_state(batch_size, self.hidden_size, 1)


METHOD = Method(
    name="hgrn",
    paper="arXiv 2311.04823",
    op="selective_memory",
    gate="f = γ + (1 - γ) sigmoid(x W), each channel; γ learned across layers",
    write="(1 - f) silu(x W)",
    read="h",
    state="1 a channel",
    config=HGRNConfig,
    module=HGRN,
    note="real, as in flash-linear-attention; the paper's is complex",
)
