"""The parts of the Pallas backends of jax 0.11 that this project uses. No other module imports `jax.experimental`."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = [
    "PROCESSORS",
    "channel_rows",
    "fragmented_array",
    "gpu_interpreter",
    "key_columns",
    "mosaic_gpu_utils",
    "on_hopper",
    "pl",
    "plgpu",
    "races_found",
    "row_major",
    "state_rows",
]

PROCESSORS = 132  # streaming multiprocessors of an H100 and of an H200


def __getattr__(name: str) -> Any:
    # `pltpu` is imported only if it is used: its import changes the key of jax's caches, so that everything is traced again.
    if name != "pltpu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jax.experimental.pallas import tpu

    return tpu


def row_major(x: jax.Array) -> jax.Array:
    """Return x, which XLA stores with its last axis contiguous, as well as its gradient."""
    from jax.experimental import layout

    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


def on_hopper() -> bool:
    """Return whether all NVIDIA devices of this process are Hopper's (compute capability 9.0); True if it has none, and may compile for
    them.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return True
    return all(getattr(device, "compute_capability", None) == "9.0" for device in devices)


def channel_rows(heads: int, head_dim: int, warps: int) -> Any:
    """Return the register layout in which a warpgroup has a tile [heads, head_dim], with each head in one of its `warps` warps.

    A thread has consecutive channels, and the number of threads of a head is a power of two.
    """
    from jax.experimental.mosaic.gpu import fragmented_array as mgpu

    vector = heads * head_dim // (32 * warps)
    tiles = mgpu.Tiling(((heads, head_dim), (heads // warps, head_dim), (vector,)))
    layout = mgpu.TiledLayout(
        tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def key_columns(channels: int) -> Any:
    """Return the register layout in which a warpgroup has a tile [keys, 4 * channels], with `channels` columns in each of its 4 warps.

    A thread has 4 consecutive columns, and the other threads of a warp have other keys.
    """
    from jax.experimental.mosaic.gpu import fragmented_array as mgpu

    across = channels // 4
    tiles = mgpu.Tiling(((32 // across, 4 * channels), (32 // across, channels), (1, 4)))
    layout = mgpu.TiledLayout(
        tiles, warp_dims=(-5,), lane_dims=(-4, -3), vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def state_rows(rows: int, states: int) -> Any:
    """Return the register layout in which a warpgroup has a tile [4, rows, states], with one index of the first axis in each of
    its 4 warps.

    A thread has 4 consecutive entries of the last axis. The other threads of a warp have the rest of the same row, then other
    rows.
    """
    from jax.experimental.mosaic.gpu import fragmented_array as mgpu

    side = 32 // (states // 4)
    tiles = mgpu.Tiling(((4, side, states), (1, side, states), (1, 1, 4)))
    layout = mgpu.TiledLayout(
        tiles, warp_dims=(-9,), lane_dims=(-5, -4), vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def mosaic_gpu_utils() -> Any:
    """Return the module of helpers for code that `plgpu.inline_mgpu` puts into a kernel."""
    from jax.experimental.mosaic.gpu import utils

    return utils


def fragmented_array(registers: Any, layout: Any) -> Any:
    """Return the float32 tile with these registers of each thread, an array of values of MLIR, for code that `plgpu.inline_mgpu` puts into a
    kernel.
    """
    from jax.experimental.mosaic.gpu import fragmented_array as mgpu

    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def gpu_interpreter() -> Any:
    """Return the value of the argument `interpret` with which a Mosaic GPU kernel runs on a CPU and detects races."""
    return plgpu.InterpretGPUParams(detect_races=True)


def races_found() -> bool:
    """Return whether the interpreter of `gpu_interpreter` found a race in the last Mosaic GPU kernel that it ran: threads that use memory
    without waiting for each other.
    """
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return interpret_pallas_call.get_races().races_found
