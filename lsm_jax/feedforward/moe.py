"""Mixture of experts (arXiv 1701.06538, Linear-MoE arXiv 2503.05447): a router sends each token to k of E SwiGLU experts.

`y = Σ_e w_e E_e(x)` over the selected experts, plus `sigmoid(x w) E_shared(x)` where one expert sees every token. None is dropped
and none has a capacity: what a token gets depends on that token alone, so decoding computes what training did. On a mesh
that spreads experts over devices tokens travel to them in buffers of a stated size; where one is too small, outputs are NaN
and `moe/overflow_count` counts the selections beyond a buffer's capacity, so that training stops rather than drop any.

Two forms of one definition. *grouped*: tokens sorted by expert, and products of groups of rows with one matrix each, so that the
work is that of the selected experts. *dense*: every expert on every token, one after another, mixed by the router's weights.
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
from lsm_jax.mixers.layers import Dense, parameter, project, recomputed
from lsm_jax.ops.experts.grouped_product import grouped_product, row_multiple
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
        execution: "grouped" or "dense"; on NVIDIA "grouped" goes dense, in more memory, outside Hopper, bfloat16 and a hidden size of
            128s (docs/decisions.md).
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
        contiguous: bool = False,
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
        logits = recomputed(lambda x: self.router(x.astype(wide)))(x)
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
    kernels = gate_proj, up_proj, down_proj
    block = row_multiple(x)
    if travels:
        place, source, _ = _places(expert, config.num_experts, 1)
        rows = _sort(top_k, x.reshape(-1, size), source, place)
        shards = config.num_experts // count
        most = expert.size // top_k * min(top_k, count)
        room = room_for(expert.size, config.expert_buffer, shards, most)
        mine = _gather(expert, source, config.num_experts)
        sent, ids, return_rows, missed = to_owners(
            rows, mine % count, mine // count, count, room=room, exchange=config.exchange
        )
        inner, outer, sizes = _places(ids, count, block)
        y = _experts(_permute(sent, outer, inner), sizes, block, None, *kernels)
        y = _permute(weight.reshape(-1, 1), source, place) * return_rows(_permute(y, inner, outer))
        lost = jnp.sum(
            _gather(missed, place, False).reshape(chosen.shape), axis=-1, dtype=jnp.int32
        )
    else:
        place, source, sizes = _places(expert, count, block)
        rows = _sort(top_k, x.reshape(-1, size), source, place)
        share = _permute(weight.reshape(-1, 1), source, place)
        y = _experts(rows, sizes, block, share, *kernels)
    y = _collect(top_k, y, source, place).reshape(x.shape)
    if gate_proj.shape[-1] < config.expert_size:
        y = sum_over("mlp", y)
    if spread and not travels:
        y = sum_over("expert", y)
    return y.astype(x.dtype), lost


def _places(expert, count, block):
    """Rows in the order of their experts, those of each from a multiple of `block` on.

    Args:
        expert: int32 [N], each row's expert; `count` and beyond for none.
        count: experts.
        block: what the rows of each expert are filled up to a multiple of, by rows that are nobody's.

    Returns:
        int32 [N], the place of each row, M where it has none; int32 [M], the row at each place, N where there is none;
        and int32 [count], places of each expert.
    """
    total = expert.shape[0]
    most = (total + min(count, total) * (block - 1)) // block * block
    sizes = jnp.sum(expert[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    room = (sizes + block - 1) // block * block
    ahead = jnp.cumsum(room - sizes) - (room - sizes)  # nobody's, before each expert
    order = jnp.argsort(expert, stable=True)
    known = expert[order]
    places = jnp.arange(total, dtype=jnp.int32) + ahead[jnp.minimum(known, count - 1)]
    places = jnp.where(known < count, places, most)
    place = jnp.zeros(total, jnp.int32).at[order].set(places, unique_indices=True)
    source = jnp.full(most, total, jnp.int32).at[places].set(order, mode="drop")
    return place, source, room


def _experts(rows, sizes, block, share, gate_proj, up_proj, down_proj):
    """Rows [M, D] in the order of `_places` through their experts, times `share` [M, 1] where it is given; beyond the last
    expert's rows stands anything. Widths too are filled up to multiples of `block`."""
    more = -gate_proj.shape[-1] % block
    if more:
        gate_proj, up_proj = (jnp.pad(p, ((0, 0), (0, 0), (0, more))) for p in (gate_proj, up_proj))
        down_proj = jnp.pad(down_proj, ((0, 0), (0, more), (0, 0)))
    both = jnp.concatenate([gate_proj, up_proj], axis=-1)
    inner = _gated(grouped_product(rows, both, sizes, multiple=block), share)
    return grouped_product(inner, down_proj, sizes, multiple=block)


@jax.custom_vjp
def _gated(gate_up, share):
    """`silu(gate) ⊙ up` of [M, 2 F], weighted here, so that the gradient of the share is taken beside that of the gate."""
    gate, up = jnp.split(_wide(gate_up), 2, axis=-1)
    y = jax.nn.silu(gate) * up
    return (y if share is None else y * share).astype(gate_up.dtype)


def _gated_backward(saved, dy):
    gate_up, share = saved
    gate, up = jnp.split(_wide(gate_up), 2, axis=-1)
    part = jax.nn.sigmoid(gate)
    silu, whole = gate * part, _wide(dy)
    d_share = None if share is None else jnp.sum(whole * silu * up, axis=-1, keepdims=True)
    whole = whole if share is None else whole * share
    d_gate = whole * up * (part + silu * (1 - part))
    return jnp.concatenate([d_gate, whole * silu], axis=-1).astype(gate_up.dtype), d_share


_gated.defvjp(lambda gate_up, share: (_gated(gate_up, share), (gate_up, share)), _gated_backward)


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# Rows in another order, by `_places`: each gradient is a gather too, and no scatter.


def _gather(rows, index, nothing=0):
    return rows.at[index].get(mode="fill", fill_value=nothing)


@jax.custom_vjp
def _permute(rows, source, place):
    """Rows [N, D] -> [M, D], row `source[i]` at i, 0 where it is N."""
    return _gather(rows, source)


_permute.defvjp(
    lambda rows, source, place: (_gather(rows, source), place),
    lambda place, dy: (_gather(dy, place), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sort(top_k, x, source, place):
    """Tokens [N, D] -> one row a choice, [M, D], in the order of `_places`."""
    return _gather(x, source // top_k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _collect(top_k, rows, source, place):
    """Rows [M, D] in the order of `_places` -> the sum over each token's, [N, D], in float32."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.sum(_gather(rows, place).reshape(-1, top_k, rows.shape[-1]), axis=1, dtype=wide)


# One is the other's transpose. What is saved of x and of the rows is their dtype.
_sort.defvjp(
    lambda top_k, x, source, place: (_sort(top_k, x, source, place), (x[:0], source, place)),
    lambda top_k, saved, dy: (_collect(top_k, dy, *saved[1:]).astype(saved[0].dtype), None, None),
)
_collect.defvjp(
    lambda top_k, rows, source, place: (
        _collect(top_k, rows, source, place),
        (rows[:0], source, place),
    ),
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
