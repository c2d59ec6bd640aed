"""Mixture of experts (arXiv 1701.06538, Linear-MoE arXiv 2503.05447): a router sends each token to k of E SwiGLU experts.

`y = Σ_e w_e E_e(x)` over the experts chosen, plus `sigmoid(x w) E_shared(x)` where one expert sees every token. None is dropped
and none has a capacity: what a token gets depends on that token alone, so decoding computes what training did. On a mesh
that spreads experts over devices tokens travel to them in buffers of a stated size; where one is too small, outputs are NaN
and `moe/overflow_count` tells how many choices found no room, so that training stops rather than leave any out.

Two forms of one definition. *grouped*: tokens sorted by expert, and products of groups of rows with one matrix each, so that the
work is that of the experts chosen. *dense*: every expert on every token, one after another, mixed by the router's weights.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.feedforward.swiglu import SwiGLU, SwiGLUConfig
from lsm_jax.mixers import checks
from lsm_jax.mixers.layers import Dense, parameter, project
from lsm_jax.ops.grouped_product import grouped_product
from lsm_jax.parallel import (
    EXCHANGES,
    alone,
    over_mesh,
    over_tokens,
    place_on,
    room_for,
    shards_of,
    sum_over,
    to_owners,
)

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
        execution: "grouped" or "dense"; on NVIDIA "grouped" goes dense outside Hopper and bfloat16, in more memory (docs/decisions.md).
        expert_buffer: where experts are spread over devices, rows that each keeps free for every other one, times the even
            share of a batch. More than the number of devices is never needed.
        exchange: how tokens travel there: "padded", buffers and all, anywhere; or "ragged", only what there is, on GPUs and TPUs.
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
    expert_buffer: float = 2.0
    exchange: str = "padded"

    @classmethod
    def for_width(cls, hidden_size: int, multiple_of: int) -> MoEConfig:
        """The proportions of Linear-MoE's A0.3B-2B: 64 experts of 7/8 of hidden_size, eight a token; it needs no rounding."""
        return cls(expert_size=hidden_size * 7 // 8)

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError where a field does not fit."""
        checks.fields(self)
        sizes = dict(num_experts=self.num_experts, expert_size=self.expert_size)
        checks.positive(self, **sizes, expert_buffer=self.expert_buffer)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"MoEConfig.top_k={self.top_k}: accepted are 1 to num_experts={self.num_experts}"
            )
        for name in ("shared_size", "balance_scale", "z_scale"):
            if getattr(self, name) < 0:
                raise ValueError(f"MoEConfig.{name}={getattr(self, name)}: it must be at least 0")
        checks.one_of(self, "router", self.router, ROUTERS)
        checks.one_of(self, "execution", self.execution, EXECUTIONS)
        checks.one_of(self, "exchange", self.exchange, EXCHANGES)

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
        # From 1 on: the padding that a mesh may add is 0, no expert.
        chosen = jnp.where(real[..., None], chosen + 1, 0)
        batched = dict(x=x, chosen=chosen, weight=jnp.where(real[..., None], weight, 0))
        if self.config.execution == "dense":
            y = over_tokens(_dense, batched, kernels)
        else:
            y, lost = over_mesh(
                _grouped, batched, kernels, x.shape[0], self.config,
                axes=_LAYOUT, out_axes=(_TOKENS, _TOKENS), in_sequence=alone,
            )  # fmt: skip
            if shards_of("expert") > 1:
                aux["moe/overflow_count"] = jnp.sum(lost)
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


# Of both forms: x [B, T, D]; chosen int32 [B, T, k], from 1 on, 0 where no expert is; weight float32 [B, T, k];
# kernels [E, ...] -> [B, T, D].

_TOKENS = ("batch", "sequence")
_LAYOUT = {
    "x": _TOKENS,
    "chosen": _TOKENS,
    "weight": _TOKENS,
    "gate_proj": ("expert", None, "mlp"),
    "up_proj": ("expert", None, "mlp"),
    "down_proj": ("expert", "mlp"),
}


def _grouped(rows_in_all, config, x, chosen, weight, gate_proj, up_proj, down_proj):
    """On one device, or mapped over a mesh: rows and experts are then its own, and the width may be a part. Also int32 [B, T],
    choices of each token that found no room on their way."""
    count, size, top_k = gate_proj.shape[0], x.shape[-1], chosen.shape[-1]
    expert = chosen.reshape(-1) - 1
    expert = jnp.where(expert < 0, config.num_experts, expert)
    lost = jnp.zeros(x.shape[:2], jnp.int32)
    spread = count < config.num_experts
    travels = spread and x.shape[0] < rows_in_all
    if spread and not travels:  # every device has all rows, and does its own experts' part
        expert = expert - count * place_on("expert")
        expert = jnp.where((expert < 0) | (expert >= count), count, expert)
    order = jnp.argsort(expert, stable=True)
    back = jnp.argsort(order)
    rows = _sort(top_k, x.reshape(-1, size), order, back)
    share = _permute(weight.reshape(-1, 1), order, back)
    kernels = gate_proj, up_proj, down_proj
    if travels:
        shards = config.num_experts // count
        most = expert.size // top_k * min(top_k, count)
        room = room_for(expert.size, config.expert_buffer, shards, most)
        mine = expert[order]
        sent, ids, return_rows, missed = to_owners(
            rows, mine % count, mine // count, count, room=room, exchange=config.exchange
        )
        inner = jnp.argsort(ids, stable=True)
        outer = jnp.argsort(inner)
        y = _experts(_permute(sent, inner, outer), ids[inner], 1, *kernels)
        y = share * return_rows(_permute(y, outer, inner))
        missed = missed[back].reshape(chosen.shape)
        lost = jnp.sum(missed, axis=-1, dtype=jnp.int32)
    else:
        y = _experts(rows, expert[order], share, *kernels)
    y = _collect(top_k, y, order, back).reshape(x.shape)
    if gate_proj.shape[-1] < config.expert_size:
        y = sum_over("mlp", y)
    if spread and not travels:
        y = sum_over("expert", y)
    return y.astype(x.dtype), lost


def _experts(rows, expert, share, gate_proj, up_proj, down_proj):
    """Rows [N, D], sorted by expert, through these, times `share` [N, 1]; 0 where `expert` is beyond the last."""
    count = gate_proj.shape[0]
    sizes = jnp.sum(expert[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    inside = (expert < count)[:, None]
    rows = jnp.where(inside, rows, 0)
    gate, up = (grouped_product(rows, kernel, sizes) for kernel in (gate_proj, up_proj))
    # Weighted here, so that the gradient of the share is taken in the same pass as that of the gate.
    inner = (jax.nn.silu(gate) * up * share).astype(rows.dtype)
    return jnp.where(inside, grouped_product(inner, down_proj, sizes), 0)


# Rows in another order, `back` its inverse: each gradient is a gather too, and no scatter.


def _gather(rows, order):
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")


@jax.custom_vjp
def _permute(rows, order, back):
    """Rows [N, D] -> [N, D]."""
    return _gather(rows, order)


_permute.defvjp(
    lambda rows, order, back: (_gather(rows, order), back),
    lambda back, dy: (_gather(dy, back), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sort(top_k, x, order, back):
    """Tokens [N, D] -> one row a choice, [N · k, D], in `order`."""
    return x.at[order // top_k].get(mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _collect(top_k, rows, order, back):
    """Rows [N · k, D] in `order` -> the sum over each token's, [N, D], in float32."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.sum(_gather(rows, back).reshape(-1, top_k, rows.shape[-1]), axis=1, dtype=wide)


# One is the other's transpose. What is saved of x and of the rows is their dtype.
_sort.defvjp(
    lambda top_k, x, order, back: (_sort(top_k, x, order, back), (x[:0], order, back)),
    lambda top_k, saved, dy: (_collect(top_k, dy, *saved[1:]).astype(saved[0].dtype), None, None),
)
_collect.defvjp(
    lambda top_k, rows, order, back: (_collect(top_k, rows, order, back), (rows[:0], order, back)),
    lambda top_k, saved, dy: (_sort(top_k, dy.astype(saved[0].dtype), *saved[1:]), None, None),
)


def _dense(x, chosen, weight, gate_proj, up_proj, down_proj):
    def one(total, expert):
        index, gate, up, down = expert
        mine = chosen == index
        y = project(jax.nn.silu(project(x, gate)) * project(x, up), down)
        share = jnp.sum(jnp.where(mine, weight, 0), axis=-1, keepdims=True)
        return total + jnp.where(mine.any(axis=-1, keepdims=True), share * y, 0), None

    start = jnp.zeros(x.shape, weight.dtype)
    every = 1 + jnp.arange(gate_proj.shape[0]), gate_proj, up_proj, down_proj
    return jax.lax.scan(one, start, every)[0].astype(x.dtype)
