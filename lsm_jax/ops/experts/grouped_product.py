"""Products of groups of rows with one matrix each: jax's own on CPU and TPU, and fused kernels on Hopper."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.ops.backends.chosen import by_platform, choose, mesh_platform
from lsm_jax.ops.core.checks import matmul_precision

KERNEL = "mosaic_gpu"
_ROWS, _STEP = 128, 64
_PIECES = 32  # parts that segments are cut to for their sums, where there are fewer segments


def grouped_product(
    x: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    *,
    multiple: int = 1,
    implementation: str | None = None,
) -> jax.Array:
    """Each group of rows times its own matrix, accumulated in float32.

    Args:
        x: [N, D], the rows of group 0 first, then those of group 1, and so on.
        kernels: [E, D, F], in x's dtype.
        sizes: int32 [E], rows of each group; 0 is accepted.
        multiple: what all `sizes`, and N, are multiples of; kernels serve multiples of 128 (`row_multiple`).
        implementation: None, "xla" (`jax.lax.ragged_dot`, which multiplies every row with every matrix on NVIDIA) or
            "mosaic_gpu" (on Hopper, in bfloat16).

    Returns:
        [N, F] in x's dtype; rows beyond the last group hold anything, and their gradient may be anything.

    Raises:
        NotImplementedError: a kernel asked for by name that does not serve these arrays.
    """
    if implementation not in (None, "xla", KERNEL):
        raise ValueError(f"implementation={implementation!r}; accepted are None, 'xla', {KERNEL!r}")
    if len(x) % multiple:
        raise ValueError(f"x has {len(x)} rows, which are no multiple of multiple={multiple}")
    why = _why_not(kernels.dtype, kernels.shape[1:], x, kernels)
    if why is None and (multiple % _ROWS or not len(x)):
        why = f"rows, and groups of multiples of {_ROWS}, not {len(x)} and multiple={multiple}"
    fused = choose("grouped_product", "ragged_dot", implementation, KERNEL, why)
    if fused == "never":
        return _xla_product(x, kernels, sizes)
    return _product(fused, x, kernels, sizes)


def serves_segments(x: jax.Array, kernels: jax.Array) -> bool:
    """Whether a kernel may compute `segment_product`; without one, products of all rows with every matrix are faster."""
    why = _why_not(x.dtype, kernels.shape[1:], x, kernels)
    if why is None and (len(x) % _STEP or len(x) < _ROWS):
        why = f"rows of multiples of {_STEP}, from {_ROWS} on, not {len(x)}"
    return choose("segment_product", "one product a group", None, KERNEL, why) == "maybe"


def segment_product(x: jax.Array, kernels: jax.Array, ends: jax.Array) -> jax.Array:
    """Segments of rows times a matrix each, in turn; for arrays that `serves_segments`.

    Args:
        x: [N, D], segments of whole blocks of 64 rows one after another.
        kernels: [E, D, F], in x's dtype; segment s takes number s modulo E.
        ends: int32 [S], the block before which each segment ends, up to N / 64; S is a multiple of E.

    Returns:
        [N, F] in x's dtype.
    """
    return _segments(x, kernels, ends)


def row_multiple(x: jax.Array) -> int:
    """What `multiple`, and all other widths, should be multiples of for products with x [..., D]: 128 where a kernel may serve
    them, else 1."""
    return 1 if _why_not(x.dtype, (x.shape[-1], _ROWS), x) else _ROWS


def _why_not(dtype: Any, shape: tuple[int, ...], *arrays: jax.Array) -> str | None:
    """What the kernel takes in place of these arrays times matrices of this dtype and shape, or None."""
    if any(a.dtype != jnp.bfloat16 for a in arrays) or dtype != jnp.bfloat16:
        return f"bfloat16, not {arrays[0].dtype} and {dtype}"
    if shape[0] % _ROWS or shape[1] % _STEP:
        return f"matrices of multiples of {_ROWS} x {_STEP}, not {shape}"
    if any(jax.typeof(a).manual_axis_type.varying for a in arrays):
        return "arrays outside jax.shard_map, or inside with check_vma=False"
    if jax.config.jax_enable_x64:
        return "32-bit indices (jax_enable_x64 off)"
    # Without a card rows would be filled up for nothing; so a program lowered here without a mesh for another machine has none.
    try:
        platform = mesh_platform() or jax.local_devices(backend="cuda") and "cuda"
    except RuntimeError:
        platform = None
    if platform != "cuda":
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
    return by_platform(*arrays, cuda=kernel, default=xla)


# Jitted, so that layers which are not scanned trace and lower a kernel once.


@functools.partial(jax.jit, static_argnames="transposed")
def _kernel_product(x, kernels, sizes, transposed=False):
    """x [N, D] times kernels [E, D, F], or [E, F, D] where `transposed`."""
    from pallas_kernels.grouped_product import hopper

    ends = jnp.cumsum(sizes // _ROWS)
    block = jnp.arange(len(x) // _ROWS)[:, None]
    groups = jnp.minimum(jnp.sum(block >= ends, axis=1, dtype=jnp.int32), len(sizes) - 1)
    return hopper.product(x, kernels, groups, ends[-1:], transposed=transposed)


@jax.jit
def _kernel_sums(x, dy, sizes):
    """The sum over each group's rows of x [N, D] times dy [N, F]: [E, D, F]."""
    from pallas_kernels.grouped_product import hopper

    return hopper.sums(x, dy, jnp.cumsum(sizes) - sizes, sizes // _STEP)


@jax.custom_vjp
def _segments(x, kernels, ends):
    return _on_platform("maybe", _kernel_segments, _xla_segments, x, kernels, ends)


def _segments_backward(saved, dy):
    x, kernels, ends = saved

    def by_kernel(x, kernels, ends, dy):
        return _kernel_segments(dy, kernels, ends, transposed=True), _kernel_segment_sums(
            x, kernels, ends, dy
        )

    def by_xla(x, kernels, ends, dy):
        return jax.vjp(lambda x, w: _xla_segments(x, w, ends), x, kernels)[1](dy)

    return *_on_platform("maybe", by_kernel, by_xla, x, kernels, ends, dy), None


_segments.defvjp(lambda *arrays: (_segments(*arrays), arrays), _segments_backward)


def _xla_segments(x, kernels, ends):
    blocks = x.reshape(-1, _STEP, x.shape[1])
    segment = jnp.sum(ends <= jnp.arange(len(blocks))[:, None], axis=1)
    own = kernels[segment % len(kernels)]
    return jnp.matmul(blocks, own, precision=matmul_precision(x, kernels)).reshape(len(x), -1)


@functools.partial(jax.jit, static_argnames="transposed")
def _kernel_segments(x, kernels, ends, transposed=False):
    """Two blocks of 64 rows at a time; a segment of an odd number ends with one."""
    from pallas_kernels.grouped_product import hopper

    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    visits = -(-(ends - begins) // 2)
    after = jnp.cumsum(visits)
    visit = jnp.arange((len(x) // _STEP + len(ends)) // 2)
    segment = jnp.sum(after <= visit[:, None], axis=1, dtype=jnp.int32)
    segment = jnp.minimum(segment, len(ends) - 1)
    first = begins[segment] + 2 * (visit - (after - visits)[segment])
    last = jnp.minimum(first + 2, ends[segment])
    parts = (part.astype(jnp.int32) for part in (first, last))
    groups = segment % len(kernels)
    return hopper.product(x, kernels, groups, after[-1:], *parts, transposed=transposed)


@jax.jit
def _kernel_segment_sums(x, kernels, ends, dy):
    """Few segments in pieces, since some may be much longer than others."""
    from pallas_kernels.grouped_product import hopper

    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    pieces = max(1, _PIECES // len(ends))
    size = -(-(ends - begins) // pieces)[:, None]
    first = jnp.minimum(begins[:, None] + size * jnp.arange(pieces, dtype=jnp.int32), ends[:, None])
    blocks = jnp.minimum(size, ends[:, None] - first)
    found = hopper.sums(x, dy, (first * _STEP).reshape(-1), blocks.reshape(-1))
    found = found.reshape(-1, len(kernels), pieces, *kernels.shape[1:]).astype(jnp.float32)
    return jnp.sum(found, axis=(0, 2)).astype(kernels.dtype)
