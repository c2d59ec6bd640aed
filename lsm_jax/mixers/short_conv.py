"""The gated short convolution of LFM2 (arXiv 2511.23404): `y = (C ⊙ conv(B ⊙ x)) W_o`, with projections B, C and x of the input. It
has no memory; a row's state is the last inputs of the convolution.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.layers import Dense
from lsm_jax.mixers.method import Method


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ShortConvConfig:
    """The config of a gated short convolution.

    Attributes:
        conv_size: width of the convolution; 1 means no convolution.
    """

    conv_size: int = 3

    @classmethod
    def for_width(cls, hidden_size: int) -> ShortConvConfig:
        """Return the config with LFM2's width of the convolution, 3, at any width of the model."""
        return cls()

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if the width of the convolution is not accepted."""
        checks.fields(self)
        checks.convolution_width(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: four projections, the convolution and two gates."""
        return hidden_size * (8.0 * hidden_size + 2 * checks.convolution_taps(self) + 2)


class ShortConv(Mixer):
    """The layer of a gated short convolution, a mixer that maps [B, T, D] to [B, T, D]; `ShortConvConfig` says what its options
    mean.
    """

    op = ops.short_convolution

    def __init__(
        self, config: ShortConvConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.b_proj = Dense(hidden_size, hidden_size, **into)
        self.c_proj = Dense(hidden_size, hidden_size, **into)
        self.x_proj = Dense(hidden_size, hidden_size, **into)
        self.conv = short_convolution(
            "conv", hidden_size, config.conv_size, rngs=rngs, axis="heads", silu=False
        )
        self.o_proj = Dense(
            hidden_size, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return C [B, T, D] of tokens x [B, T, D], and the context."""
        return self.c_proj(x), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return conv(B ⊙ x) [B, T, D] of tokens x [B, T, D] as `v`, and the context with the convolution's tail."""
        y, context = self.conv(self.b_proj(x) * self.x_proj(x), context)
        return dict(v=y), context

    def through_memory(
        self, x: jax.Array, context: Context, memory: Any
    ) -> tuple[jax.Array, Any, Context]:
        """Return `C ⊙ conv(B ⊙ x)` [B, T, D] for tokens x [B, T, D], None as the memory, and the context."""
        c, context = self.read(x, context)
        written, context = self.write(x, context)
        return c * written["v"], None, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the projection [B, T, D] of o [B, T, D], and the context."""
        return self.o_proj(o), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> None:
        """Return None: there is no memory."""
        return None


METHOD = Method(
    name="short_conv",
    paper="arXiv 2511.23404",
    op="short_convolution",
    gate="none: no memory",
    write="B ⊙ x",
    read="C ⊙ conv(B ⊙ x)",
    state="2 tokens of B ⊙ x",
    forms=(),
    config=ShortConvConfig,
    module=ShortConv,
)
