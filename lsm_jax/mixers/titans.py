"""Titans' neural long-term memory (arXiv 2501.00663): a model that is trained while it reads, with momentum
and forgetting.

`S_t = η_t S_{t-1} - θ_t ∇ℓ(k_t, v_t)`, `M_t = (1 - α_t) M_{t-1} + S_t`, `o_t = M_t(q_t)`, gradients taken at
the start of the mini-batch. As a layer of a pattern it is the paper's MAL (memory as a layer).
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
from lsm_jax.mixers.layers import (
    Dense,
    HeadNorm,
    RMSNorm,
    merge_heads,
    parameter,
    split_heads,
)
from lsm_jax.mixers.method import ONLINE_NOTE, Method
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class TitansConfig(RecurrentConfig):
    """The config of a Titans layer: a memory that gradient steps with momentum and forgetting train on the
    tokens. The paper does not specify the number of heads, the expansion, `max_lr` and the initial gates;
    those here are this project's choice.

    Attributes:
        num_heads: number of heads, each with one memory.
        memory_depth: layers of the memory, 1 (a matrix, as in arXiv 2503.05447 Table 1) or 2 (an MLP with
            GELU).
        memory_expand: number of channels between the memory's two layers, divided by the channels of a head.
        inner_norm: whether M(x) = x + LN(memory(x)), as in public implementations, instead of the paper's
            M(x) = memory(x).
        mini_batch: tokens whose gradients are taken at the same weights.
        max_lr: θ = max_lr · sigmoid(x w + b), for the mean square of the error over a head's channels. A
            matrix without norm is linear in the values, so that the size of the values cannot make it
            diverge; other memories may diverge, and require a smaller rate (TTT-MLP has 0.1).
        conv_size: width of the short convolutions on q, k and v; 1 means no convolution, only the SiLU that follows it.
        inner_norm_eps: epsilon of the memory's layer norm.
        norm_eps: epsilon of the norm over each head's output.
    """

    num_heads: int = 16
    memory_depth: int = 1
    memory_expand: int = 2
    inner_norm: bool = False
    mini_batch: int = 16
    max_lr: float = 1.0
    conv_size: int = 4
    inner_norm_eps: float = 1e-6
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> TitansConfig:
        """Return the config of Titans for a model of width `hidden_size`, with heads of 64 channels; below width 512,
        eight smaller heads.
        """
        return cls(num_heads=hidden_size // min(64, hidden_size // 8))

    def sizes(self, hidden_size: int) -> tuple[int, ...]:
        """Return the numbers of channels of Titans' memory, a small network: of its keys, of its hidden layers if any,
        and of its values.
        """
        size = hidden_size // self.num_heads
        return (size, *(self.memory_expand * size,) * (self.memory_depth - 1), size)

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of Titans is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields(("recurrent", "chunk"))
        checks.divides(self, "num_heads", self.num_heads, "hidden_size", hidden_size)
        checks.one_of(self, "memory_depth", self.memory_depth, (1, 2))
        checks.positive(
            self,
            memory_expand=self.memory_expand,
            mini_batch=self.mini_batch,
            max_lr=self.max_lr,
            inner_norm_eps=self.inner_norm_eps,
            norm_eps=self.norm_eps,
        )
        checks.convolution_width(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections and
        convolutions; for each weight of a head's memory 2 each for the output for the key, the write and the
        read, and 3 for the decays and the additions of momentum and memory; and 2 for each weight of the
        second layer for the gradient's backward pass.
        """
        size = hidden_size // self.num_heads
        around = (
            2.0
            * hidden_size
            * (5 * hidden_size + 3 * self.num_heads + 3 * checks.convolution_taps(self))
        )
        weights = 20 * self.memory_expand if self.memory_depth == 2 else 9
        return around + weights * hidden_size * size


