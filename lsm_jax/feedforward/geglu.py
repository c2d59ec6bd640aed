"""The GeGLU feedforward (arXiv 2002.05202), that of Griffin, Hawk and RecurrentGemma: `(gelu(x W_g + b) ⊙ (x W_u + b)) W_d + b`,
with three matrices W, biases b, and the approximation of GELU by tanh."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
from flax import nnx

from lsm_jax.feedforward.tokenwise import Tokenwise
from lsm_jax.mixers import checks
from lsm_jax.mixers.layers import Dense, recomputed


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class GeGLUConfig:
    """The config of a GeGLU feedforward, `(gelu(x W_g + b) ⊙ (x W_u + b)) W_d + b`.

    Attributes:
        hidden_ratio: the inner width, divided by hidden_size.
        intermediate_size: the inner width; None computes it from `hidden_ratio`.
        bias: whether there are biases.
    """

    hidden_ratio: float = 3.0
    intermediate_size: int | None = None
    bias: bool = True

    @classmethod
    def for_width(cls, hidden_size: int, multiple_of: int) -> GeGLUConfig:
        """Return the config with an inner width of 3 hidden_size, rounded up to a multiple of `multiple_of`."""
        return cls(intermediate_size=-(-3 * hidden_size // multiple_of) * multiple_of)

    def width(self, hidden_size: int) -> int:
        """Return the inner width, the number of columns of W_g and W_u, in a model of width `hidden_size`."""
        given = self.intermediate_size
        return int(hidden_size * self.hidden_ratio) if given is None else given

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of the GeGLU feedforward is not valid."""
        checks.fields(self)
        checks.positive(self, hidden_ratio=self.hidden_ratio)
        if self.intermediate_size is not None:
            checks.positive(self, intermediate_size=self.intermediate_size)

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

        @recomputed
        def down(gate, up):
            return self.down_proj(jax.nn.gelu(gate, approximate=True) * up)

        return down(self.gate_proj(x), self.up_proj(x))
