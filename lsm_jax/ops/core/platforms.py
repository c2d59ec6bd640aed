"""The platform and the compute capability of the devices that a program is compiled for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

# Compute capabilities by the beginning of a device's kind, for meshes of devices that this process does not
# have.
_CAPABILITIES = {
    "NVIDIA A100": "8.0",
    "NVIDIA A10": "8.6",
    "NVIDIA GeForce RTX 30": "8.6",
    "NVIDIA GeForce RTX 40": "8.9",
    "NVIDIA L4": "8.9",
    "NVIDIA H100": "9.0",
    "NVIDIA H200": "9.0",
    "NVIDIA GH200": "9.0",
    "NVIDIA B200": "10.0",
    "NVIDIA GeForce RTX 50": "12.0",
}


def mesh_platform() -> str | None:
    """The platform of the current mesh's devices: "cpu", "cuda", "rocm" or "tpu"; None if the mesh does not
    know its devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.platform not in ("cpu", "gpu", "tpu"):
        return None
    gpu = "cuda" if device.device_kind.startswith("NVIDIA") else "rocm"
    return gpu if device.platform == "gpu" else device.platform


def compute_capabilities() -> frozenset[str]:
    """Return the compute capabilities, such as "9.0", of the NVIDIA cards that a traced program is for; empty
    where they are not known.

    They are those of the current mesh's devices if the mesh knows them, else those of this process's cards. A
    process without cards may compile for any card.
    """
    if mesh_platform() == "cuda":
        device = jax.sharding.get_abstract_mesh().abstract_device
        kinds = sorted(_CAPABILITIES, key=len, reverse=True)
        for kind in kinds:
            if device is not None and device.device_kind.startswith(kind):
                return frozenset([_CAPABILITIES[kind]])
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return frozenset()
    return frozenset(str(getattr(device, "compute_capability", "unknown")) for device in devices)


def for_platform(
    default: Callable[..., Any] | None, **branches: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls the branch of the platform that the program is lowered for, or `default`.

    Inside a `jax.shard_map` whose mesh knows its devices this is the branch itself. If lowering selected the
    branch, the branch's index would be a number that the forward pass saves for the backward pass, with the
    residuals of all branches; and XLA does not see that a number which leaves one `jax.shard_map` and enters
    the next is constant.

    Args:
        default: for platforms without a branch; None if there is none.
        branches: by platform; all have the same arguments and results.
    """
    platform = mesh_platform()
    if platform is None or AxisType.Manual not in jax.sharding.get_abstract_mesh().axis_types:
        return functools.partial(jax.lax.platform_dependent, default=default, **branches)
    branch = branches.get(platform, default)
    if branch is None:
        raise NotImplementedError(
            f"the mesh's devices are of the platform {platform}; accepted here are {', '.join(branches)}"
        )
    return branch


def by_platform(
    *arguments: Any, default: Callable[..., Any], **branches: Callable[..., Any]
) -> Any:
    """Call one of several functions on `arguments` and return its result: the branch for the platform that the program
    is compiled for, or else `default`.
    """
    return for_platform(default, **branches)(*arguments)
