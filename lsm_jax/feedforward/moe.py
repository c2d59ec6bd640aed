"""Mixture of experts (arXiv 1701.06538, Linear-MoE arXiv 2503.05447): a router sends each token to k of E SwiGLU experts.

`y = Σ_e w_e E_e(x)` over the experts chosen, plus `sigmoid(x w) E_shared(x)` where one expert sees every token. None is dropped
and none has a capacity: what a token gets depends on that token alone, so decoding computes what training did.

Two forms of one definition. *grouped*: tokens sorted by expert, and products of groups of rows with one matrix each, so that the
work is that of the experts chosen. *dense*: every expert on every token, one after another, mixed by the router's weights.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.feedforward.swiglu import SwiGLU, SwiGLUConfig
from lsm_jax.mixers import checks
from lsm_jax.mixers.layers import Dense, matmul_precision, parameter, project
from lsm_jax.parallel import over_batch

EXECUTIONS = ("grouped", "dense")
ROUTERS = ("softmax_topk", "topk_softmax")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class MoEConfig:
    """Mixture of experts.

    Attributes:
        num_experts: experts the router chooses from (E).
        top_k: experts a token is routed to (k).
        expert_size: inner width of an expert.
        shared_size: inner width of one more expert that sees every token; 0 for none.
        shared_gate: multiply the shared expert by `sigmoid(x w)` (Qwen2-MoE), a number a token.
        router: "softmax_topk", a softmax over all experts of which the k largest are the weights (Qwen2, DeepSeek-V2), or
            "topk_softmax", a softmax over the k largest logits, which sums to 1 (Mixtral).
        renormalize: divide the weights of "softmax_topk" by their sum, which makes them those of "topk_softmax".
        balance_scale: multiplies the balance loss (Switch Transformer, arXiv 2101.03961), `E Σ f_e P_e` with f_e the part of all
            choices that fell on e and P_e its mean probability: 1 at perfect balance, averaged over the model's layers.
        z_scale: multiplies the z-loss (ST-MoE, arXiv 2202.08906), the mean of `logsumexp(logits)²`, averaged likewise.
        execution: "grouped" or "dense"; "grouped" goes dense in XLA on NVIDIA, in more memory (docs/decisions.md).
    """

    num_experts: int = 64
    top_k: int = 8
    expert_size: int = 896
    shared_size: int = 0
    shared_gate: bool = True
    router: str = "softmax_topk"
    renormalize: bool = False
    balance_scale: float = 1e-2
    z_scale: float = 0.0
    execution: str = "grouped"

    @classmethod
    def for_width(cls, hidden_size: int, multiple_of: int) -> MoEConfig:
        """The proportions of Linear-MoE's A0.3B-2B: 64 experts of 7/8 of hidden_size, eight a token; it needs no rounding."""
        return cls(expert_size=hidden_size * 7 // 8)

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError where a field does not fit."""
        checks.fields(self)
        checks.positive(self, num_experts=self.num_experts, expert_size=self.expert_size)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"MoEConfig.top_k={self.top_k}: accepted are 1 to num_experts={self.num_experts}"
            )
        for name in ("shared_size", "balance_scale", "z_scale"):
            if getattr(self, name) < 0:
                raise ValueError(f"MoEConfig.{name}={getattr(self, name)}: it must be at least 0")
        checks.one_of(self, "router", self.router, ROUTERS)
        checks.one_of(self, "execution", self.execution, EXECUTIONS)

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Forward floating-point operations of a token: router, the experts it is routed to, the shared one."""
        widths = 3 * (self.top_k * self.expert_size + self.shared_size)
        gate = 1 if self.shared_size and self.shared_gate else 0
        return 2.0 * hidden_size * (self.num_experts + widths + gate)


class MoE(nnx.Module):
    """Mixture of experts; see `MoEConfig`. It remembers nothing: its state is None."""

    uses_depth: ClassVar[bool] = True

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
        layer: jax.Array | int = 0,
        num_layers: int = 1,
    ):
        config.validate(hidden_size)
        self.config, self.num_layers = copy.copy(config), num_layers
        count, width = config.num_experts, config.expert_size

        def kernels(size: int, out: int, axes: tuple[str, str]) -> nnx.Param:
            draw = init_std * jax.random.normal(rngs.params(), (count, size, out), jnp.float32)
            made = parameter(draw, ("expert", *axes), weight_decay=True)
            made.set_metadata(active=config.top_k / count)
            return made

        self.gate_proj = kernels(hidden_size, width, ("embed", "mlp"))
        self.up_proj = kernels(hidden_size, width, ("embed", "mlp"))
        self.down_proj = kernels(width, hidden_size, ("mlp", "embed"))
        plain: dict[str, Any] = dict(rngs=rngs, init_std=init_std)
        self.router = Dense(hidden_size, count, axes=("embed", None), **plain)
        inner = SwiGLUConfig(intermediate_size=config.shared_size or None)
        self.shared = SwiGLU(inner, hidden_size, **plain) if config.shared_size else None
        gated = config.shared_size and config.shared_gate
        self.shared_gate = Dense(hidden_size, 1, axes=("embed", None), **plain) if gated else None

    def init_state(self, batch_size: int, max_length: int, dtype: Any) -> None:
        """None: nothing is remembered."""
        return None

    def __call__(
        self,
        x: jax.Array,
        *,
        layer: jax.Array | int | None = None,
        shared: dict[str, jax.Array] | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        update_mask: jax.Array | None = None,
        state: None = None,
    ) -> tuple[jax.Array, None, dict[str, jax.Array]]:
        """x [B, T, D] -> [B, T, D], None, the router's losses and statistics.

        Padding is routed to no expert. Neither it nor a token whose `update_mask` is 0 counts in losses and statistics.
        """
        real = jnp.ones(x.shape[:2], bool) if segment_ids is None else segment_ids != 0
        live = real if update_mask is None else real & (update_mask != 0)
        weight, chosen, aux = self._route(x, live)
        names = ("gate_proj", "up_proj", "down_proj")
        kernels = {name: getattr(self, name)[...].astype(x.dtype) for name in names}
        chosen = jnp.where(real[..., None], chosen, self.config.num_experts)
        batched = dict(x=x, chosen=chosen, weight=jnp.where(real[..., None], weight, 0))
        run = _grouped if self.config.execution == "grouped" else _dense
        y = over_batch(run, batched, kernels)
        if self.shared is not None:
            more, _, _ = self.shared(x)
            if self.shared_gate is not None:
                gate = jax.nn.sigmoid(self.shared_gate(x, dtype=weight.dtype))
                more = (gate * more).astype(x.dtype)
            y = y + more
        return y, None, aux

    def _route(
        self, x: jax.Array, live: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Weights and experts of each token, [B, T, k], likeliest first, and what is reported; all of it in float32.

        Args:
            x: [B, T, D].
            live: bool [B, T], the tokens that count.
        """
        config, wide = self.config, jnp.promote_types(x.dtype, jnp.float32)
        logits = self.router(x.astype(wide))
        log_probability = jax.nn.log_softmax(logits, axis=-1)
        probability = jnp.exp(log_probability)
        best, chosen = jax.lax.top_k(logits, config.top_k)
        if config.router == "topk_softmax":
            weight = jax.nn.softmax(best, axis=-1)
        else:
            weight = jnp.take_along_axis(probability, chosen, axis=-1)
            if config.renormalize:
                weight = weight / jnp.sum(weight, axis=-1, keepdims=True)

        count = jnp.maximum(jnp.sum(live), 1).astype(wide)

        def mean(values):  # over the tokens that count, of [B, T, ...]
            mask = live.reshape(*live.shape, *(1,) * (values.ndim - 2))
            return jnp.sum(jnp.where(mask, values, 0), axis=(0, 1)) / count

        routed = (chosen[..., None] == jnp.arange(config.num_experts)).any(axis=-2)
        load = mean(routed.astype(wide)) / config.top_k
        balance = config.num_experts * jnp.sum(load * mean(probability))
        square = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        aux = {
            "moe/balance_loss": config.balance_scale / self.num_layers * balance,
            "moe/z_loss": config.z_scale / self.num_layers * mean(square),
            "moe/load": load,
            "moe/entropy": -mean(jnp.sum(probability * log_probability, axis=-1)),
        }
        return weight, chosen, aux


def grouped_product(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each group of rows times its own matrix, accumulated in float32.

    Args:
        x: [N, D], the rows of group 0 first, then those of group 1, and so on.
        kernels: [E, D, F], in x's dtype.
        sizes: int32 [E], rows of each group; 0 is accepted.

    Returns:
        [N, F] in x's dtype; rows beyond the last group are not defined.
    """
    return jax.lax.ragged_dot(x, kernels, sizes, precision=matmul_precision(x.dtype))


# Of both forms: x [B, T, D]; chosen int32 [B, T, k], E where no expert is; weight float32 [B, T, k]; kernels [E, ...] -> [B, T, D].


def _grouped(x, chosen, weight, gate_proj, up_proj, down_proj):
    count, size = gate_proj.shape[0], x.shape[-1]
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.sum(expert[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    inside = (expert[order] < count)[:, None]
    rows = jnp.broadcast_to(x[..., None, :], (*chosen.shape, size)).reshape(-1, size)
    rows = jnp.where(inside, _permute(rows, order), 0)
    inner = jax.nn.silu(grouped_product(rows, gate_proj, sizes))
    inner = inner * grouped_product(rows, up_proj, sizes)
    rows = jnp.where(inside, grouped_product(inner, down_proj, sizes), 0)
    y = _permute(rows, jnp.argsort(order)).reshape(*chosen.shape, size)
    return jnp.sum(weight[..., None] * y, axis=-2).astype(x.dtype)


def _permute(rows, order):
    """Rows [N, D] in another order; that it is a permutation spares the gradient's scatter its additions."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")


def _dense(x, chosen, weight, gate_proj, up_proj, down_proj):
    def one(total, expert):
        index, gate, up, down = expert
        mine = chosen == index
        y = project(jax.nn.silu(project(x, gate)) * project(x, up), down)
        share = jnp.sum(jnp.where(mine, weight, 0), axis=-1, keepdims=True)
        return total + jnp.where(mine.any(axis=-1, keepdims=True), share * y, 0), None

    start = jnp.zeros(x.shape, weight.dtype)
    every = jnp.arange(gate_proj.shape[0]), gate_proj, up_proj, down_proj
    return jax.lax.scan(one, start, every)[0].astype(x.dtype)
