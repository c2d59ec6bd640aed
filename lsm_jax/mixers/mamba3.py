"""Mamba-3 (arXiv 2603.15569): a state space memory by the trapezoidal rule, with a complex transition and R writes and
reads for each token.

With the step size Δ_t, α_t = exp(A_t Δ_t), λ_t in (0, 1), the angles θ_t = θ_{t-1} + π tanh(x W_θ) Δ_t, and keys and
queries turned by them, k̂_t = R(θ_t) k_t and q̂_t = R(θ_t) q_t,

    M_t = α_t M_{t-1} + (1 - λ_t) Δ_t α_t k̂_{t-1}ᵀ v_{t-1} + λ_t Δ_t k̂_tᵀ v_t,    y_t = q̂_t M_t + D v_t.

Nothing is written for the token before a document's first. λ = 1 is Mamba-2's Euler rule. With γ_t = λ_t Δ_t and
c_t = (1 - λ_t) Δ_t, the memory without the token's own write, G_t = M_t - γ_t k̂_tᵀ v_t, obeys

    G_t = α_t (G_{t-1} + (γ_{t-1} + c_t) k̂_{t-1}ᵀ v_{t-1}),

which is a `linear_memory` of shifted keys and values; `y_t = q̂_t G_t + γ_t (q̂_t k̂_tᵀ) v_t + D v_t`. The state is G turned
back by the angle of its last token, so that the angles start from 0 in every call, and the last token's key, value and γ.

With `mimo_rank` R, a token has R keys, queries and values v_r = x ⊙ mimo_x_r, which are R rows of the op; each reads
after all of them are written (`linear_memory`'s `rank`).

Sources and decisions (state-spaces/mamba: mamba_ssm/modules/mamba3.py, commit e9594ce):

* The rate -A is 1 + u for u ≥ 0 and 1 / (1 - u) for u < 0 ("heavy_tail"), as in the authors' code since June 2026, where
  softplus blew up at high rates. The paper precedes this change and flash-linear-attention 0.6.0 has softplus; which of
  the two the released checkpoints were trained with is not known: `rate` selects.
* Without `mimo_rank` neighbouring channels are turned together; with it channels i and i + N / 2, as in the authors' layer
  and kernels (their step-by-step reference of MIMO turns neighbours).
* The kernels of the reference put c_{t+1} into token t's key and subtract it again on the diagonal; here no output
  depends on later tokens, in no bit.
* B and C of a group are repeated for its neighbouring heads, as in flash-linear-attention; the authors' decoding step is
  right only for one group, or one per head.
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
from lsm_jax.mixers.base import Context, Mixer, TokenShift
from lsm_jax.mixers.layers import (
    Dense,
    RMSNorm,
    log_uniform_step_bias,
    merge_heads,
    parameter,
    recomputed,
    split_heads,
)
from lsm_jax.mixers.method import Method
from lsm_jax.mixers.op_config import RecurrentConfig
from lsm_jax.mixers.ranks import add_own_writes, gate_ranks, values_of_ranks
from lsm_jax.mixers.steps import run_steps
from lsm_jax.mixers.turns import (
    pairs_first,
    pairs_in_place,
    scores_of_heads,
    turn,
    turn_pairs,
    turned_heads,
    waves,
    waves_before,
)
from lsm_jax.ops.core.segments import carry_ids_forward

RATES = ("heavy_tail", "softplus")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class Mamba3Config(RecurrentConfig):
    """The config of a Mamba-3 layer.

    Attributes:
        expand: number of inner channels, divided by hidden_size.
        head_dim: value channels of a head (P); expand * hidden_size / head_dim heads.
        state_size: key channels of a head (N), even.
        num_groups: groups of heads that share B and C.
        mimo_rank: the writes and reads R of a token (MIMO); None is one of each, without weights for the ranks (SISO).
        rope_fraction: share of the N key channels that turn.
        rate: the function of the token that is the rate -A, "heavy_tail" or "softplus"; at least 1e-4.
        output_norm: whether each head's output is normalised before the gate.
        norm_eps: epsilon of the norms of B, of C and of the output.
    """

    expand: int = 2
    head_dim: int = 64
    state_size: int = 128
    num_groups: int = 1
    mimo_rank: int | None = None
    rope_fraction: float = 0.5
    rate: str = "heavy_tail"
    output_norm: bool = False
    norm_eps: float = 1e-5

    @classmethod
    def for_width(cls, hidden_size: int) -> Mamba3Config:
        """Return the config of Mamba-3 for a model of width `hidden_size`, with the published proportions: heads of 64
        channels and 128 state channels; both smaller below width 512.
        """
        return cls(head_dim=min(64, hidden_size // 4), state_size=min(128, hidden_size // 2))

    def num_heads(self, hidden_size: int) -> int:
        """Return the number of heads of a Mamba-3 layer in a model of width `hidden_size`: the inner width divided by
        `head_dim`.
        """
        return self.expand * hidden_size // self.head_dim

    def rank(self) -> int:
        """Return the number R of writes and reads of a token: `mimo_rank`, or 1 if that is None."""
        return 1 if self.mimo_rank is None else self.mimo_rank

    def num_angles(self) -> int:
        """Return the number S of pairs of key channels that turn."""
        return int(self.state_size * self.rope_fraction) // 2

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of Mamba-3 is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        self.validate_fields()
        checks.positive(
            self,
            expand=self.expand,
            state_size=self.state_size,
            mimo_rank=self.rank(),
            norm_eps=self.norm_eps,
        )
        checks.one_of(self, "rate", self.rate, RATES)
        checks.divides(
            self, "head_dim", self.head_dim, "expand * hidden_size", self.expand * hidden_size
        )
        heads = self.num_heads(hidden_size)
        checks.divides(
            self, "num_groups", self.num_groups, "expand * hidden_size / head_dim", heads
        )
        if self.state_size % 2:
            raise ValueError(
                f"Mamba3Config.state_size={self.state_size}: accepted are even numbers"
            )
        if not 0 < self.rope_fraction <= 1 or not self.num_angles():
            raise ValueError(
                f"Mamba3Config.rope_fraction={self.rope_fraction}: accepted are numbers up to 1 that leave at least "
                f"2 of the state_size={self.state_size} channels to turn"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: the projections; per head N P to decay
        the memory and for each rank 2 N P each to write and to read; and for each pair of ranks 2 (N + P) for the
        token's own write.
        """
        inner, heads, rank = self.expand * hidden_size, self.num_heads(hidden_size), self.rank()
        keys = rank * self.num_groups * self.state_size
        projections = 2.0 * hidden_size * (3 * inner + 2 * keys + 3 * heads + self.num_angles())
        memory = (1 + 4 * rank) * self.state_size * inner
        own = 2.0 * rank**2 * heads * (self.state_size + self.head_dim)
        return projections + memory + own


