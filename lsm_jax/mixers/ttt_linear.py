"""TTT-Linear (arXiv 2407.04620): the memory is a linear model with a norm, trained on each mini-batch of
tokens while it reads.

`f(x) = x + LN(x W + b)`, loss `½ ‖f(k) - v‖²`, gradients taken at the start of the mini-batch. Queries and
keys share a projection and differ by their convolutions; positions are rotary and count within the
mini-batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.layers import Dense, HeadNorm, merge_heads, parameter, rotate, split_heads
from lsm_jax.mixers.method import ONLINE_NOTE, Method
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class TTTLinearConfig(RecurrentConfig):
    """The config of a TTT-Linear layer, whose memory is a dense layer that gradient steps train on the tokens.

    Attributes:
        num_heads: number of heads, each with one inner model.
        mini_batch: tokens whose gradients are taken at the same weights.
        base_lr: the inner learning rate is base_lr · sigmoid(x w + b) / head channels.
        conv_size: width of the short convolutions on q and k, which no activation follows; 1 is none.
        rope_base: base of the rotary positions.
        inner_norm_eps: epsilon of the inner model's layer norm.
        norm_eps: epsilon of the layer norm over the output's channels.
    """

    num_heads: int = 16
    mini_batch: int = 16
    base_lr: float = 1.0
    conv_size: int = 4
    rope_base: float = 10000.0
    inner_norm_eps: float = 1e-6
    norm_eps: float = 1e-6

    @classmethod
    def for_width(cls, hidden_size: int) -> TTTLinearConfig:
        """Return the config of TTT-Linear for a model of width `hidden_size`, with heads of 64 channels, as published;
        below width 512, eight smaller heads.
        """
        return cls(num_heads=hidden_size // min(64, hidden_size // 8))

    def sizes(self, hidden_size: int) -> tuple[int, ...]:
        """Return the numbers of channels (key, value) of TTT-Linear's inner model, one dense layer from keys to values."""
        return (hidden_size // self.num_heads,) * 2

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of TTT-Linear is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields(("recurrent", "chunk"))
        checks.divides(self, "num_heads", self.num_heads, "hidden_size", hidden_size)
        if hidden_size // self.num_heads % 2:
            raise ValueError(
                f"{type(self).__name__}.num_heads={self.num_heads} gives heads of "
                f"{hidden_size // self.num_heads} channels; they must be even to be rotated"
            )
        checks.positive(
            self,
            mini_batch=self.mini_batch,
            base_lr=self.base_lr,
            rope_base=self.rope_base,
            inner_norm_eps=self.inner_norm_eps,
            norm_eps=self.norm_eps,
        )
        checks.convolution_width(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and
        convolutions, and per head 2 K V each for the model's output for the key, the write and the read.
        """
        around = hidden_size * (
            8.0 * hidden_size + 2 * self.num_heads + 4 * checks.convolution_taps(self)
        )
        return around + 6 * hidden_size * self.sizes(hidden_size)[0]


class TTTLinear(Mixer):
    """The layer of TTT-Linear: a mixer that maps [B, T, D] to [B, T, D]; `TTTLinearConfig` says what its options mean."""

    op = ops.online_memory
    uses_positions = True
    positions_in_memory = True
    memory_parts = ("qk_proj", "v_proj", "lr_proj")
    token_parts = ("qk_proj", "v_proj", "lr_proj")

    def __init__(
        self, config: TTTLinearConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        heads, sizes = config.num_heads, config.sizes(hidden_size)
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.qk_proj = Dense(hidden_size, hidden_size, **into)
        self.v_proj = Dense(hidden_size, hidden_size, **into)
        self.g_proj = Dense(hidden_size, hidden_size, **into)
        self.lr_proj = Dense(hidden_size, heads, bias=True, **into)
        convolution = dict(width=config.conv_size, rngs=rngs, axis="heads", bias=True, silu=False)
        self.q_conv = short_convolution("q", hidden_size, **convolution)
        self.k_conv = short_convolution("k", hidden_size, **convolution)
        fixed: dict[str, Any] = dict(weight_decay=False)
        by_layer = list(itertools.pairwise(sizes))
        self.inner_weights = nnx.List(
            [
                parameter(
                    init_std * jax.random.normal(rngs.params(), (heads, before, after)),
                    ("heads", None, None),
                    **fixed,
                )
                for before, after in by_layer
            ]
        )
        self.inner_biases = nnx.List(
            [
                parameter(jnp.zeros((heads, after)), ("heads", None), **fixed)
                for _, after in by_layer
            ]
        )
        self.inner_norm_scale = parameter(jnp.ones((heads, sizes[-1])), ("heads", None), **fixed)
        self.inner_norm_bias = parameter(jnp.zeros((heads, sizes[-1])), ("heads", None), **fixed)
        self.coefficients = parameter(jnp.zeros(config.mini_batch), (None,), **fixed)
        self.norm = HeadNorm(1, hidden_size, eps=config.norm_eps, axis="norm")
        self.o_proj = Dense(
            hidden_size, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _rotated(self, x: jax.Array, context: Context) -> jax.Array:
        positions = context.positions % self.config.mini_batch
        return rotate(split_heads(x, self.config.num_heads), positions, base=self.config.rope_base)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], convolved and rotated, and the context, in which
        `write` finds the shared projection of queries and keys.
        """
        qk = self.qk_proj(x)
        q, context = self.q_conv(qk, context.add(saved={"qk": qk}))
        return self._rotated(q, context), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `online_memory` that update the memory, by name, and the context: keys,
        convolved and rotated, values, the inner model that is trained, the learning rate of each token, and
        the factors of the summed gradient steps by a token's place in its mini-batch.
        """
        config = self.config
        rate = jax.nn.sigmoid(self.lr_proj(x, dtype=jnp.float32))
        place = jnp.arange(1, config.mini_batch + 1, dtype=jnp.float32)
        k, context = self.k_conv(context.saved["qk"], context)
        written = dict(
            k=self._rotated(k, context),
            v=split_heads(self.v_proj(x), config.num_heads),
            inner=ops.Inner(
                tuple(w[...] for w in self.inner_weights),
                tuple(b[...] for b in self.inner_biases),
                self.inner_norm_scale[...],
                self.inner_norm_bias[...],
            ),
            eta=rate * (config.base_lr * config.num_heads / self.hidden_size),
            coefficients=jnp.maximum(0, 1 / place + self.coefficients[...]),
        )
        return written, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: apply a layer
        norm over all channels, multiply by gelu(x W_g), and project.
        """
        normed = self.norm(merge_heads(o)[..., None, :])[..., 0, :]
        return self.o_proj(normed * jax.nn.gelu(self.g_proj(x))), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `online_memory` that do not depend on the input: those of its config, the
        mini-batch, and the norm of the inner model.
        """
        config = self.config
        return dict(
            super().options(),
            mini_batch=config.mini_batch,
            residual=True,
            norm_eps=config.inner_norm_eps,
        )

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.OnlineState:
        """Return the state of the online memory before any gradient step: no change of the weights and biases, for
        `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        config = self.config
        return ops.online_state(
            batch_size, config.num_heads, config.sizes(self.hidden_size), bias=True
        )


METHOD = Method(
    name="ttt_linear",
    paper="arXiv 2407.04620",
    op="online_memory",
    gate="1",
    write="-η ∇_W ½‖f(k) - v‖² at the mini-batch's start",
    read="f(q) = q + LN(q W + b)",
    state="W, b and the mini-batch's sum of gradients: 2 V (K + 1) a head; 3 tokens of q, k",
    forms=("recurrent", "chunk"),
    config=TTTLinearConfig,
    module=TTTLinear,
    note=ONLINE_NOTE,
)
