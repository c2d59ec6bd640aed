"""PaTH attention (arXiv 2505.16381): softmax attention whose positions are products of the matrices I - β wᵀ w of the
tokens between query and key, with or without forget gates.

The layer is flash-linear-attention's (fla/layers/path_attn.py): queries, keys and values go through no convolution and no
rotation; w is x W₁ W₂, of rank 32, after a short convolution of width 3, of unit length; β = 2 sigmoid(x W + b). A forget
gate is sigmoid(x W + b) for each query head; the scale of the scores multiplies its logarithm too, as it does there.
Its code has directions of rank 32 for grouped heads too, where its comment advises a full matrix: the rank is 32 here as well, and
`rank=None` is the full matrix.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer, short_convolution
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig

FORMS = ("recurrent", "chunk")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class PaTHConfig(RecurrentConfig):
    """The config of a layer of PaTH attention.

    Attributes:
        num_heads: heads of queries.
        num_kv_heads: heads of keys, values and directions, a divisor of `num_heads`; None is `num_heads`.
        head_dim: channels of a head.
        rank: rank of the projection to the directions w; None is a full matrix.
        conv_size: width of the short convolution on w; 1 means no convolution, only the SiLU that follows it.
        forget_gate: whether heads have forget gates.
        qk_norm: whether queries and keys are RMS-normalised, with learned scales.
        norm_eps: epsilon of the norms of queries and keys.
    """

    num_heads: int = 32
    num_kv_heads: int | None = None
    head_dim: int = 64
    rank: int | None = 32
    conv_size: int = 3
    forget_gate: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6

    @classmethod
    def for_width(cls, hidden_size: int) -> PaTHConfig:
        """Return the config of PaTH attention for a model of width `hidden_size`, with the published proportions: heads
        of 64 channels and directions of rank 32 (both smaller below width 256).
        """
        head_dim = min(64, hidden_size // 4)
        return cls(
            head_dim=head_dim, num_heads=max(1, hidden_size // head_dim), rank=min(32, hidden_size // 8)
        )  # fmt: skip

    def kv_heads(self) -> int:
        """Return the number of heads of keys, values and directions: `num_kv_heads`, or `num_heads` if that is None."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of PaTH attention is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields(FORMS)
        checks.positive(
            self, num_heads=self.num_heads, head_dim=self.head_dim, norm_eps=self.norm_eps
        )
        checks.divides(self, "num_kv_heads", self.kv_heads(), "num_heads", self.num_heads)
        if self.rank is not None:
            checks.positive(self, rank=self.rank)
        checks.convolution_width(self)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, the scores and weighted
        sums over the keys that a query attends to on average, and 2 K² a head for each chunk of 64 tokens that it passes.
        """
        heads, kv_heads, dim = self.num_heads, self.kv_heads(), self.head_dim
        into_w = hidden_size * kv_heads * dim
        if self.rank is not None:
            into_w = self.rank * (hidden_size + kv_heads * dim)
        gates = hidden_size * (kv_heads + heads * self.forget_gate)
        projections = 2.0 * (hidden_size * dim * (2 * heads + 2 * kv_heads) + into_w + gates)
        convolution = 2 * checks.convolution_taps(self) * kv_heads * dim
        seen = (seq_len + 1) / 2
        return projections + convolution + heads * dim * (4 * seen + 2 * dim * seen / 64)


class PaTH(Mixer):
    """The layer of PaTH attention: a mixer that maps [B, T, D] to [B, T, D]; `PaTHConfig` says what its options mean."""

    single_because = "it stores the keys and values of all tokens, of which no memory is chosen"
    op = ops.path_attention

    def __init__(
        self, config: PaTHConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        heads, kv_heads, dim = config.num_heads, config.kv_heads(), config.head_dim
        dense: dict[str, Any] = dict(rngs=rngs, init_std=init_std)
        into: dict[str, Any] = dict(dense, axes=("embed", "heads"))
        self.q_proj = Dense(hidden_size, heads * dim, **into)
        self.k_proj = Dense(hidden_size, kv_heads * dim, **into)
        self.v_proj = Dense(hidden_size, kv_heads * dim, **into)
        if config.rank is None:
            self.w_proj = Dense(hidden_size, kv_heads * dim, **into)
        else:
            self.w_down = Dense(hidden_size, config.rank, axes=("embed", None), **dense)
            self.w_up = Dense(config.rank, kv_heads * dim, axes=(None, "heads"), **dense)
        self.w_conv = short_convolution(
            "w", kv_heads * dim, config.conv_size, rngs=rngs, axis="heads"
        )
        self.beta_proj = Dense(hidden_size, kv_heads, bias=True, **into)
        self.f_proj = Dense(hidden_size, heads, bias=True, **into) if config.forget_gate else None
        self.q_norm = RMSNorm(dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, eps=config.norm_eps) if config.qk_norm else None
        self.o_proj = Dense(heads * dim, hidden_size, axes=("heads", "embed"), **dense)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], normalised if the config says so, and the context."""
        q = split_heads(self.q_proj(x), self.config.num_heads)
        return q if self.q_norm is None else self.q_norm(q), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `path_attention` that update the memory, by name, and the context: keys and values
        [B, T, G, K], directions w of unit length, strengths β, and the log forget gates of each query head or None.
        """
        heads, dim = self.config.kv_heads(), self.config.head_dim
        w = self.w_proj(x) if self.config.rank is None else self.w_up(self.w_down(x))
        w, context = self.w_conv(w, context, dim)
        k = split_heads(self.k_proj(x), heads)
        log_forget = None
        if self.f_proj is not None:
            gate = jax.nn.log_sigmoid(self.f_proj(x, dtype=jnp.float32))
            log_forget = dim**-0.5 * gate
        written = dict(
            k=k if self.k_norm is None else self.k_norm(k),
            v=split_heads(self.v_proj(x), heads),
            w=split_heads(w, heads),
            beta=2 * jax.nn.sigmoid(self.beta_proj(x, dtype=jnp.float32)),
            log_forget=log_forget,
        )
        return written, context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]: project the heads
        together.
        """
        return self.o_proj(merge_heads(o)), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.AttentionState:
        """Return an empty state with capacity for `max_length` keys, in float32, and values."""
        config = self.config
        return ops.path_attention_state(
            batch_size,
            max_length,
            config.kv_heads(),
            config.head_dim,
            config.head_dim,
            forget_heads=config.num_heads if config.forget_gate else None,
            dtype=dtype,
        )


METHOD = Method(
    name="path",
    paper="arXiv 2505.16381",
    op="path_attention",
    gate="I - β wᵀ w on all stored keys; and sigmoid(x W + b) on attention weights, if asked for",
    write="k, v",
    read="softmax(q Kᵀ + sums of log gates) V",
    state="k, in float32, and v of every token; 2 tokens of w",
    forms=FORMS,
    config=PaTHConfig,
    module=PaTH,
    note="the memory grows with the sequence: no associative form",
)
