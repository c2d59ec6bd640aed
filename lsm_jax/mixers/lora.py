"""Low-rank adapters (LoRA, arXiv 2106.09685): `y = x W + (alpha / rank) x A B` added to a projection whose W
does not train.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lsm_jax.mixers import checks
from lsm_jax.mixers.layers import Dense, parameter, project

EVERY = "all"
"""The target that names every `Dense` layer."""


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class LoRAConfig:
    """The config of low-rank adapters (LoRA): the projections that have an adapter, and the adapters' size.

    Attributes:
        targets: names of `Dense` layers of mixers and feedforwards, such as "q_proj"; of a layer inside another part the path
            ("decay.down") or its end ("down"), such as "k_proj" for the memories of a Mixture-of-Memories too. "all" names every
            `Dense` layer. A layer of a hybrid has adapters for the names that it has.
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

    A [in_size, rank] starts uniform in ±1/sqrt(in_size) and B at zero, so that a new adapter adds nothing. An adapter of a
    kernel with an axis of memories, [G, in_size, out_size], has this axis too.

    Attributes:
        products: the functions that multiply x by A, and the result by B, with the arguments of `layers.project`.
            Mixture-of-Memories sets others in a copy of its inner mixer, as of `Dense.product`.
    """

    products: tuple[Callable[..., jax.Array], Callable[..., jax.Array]] = (project, project)

    def __init__(self, kernel: nnx.Param, config: LoRAConfig, *, rngs: nnx.Rngs):
        *memories, into, out = kernel.logical_axes
        *groups, in_size, out_size = kernel.shape
        bound = 1 / math.sqrt(in_size)
        shape = (*groups, in_size, config.rank)
        a = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
        b = jnp.zeros((*groups, config.rank, out_size), jnp.float32)
        self.scale = config.alpha / config.rank
        self.a = parameter(a, (*memories, into, None), weight_decay=True)
        self.b = parameter(b, (*memories, None, out), weight_decay=True)

    def __call__(self, x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
        """Return the low-rank term `(alpha / rank) x A B` of x [..., in_size], which is added to a projection
        of x: [..., out_size] in `dtype` (None is x's).
        """
        first, second = self.products
        return self.scale * second(first(x, self.a[...], None, None), self.b[...], None, dtype)


def adapted_kernel(layer: Dense) -> jax.Array:
    """Return the matrix [in_size, out_size] by which a `Dense` layer multiplies: its kernel W, or with an adapter
    `W + (alpha / rank) A B`.
    """
    kernel, lora = layer.kernel[...], layer.lora
    if lora is None:
        return kernel
    return kernel + lora.scale * jnp.matmul(lora.a[...], lora.b[...], precision="highest")


def adaptable(part: nnx.Module) -> dict[str, Dense]:
    """Return the `Dense` layers of a mixer or feedforward by their path in it, such as "q_proj" or "decay.down"."""
    layers = [
        (path, layer) for path, layer in nnx.iter_graph(part) if isinstance(layer, Dense) and path
    ]
    return {".".join(map(str, path)): layer for path, layer in layers}


def add_adapters(part: nnx.Module, config: LoRAConfig, *, rngs: nnx.Rngs) -> list[str]:
    """Add an adapter to each `Dense` layer of a mixer or feedforward that `config.targets` names, and return the names among
    `config.targets` that it has.
    """
    layers, found = adaptable(part), []
    for target in config.targets:
        named = [path for path in layers if target == EVERY or f".{path}".endswith(f".{target}")]
        found += [target] if named else []
        for layer in (layers[path] for path in named):
            if layer.lora is None:
                layer.lora = LoRA(layer.kernel, config, rngs=rngs)
    return found


def merge_adapters(params: dict[str, Any], lora: LoRAConfig | None) -> dict[str, Any]:
    """Return a model's parameters without adapters: each adapted kernel W becomes `W + (alpha / rank) A B`
    in float32, where A and B are the adapter's matrices.

    Args:
        params: the parameters of a model, with layers stacked or not.
        lora: the adapters' config, which has `rank` and `alpha`; None if there are none.
    """
    merged = {}
    for key, value in params.items():
        if isinstance(value, dict) and "lora" in value and lora is not None:
            a, b = value["lora"]["a"], value["lora"]["b"]
            product = jnp.matmul(a, b, precision="highest")
            kernel = value["kernel"].astype(jnp.float32) + lora.alpha / lora.rank * product
            value = {name: leaf for name, leaf in value.items() if name != "lora"} | dict(kernel=kernel)  # fmt: skip
        elif isinstance(value, dict):
            value = merge_adapters(value, lora)
        merged[key] = value
    return merged