def trapezoid_memory(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_before: jax.Array,
    v_before: jax.Array,
    log_decay: jax.Array,
    weight: jax.Array,
    weight_before: jax.Array,
    weight_old: jax.Array,
    angle: jax.Array,
    *,
    halves: bool,
    q_bias: jax.Array | None = None,
    k_bias: jax.Array | None = None,
    v_weights: jax.Array | None = None,
    skip: jax.Array | None = None,
    initial_state: ops.LinearState | None = None,
    segment_ids: jax.Array | None = None,
    update_mask: jax.Array | None = None,
    **call,
) -> tuple[jax.Array, ops.LinearState]:
    """Write and read Mamba-3's memory, by `linear_memory`.

    A token whose `update_mask` is 0 reads the memory of the last token that was written, with that token's angles.

    Args:
        q: [B, T, R, G, N] queries, not yet turned, of R ranks; each of the G groups is that of H / G neighbouring heads.
        k: [B, T, R, G, N] keys.
        v: [B, T, H, P] values, of which those of a rank are `v_weights` times as large.
        k_before: the keys of the token before in the document; any numbers before the first.
        v_before: the values of the token before; 0 before the first.
        log_decay: [B, T, H], log α.
        weight: [B, T, H], γ.
        weight_before: [B, T, H], γ of the token before; 0 before the first.
        weight_old: [B, T, H], c.
        angle: [B, T, H, S], the turn of this token in radians.
        halves: which channels turn together; see `pairs_first`.
        q_bias: [R, H, N], added to the queries of each head before they are turned; None adds nothing.
        k_bias: [R, H, N], added to `k` and `k_before` in the same way.
        v_weights: [R, H, P]; None is 1, for one rank.
        skip: [H], D: each rank's value times it is added to the rank's output; None adds nothing.
        initial_state: G turned back, as this function returns it, or None.
        segment_ids: [B, T] or None.
        update_mask: [B, T] or None.
        call: further arguments of `linear_memory`; a chunk's size counts ranks.

    Returns:
        The output [B, T, R, H, P], and the final state.
    """
    ranks, heads, wide = q.shape[2], v.shape[2], log_decay.dtype
    segments = None
    if initial_state is not None and initial_state.memory.ndim == 5:
        segments = initial_state.memory.shape[1]
    angle = angle - 2 * math.pi * jnp.round(angle / (2 * math.pi))  # a step can exceed half a turn
    ids, mask = segment_ids, update_mask
    # Padding inside a document has the phase of the token before, by which the next token's `k_before` is turned.
    if ids is not None and segments is None:
        mask = (ids != 0) if mask is None else (ids != 0) & (mask != 0)
        ids = carry_ids_forward(ids, jnp.zeros_like(ids[:, 0]))
    phase, final = ops.cumulative_phase(
        merge_heads(angle), num_segments=segments, segment_ids=ids, update_mask=mask
    )
    phase, final = split_heads(phase, heads), split_heads(final, heads)

    pairs = angle.shape[-1]
    none = jnp.zeros((ranks, heads, q.shape[-1]), q.dtype)
    arrays = (q, k, k_before, *(none if bias is None else bias for bias in (q_bias, k_bias)))
    q, k, k_before, q_bias, k_bias = (pairs_first(x, pairs, halves) for x in arrays)
    # In few tokens, as in decoding, queries and keys are put in the memory's order, in many the memory in theirs.
    published = v.shape[1] < v.shape[-1]
    if initial_state is not None and not published:
        memory = jnp.swapaxes(initial_state.memory, -1, -2)
        memory = jnp.swapaxes(pairs_first(memory, pairs, halves), -1, -2)
        initial_state = initial_state._replace(memory=memory)

    # Groups become heads in here: arrays of all heads' keys would be saved for the backward pass.
    @recomputed
    def inputs(
        q, k, k_before, v_before, log_decay, weight, weight_before, weight_old, phase, angle, q_bias, k_bias, v_weights, skip,
    ):  # fmt: skip
        turned = waves(phase, q.dtype)
        # A document's first token is turned by another's phase: what it writes of the token before is 0.
        if segments is None:
            phase_before = jnp.pad(phase[:, :-1], [(0, 0), (1, 0), (0, 0), (0, 0)])
            turned_before = waves_before(*turned)
        else:
            phase_before = phase - angle
            turned_before = waves(phase_before, q.dtype)
        read = turned_heads(q, q_bias, phase, *turned)
        written = turned_heads(k_before, k_bias, phase_before, *turned_before)
        share = jnp.exp(log_decay) * (weight_before + weight_old)
        values = values_of_ranks(v_before, share, v_weights)
        own = weight[:, :, None, None] * scores_of_heads(q, q_bias, k, k_bias, wide)
        last = None
        if update_mask is not None:
            updated = (update_mask != 0)[:, :, None, None, None]
            last = scores_of_heads(q, q_bias, k_before, k_bias, wide)
            last = jnp.where(updated, 0, weight_before[:, :, None, None] * last)
            own = jnp.where(updated, own, 0)
        if skip is not None:
            own += jnp.eye(ranks, dtype=wide)[..., None] * skip.astype(wide)
        # Stored, or each channel of an output would compute them again.
        return read, written, values, jax.lax.optimization_barrier(own), last

    read, written, values, own, last = inputs(
        q, k, k_before, v_before, log_decay, weight, weight_before, weight_old, phase, angle, q_bias, k_bias, v_weights, skip,
    )  # fmt: skip
    if published:
        read, written = (pairs_in_place(x, pairs, halves) for x in (read, written))
    arguments = dict(q=read, k=written, v=values)
    o, state = run_steps(
        ops.linear_memory,
        arguments,
        log_decay,
        scale=1.0,
        rank=ranks,
        initial_state=initial_state,
        segment_ids=segment_ids,
        update_mask=update_mask,
        **call,
    )
    memory, final = jnp.swapaxes(state.memory, -1, -2), -final[..., None, :]
    if published:
        memory = turn(memory, final, halves=halves)
    else:
        memory = turn_pairs(memory, jnp.cos(final), jnp.sin(final))
        memory = pairs_in_place(memory, pairs, halves)
    y = add_own_writes(o, own, v, v_weights)
    if last is not None:
        y = add_own_writes(y, last, v_before, v_weights)
    return y, state._replace(memory=jnp.swapaxes(memory, -1, -2))


