"""Low-rank adapters (LoRA, arXiv 2106.09685): `y = x W + (alpha / rank) x A B` added to a projection whose W
does not train.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lsm_jax.mixers import checks
from lsm_jax.mixers.layers import Dense, parameter, project


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class LoRAConfig:
    """The config of low-rank adapters (LoRA): the projections that have an adapter, and the adapters' size.

    Attributes:
        targets: names of `Dense` layers of mixers and feedforwards; a layer has adapters for those that it
            has.
        rank: inner width of an adapter.
        alpha: an adapter's product is multiplied by alpha / rank.
    """

    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    rank: int = 8
    alpha: float = 8.0

    def validate(self) -> None:
        """Raise ValueError if a field of this config of LoRA adapters (rank, alpha, targets) is not accepted."""
        checks.fields(self)
        checks.positive(self, rank=self.rank, alpha=self.alpha)
        if not self.targets or isinstance(self.targets, str):
            raise ValueError(
                f"LoRAConfig.targets={self.targets!r}: accepted are names of projections, such as ('q_proj', 'v_proj')"
            )


class LoRA(nnx.Module):
    """One low-rank adapter, x A B, that is added to a projection of x.

    A [in_size, rank] starts uniform in ±1/sqrt(in_size) and B at zero, so that a new adapter adds nothing.
    """

    def __init__(self, kernel: nnx.Param, config: LoRAConfig, *, rngs: nnx.Rngs):
        into, out = kernel.logical_axes
        bound = 1 / math.sqrt(kernel.shape[0])
        a = jax.random.uniform(
            rngs.params(), (kernel.shape[0], config.rank), jnp.float32, -bound, bound
        )
        b = jnp.zeros((config.rank, kernel.shape[1]), jnp.float32)
        self.scale = config.alpha / config.rank
        self.a = parameter(a, (into, None), weight_decay=True)
        self.b = parameter(b, (None, out), weight_decay=True)

    def __call__(self, x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
        """Return the low-rank term `(alpha / rank) x A B` of x [..., in_size], which is added to a projection
        of x: [..., out_size] in `dtype` (None is x's).
        """
        return self.scale * project(project(x, self.a[...]), self.b[...], dtype=dtype)


def add_adapters(part: nnx.Module, config: LoRAConfig, *, rngs: nnx.Rngs) -> list[str]:
    """Add an adapter to each `Dense` layer of a mixer or feedforward that `config.targets` names, and return
    their names.
    """
    adapted = [name for name in config.targets if isinstance(getattr(part, name, None), Dense)]
    for name in adapted:
        dense = getattr(part, name)
        dense.lora = LoRA(dense.kernel, config, rngs=rngs)
    return adapted
