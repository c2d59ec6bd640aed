"""Functions that run a Mosaic GPU kernel with inputs, outputs and buffers in shared memory that have names instead of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels.compat import pl, plgpu


def launch(
    kernel: Callable[..., None],
    *,
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    grid: dict[str, int],
    cluster: dict[str, int] | None = None,
    num_threads: int | None = None,
    thread_name: str = "group",
    scratch: dict[str, Any] | None = None,
    approx_math: bool = True,
    reduction_scratch_bytes: int | None = None,
    auto_barriers: bool = True,
    name: str | None = None,
    interpret: Any,
) -> dict[str, jax.Array]:
    """Run a Mosaic GPU kernel on a grid of thread blocks, and return its outputs by name.

    Args:
        kernel: called with a dictionary of references to the inputs and outputs in global memory; with `scratch` also with one of
            references to the scratch buffers.
        inputs: arrays (or references to arrays that the kernel updates in place); those that are None are left out.
        outputs: shapes and dtypes of the results; those that are None are left out.
        grid: sizes of the grid's axes, by the names for `jax.lax.axis_index`.
        cluster: sizes and names likewise of the axes of a cluster, of thread blocks that can load for each other; each of the grid's blocks is
            then such a cluster. None is one block.
        num_threads: warpgroups of a thread block, along the axis `thread_name`; None is one warpgroup and no axis.
        thread_name: the name of the axis of a thread block's warpgroups.
        scratch: types, by name, of the thread block's buffers in shared memory and barriers, in the order in which they are allocated.
        approx_math: whether the compiler may use approximations of `exp` and the like.
        reduction_scratch_bytes: shared memory for sums over rows of registers, which all warpgroups of a thread block use at once; 0 forbids
            such sums, None is Pallas's default.
        auto_barriers: whether a warpgroup's threads wait for each other before and after each store to memory. Without it, a kernel in
            which one warp loads what another has stored must wait itself.
        name: the kernel's name in profiles.
        interpret: parameters of the interpreter, or False.
    """
    present = {name: x for name, x in inputs.items() if x is not None}
    wanted = {name: x for name, x in outputs.items() if x is not None}

    def by_name(*refs):
        count = len(present) + len(wanted)
        named = dict(zip([*present, *wanted], refs[:count], strict=True))
        if scratch is None:
            kernel(named)
        else:
            kernel(named, dict(zip(scratch, refs[count:], strict=True)))

    if name is not None:
        by_name.__name__ = name
    types = list(wanted.values())
    reductions: dict[str, Any] = (
        {}
        if reduction_scratch_bytes is None
        else dict(reduction_scratch_bytes=reduction_scratch_bytes)
    )
    results = plgpu.kernel(
        by_name,
        out_type=types[0] if len(types) == 1 else types,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple((cluster or {}).values()),
        cluster_names=tuple(cluster or {}),
        num_threads=num_threads,
        thread_name=None if num_threads is None else thread_name,
        scratch_types=() if scratch is None else list(scratch.values()),
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            # The layout inference of the other semantics finds no solution here (jax 0.11.2).
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=not auto_barriers,
            **reductions,
        ),
        interpret=interpret,
    )(*present.values())
    return dict(zip(wanted, [results] if len(types) == 1 else results, strict=True))


def with_smem(
    body: Callable[[dict[str, Any]], Any], buffers: dict[str, Any], thread_name: str = "group"
) -> Any:
    """Call `body`, a part of a kernel, with newly allocated buffers in shared memory, barriers and
    accumulators, by name, and return its result. All warpgroups of a thread block use the same ones.

    Args:
        body: function of a dictionary of references to the buffers.
        buffers: the types of the buffers, by name, such as `plgpu.SMEM((64, 64), jnp.bfloat16)`; those that
            are None are left out.
        thread_name: the axis of the thread block's warpgroups.
    """
    present = {name: x for name, x in buffers.items() if x is not None}

    def by_name(*refs):
        return body(dict(zip(present, refs, strict=True)))

    return pl.run_scoped(by_name, *present.values(), collective_axes=thread_name)
