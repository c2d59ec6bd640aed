"""The SwiGLU feedforward (arXiv 2002.05202): `(silu(x W_g) ⊙ x W_u) W_d`, with three matrices W."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.feedforward.tokenwise import Tokenwise
from lsm_jax.mixers import checks
from lsm_jax.mixers.layers import Dense, project, recomputed
from lsm_jax.ops.core.saved import INPUTS, product_input, stored_gradient


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class SwiGLUConfig:
    """The config of a SwiGLU feedforward, `(silu(x W_g) ⊙ x W_u) W_d`: its inner width.

    Attributes:
        hidden_ratio: the inner width is 2/3 hidden_ratio hidden_size, rounded up to a multiple of
            `multiple_of`. Its three matrices then have as many parameters as the two of a feedforward without
            gate and with inner width hidden_ratio hidden_size.
        multiple_of: the number of which the inner width is a multiple.
        intermediate_size: the inner width; None computes it from `hidden_ratio`.
        gate_scale: multiplies x W_g.
        output_scale: multiplies the output.
    """

    hidden_ratio: float = 4.0
    multiple_of: int = 256
    intermediate_size: int | None = None
    gate_scale: float = 1.0
    output_scale: float = 1.0

    @classmethod
    def for_width(cls, hidden_size: int, multiple_of: int) -> SwiGLUConfig:
        """Return the config with the default proportions and the inner width rounded up to a multiple of
        `multiple_of`.
        """
        return cls(multiple_of=multiple_of)

    def width(self, hidden_size: int) -> int:
        """Return SwiGLU's inner width, the number of columns of W_g and W_u, in a model of width
        `hidden_size`.
        """
        if self.intermediate_size is not None:
            return self.intermediate_size
        wanted = int(hidden_size * self.hidden_ratio * 2 / 3)
        return -(-wanted // self.multiple_of) * self.multiple_of

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of the SwiGLU feedforward is not valid."""
        checks.fields(self)
        checks.positive(self, hidden_ratio=self.hidden_ratio, multiple_of=self.multiple_of)
        checks.positive(self, gate_scale=self.gate_scale, output_scale=self.output_scale)
        if self.intermediate_size is not None:
            checks.positive(self, intermediate_size=self.intermediate_size)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the SwiGLU feedforward in a forward pass, per token: 2 for each
        number of its three matrices.
        """
        return 6.0 * hidden_size * self.width(hidden_size)


class SwiGLU(Tokenwise):
    """The SwiGLU feedforward, `(silu(x W_g) ⊙ x W_u) W_d`, [B, T, D] to [B, T, D]; `SwiGLUConfig` says what its options
    mean. It has no state.

    Attributes:
        gate_up: W_g and W_u side by side, [D, 2F], instead of `gate_proj` and `up_proj`; None before `join`.
    """

    gate_up: Any = None

    def __init__(
        self, config: SwiGLUConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        config.validate(hidden_size)
        self.config = copy.copy(config)
        width = config.width(hidden_size)
        into = dict(axes=("embed", "mlp"), rngs=rngs, init_std=init_std)
        self.gate_proj = Dense(hidden_size, width, **into)
        self.up_proj = Dense(hidden_size, width, **into)
        self.down_proj = Dense(
            width, hidden_size, axes=("mlp", "embed"), rngs=rngs, init_std=init_std
        )

    def join(self) -> None:
        """Replace the projections of gate and up by their kernels side by side, `gate_up`; the kernels may be stacked over layers.

        One product then loads x once, and the gradient of x is one array instead of two that are added. Biases, adapters and products of
        the projections are lost: they must have none but the product with the kernel.
        """
        kernels = [layer.kernel[...] for layer in (self.gate_proj, self.up_proj)]
        self.gate_up = nnx.Param(jnp.concatenate(kernels, axis=-1))
        del self.gate_proj, self.up_proj

    def transform(self, x: jax.Array) -> jax.Array:
        """Return the output [B, T, D] of SwiGLU for tokens x [B, T, D]."""
        into, out = self.config.gate_scale, self.config.output_scale

        def down(gate, up):
            hidden = product_input(jax.nn.silu(gate if into == 1 else into * gate) * up)
            y = self.down_proj(hidden)
            return y if out == 1 else out * y

        if self.gate_up is None:
            return recomputed(down, INPUTS)(self.gate_proj(x), self.up_proj(x))
        gate_up = project(x, self.gate_up[...])

        def down_of_both(gate_up):
            return down(*jnp.split(gate_up, 2, axis=-1))

        # The gradient of `split` joins those of its results. XLA computes and joins them in one pass if the joined array is stored; otherwise
        # it computes them apart, and the product with x^T joins them for itself.
        return recomputed(down_of_both, INPUTS)(stored_gradient(gate_up))