class Titans(Mixer):
    """The layer of Titans: a mixer that maps [B, T, D] to [B, T, D]; `TitansConfig` says what its options mean."""

    op = ops.online_memory
    memory_parts = ("k_proj", "v_proj", "momentum_proj", "lr_proj", "decay_proj")
    token_parts = ("q_proj", "k_proj", "v_proj", "momentum_proj", "lr_proj", "decay_proj")

    def __init__(
        self, config: TitansConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        heads, sizes = config.num_heads, config.sizes(hidden_size)
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, hidden_size, **into)
        self.k_proj = Dense(hidden_size, hidden_size, **into)
        self.v_proj = Dense(hidden_size, hidden_size, **into)
        self.g_proj = Dense(hidden_size, hidden_size, **into)
        self.momentum_proj = Dense(hidden_size, heads, bias=True, **into)
        self.lr_proj = Dense(hidden_size, heads, bias=True, **into)
        self.decay_proj = Dense(hidden_size, heads, **into)
        # α starts at 0.02: at 0.5, where a bias of 0 would put it, a memory is forgotten within a mini-batch.
        self.decay_bias = parameter(jnp.full(heads, -4.0), ("heads",), weight_decay=False)
        convolution = dict(width=config.conv_size, rngs=rngs, axis="heads")
        self.q_conv = short_convolution("q", hidden_size, **convolution)
        self.k_conv = short_convolution("k", hidden_size, **convolution)
        self.v_conv = short_convolution("v", hidden_size, **convolution)
        # By fan-in: keys have unit length, and layers of a small scale would hardly learn at first.
        self.inner_weights = nnx.List(
            [
                parameter(
                    before**-0.5 * jax.random.normal(rngs.params(), (heads, before, after)),
                    ("heads", None, None),
                    weight_decay=False,
                )
                for before, after in itertools.pairwise(sizes)
            ]
        )
        norm = HeadNorm(heads, sizes[-1], eps=config.inner_norm_eps)
        self.inner_norm = norm if config.inner_norm else None
        self.norm = RMSNorm(sizes[-1], eps=config.norm_eps)
        self.o_proj = Dense(
            hidden_size, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], x W_q after the short convolution, each of unit
        length, and the context.
        """
        heads = self.config.num_heads
        q, context = self.q_conv(self.q_proj(x), context, self.hidden_size // heads)
        return split_heads(q, heads), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `online_memory` that update the memory, by name, and the context: keys of unit length
        and values after the short convolutions, the initial weights of the memory, the learning rates, and the log
        gates of momentum and decay.
        """
        heads = self.config.num_heads
        rate = jax.nn.sigmoid(self.lr_proj(x, dtype=jnp.float32))
        momentum = self.momentum_proj(x, dtype=jnp.float32)
        forget = self.decay_proj(x, dtype=jnp.float32) + self.decay_bias[...]
        k, context = self.k_conv(self.k_proj(x), context, self.hidden_size // heads)
        v, context = self.v_conv(self.v_proj(x), context)
        written = dict(
            k=split_heads(k, heads),
            v=split_heads(v, heads),
            inner=self._inner(),
            # The op's loss is half the sum of squares.
            eta=rate * (2 * self.config.max_lr * heads / self.hidden_size),
            log_momentum=jax.nn.log_sigmoid(momentum),
            log_decay=jax.nn.log_sigmoid(-forget),
        )
        return written, context

    def _inner(self) -> ops.Inner:
        weights, norm = tuple(w[...] for w in self.inner_weights), self.inner_norm
        if norm is None or norm.bias is None:
            return ops.Inner(weights)
        return ops.Inner(weights, None, norm.scale[...], norm.bias[...])

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: normalise each
        head, multiply by silu(x W_g), and project.
        """
        gate = split_heads(self.g_proj(x), self.config.num_heads)
        return self.o_proj(merge_heads(self.norm(o, gate))), context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `online_memory` that do not depend on the input: those of its config, the
        mini-batch, and the norm of the inner model.
        """
        config = self.config
        return dict(
            super().options(),
            mini_batch=config.mini_batch,
            residual=config.inner_norm,
            norm_eps=config.inner_norm_eps,
        )

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.OnlineState:
        """Return the state of the online memory before any gradient step: no change of the weights and no momentum, for
        `batch_size` rows; `max_length` and `dtype` do not affect it.
        """
        config = self.config
        return ops.online_state(
            batch_size, config.num_heads, config.sizes(self.hidden_size), momentum=True
        )


METHOD = Method(
    name="titans",
    paper="arXiv 2501.00663",
    op="online_memory",
    gate="1 - α, each head",
    write="S ← η S - θ ∇‖M(k) - v‖² at the mini-batch's start",
    read="M(q), M a matrix or an MLP",
    state="M, S and M at the mini-batch's start: 3 K × V a head for a matrix; 3 tokens of q, k, v",
    forms=("recurrent", "chunk"),
    config=TitansConfig,
    module=Titans,
    note=ONLINE_NOTE
    + "; a pattern of it is the paper's MAL, and persistent-memory tokens, MAC and MAG are not here",
)
