"""A method in one file outside of the package: a sum of values that decays by half at each token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import mixers, ops
from lsm_jax.mixers import Context, Mixer
from lsm_jax.mixers.layers import Dense


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ToyConfig:
    """The toy method's config.

    Attributes:
        log_decay: logarithm of what multiplies the memory at each token.
    """

    log_decay: float = -0.7

    @classmethod
    def for_width(cls, hidden_size: int) -> ToyConfig:
        """The defaults, at any width."""
        return cls()

    def validate(self, hidden_size: int) -> None:
        """Accept any width."""

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Forward floating-point operations of a token."""
        return 4.0 * hidden_size**2


class Toy(Mixer):
    """The toy method's mixer."""

    op = ops.linear_memory

    def __init__(
        self, config: ToyConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.v_proj = Dense(
            hidden_size, hidden_size, axes=("embed", "heads"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Constant queries of one channel."""
        return jnp.ones((*x.shape[:2], 1, 1), x.dtype), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Constant keys, values, and the constant decay."""
        decay = jnp.full(1, self.config.log_decay, jnp.float32)
        return dict(
            k=jnp.ones((*x.shape[:2], 1, 1), x.dtype),
            v=self.v_proj(x)[:, :, None],
            log_decay=decay,
        ), context

    def options(self) -> dict[str, Any]:
        """The op's constant arguments."""
        return dict(form="recurrent")

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """The memory's output."""
        return o[:, :, 0], context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """An empty memory."""
        return ops.linear_state(batch_size, 1, 1, self.hidden_size)


METHOD = mixers.Method(
    name="toy",
    paper="none",
    op="linear_memory",
    gate="exp(log_decay)",
    write="v",
    read="M",
    state="V",
    forms=("recurrent",),
    config=ToyConfig,
    module=Toy,
)
