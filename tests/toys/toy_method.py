"""A method from outside the package: one file and one `register`.

It is a linear memory with a learned constant decay per head. As a plugin of pytest
(`-p tests.toys.toy_method`) it adds the method to the tests of mixers and models.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lsm_jax import mixers, ops
from lsm_jax.mixers.layers import Dense, merge_heads, parameter, split_heads
from lsm_jax.mixers.op_config import RecurrentConfig


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ToyConfig(RecurrentConfig):
    """The config of the toy method.

    Attributes:
        num_heads: number of heads; it divides the model's width D.
    """

    num_heads: int = 2

    @classmethod
    def for_width(cls, hidden_size: int) -> ToyConfig:
        """Return the toy method's config for a model of this width, with two heads."""
        return cls(num_heads=2)

    def validate(self, hidden_size: int) -> None:
        """Raise ValueError if a field of the toy method's config is not accepted at this width."""
        self.validate_fields()
        if hidden_size % self.num_heads:
            raise ValueError(f"ToyConfig.num_heads={self.num_heads}: it must divide {hidden_size}")

    def flops_per_token(self, hidden_size: int, seq_len: int) -> float:
        """Return the floating-point operations of the toy method's mixer per token: four projections, and
        the memory's update and read.
        """
        return 8.0 * hidden_size**2 + 4.0 * hidden_size**2 / self.num_heads


class Toy(mixers.Mixer):
    """The toy method's mixer, a linear memory with a learned constant decay per head; see `ToyConfig`."""

    op = ops.linear_memory

    def __init__(
        self, config: ToyConfig, hidden_size: int, *, rngs: nnx.Rngs, init_std: float = 0.02
    ):
        super().__init__(config, hidden_size)

        def project(axes):
            return Dense(hidden_size, hidden_size, axes=axes, rngs=rngs, init_std=init_std)

        self.q_proj, self.k_proj, self.v_proj = (project(("embed", "heads")) for _ in range(3))
        self.o_proj = project(("heads", "embed"))
        self.decay = parameter(jnp.ones(config.num_heads), ("heads",), weight_decay=False)

    def read(self, x: jax.Array, context: mixers.Context) -> tuple[jax.Array, mixers.Context]:
        """Return the queries [B, T, H, K] with which the toy method reads its memory."""
        return split_heads(self.q_proj(x), self.config.num_heads), context

    def write(self, x: jax.Array, context: mixers.Context) -> tuple[dict[str, Any], mixers.Context]:
        """Return the arguments of the memory's updates by name: keys, values and the constant log decay per
        head.
        """
        heads = self.config.num_heads
        keys, values = (split_heads(p(x), heads) for p in (self.k_proj, self.v_proj))
        return dict(k=keys, v=values, log_decay=jax.nn.log_sigmoid(self.decay[...])), context

    def finish(
        self, o: jax.Array, x: jax.Array, context: mixers.Context
    ) -> tuple[jax.Array, mixers.Context]:
        """Return the toy mixer's output [B, T, D]: the output projection of what the heads read, o."""
        return self.o_proj(merge_heads(o)), context

    def init_memory(self, batch_size: int, max_length: int, dtype: Any) -> ops.LinearState:
        """Return an empty memory of the toy method for `batch_size` rows."""
        dim = self.hidden_size // self.config.num_heads
        return ops.linear_state(batch_size, self.config.num_heads, dim, dim)


METHOD = mixers.Method(
    name="toy",
    paper="none",
    op="linear_memory",
    gate="a constant for each head",
    write="kᵀ v",
    read="q M",
    state="K × V a head",
    config=ToyConfig,
    module=Toy,
)


def pytest_configure(config):
    """Register the toy method: pytest calls this when it loads the plugin."""
    mixers.register(METHOD)
