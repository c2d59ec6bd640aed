"""Products of groups of rows with one matrix each: jax's own on CPU and TPU, and the kernels that ship with it on Hopper."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.checks import matmul_precision
from lsm_jax.ops.chosen import choose

KERNEL = "mosaic_gpu"
_BLOCK = 64  # of the axes that are summed over
_ROWS = 8  # rows come in multiples of so many
# Five steps and tiles over the whole width took 0.49 ms where these take 0.67 (131,072 rows, 64 x 1024 x 896, H200); no whole
# layer has been timed with them yet.
_STEPS, _ACROSS = 4, 1


def grouped_product(
    x: jax.Array, kernels: jax.Array, sizes: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Each group of rows times its own matrix, accumulated in float32.

    Args:
        x: [N, D], the rows of group 0 first, then those of group 1, and so on; those beyond the last are finite.
        kernels: [E, D, F], in x's dtype.
        sizes: int32 [E], rows of each group; 0 is accepted.
        implementation: None, "xla" (`jax.lax.ragged_dot`, which multiplies every row with every matrix on NVIDIA) or
            "mosaic_gpu" (on Hopper, in bfloat16).

    Returns:
        [N, F] in x's dtype; rows beyond the last group are 0.

    Raises:
        NotImplementedError: a kernel asked for by name that does not serve these arrays.
    """
    if implementation not in (None, "xla", KERNEL):
        raise ValueError(f"implementation={implementation!r}; accepted are None, 'xla', {KERNEL!r}")
    why = _why_not(x, kernels)
    fused = choose("grouped_product", "ragged_dot", implementation, KERNEL, why)
    if fused == "never":
        return _xla_product(x, kernels, sizes)
    more = -len(x) % _ROWS
    padded = jnp.pad(x, ((0, more), (0, 0))) if more else x
    return _product(fused, padded, kernels, sizes)[: len(x)]


def _why_not(x: jax.Array, kernels: jax.Array) -> str | None:
    """What the kernel takes in place of this call, or None."""
    if x.dtype != jnp.bfloat16 or kernels.dtype != x.dtype:
        return f"bfloat16, not {x.dtype} and {kernels.dtype}"
    if any(size % _BLOCK for size in kernels.shape[1:]) or not len(x):
        return (
            f"rows, and widths that are multiples of {_BLOCK}, not {x.shape} times {kernels.shape}"
        )
    if any(jax.typeof(a).manual_axis_type.varying for a in (x, kernels)):
        return "arrays outside jax.shard_map, or inside with check_vma=False"
    try:
        jax.local_devices(backend="cuda")  # the kernels ask the device how large it is
    except RuntimeError:
        return "NVIDIA Hopper"
    from pallas_kernels import compat

    return None if compat.on_hopper() else "NVIDIA Hopper"


def _xla_product(x, kernels, sizes):
    return jax.lax.ragged_dot(x, kernels, sizes, precision=matmul_precision(x, kernels))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(fused, x, kernels, sizes):
    return _on_platform(fused, _kernel_product, _xla_product, x, kernels, sizes)


def _forward(fused, x, kernels, sizes):
    return _product(fused, x, kernels, sizes), (x, kernels, sizes)


def _backward(fused, saved, dy):
    x, kernels, sizes = saved

    def by_kernel(x, kernels, sizes, dy):
        return _kernel_product(dy, kernels, sizes, transposed=True), _kernel_sums(x, dy, sizes)

    def by_xla(x, kernels, sizes, dy):
        return jax.vjp(lambda x, w: _xla_product(x, w, sizes), x, kernels)[1](dy)

    return *_on_platform(fused, by_kernel, by_xla, x, kernels, sizes, dy), None


_product.defvjp(_forward, _backward)


def _on_platform(fused, kernel, xla, *arrays) -> Any:
    if fused == "always":
        return kernel(*arrays)
    return jax.lax.platform_dependent(*arrays, cuda=kernel, default=xla)


def _inside(x, sizes):
    """x [N, D] with zeros beyond the last group, where a kernel leaves what was there."""
    return jnp.where((jnp.arange(len(x)) < jnp.sum(sizes))[:, None], x, 0)


def _widest(size: int) -> int:
    return 128 if size % 128 == 0 else _BLOCK


def _kernel_product(x, kernels, sizes, transposed=False):
    """x [N, D] times kernels [E, D, F], or [E, F, D] where `transposed`."""
    from pallas_kernels import compat

    width = kernels.shape[1 if transposed else 2]
    y = compat.grouped_product_kernel()(
        x, kernels, group_sizes=sizes, transpose_rhs=transposed,
        block_m=128, block_n=_widest(width), block_k=_BLOCK, max_concurrent_steps=_STEPS, grid_block_n=_ACROSS,
    )  # fmt: skip
    return _inside(y, sizes)


def _kernel_sums(x, dy, sizes):
    """The sum over each group's rows of x [N, D] times dy [N, F]: [E, D, F]."""
    from pallas_kernels import compat

    return compat.grouped_sums_kernel()(  # what stands beyond the last group is read, and multiplied by 0
        x, dy, group_sizes=sizes,
        block_m=_widest(x.shape[1]), block_n=_widest(dy.shape[1]), block_k=_BLOCK, max_concurrent_steps=_STEPS, grid_block_n=_ACROSS,
    )  # fmt: skip
