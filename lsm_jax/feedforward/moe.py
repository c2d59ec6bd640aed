"""Mixture of experts (arXiv 1701.06538, Linear-MoE arXiv 2503.05447): a router sends each token to k of E
experts, which are SwiGLU layers or feedforwards with a squared ReLU (`lsm_jax.feedforward.relu2`).

`y = Σ_e w_e E_e(x)` over the selected experts, plus `sigmoid(x w) E_shared(x)` if there is a shared expert,
which every token uses. Experts have no capacity and no token is dropped: a token's output depends on that
token alone, so decoding computes the same as training. If a mesh shards experts over devices, tokens are sent
to them in buffers of a configured size. If a buffer is too small, outputs are NaN and `moe/overflow_count`
counts the choices that did not fit; training then takes the step again with larger buffers.

Two forms compute the same function (`lsm_jax.feedforward.moe_forms`). *grouped*: tokens are sorted by expert,
and groups of rows are multiplied by one matrix each, so only selected experts are computed. *dense*: every
expert computes every token, one expert after another, and the router's weights mix the results.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax.feedforward.moe_forms import dense, grouped
from lsm_jax.feedforward.moe_router import ROUTERS, route
from lsm_jax.feedforward.relu2 import ReLU2, ReLU2Config
from lsm_jax.feedforward.swiglu import SwiGLU, SwiGLUConfig
from lsm_jax.mixers import checks
from lsm_jax.mixers.layers import Dense, parameter, recomputed
from lsm_jax.parallel import EXCHANGES, shards_of

EXECUTIONS = ("grouped", "dense")
ACTIVATIONS = ("swiglu", "relu2")
MATMUL = ("default", "fp8")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class MoEConfig:
    """The config of a mixture of experts, a feedforward that sends each token to some of several feedforwards.

    Attributes:
        num_experts: number of experts (E).
        top_k: number of experts to which a token is routed (k).
        expert_size: inner width of an expert.
        shared_size: inner width of the shared expert, which every token uses; 0 for none.
        shared_gate: whether the shared expert is multiplied by `sigmoid(x w)` (Qwen2-MoE), one number per
            token.
        activation: the experts and the shared expert: "swiglu", or "relu2" without a gate (Nemotron-H).
        router: "softmax_topk", a softmax over all experts, whose k largest values are the weights (Qwen2,
            DeepSeek-V2); "topk_softmax", a softmax over the k largest logits, whose values sum to 1
            (Mixtral); or "sigmoid" of the logits (DeepSeek-V3).
        renormalize: whether the weights of "softmax_topk" or "sigmoid" are divided by their sum, which makes those of
            "softmax_topk" equal to those of "topk_softmax".
        router_bias: whether "sigmoid" adds a bias of each expert to the scores when it chooses experts. The bias has no gradient.
        num_groups: number of groups of consecutive experts of "sigmoid".
        top_groups: number of groups from which the experts of a token are chosen: those with the largest sums of two scores.
        weight_scale: multiplies the weights.
        balance_scale: factor of the balance loss (Switch Transformer, arXiv 2101.03961), `E Σ f_e P_e` with
            f_e the fraction of all choices that are expert e, and P_e its mean probability: 1 at perfect
            balance, averaged over the model's layers.
        z_scale: factor of the z-loss (ST-MoE, arXiv 2202.08906), the mean of `logsumexp(logits)²`, averaged
            over layers, too.
        execution: "grouped" or "dense". On NVIDIA GPUs "grouped" computes every expert on every row, and
            needs more memory than "dense", unless it can use Hopper's kernel: bfloat16 and a hidden size that
            is a multiple of 128 (docs/decisions.md).
        expert_buffer: if experts are sharded over devices, the capacity of the buffer for each pair of
            devices, as a multiple of the rows sent between them when tokens are routed evenly. The number of
            devices is always enough, and training doubles the buffer up to it if tokens do not fit.
        exchange: how tokens are sent: "padded" sends full buffers, on all platforms; "ragged" sends only the
            tokens, on GPUs and TPUs.
        matmul: how the experts multiply: "default", in the dtype of activations, or "fp8" in the grouped form
            (`lsm_jax.ops.experts.narrow`), which is for Hopper's kernel; elsewhere it has the same values and is slow. Evaluation and
            sampling do not use it, and `model.matmul` does not change it.
    """

    num_experts: int = 64
    top_k: int = 8
    expert_size: int = 896
    shared_size: int = 0
    shared_gate: bool = True
    activation: str = "swiglu"
    router: str = "softmax_topk"
    renormalize: bool = False
    router_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    weight_scale: float = 1.0
    balance_scale: float = 1e-2
    z_scale: float = 0.0
    execution: str = "grouped"
    expert_buffer: float = 2.0
    exchange: str = "padded"
    matmul: str = "default"

    @classmethod
    def for_width(cls, hidden_size: int, multiple_of: int) -> MoEConfig:
        """Return the config with the proportions of the published Linear-MoE model A0.3B-2B: 64 experts of
        width 7/8 hidden_size, eight for each token; `multiple_of` has no effect.
        """
        return cls(expert_size=hidden_size * 7 // 8)

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of a mixture of experts is not valid, or does not fit a model of
        width `hidden_size`.
        """
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
        checks.one_of(self, "activation", self.activation, ACTIVATIONS)
        checks.one_of(self, "router", self.router, ROUTERS)
        checks.positive(self, weight_scale=self.weight_scale)
        self._check_groups()
        checks.one_of(self, "execution", self.execution, EXECUTIONS)
        checks.one_of(self, "exchange", self.exchange, EXCHANGES)
        checks.one_of(self, "matmul", self.matmul, MATMUL)
        if self.matmul == "fp8" and self.execution != "grouped":
            raise ValueError(
                f"MoEConfig.matmul='fp8' with execution={self.execution!r}: accepted is execution='grouped', or matmul='default'"
            )

    def for_inference(self) -> MoEConfig:
        """Return the config of the same experts in evaluation and sampling, which use no FP8."""
        return dataclasses.replace(self, matmul="default")

    def _check_groups(self) -> None:
        checks.divides(self, "num_groups", self.num_groups, "num_experts", self.num_experts)
        if self.router != "sigmoid" and (self.router_bias or self.num_groups != 1):
            raise ValueError(
                f"MoEConfig.router_bias={self.router_bias}, num_groups={self.num_groups}: router={self.router!r} has neither; "
                "accepted are False and 1"
            )
        size = self.num_experts // self.num_groups
        if not 1 <= self.top_groups <= self.num_groups or self.top_k > self.top_groups * size:
            raise ValueError(
                f"MoEConfig.top_groups={self.top_groups}: accepted are 1 to num_groups={self.num_groups}, with at least "
                f"top_k={self.top_k} experts in so many groups of {size}"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the router, the experts that a
        token selects, and the shared expert with its gate, if any.
        """
        matrices = 3 if self.activation == "swiglu" else 2
        widths = matrices * (self.top_k * self.expert_size + self.shared_size)
        gate = 1 if self.shared_size and self.shared_gate else 0
        return 2.0 * hidden_size * (self.num_experts + widths + gate)


class MoE(nnx.Module):
    """A feedforward that sends each token to some of several feedforwards (experts); `MoEConfig` says what its options
    mean. It has no state.
    """

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
            values = init_std * jax.random.normal(rngs.params(), (count, size, out), jnp.float32)
            kernel = parameter(values, ("expert", *axes), weight_decay=True)
            kernel.set_metadata(active=config.top_k / count)
            return kernel

        gated_experts = config.activation == "swiglu"
        self.gate_proj = kernels(hidden_size, width, ("embed", "mlp")) if gated_experts else None
        self.up_proj = kernels(hidden_size, width, ("embed", "mlp"))
        self.down_proj = kernels(width, hidden_size, ("mlp", "embed"))
        init: dict[str, Any] = dict(rngs=rngs, init_std=init_std)
        self.router = Dense(hidden_size, count, axes=("embed", None), **init)
        zeros = jnp.zeros(count, jnp.float32)
        biased = config.router_bias
        self.router_bias = parameter(zeros, (None,), weight_decay=False) if biased else None
        inner = SwiGLUConfig if gated_experts else ReLU2Config
        module: Any = SwiGLU if gated_experts else ReLU2
        shared = inner(intermediate_size=config.shared_size or None)
        self.shared = module(shared, hidden_size, **init) if config.shared_size else None
        gated = config.shared_size and config.shared_gate
        self.shared_gate = Dense(hidden_size, 1, axes=("embed", None), **init) if gated else None

    def init_state(self, batch_size: int, max_length: int, dtype: Any) -> None:
        """Return None: a mixture of experts treats each token alone, and carries no state from call to call."""
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
        """Return the mixture of experts' output y [B, T, D] for tokens x [B, T, D], None as its state, and the router's
        losses and statistics.

        Padding is routed to no expert. Losses and statistics are of tokens that are not padding and whose
        `update_mask` is not 0.
        """
        is_token = jnp.ones(x.shape[:2], bool) if segment_ids is None else segment_ids != 0
        counted = is_token if update_mask is None else is_token & (update_mask != 0)
        weight, chosen, aux = self._route(x, counted)
        stored = dict(gate_proj=self.gate_proj, up_proj=self.up_proj, down_proj=self.down_proj)
        kernels = {n: p[...].astype(x.dtype) for n, p in stored.items() if p is not None}
        # Experts from 1, so that 0 is no expert: `over_mesh` may pad rows with zeros.
        chosen = jnp.where(is_token[..., None], chosen + 1, 0)
        arrays = dict(x=x, chosen=chosen, weight=jnp.where(is_token[..., None], weight, 0))
        if self.config.execution == "dense":
            y = dense(arrays, kernels)
        else:
            y, overflow = grouped(self.config, arrays, kernels)
            if shards_of("expert") > 1:
                # Tokens that are NaN, from an overflow in an earlier layer or in a diverged model, do not count.
                finite = jnp.isfinite(weight[..., 0])
                aux["moe/overflow_count"] = jnp.sum(jnp.where(finite, overflow, 0))
        if self.shared is not None:
            shared_y, _, _ = self.shared(x)
            if self.shared_gate is not None:
                gate = jax.nn.sigmoid(self.shared_gate(x, dtype=weight.dtype))
                shared_y = (gate * shared_y).astype(x.dtype)
            y = y + shared_y
        return y, None, aux

    def _route(
        self, x: jax.Array, counted: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Select the experts of each token by the router's logits, in float32.

        Args:
            x: [B, T, D].
            counted: bool [B, T], the tokens that losses and statistics are computed from.

        Returns:
            The weights [B, T, k] and indices [B, T, k] of the selected experts, the most probable first;
            losses and statistics.
        """
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = recomputed(lambda x: self.router(x.astype(wide)))(x)
        bias = None if self.router_bias is None else self.router_bias[...]
        return route(self.config, logits, bias, counted, self.num_layers)
