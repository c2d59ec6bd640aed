"""The GeGLU feedforward (arXiv 2002.05202), that of Griffin, Hawk and RecurrentGemma: `(gelu(x W_g + b) ⊙ (x W_u + b)) W_d + b`,
with three matrices W, biases b, and the approximation of GELU by tanh."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
from flax import nnx

from lsm_jax.feedforward.inner_width import InnerWidthConfig
from lsm_jax.feedforward.tokenwise import Tokenwise
from lsm_jax.mixers.layers import Dense, recomputed
from lsm_jax.ops.core.saved import INPUTS, product_input


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GeGLUConfig(InnerWidthConfig):
    """The config of a GeGLU feedforward, `(gelu(x W_g + b) ⊙ (x W_u + b)) W_d + b`.

    Attributes:
        hidden_ratio: the inner width, divided by hidden_size.
        intermediate_size: the inner width; None computes it from `hidden_ratio`.
        bias: whether there are biases.
    """

    hidden_ratio: float = 3.0
    bias: bool = True

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the GeGLU feedforward in a forward pass, per token: 2 for each number of its
        three matrices.
        """
        return 6.0 * hidden_size * self.width(hidden_size)


class GeGLU(Tokenwise):
    """The GeGLU feedforward, [B, T, D] to [B, T, D]; `GeGLUConfig` says what its options mean. It has no state."""

    def __init__(
        self, config: GeGLUConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        config.validate(hidden_size)
        self.config = copy.copy(config)
        width = config.width(hidden_size)
        given: dict[str, Any] = dict(rngs=rngs, init_std=init_std, bias=config.bias)
        self.gate_proj = Dense(hidden_size, width, axes=("embed", "mlp"), **given)
        self.up_proj = Dense(hidden_size, width, axes=("embed", "mlp"), **given)
        self.down_proj = Dense(width, hidden_size, axes=("mlp", "embed"), **given)

    def transform(self, x: jax.Array) -> jax.Array:
        """Return the output [B, T, D] of GeGLU for tokens x [B, T, D]."""

        def down(gate, up):
            return self.down_proj(product_input(jax.nn.gelu(gate, approximate=True) * up))

        return recomputed(down, INPUTS)(self.gate_proj(x), self.up_proj(x))
