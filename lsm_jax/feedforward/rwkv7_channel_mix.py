"""RWKV7's channel mix (arXiv 2503.14456): `relu((x + μ ⊙ (x_before - x)) W_k)² W_v`, where x_before is the
token before x."""

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
class RWKV7ChannelMixConfig:
    """The config of RWKV7's channel mix, a feedforward on each token interpolated with the token before it.

    Attributes:
        hidden_ratio: inner width divided by hidden_size.
        intermediate_size: the inner width; None computes it from `hidden_ratio`.
    """

    hidden_ratio: float = 4.0
    intermediate_size: int | None = None

    @classmethod
    def for_width(cls, hidden_size: int, multiple_of: int) -> RWKV7ChannelMixConfig:
        """Return the config with the published inner width, 4 hidden_size; `multiple_of` has no effect."""
        return cls()

    def width(self, hidden_size: int) -> int:
        """Return the inner width of RWKV7's channel mix, the number of channels between its two matrices, in
        a model of width `hidden_size`.
        """
        if self.intermediate_size is not None:
            return self.intermediate_size
        return int(self.hidden_ratio * hidden_size)

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of this config of RWKV7's channel mix is not valid, or does not fit a model of
        width `hidden_size`.
        """
        checks.fields(self)
        if self.intermediate_size is not None:
            checks.positive(self, intermediate_size=self.intermediate_size)
        if not self.hidden_ratio * hidden_size >= 1:
            raise ValueError(
                f"RWKV7ChannelMixConfig.hidden_ratio={self.hidden_ratio}: "
                f"it must be at least 1 / hidden_size = 1 / {hidden_size}"
            )

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of RWKV7's channel mix in a forward pass, per token: 2 for each number
        of its two matrices.
        """
        return 4.0 * hidden_size * self.width(hidden_size)


class RWKV7ChannelMix(nnx.Module):
    """RWKV7's channel mix: a feedforward on each token interpolated with the token before it; `RWKV7ChannelMixConfig`
    says what its options mean.

    Parameters are initialised as published; `init_std` is not used. Its state is the last token.
    """

    uses_depth: ClassVar[bool] = True

    def __init__(
        self,
        config: RWKV7ChannelMixConfig,
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
        mix = 1 - channel ** ((1 - layer / num_layers) ** 4)
        self.mix = parameter(mix, ("embed",), weight_decay=False)
        self.up_proj = OrthogonalDense(
            hidden_size, width, gain=1.0, axes=("embed", "mlp"), rngs=rngs
        )
        self.down_proj = OrthogonalDense(
            width, hidden_size, gain=0, axes=("mlp", "embed"), rngs=rngs
        )

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
        mixed = x + (before - x) * self.mix[...].astype(x.dtype)
        return self.down_proj(squared_relu(self.up_proj(mixed))), state, {}
