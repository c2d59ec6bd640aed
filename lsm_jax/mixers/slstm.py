"""sLSTM (xLSTM, arXiv 2405.04517): a memory of one number for each channel with exponential gates, whose output is an input
of the next token's gates, among the channels of a head.

The layer is the authors' (NX-AI/xlstm, blocks/slstm): the inputs of the gates i and f come from a short convolution with bias,
those of the value z and the gate o from x itself, each by a matrix for each head; each head's output is normalised, and there
is no projection after it. Their code exchanges the names of the parameters of i and f, for the sake of older checkpoints; here
each has its own name. A channel is empty where its normaliser is 0, as in their CUDA code; their PyTorch code asks that of the
whole batch, so that one row would depend on the others. Their feedforward is a gated GELU of 1.3 times the width; ours is
SwiGLU, as for every method.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.layers import HeadNorm, merge_heads, parameter, split_heads
from lsm_jax.mixers.method import Method


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class SLSTMConfig:
    """The config of an sLSTM layer. Its op has one form, a scan over tokens.

    Attributes:
        num_heads: number of heads, a divisor of the width.
        conv_size: width of the short convolution ahead of the gates i and f; 1 means no convolution, only SiLU.
        norm_eps: epsilon of the norm over each head's output.
        implementation: the op's backend; None lets the op select.
    """

    num_heads: int = 4
    conv_size: int = 4
    norm_eps: float = 1e-5
    implementation: str | None = None

    @classmethod
    def for_width(cls, hidden_size: int) -> SLSTMConfig:
        """Return the config of sLSTM for a model of any width, with the published four heads."""
        return cls()

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of sLSTM is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        checks.fields(self)
        checks.divides(self, "num_heads", self.num_heads, "hidden_size", hidden_size)
        checks.positive(self, norm_eps=self.norm_eps)
        checks.convolution_width(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the convolution, the products of inputs and
        of the last output with the matrices of four gates, and 6 for each channel's memory and normaliser.
        """
        matrices = 2.0 * 8 * hidden_size * hidden_size // self.num_heads
        return matrices + (2 * checks.convolution_taps(self) + 6) * hidden_size


class HeadDense(nnx.Module):
    """Products of the channels of each head with matrices of its own, `kernel` [H, K, ..., K]."""

    def __init__(self, kernel: jax.Array):
        axes = ("heads", "embed", *(None,) * (kernel.ndim - 2))
        self.kernel = parameter(kernel, axes, weight_decay=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the products [B, T, H, K], in float32 or wider, of x [B, T, H, K]."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        kernel = self.kernel[...].astype(wide)
        highest = jax.lax.Precision.HIGHEST
        return jnp.einsum("bthk,hkl->bthl", x.astype(wide), kernel, precision=highest)


class SLSTM(Mixer):
    """The layer of sLSTM: a mixer that maps [B, T, D] to [B, T, D]; `SLSTMConfig` says what its options mean.

    The recurrent matrices start at 0, and the biases of the forget gates from 5 down to -7 over the channels of a head,
    faster in later layers.
    """

    single_because = (
        "each token's gates read the output before, so a memory cannot leave out tokens"
    )
    op = ops.slstm_memory
    uses_depth = True

    def __init__(
        self,
        config: SLSTMConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
        layer: jax.Array | int = 0,
        num_layers: int = 1,
    ):
        super().__init__(config, hidden_size)
        heads, dim = config.num_heads, hidden_size // config.num_heads
        std = math.sqrt(2 / (5 * hidden_size))

        def dense() -> HeadDense:
            draw = jax.random.normal(rngs.params(), (heads, dim, dim), jnp.float32)
            return HeadDense(std * draw)

        self.i_proj, self.f_proj, self.z_proj, self.o_proj = (dense() for _ in range(4))
        self.recurrent = HeadDense(jnp.zeros((heads, dim, 4, dim), jnp.float32))
        place = jnp.arange(dim) / max(1, dim - 1)
        power = 0.3 + 1.3 * jnp.asarray(layer) / max(1, num_layers - 1)
        fixed = dict(logical_axes=("heads", None), weight_decay=False)
        forget = jnp.broadcast_to(5 - 12 * place**power, (heads, dim))
        self.f_bias = parameter(forget, **fixed)
        self.i_bias, self.z_bias, self.o_bias = (
            parameter(jnp.zeros((heads, dim), jnp.float32), **fixed) for _ in range(3)
        )
        self.conv = short_convolution(
            "x", hidden_size, config.conv_size, rngs=rngs, axis="embed", bias=True
        )
        self.norm = HeadNorm(heads, dim, eps=config.norm_eps, bias=False)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the inputs of the output gates [B, T, H, K] of tokens x [B, T, D], and the context."""
        o = self.o_proj(split_heads(x, self.config.num_heads))
        return o + self.o_bias[...], context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `slstm_memory` that update the memory, by name, and the context: the inputs of the gates
        i and f, from the short convolution, and of the value z, [B, T, H, K], and the recurrent matrices.
        """
        heads = self.config.num_heads
        gated, context = self.conv(x, context)
        gated = split_heads(gated, heads)
        written = dict(
            i=self.i_proj(gated) + self.i_bias[...],
            f=self.f_proj(gated) + self.f_bias[...],
            z=self.z_proj(split_heads(x, heads)) + self.z_bias[...],
            recurrent=self.recurrent.kernel[...],
        )
        return written, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D]: the memory's output o [B, T, H, K], normalised in each
        head.
        """
        return merge_heads(self.norm(o)).astype(x.dtype), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `slstm_memory` that do not depend on the input: the backends."""
        return dict(implementation=self.config.implementation)

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.SLSTMState:
        """Return the state before any token: zeros [B, H, K] in float32 for `batch_size` rows; `max_length` and `dtype` do
        not affect it.
        """
        heads = self.config.num_heads
        return ops.slstm_state(batch_size, heads, self.hidden_size // heads)


METHOD = Method(
    name="slstm",
    paper="arXiv 2405.04517",
    op="slstm_memory",
    gate="sigmoid(x W + y R + b), each channel; y the token before's output",
    write="exp(x W + y R + b) tanh(x W + y R + b)",
    read="sigmoid(x W + y R + b) c / n",
    state="4 numbers a channel: output, memory, normaliser, largest exponent; 3 tokens of x",
    forms=(),
    config=SLSTMConfig,
    module=SLSTM,
    note="gates depend on the output before: a scan over tokens is the only form",
)
