"""Attention by cuDNN, on NVIDIA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from lsm_jax.ops.backends.registry import Call
from pallas_kernels.requirements import Requirement


def _dtypes(call: Call) -> set[Any]:
    return {call.arguments[n].dtype for n in "qkv"}


def _heads_fit(call: Call) -> bool:
    q, k, v = (call.arguments[n].shape[2] for n in "qkv")
    return k == v and q % v == 0


def _channels_fit(call: Call) -> bool:
    key_dim, value_dim = (call.arguments[n].shape[3] for n in "qv")
    return key_dim == value_dim and key_dim % 8 == 0 and key_dim <= 128


REQUIREMENTS = (
    Requirement(
        "whole documents without initial_state, segment_ids or update_mask",
        lambda call: call.options.plain,
    ),
    Requirement("rows that are not split over devices", lambda call: call.options.axis is None),
    Requirement("no log_forget", lambda call: call.arguments["log_forget"] is None),
    Requirement(
        "bfloat16 or float16 inputs",
        lambda call: _dtypes(call) in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}),
        lambda call: str(call.arguments["q"].dtype),
    ),
    Requirement("as many key heads as value heads, dividing the query heads", _heads_fit),
    Requirement("as many key channels as value channels, a multiple of 8 up to 128", _channels_fit),
    Requirement("T of at least 2", lambda call: call.arguments["q"].shape[1] >= 2),
    Requirement("an NVIDIA device in this process, and cuDNN", lambda call: has_cudnn()),
    Requirement("rows and heads that divide over the devices", lambda call: not half_mapped()),
)


def run(call: Call) -> jax.Array:
    """The output for whole documents, [B, T, H, V]."""
    q, k, v = (call.arguments[n] for n in "qkv")
    window, scale = call.options.window, call.options.scale
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
def has_cudnn() -> bool:
    """Whether this process has an NVIDIA device with cuDNN."""
    try:
        return bool(jax.local_devices(backend="cuda")[0].client.platform_version)
    except RuntimeError:
        return False
