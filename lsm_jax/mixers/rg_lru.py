"""RG-LRU, the real-gated linear recurrent unit of Griffin and Hawk (arXiv 2402.19427), in the recurrent block of
RecurrentGemma.

For each channel, with gates r and i in (0, 1) of the convolved input u and a learned Λ,

    log a_t = -8 r_t softplus(Λ),    h_t = a_t h_{t-1} + sqrt(1 - a_t²) i_t u_t,

and at a document's first token h = i u. The gates' matrices are block-diagonal. The block is
y = (h ⊙ gelu(x W_y + b)) W_o + b, with u a convolution of x W_x + b, with a bias and without an activation.

Source: google-deepmind/recurrentgemma (jax/layers.py). The derivative of the square root is at most 1000 there and here. The
convolution's state has the channels of the recurrence; transformers' has those of the model, which fails where the two differ.
Its complex variant (`only_real=False`) is not implemented.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, TokenShift, short_convolution
from lsm_jax.mixers.elementwise import elementwise_memory
from lsm_jax.mixers.feature_maps import HeadDense
from lsm_jax.mixers.layers import Dense, merge_heads, parameter, recomputed, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig

_STEEPEST = 1000.0


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class RGLRUConfig(RecurrentConfig):
    """The config of the recurrent block of Griffin, Hawk and RecurrentGemma.

    Attributes:
        num_heads: blocks of the gates' matrices.
        expand: number of the recurrence's channels, divided by hidden_size: 1 in RecurrentGemma and Hawk 2B, 1.375 in
            Griffin 7B.
        conv_size: width of the short convolution; 1 means none.
    """

    num_heads: int = 10
    expand: float = 1.0
    conv_size: int = 4

    @classmethod
    def for_width(cls, hidden_size: int) -> RGLRUConfig:
        """Return the config of RG-LRU for a model of width `hidden_size`, with RecurrentGemma's proportions: as many
        channels as the width, in blocks of 256 (smaller ones below width 1024).
        """
        return cls(num_heads=hidden_size // min(256, hidden_size // 4))

    def channels(self, hidden_size: int) -> int:
        """Return the number of channels of the recurrence in a model of width `hidden_size`."""
        return self.num_heads * checks.expanded(
            self, "expand", self.expand, hidden_size, self.num_heads
        )

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of RG-LRU is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        self.channels(hidden_size)
        checks.convolution_width(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, the gates, the
        convolution, and 3 for each channel's number.
        """
        inner = self.channels(hidden_size)
        projections = 6.0 * hidden_size * inner + 4 * inner * (inner // self.num_heads)
        return projections + (2 * checks.convolution_taps(self) + 3) * inner


@jax.custom_jvp
def root_of_positive(x: jax.Array) -> jax.Array:
    """Return sqrt(x) of x ≥ 0, with a derivative of at most 1000."""
    return jnp.sqrt(x)


@root_of_positive.defjvp
def _root_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return jnp.sqrt(x), dx * jax.lax.rsqrt(jnp.maximum(4 * x, _STEEPEST**-2))


def gated_input(
    u: jax.Array, reset: jax.Array, write: jax.Array, rate: jax.Array, first: jax.Array
) -> dict[str, jax.Array]:
    """Return the arguments of `elementwise_memory` for RG-LRU, by name.

    Args:
        u: [B, T, D] inputs, float32 as all arguments.
        reset: [B, T, D], r.
        write: [B, T, D], i.
        rate: [D], Λ.
        first: [B, T, 1], whether a token is the first of its document.
    """
    log_decay = -8 * reset * jax.nn.softplus(rate)
    share = root_of_positive(-jnp.expm1(2 * log_decay))
    return dict(u=jnp.where(first, 1, share) * write * u, log_decay=log_decay)


class RGLRU(Mixer):
    """The recurrent block with RG-LRU: a mixer that maps [B, T, D] to [B, T, D]; `RGLRUConfig` says what its options mean."""

    op = ops.selective_memory
    memory_parts = ("x_proj",)
    token_parts = ("x_proj",)

    def __init__(
        self, config: RGLRUConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.inner, heads = config.channels(hidden_size), config.num_heads
        inner = self.inner
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std, bias=True)
        self.x_proj = Dense(hidden_size, inner, **into)
        self.y_proj = Dense(hidden_size, inner, **into)
        self.conv = short_convolution(
            "x", inner, config.conv_size, rngs=rngs, axis="heads", bias=True, silu=False
        )
        size = inner // heads

        def gate() -> HeadDense:
            kernel = jax.random.normal(rngs.params(), (heads, size, size), jnp.float32)
            return HeadDense(0.1 * size**-0.5 * kernel, bias=True)

        self.reset_gate, self.write_gate = gate(), gate()
        square = jax.random.uniform(rngs.params(), (inner,), jnp.float32, 0.9**2, 0.999**2)
        rate = jnp.log(jnp.expm1(-0.5 * jnp.log(square)))  # softplus(Λ) = -log of the radius
        self.rate = parameter(rate, ("heads",), weight_decay=False)
        self.begun = TokenShift("begun", 1, in_finish=False)
        self.o_proj = Dense(
            inner, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std, bias=True
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the read vector of `selective_memory`, ones [D, 1], and the context."""
        return jnp.ones((self.inner, 1), jnp.float32), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `elementwise_memory`, by name, and the context; see `gated_input`."""
        u, context = self.conv(self.x_proj(x), context)
        begun, context = self.begun(jnp.ones_like(x[..., :1]), context)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        heads = split_heads(u, self.config.num_heads)

        @recomputed
        def gated(u, reset, write, rate, begun):
            reset, write = (jax.nn.sigmoid(merge_heads(g).astype(wide)) for g in (reset, write))
            written = gated_input(u.astype(wide), reset, write, rate, begun == 0)
            return written | dict(u=written["u"].astype(u.dtype))

        gates = self.reset_gate(heads), self.write_gate(heads)
        return gated(u, *gates, self.rate[...], begun), context

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Return the memory [B, T, D] after each token, and the final state."""
        return elementwise_memory(**written, **call)

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the block's output y [B, T, D] from the memory o [B, T, inner channels]: multiply by
        gelu(x W_y + b), and project.
        """
        return self.o_proj(o * jax.nn.gelu(self.y_proj(x))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.SelectiveState:
        """Return the state before any token: zeros [B, inner channels, 1] in float32 for `batch_size` rows; `max_length`
        and `dtype` do not affect it.
        """
        return ops.selective_state(batch_size, self.inner, 1)


METHOD = Method(
    name="rg_lru",
    paper="arXiv 2402.19427",
    op="selective_memory",
    gate="a = exp(-8 r softplus(Λ)), each channel",
    write="sqrt(1 - a²) i u; i u at a document's first token",
    read="h",
    state="1 a channel; 3 tokens",
    config=RGLRUConfig,
    module=RGLRU,
)
