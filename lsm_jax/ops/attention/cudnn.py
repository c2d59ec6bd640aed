"""Where `attention` runs as cuDNN's, on NVIDIA, and why it does not elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

MAPPED = "rows and heads that divide over the devices"
"""What it takes where `half_mapped`."""


def why_not(q, k, v, plain: bool, gated: bool) -> str | None:
    """Why cuDNN does not serve these inputs, or None. The platform is not asked: lowering decides that."""
    if not plain:
        return "only whole documents: no initial_state, segment_ids or update_mask"
    if gated:
        return "no log_forget"
    if {q.dtype, k.dtype, v.dtype} not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        return f"bfloat16 or float16 inputs, not {q.dtype}"
    if k.shape[2] != v.shape[2] or q.shape[2] % v.shape[2]:
        return "as many key as value heads, dividing the query heads"
    if q.shape[3] != v.shape[3] or q.shape[3] % 8 or q.shape[3] > 128:
        return "key_dim = value_dim, a multiple of 8 up to 128"
    if q.shape[1] < 2:
        return "T of at least 2"
    return _cudnn_missing()


def run(q, k, v, *, scale: float, window: int | None) -> jax.Array:
    """Attention of whole documents, [B, T, H, V]."""
    local = None if window is None else (window - 1, 0)
    cudnn: Any = functools.partial(
        jax.nn.dot_product_attention, scale=scale, is_causal=True, local_window_size=local, implementation="cudnn"
    )  # fmt: skip
    cudnn = jax.checkpoint(cudnn, prevent_cse=False, policy=_no_constants)
    if rest := _left():  # of one device each: see `half_mapped`
        rows = PartitionSpec(rest)
        cudnn = jax.shard_map(
            cudnn, in_specs=rows, out_specs=rows, axis_names=set(rest), check_vma=False
        )
    return cudnn(q, k, v)


def _no_constants(primitive, *_, **__) -> bool:
    """Keep all but what is made of nothing: cuDNN's absent arguments are empty arrays, over which XLA's compiler crashes where they
    leave a `jax.shard_map` (jax 0.11.2)."""
    return primitive.name not in ("broadcast_in_dim", "empty")


def half_mapped() -> bool:
    """Whether some axes of the mesh are mapped and others of several devices left to the partitioner: XLA's compiler crashes over the
    partitioning that cuDNN's attention brings then (jax 0.11.2)."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in _left())


def _left() -> tuple[str, ...]:
    """The mesh's axes that are not mapped, where others are."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    left = tuple(name for name, kind in kinds if kind != AxisType.Manual)
    return left if len(left) < len(mesh.axis_names) else ()


@functools.cache
def _cudnn_missing() -> str | None:
    try:
        version = jax.local_devices(backend="cuda")[0].client.platform_version
    except RuntimeError:
        return "an NVIDIA device, and this host has none"
    return None if version else "no cuDNN"
