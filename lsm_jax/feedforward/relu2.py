"""The feedforward with a squared ReLU (arXiv 2109.08668): `relu(x W_u)² W_d`, with two matrices W and no gate."""

from __future__ import annotations

import copy
import dataclasses

import jax
from flax import nnx

from lsm_jax.feedforward.inner_width import InnerWidthConfig
from lsm_jax.feedforward.squared_relu import squared_relu
from lsm_jax.feedforward.tokenwise import Tokenwise
from lsm_jax.mixers.layers import Dense


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ReLU2Config(InnerWidthConfig):
    """The config of a feedforward `relu(x W_u)² W_d`: its inner width.

    Attributes:
        hidden_ratio: the inner width, divided by hidden_size.
        intermediate_size: the inner width; None computes it from `hidden_ratio`.
    """

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the feedforward in a forward pass, per token: 2 for each number of its two
        matrices.
        """
        return 4.0 * hidden_size * self.width(hidden_size)


class ReLU2(Tokenwise):
    """The feedforward `relu(x W_u)² W_d`, [B, T, D] to [B, T, D]; `ReLU2Config` says what its options mean. It has no state."""

    def __init__(
        self, config: ReLU2Config, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        config.validate(hidden_size)
        self.config = copy.copy(config)
        width, given = config.width(hidden_size), dict(rngs=rngs, init_std=init_std)
        self.up_proj = Dense(hidden_size, width, axes=("embed", "mlp"), **given)
        self.down_proj = Dense(width, hidden_size, axes=("mlp", "embed"), **given)

    def transform(self, x: jax.Array) -> jax.Array:
        """Return the output [B, T, D] of ReLU2 for tokens x [B, T, D]."""
        return self.down_proj(squared_relu(self.up_proj(x)))
