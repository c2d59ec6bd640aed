"""Liger (arXiv 2503.01496): a pretrained softmax layer as a gated memory and a sliding window, with no new
parameter.

The gate is the layer's key projection, pooled over channels: `M_t = G_t ⊙ M_{t-1} + k_tᵀ v_t`,
`G_t = f(Pool(x_t W_k))`. Table 1 of the paper has the gates. Where the paper is not specific, this follows the
published code (github.com/OpenSparseLLMs/Linearization): softmax over channels as the feature map, queries
not scaled, no normaliser, norm or output gate.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lsm_jax import ops
from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Context
from lsm_jax.mixers.feature_maps import FeatureMap, num_features
from lsm_jax.mixers.layers import Dense, parameter, split_heads
from lsm_jax.mixers.method import METHODS, Method
from lsm_jax.mixers.op_config import RecurrentConfig
from lsm_jax.mixers.softmax import Softmax, SoftmaxConfig

GATES = ("gla", "mamba2", "mlstm", "gated_retention", "hgrn2", "rwkv6", "gsa", "none")
FEATURE_MAPS = ("softmax", "t2r", "hedgehog")
_BY_HEAD = ("mamba2", "mlstm", "gated_retention")
_TEMPERATURE = {"gla": 16.0, "gsa": 16.0}
_LARGEST_EXPONENT = 4.0  # of RWKV6's exp(-exp(z)): exp(-55) forgets all


def _refusal(method: Method) -> str:
    """Return why a pretrained layer's parameters alone do not make a method's memory."""
    if method.op not in ("linear_memory", "slot_memory"):
        return (
            f"its memory is {method.op}'s, with factors that a pretrained layer does not have; "
            "Liger's gates are pooled from keys, for linear_memory and slot_memory"
        )
    return "its decay is none that Liger pools from a pretrained layer's keys"


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class LigerConfig(RecurrentConfig, SoftmaxConfig):
    """The config of Liger attention. The fields of `SoftmaxConfig` describe the pretrained layer, except
    `window` and `implementation`, which are for the branch with attention in a window; `op` is for the branch
    with a recurrent memory.

    With z the pooled key projection, the logarithm of the gate is log sigmoid(z) / gate_temperature for each
    key channel (gla; and hgrn2, in which 1 - gate replaces the key), head (mlstm and gated_retention, which
    are the same function here) or slot (gsa); -softplus(z) for each head (mamba2); or -exp(min(z, 4)) for
    each key channel (rwkv6). With the gate "none", an ablation, the memory does not decay.

    Attributes:
        window: number of tokens that a query of the window's branch attends to, itself included; None means
            all.
        gate: the kind of recurrence, a name in `GATES`.
        gate_temperature: divides the gate's logarithm; None is 16 for gla and gsa, else 1.
        num_slots: number of slots of gsa; None means as many as a key has channels.
        gate_lower_bound: γ of hgrn2, whose gate is γ + (1 - γ) sigmoid(z) in every layer but the first; 0, as in
            the published code, is no bound.
        memory_weight: factor of the memory's output; 0 removes the memory.
        window_weight: factor of the window's output; 0 removes the window (ablation).
        learned_weights: whether each layer's two weights are parameters, which start at `memory_weight` and
            `window_weight`.
        gate_projection: whether the gate is computed by a new projection with random weights instead of the
            key projection (ablation).
        feature_map: "softmax" over channels, or a learned one: "t2r" or "hedgehog" of
            `lsm_jax.mixers.feature_maps` (ablation).
    """

    window: int | None = 64
    gate: str = "gla"
    gate_temperature: float | None = None
    num_slots: int | None = None
    gate_lower_bound: float = 0.0
    memory_weight: float = 0.5
    window_weight: float = 0.5
    learned_weights: bool = False
    gate_projection: bool = False
    feature_map: str = "softmax"

    @classmethod
    def for_width(cls, hidden_size: int) -> LigerConfig:
        """Return the config of Liger for a model of width `hidden_size`, with as many query heads as
        `SoftmaxConfig` has at that width, and two query heads for each key head.
        """
        heads = SoftmaxConfig.for_width(hidden_size).num_heads
        return cls(num_heads=heads, num_kv_heads=max(1, heads // 2))

    def gate_size(self, hidden_size: int) -> int:
        """Return the number of gates of one key head: one for each slot, for each key channel or for the head, as
        `gate` says; 0 without gates.
        """
        channels = self.dim(hidden_size)
        if self.gate == "gsa":
            return channels if self.num_slots is None else self.num_slots
        if self.gate == "none":
            return 0
        return 1 if self.gate in _BY_HEAD else channels

    def features(self, hidden_size: int) -> int:
        """Return the number of key channels of the memory of one head: the features of the learned feature map, or the
        head's channels if keys pass through a softmax.
        """
        learned = self.feature_map != "softmax"
        return num_features(self.feature_map, self.dim(hidden_size)) if learned else self.dim(hidden_size)  # fmt: skip

    def temperature(self) -> float:
        """Return the number that divides the logarithm of each gate, and so brings the decay nearer to 1:
        `gate_temperature`, or the default of this kind of gate.
        """
        given = self.gate_temperature
        return _TEMPERATURE.get(self.gate, 1.0) if given is None else given

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of Liger is not accepted, or does not fit a model of width
        `hidden_size`.
        """
        super().validate(hidden_size)
        self.validate_fields()
        checks.one_of(self, "scale", self.scale, (None,))
        if self.gate in METHODS and self.gate not in GATES:
            raise ValueError(
                f"LigerConfig.gate={self.gate!r}: {_refusal(METHODS[self.gate])}; accepted are {', '.join(map(repr, GATES))}"
            )
        checks.one_of(self, "gate", self.gate, GATES)
        checks.one_of(self, "feature_map", self.feature_map, FEATURE_MAPS)
        checks.positive(self, gate_temperature=self.temperature())
        if self.num_slots is not None:
            if self.gate != "gsa":
                raise ValueError(f"LigerConfig.num_slots={self.num_slots}: only gate='gsa' has slots")  # fmt: skip
            checks.positive(self, num_slots=self.num_slots)
            if not self.gate_projection and self.num_slots > self.dim(hidden_size):
                raise ValueError(
                    f"LigerConfig.num_slots={self.num_slots}: gates are pooled from a key's {self.dim(hidden_size)} channels; accepted are None and 1 to that number"
                )
        if self.feature_map != "softmax" and self.gate in ("gsa", "hgrn2"):
            raise ValueError(
                f"LigerConfig.feature_map={self.feature_map!r}: gate={self.gate!r} maps no keys; accepted is 'softmax'"
            )
        if not 0 <= self.gate_lower_bound < 1:
            raise ValueError(
                f"LigerConfig.gate_lower_bound={self.gate_lower_bound}: accepted are numbers from 0 to less than 1"
            )
        if self.gate_lower_bound and self.gate != "hgrn2":
            raise ValueError(
                f"LigerConfig.gate_lower_bound={self.gate_lower_bound}: only gate='hgrn2' has a lower bound; accepted is 0"
            )
        if self.gate == "none" and (self.gate_projection or self.gate_temperature is not None):
            raise ValueError(
                f"LigerConfig.gate_projection={self.gate_projection}, gate_temperature={self.gate_temperature}: gate='none' has no "
                "gate; accepted are False and None"
            )
        if self.learned_weights and not (self.memory_weight and self.window_weight):
            raise ValueError(
                f"LigerConfig.learned_weights=True: memory_weight={self.memory_weight}, window_weight={self.window_weight}; "
                "accepted are weights other than 0, since a branch of weight 0 is not built"
            )
        if not (self.memory_weight or self.window_weight):
            raise ValueError(
                "LigerConfig.memory_weight=0, window_weight=0: at least one must not be 0"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the forward pass per token: attention and the memory, with
        3 K V per key head to decay and write and 2 K V per query head to read; twice that for gsa.
        """
        dim, heads, kv_heads = self.dim(hidden_size), self.num_heads, self.kv_heads()
        total = 4.0 * hidden_size * dim * (heads + kv_heads)
        if self.window_weight:
            total = super().flops_per_token(hidden_size, seq_len)
        slots = self.gate_size(hidden_size)
        keys = 2 * slots if self.gate == "gsa" else self.features(hidden_size)
        if self.memory_weight:
            total += (3.0 * kv_heads + 2.0 * heads) * keys * dim
        return total + 2.0 * hidden_size * kv_heads * slots * self.gate_projection


class LigerState(NamedTuple):
    """The state of a Liger layer between calls: the memory of linear attention, and the keys and values of the window
    of softmax attention.

    Attributes:
        memory: `ops.LinearState`, gsa's `ops.SlotState`, or None without a memory; one for each key head.
        window: `ops.AttentionState`, a ring buffer with the window's rotated keys and values; None without a
            window.
    """

    memory: Any
    window: Any


class Liger(Softmax):
    """The layer of Liger attention: the weighted sum of softmax attention in a window and gated linear
    attention; `LigerConfig` says what its options mean. It has softmax attention's parameters, under the same
    names; ablations add a gate's projection, weights of the two branches or feature maps.

    The memory uses keys and queries before the rotation, normalised if the layer normalises them. The gate
    uses keys before the norm too.
    """

    single_because = (
        "it has the projections of a pretrained layer, of which memories have no copies"
    )
    op = ops.linear_memory
    config: LigerConfig

    def __init__(
        self, config: LigerConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size, rngs=rngs, init_std=init_std)
        gates = config.kv_heads() * config.gate_size(hidden_size)
        into = dict(axes=("embed", "heads"), rngs=rngs, init_std=init_std)
        self.memory_gate = Dense(hidden_size, gates, **into) if config.gate_projection else None
        weights = jnp.array([config.memory_weight, config.window_weight], jnp.float32)
        self.branch_weights = (
            parameter(weights, (None,), weight_decay=False) if config.learned_weights else None
        )

        def learned(heads: int) -> FeatureMap | None:
            if config.feature_map == "softmax":
                return None
            return FeatureMap(
                config.feature_map, heads, self.head_dim, rngs=rngs, init_std=init_std
            )

        self.q_map, self.k_map = learned(config.num_heads), learned(config.kv_heads())

    def read(self, x: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        """Return the queries [B, T, H, K] with which tokens x [B, T, D] read the memory, and the context,
        which contains the queries of the attention window as `saved["q"]`.
        """
        q = split_heads(self.q_proj(x), self.config.num_heads)
        context = context.add(saved={"q": self._rotated(q, self.q_norm, context)})
        q = q if self.q_norm is None else self.q_norm(q)
        return q if self.config.gate == "gsa" else _mapped(q, self.q_map), context

    def write(self, x: jax.Array, context: Context) -> tuple[dict[str, Any], Context]:
        """Return the arguments that update Liger's memory (keys, values and log gates), by name, and the
        context, which contains the keys of the attention window as `saved["k"]`.
        """
        config, heads = self.config, self.config.kv_heads()
        keys, context = self.keys(x, context)
        values, context = self.values(x, context)
        raw, v = split_heads(keys, heads), split_heads(values, heads)
        context = context.add(saved={"k": self._rotated(raw, self.k_norm, context)})
        k = raw if self.k_norm is None else self.k_norm(raw)
        if config.gate == "none":
            return dict(k=_mapped(k, self.k_map), v=v), context
        log_decay = self.log_decay(raw, x, context.layer)
        if config.gate == "gsa":
            return dict(k=k, v=v, s=-jnp.expm1(log_decay), log_decay=log_decay), context
        if config.gate == "hgrn2":
            k = (-jnp.expm1(log_decay)).astype(x.dtype)
            return dict(k=k, v=v, log_decay=log_decay), context
        k = _mapped(k, self.k_map)
        if config.gate in _BY_HEAD:
            return dict(k=k, v=v, log_decay=log_decay[..., 0]), context
        copies = k.shape[-1] // log_decay.shape[-1]  # a channel's features share its gate
        return dict(k=k, v=v, log_decay=jnp.tile(log_decay, copies)), context

    def log_decay(
        self, keys: jax.Array, x: jax.Array, layer: jax.Array | int | None = None
    ) -> jax.Array:
        """Return the log gates of Liger's memory, [B, T, G, gates of a head] in float32, computed from keys or tokens.

        Args:
            keys: [B, T, G, K], before norm and rotation.
            x: [B, T, D], the layer's input.
            layer: index of the layer, whose lower bound is 0 in layer 0; None is a later layer.
        """
        wide = jnp.promote_types(x.dtype, jnp.float32)
        if self.memory_gate is None:
            z = pool(keys.astype(wide), self.config.gate_size(self.hidden_size))
        else:
            z = split_heads(self.memory_gate(x, dtype=wide), self.config.kv_heads())
        if self.config.gate == "mamba2":
            z = -jax.nn.softplus(z)
        elif self.config.gate == "rwkv6":
            z = -jnp.exp(jnp.minimum(z, _LARGEST_EXPONENT))
        else:
            z = jax.nn.log_sigmoid(z)
        if bound := self.config.gate_lower_bound:
            bounded = jnp.logaddexp(math.log(bound), math.log1p(-bound) + z)
            z = bounded if layer is None else jnp.where(jnp.equal(layer, 0), z, bounded)
        return z / self.config.temperature()

    def through_memory(
        self, x: jax.Array, context: Context, memory: Any
    ) -> tuple[jax.Array, Any, Context]:
        """Return the weighted sum [B, T, H, V] of the outputs of Liger's two branches, the recurrent memory
        and softmax attention in a window, for tokens x [B, T, D]; the final state of the two; and the
        context.
        """
        config = self.config
        earlier = LigerState(None, None) if memory is None else memory
        call = dict(segment_ids=context.segment_ids, update_mask=context.update_mask)
        query, context = self.read(x, context)
        written, context = self.write(x, context)
        outputs, after = [], {}
        memory_weight, window_weight = config.memory_weight, config.window_weight
        if self.branch_weights is not None:
            memory_weight, window_weight = self.branch_weights[...]
        if config.memory_weight:
            op = ops.slot_memory if config.gate == "gsa" else ops.linear_memory
            o, after["memory"] = op(
                query, **written, **self.options(), initial_state=earlier.memory, **call
            )
            outputs.append((memory_weight, o))
        if config.window_weight:
            o, after["window"] = ops.attention(
                context.saved["q"], context.saved["k"], written["v"],
                window=config.window, implementation=config.implementation,
                initial_state=earlier.window, **call,
            )  # fmt: skip
            outputs.append((window_weight, o))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        mixed = jnp.asarray(sum(weight * o.astype(wide) for weight, o in outputs))
        state = LigerState(after.get("memory"), after.get("window"))
        return mixed.astype(x.dtype), state, context

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the memory's op that do not depend on the input; the scale is 1, so that
        queries are not scaled.
        """
        config = self.config
        return dict(
            scale=1.0,
            **config.op.arguments(),
        )

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> Any:
        """Return Liger's state before any token: an empty memory for each key head, and an empty window of keys and
        values.
        """
        config, heads, dim = self.config, self.config.kv_heads(), self.head_dim
        memory = window = None
        if config.memory_weight and config.gate == "gsa":
            memory = ops.slot_state(batch_size, heads, config.gate_size(self.hidden_size), dim, dim)
        elif config.memory_weight:
            memory = ops.linear_state(batch_size, heads, config.features(self.hidden_size), dim)
        if config.window_weight:
            window = super().init_memory(batch_size, max_length, dtype)
        return LigerState(memory, window)


def pool(x: jax.Array, size: int) -> jax.Array:
    """Return the means [..., size] of the channels of x [..., K] over bins of channels, by which gates are made of
    keys; bin i is from floor(i K / size) to ceil((i + 1) K / size).
    """
    channels = x.shape[-1]
    if size == channels:
        return x
    bins = np.arange(size)[None]
    place = np.arange(channels)[:, None]
    inside = (place >= bins * channels // size) & (place < -(-(bins + 1) * channels // size))
    means = jnp.asarray(inside / inside.sum(0), x.dtype)
    return jnp.matmul(x, means, precision="highest")


def _mapped(x: jax.Array, learned: FeatureMap | None) -> jax.Array:
    if learned is not None:
        return learned(x)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.nn.softmax(x.astype(wide), axis=-1).astype(x.dtype)


METHOD = Method(
    name="liger",
    paper="arXiv 2503.01496",
    op="linear_memory",
    gate="sigmoid(Pool(x W_k))^(1/16), each key channel; or mamba2's, hgrn2's, rwkv6's, mlstm's, gsa's from the same keys",
    write="softmax(k)ᵀ v, and k, v into a window",
    read="½ softmax(q) M + ½ softmax(q Kᵀ) V over the window",
    state="K × V a key head; k and v of a window",
    config=LigerConfig,
    module=Liger,
    note="of a pretrained softmax layer's parameters alone; gsa's memory is slot_memory's",
)
