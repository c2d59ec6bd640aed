"""RWKV6's channel mix (arXiv 2404.05892): `sigmoid(x_r W_r) ⊙ (relu(x_k W_k)² W_v)`.

x_r and x_k interpolate between a token and the one before it, with one learned weight per channel:
`x + μ ⊙ (x_before - x)`.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import ops
from lsm_jax.feedforward.squared_relu import squared_relu
from lsm_jax.mixers import checks
from lsm_jax.mixers.layers import OrthogonalDense, parameter


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class RWKV6ChannelMixConfig:
    """The config of RWKV6's channel mix, a gated feedforward on each token interpolated with the token before it.

    Attributes:
        hidden_ratio: inner width divided by hidden_size; the inner width is rounded down to a multiple of
            `multiple_of`.
        multiple_of: the number of which the inner width is a multiple.
        intermediate_size: the inner width; None computes it from `hidden_ratio`.
    """

    hidden_ratio: float = 3.5
    multiple_of: int = 32
    intermediate_size: int | None = None

    @classmethod
    def for_width(cls, hidden_size: int, multiple_of: int) -> RWKV6ChannelMixConfig:
        """Return the config with the published inner width, 3.5 hidden_size, a multiple of 32; `multiple_of`
        has no effect.
        """
        return cls()

    def width(self, hidden_size: int) -> int:
        """Return the inner width of RWKV6's channel mix, the number of channels between its two matrices, in
        a model of width `hidden_size`.
        """
        if self.intermediate_size is not None:
            return self.intermediate_size
        return int(self.hidden_ratio * hidden_size) // self.multiple_of * self.multiple_of

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of RWKV6's channel mix is not valid, or does not fit a model of
        width `hidden_size`.
        """
        checks.fields(self)
        if self.intermediate_size is not None:
            checks.positive(self, intermediate_size=self.intermediate_size)
        checks.positive(self, hidden_ratio=self.hidden_ratio, multiple_of=self.multiple_of)
        if self.width(hidden_size) < 1:
            raise ValueError(
                f"RWKV6ChannelMixConfig.hidden_ratio={self.hidden_ratio}: hidden_ratio x hidden_size={hidden_size} must be at least "
                f"multiple_of={self.multiple_of}"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of RWKV6's channel mix in a forward pass, per token: 2 for each number
        of its three matrices.
        """
        return 2.0 * hidden_size * (2 * self.width(hidden_size) + hidden_size)


class RWKV6ChannelMix(nnx.Module):
    """RWKV6's channel mix: a gated feedforward on each token interpolated with the token before it;
    `RWKV6ChannelMixConfig` says what its options mean. Parameters are initialised as published; `init_std` is not used.
    Its state is the last token.
    """

    uses_depth: ClassVar[bool] = True

    def __init__(
        self,
        config: RWKV6ChannelMixConfig,
        hidden_size: int,
        *,
        rngs: nnx.Rngs,
        init_std: float = 0.02,
        layer: jax.Array | int = 0,
        num_layers: int = 1,
    ):
        config.validate(hidden_size)
        self.config, self.hidden_size = copy.copy(config), hidden_size
        width = config.width(hidden_size)
        channel = jnp.arange(hidden_size, dtype=jnp.float32) / hidden_size
        mix = 1 - channel ** (1 - layer / num_layers)
        self.mix_k = parameter(mix, ("embed",), weight_decay=False)
        self.mix_r = parameter(mix, ("embed",), weight_decay=False)
        self.k_proj = OrthogonalDense(
            hidden_size, width, gain=1.0, axes=("embed", "mlp"), rngs=rngs
        )
        self.r_proj = OrthogonalDense(
            hidden_size, hidden_size, gain=0, axes=("embed", None), rngs=rngs
        )
        self.v_proj = OrthogonalDense(width, hidden_size, gain=0, axes=("mlp", "embed"), rngs=rngs)

    def init_state(self, batch_size: int, max_length: int, dtype: Any) -> ops.ShiftState:
        """Return the channel mix's state before the first token: zeros as the token before it, for each of `batch_size`
        rows.
        """
        return ops.shift_state(batch_size, 1, self.hidden_size, dtype=dtype)

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
        state: ops.ShiftState | None = None,
    ) -> tuple[jax.Array, ops.ShiftState, dict[str, jax.Array]]:
        """Return the channel mix's output [B, T, D] for tokens x [B, T, D], its state (the last token of each row), and
        no statistics.
        """
        before, state = ops.token_shift(
            x,
            initial_state=state,
            segment_ids=segment_ids,
            update_mask=update_mask,
            contiguous=contiguous,
        )
        keys = self.k_proj(x + (before - x) * self.mix_k[...].astype(x.dtype))
        gate = jax.nn.sigmoid(self.r_proj(x + (before - x) * self.mix_r[...].astype(x.dtype)))
        return gate * self.v_proj(squared_relu(keys)), state, {}
