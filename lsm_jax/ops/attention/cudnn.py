"""The backend of `attention` that calls cuDNN's fused softmax attention, on NVIDIA GPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from lsm_jax.ops.backends.registry import Call
from lsm_jax.ops.core.platforms import compute_capabilities
from pallas_kernels.requirements import Requirement


def _input_dtypes(call: Call) -> set[Any]:
    return {call.arguments[n].dtype for n in "qkv"}


def _heads_supported(call: Call) -> bool:
    q, k, v = (call.arguments[n].shape[2] for n in "qkv")
    return k == v and q % v == 0


def _channels_supported(call: Call) -> bool:
    channels = [call.arguments[n].shape[3] for n in "qv"]
    most = 256 if compute_capabilities() == {"9.0"} else 128
    return all(size % 8 == 0 and size <= most for size in channels)


REQUIREMENTS = (
    Requirement(
        "no initial_state, segment_ids or update_mask",
        lambda call: call.options.unmasked,
    ),
    Requirement("rows that are not split over devices", lambda call: call.options.axis is None),
    Requirement("no log_forget", lambda call: call.arguments["log_forget"] is None),
    Requirement(
        "q, k and v in bfloat16 or in float16",
        lambda call: _input_dtypes(call) in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}),
        lambda call: str(call.arguments["q"].dtype),
    ),
    Requirement(
        "as many key heads as value heads, and a multiple of them as query heads", _heads_supported
    ),
    Requirement(
        "key channels and value channels that are multiples of 8 up to 128 (on compute capability 9.0 up to 256)",
        _channels_supported,
        lambda call: " and ".join(str(call.arguments[n].shape[3]) for n in "kv"),
    ),
    Requirement("T of at least 2", lambda call: call.arguments["q"].shape[1] >= 2),
    Requirement("an NVIDIA GPU in this process, and cuDNN", lambda call: has_cudnn()),
    Requirement("rows and heads that divide over the devices", lambda call: not partly_mapped()),
)


def run(call: Call) -> jax.Array:
    """Compute the output [B, T, H, V] of an `attention` call by cuDNN's fused kernel.

    JAX's call of cuDNN requires as many key channels as value channels: zeros are appended where there are fewer.
    """
    values = call.arguments["v"].shape[3]
    size = max(call.arguments["q"].shape[3], values)
    q, k, v = (_padded(call.arguments[n], size) for n in "qkv")
    window, scale = call.options.window, call.options.scale
    local = None if window is None else (window - 1, 0)
    attend: Any = functools.partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=True,
        local_window_size=local,
        implementation="cudnn",
    )
    attend = jax.checkpoint(attend, prevent_cse=False, policy=_is_saved)
    if axes := _unmapped_axes():  # of one device each: see `partly_mapped`
        rows = PartitionSpec(axes)
        attend = jax.shard_map(
            attend, in_specs=rows, out_specs=rows, axis_names=set(axes), check_vma=False
        )
    return attend(q, k, v)[..., :values]


def _padded(x: jax.Array, size: int) -> jax.Array:
    """Return x [B, T, H, D] with zeros appended up to `size` channels."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[3])))


def _is_saved(primitive, *_, **__) -> bool:
    """Return whether the backward pass of rematerialised cuDNN attention uses the saved result of a primitive: of all
    except those without inputs.

    cuDNN's absent arguments are empty arrays. XLA's compiler crashes if they leave a `jax.shard_map` (jax
    0.11.2).
    """
    return primitive.name not in ("broadcast_in_dim", "empty")


def partly_mapped() -> bool:
    """Return whether some axes of the current mesh are mapped to single devices, while others with several
    devices are left to XLA's partitioner.

    cuDNN's attention then adds its own partitioning, on which XLA's compiler crashes (jax 0.11.2).
    """
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in _unmapped_axes())


def _unmapped_axes() -> tuple[str, ...]:
    """Return the names of the mesh's axes over which the program is not yet mapped to single devices; empty if no axis
    of the mesh is mapped.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    unmapped = tuple(name for name, kind in kinds if kind != AxisType.Manual)
    return unmapped if len(unmapped) < len(mesh.axis_names) else ()


@functools.cache
def has_cudnn() -> bool:
    """Return whether this process has an NVIDIA GPU, on which cuDNN's attention can run."""
    try:
        return bool(jax.local_devices(backend="cuda")[0].client.platform_version)
    except RuntimeError:
        return False