def _summed_now(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return activations and parameters unchanged; in the backward pass, the parameters' gradients are computed before the activations'
    gradients are used.

    Where layers are compiled one after the other, XLA joins the sums over tokens of several layers in one kernel at the end, and until then
    stores what they sum, arrays of all ranks: 59 GB instead of 26 for 8 layers at 340M and 32,768 tokens.
    """
    return tuple(jax.lax.optimization_barrier(arrays))


class Mamba3(Mixer):
    """The layer of Mamba-3: a mixer that maps [B, T, D] to [B, T, D]; `Mamba3Config` says what its options mean.

    Weights of the ranks (`mimo_x`, `mimo_z`, `mimo_o`) are [H, R, P], biases of B and C [H, R, N].
    """

    op = ops.linear_memory
    memory_parts = ("x_proj", "b_proj", "dt_proj", "rate_proj", "trapezoid_proj", "angle_proj")
    token_parts = ("c_proj", *memory_parts)
    memories_in_place = False

    def __init__(
        self, config: Mamba3Config, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)
        self.num_heads = heads = config.num_heads(hidden_size)
        inner, rank, size = config.expand * hidden_size, config.rank(), config.state_size
        keys = rank * config.num_groups * size
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.z_proj = Dense(hidden_size, inner, **into)
        self.x_proj = Dense(hidden_size, inner, **into)
        self.b_proj = Dense(hidden_size, keys, **into)
        self.c_proj = Dense(hidden_size, keys, **into)
        self.dt_proj = Dense(hidden_size, heads, **into)
        self.rate_proj = Dense(hidden_size, heads, **into)
        self.trapezoid_proj = Dense(hidden_size, heads, **into)
        self.angle_proj = Dense(
            hidden_size, config.num_angles(), axes=("embed", None), rngs=rngs, init_std=init_std
        )
        self.b_norm = RMSNorm(size, eps=config.norm_eps)
        self.c_norm = RMSNorm(size, eps=config.norm_eps)

        def constant(value, *shape):
            axes = ("heads", *(None,) * len(shape))
            array = jnp.full((heads, *shape), value, jnp.float32)
            return parameter(array, axes, weight_decay=False)

        step_bias = log_uniform_step_bias(rngs, heads)
        self.dt_bias = parameter(step_bias, ("heads",), weight_decay=False)
        self.b_bias, self.c_bias = constant(1.0, rank, size), constant(1.0, rank, size)
        self.skip = constant(1.0)
        if config.mimo_rank is not None:
            self.mimo_x = constant(1 / rank, rank, config.head_dim)
            self.mimo_z = constant(1.0, rank, config.head_dim)
            self.mimo_o = constant(1 / rank, rank, config.head_dim)
        norm = RMSNorm(config.head_dim, eps=config.norm_eps, num_heads=heads)
        self.norm = norm if config.output_norm else None
        self.key_shift = TokenShift("k", keys, in_finish=False)
        self.value_shift = TokenShift("v", inner, in_finish=False)
        self.weight_shift = TokenShift("weight", heads, in_finish=False)
        self.o_proj = Dense(
            inner, hidden_size, axes=("heads", "embed"), rngs=rngs, init_std=init_std
        )

    def _of_ranks(self, x: jax.Array, weights: nnx.Param | None) -> jax.Array:
        """Return x [B, T, H, P] multiplied by the weights [H, R, P] of each rank, [B, T, R, H, P]; None is R = 1."""
        if weights is None:
            return x[:, :, None]
        x, by_head = _summed_now(x, weights[...])
        return x[:, :, None] * jnp.swapaxes(by_head, 0, 1).astype(x.dtype)

    def _normed(self, x: jax.Array, norm: RMSNorm) -> jax.Array:
        """Normalise B or C [B, T, R groups N] over the N channels of each rank and group."""
        return norm(x.reshape(*x.shape[:2], -1, self.config.state_size)).reshape(x.shape)

    def _of_groups(self, x: jax.Array) -> jax.Array:
        """Return B or C [B, T, R groups N] by ranks and groups, [B, T, R, groups, N]."""
        config = self.config
        return x.reshape(*x.shape[:2], config.rank(), config.num_groups, config.state_size)

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries C [B, T, R, groups, N] of tokens x [B, T, D], normalised and without the bias of each head, and
        the context.
        """
        return self._of_groups(self._normed(self.c_proj(x), self.c_norm)), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments of `trapezoid_memory` that update the memory, by name, and the context."""
        step = jax.nn.softplus(self.dt_proj(x, dtype=jnp.float32) + self.dt_bias[...])
        rate = self.rate_proj(x, dtype=jnp.float32)
        if self.config.rate == "softplus":
            rate = jax.nn.softplus(rate)
        else:
            rate = jnp.maximum(rate, 0) + 1 / (1 - jnp.minimum(rate, 0))
        share = jax.nn.sigmoid(self.trapezoid_proj(x, dtype=jnp.float32))
        turned = math.pi * jnp.tanh(self.angle_proj(x, dtype=jnp.float32))
        weight = (share * step).astype(x.dtype)  # in the dtype in which the state remembers it
        b, inner = self._normed(self.b_proj(x), self.b_norm), self.x_proj(x)
        weight_before, context = self.weight_shift(weight, context)
        b_before, context = self.key_shift(b, context)
        inner_before, context = self.value_shift(inner, context)

        written = dict(
            k=self._of_groups(b),
            v=split_heads(inner, self.num_heads),
            k_before=self._of_groups(b_before),
            v_before=split_heads(inner_before, self.num_heads),
            log_decay=-jnp.maximum(rate, 1e-4) * step,
            weight=weight,
            weight_before=weight_before,
            weight_old=(1 - share) * step,
            angle=turned[:, :, None] * step[..., None],
        )
        return written, context

    def apply(self, query: jax.Array, written: dict[str, Any], **call) -> tuple[jax.Array, Any]:
        """Return the output of `trapezoid_memory` plus D v, [B, T, R, H, P], and the final state."""
        halves = self.config.mimo_rank is not None
        query, *biases = _summed_now(query, self.c_bias[...], self.b_bias[...])
        q_bias, k_bias = (jnp.swapaxes(bias, 0, 1) for bias in biases)
        call |= dict(halves=halves, q_bias=q_bias, k_bias=k_bias, skip=self.skip[...])
        if halves:
            call["v_weights"] = jnp.swapaxes(self.mimo_x[...], 0, 1)
        return trapezoid_memory(query, **written, **call)

    def finish(self, o: jax.Array, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return (y, context), with the layer's output y [B, T, D] from o [B, T, R, H, P]: normalise each head if the
        config says so, multiply by silu(z), where z is a projection of x, sum the ranks with their weights, and project.
        """
        z, several = split_heads(self.z_proj(x), self.num_heads), self.config.mimo_rank is not None
        if several and self.norm is None:
            weights = (jnp.swapaxes(w[...], 0, 1) for w in (self.mimo_z, self.mimo_o))
            return self.o_proj(merge_heads(gate_ranks(o, z, *weights))), context
        gate = self._of_ranks(z, self.mimo_z if several else None)
        weights: Any = 1
        if several:
            o, weights = _summed_now(o, self.mimo_o[...])
            weights = jnp.swapaxes(weights, 0, 1).astype(o.dtype)
        y = o * jax.nn.silu(gate) if self.norm is None else self.norm(o, gate)
        return self.o_proj(merge_heads(jnp.sum(y * weights, axis=2))), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return the state before any token: a memory of zeros [B, H, N, P] in float32 for `batch_size` rows;
        `max_length` and `dtype` do not affect it.
        """
        return ops.linear_state(
            batch_size, self.num_heads, self.config.state_size, self.config.head_dim
        )


METHOD = Method(
    name="mamba3",
    paper="arXiv 2603.15569",
    op="linear_memory",
    gate="exp(A Δ), each head; keys and queries turn by angles of the token",
    write="λ Δ k̂ᵀ x, and (1 - λ) Δ α k̂ᵀ x of the token before",
    read="q̂ M + D x",
    state="N × V a head; a token's B, x and step",
    config=Mamba3Config,
    module=Mamba3,
    feedforward=None,
    in_loop=True,
    note="`linear_memory` of shifted keys and values, and each token's own write outside",
)
