"""HGRN2 (arXiv 2404.07904): `M_t = diag(f_t) M_{t-1} + (1 - f_t)ᵀ i_t`, `o_t = silu(q_t) M_t`, f bounded
below.

`f = γ + (1 - γ) sigmoid(x W_f)`. The bounds γ are learned across the model's HGRN2 layers: each layer has a
row of logits, and a layer's bound is the sum of the softmax over layers from the second layer up to it, so
they grow from 0 with depth.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context, Mixer
from lsm_jax.mixers.layers import Dense, RMSNorm, merge_heads, parameter, recomputed, split_heads
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig

_BOUNDS = "hgrn2_log_bounds"


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class HGRN2Config(RecurrentConfig):
    """The config of an HGRN2 layer: linear attention whose keys are 1 minus the forget gate, which has a learned lower
    bound.

    Attributes:
        head_dim: key and value channels of a head (the paper's expansion ratio); hidden_size / head_dim heads.
        lower_bound: γ of every layer but the model's first, whose γ is 0. With None the model learns γ for
            each layer; a number from 0 to less than 1 is constant, and adds no parameters. Linear-MoE's
            models (arXiv 2503.05447, its code) have 0.
        head_norm: whether the norm is over each head's output, as in Linear-MoE, and not over the whole width.
        norm_eps: epsilon of the norm over the output.
    """

    head_dim: int = 128
    lower_bound: float | None = None
    head_norm: bool = False
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> HGRN2Config:
        """Return the config of HGRN2 for a model of width `hidden_size`, with the published proportions: heads of 128
        channels, smaller ones below width 512.
        """
        return cls(head_dim=min(128, hidden_size // 4))

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of HGRN2 is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.divides(self, "head_dim", self.head_dim, "hidden_size", hidden_size)
        checks.positive(self, norm_eps=self.norm_eps)
        if self.lower_bound is not None and not 0 <= self.lower_bound < 1:
            raise ValueError(
                f"HGRN2Config.lower_bound={self.lower_bound}: accepted are None and numbers from 0 to less than 1"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections, and per head K
        V to decay the memory and 2 K V each to write and to read.
        """
        return 8.0 * hidden_size**2 + 5.0 * hidden_size * self.head_dim


def log_bounds(logits: jax.Array) -> jax.Array:
    """Return log γ and log (1 - γ) of each layer, [L, 2, D], where γ is HGRN2's lower bound of the forget gate, from
    the layers' learned logits [L, D]; γ of the first layer is 0.
    """
    share = jax.nn.log_softmax(logits, axis=0)
    layers = jnp.arange(len(logits))
    below = (layers <= layers[1:, None]) & (layers > 0)  # of every layer but the first

    def total(which):
        return jax.nn.logsumexp(jnp.where(which[..., None], share, -jnp.inf), axis=1)

    bounds = jnp.stack([total(below), total(~below)], axis=1)
    return jnp.concatenate([_unbounded(logits.shape[1])[None], bounds])


def _unbounded(size: int) -> jax.Array:
    """Return the logarithms of γ = 0 and of 1 - γ, [2, size], where γ is HGRN2's lower bound of the forget gate: no
    bound.
    """
    return jnp.stack([jnp.full(size, -jnp.inf, jnp.float32), jnp.zeros(size, jnp.float32)])


def shared_log_bounds(stacks: list[tuple[jax.Array, Any]]) -> jax.Array | None:
    """Return log γ and log (1 - γ) of the layers of a model, [L, 2, D], from the mixers that `Mixer.init_shared` receives;
    only layers with learned bounds have entries. None if no layer learns its bound.
    """
    stacks = [stack for stack in stacks if stack[1].lower_bound is not None]
    if not stacks:
        return None
    index = jnp.concatenate([layers for layers, _ in stacks])
    logits = jnp.concatenate([mixer.lower_bound[...] for _, mixer in stacks])
    order = jnp.argsort(index)
    table = jnp.zeros((stacks[0][1].num_layers, 2, logits.shape[1]), logits.dtype)
    return table.at[index[order]].set(log_bounds(logits[order]))


def log_bound(mixer: Any, context: Context, name: str) -> jax.Array:
    """Return log γ and log (1 - γ), [2, D], of the layer of a call, from the config's constant γ or from
    `context.shared[name]`; γ is 0 outside a model and in its first layer.
    """
    unbounded, constant = _unbounded(mixer.hidden_size), mixer.config.lower_bound
    if context.layer is None:
        return unbounded
    if constant is not None:
        logs = jnp.log(jnp.array([[constant], [1 - constant]], jnp.float32))
        return jnp.where(jnp.equal(context.layer, 0), unbounded, logs)
    return context.shared[name][context.layer] if name in context.shared else unbounded


def forget_and_rest(gate: jax.Array, log_bounds: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return log f and 1 - f, with the forget gate f = γ + (1 - γ) sigmoid(gate); both in the gate's dtype."""
    bound, rest = log_bounds
    log_f = jnp.logaddexp(bound, rest + jax.nn.log_sigmoid(gate))
    return log_f, jnp.exp(rest + jax.nn.log_sigmoid(-gate))


class HGRN2(Mixer):
    """The layer of HGRN2: a mixer that maps [B, T, D] to [B, T, D]; `HGRN2Config` says what its options mean."""

    op = ops.linear_memory
    uses_depth = True
    memory_parts = ("f_proj", "i_proj")
    token_parts = ("q_proj", "f_proj", "i_proj")

    def __init__(
        self,
        config: HGRN2Config,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
        layer: jax.Array | int = 0,
        num_layers: int = 1,
    ):
        super().__init__(config, hidden_size)
        self.num_heads, self.num_layers = hidden_size // config.head_dim, num_layers
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.q_proj = Dense(hidden_size, hidden_size, **into)
        self.f_proj = Dense(hidden_size, hidden_size, **into)
        self.i_proj = Dense(hidden_size, hidden_size, **into)
        zeros = jnp.zeros(hidden_size, jnp.float32)  # logits of the learned bounds
        learned = config.lower_bound is None
        self.lower_bound = parameter(zeros, ("heads",), weight_decay=False) if learned else None
        normed = config.head_dim if config.head_norm else hidden_size
        self.norm = RMSNorm(normed, eps=config.norm_eps)
        self.o_proj = Dense(
            hidden_size, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    @classmethod
    def init_shared(cls, x: jax.Array, stacks: list[tuple[jax.Array, Any]]) -> dict[str, jax.Array]:
        """Return, by name, log γ and log (1 - γ) for HGRN2's lower bounds γ in a model of L layers,
        [L, 2, D], learned across its HGRN2 layers; only the layers with learned bounds read their entries.
        Empty if no layer learns its bound.
        """
        table = shared_log_bounds(stacks)
        return {} if table is None else {_BOUNDS: table}

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] of tokens x [B, T, D], silu(x W_q) cut into heads, and the context."""
        return jax.nn.silu(split_heads(self.q_proj(x), self.num_heads)), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `linear_memory` that update the memory, by name, and the context: keys 1 - f, values
        x W_i, and the log decay log f of each key channel, where f is the forget gate with the lower bound γ (0 outside
        a model).
        """

        @recomputed
        def bounded(gate, bounds):
            log_f, rest = forget_and_rest(gate, bounds)
            return log_f, rest.astype(x.dtype)

        gate = self.f_proj(x, dtype=jnp.float32)
        log_f, key = bounded(gate, log_bound(self, context, _BOUNDS))
        return dict(
            k=split_heads(key, self.num_heads),
            v=split_heads(self.i_proj(x), self.num_heads),
            log_decay=split_heads(log_f, self.num_heads),
        ), context

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from the memory's output o [B, T, H, V]:
        normalise each head, or all channels together, as the config says, and project.
        """
        if self.config.head_norm:
            return self.o_proj(merge_heads(self.norm(o))), context
        return self.o_proj(self.norm(merge_heads(o))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, K, V] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        head = self.config.head_dim
        return ops.linear_state(batch_size, self.num_heads, head, head)


METHOD = Method(
    name="hgrn2",
    paper="arXiv 2404.07904",
    op="linear_memory",
    gate="f = γ + (1 - γ) sigmoid(x W), each key channel; γ learned across layers",
    write="(1 - f)ᵀ i",
    read="silu(q) M",
    state="K × V a head",
    config=HGRN2Config,
    module=HGRN2,
)
