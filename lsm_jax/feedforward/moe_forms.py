"""Two forms of `y = Σ_e w_e E_e(x)`, the sum over each token's selected experts, SwiGLU layers
`E(x) = (silu(x W_g) ⊙ x W_u) W_d`, or without a gate W_g `E(x) = relu(x W_u)² W_d`.

*grouped*: tokens are copied to one row per selected expert and sorted by expert; each expert multiplies its
rows. If a device has at most as many choices as experts, as in decoding, the matrices of the chosen experts are gathered instead.
*dense*: every expert computes every token, one expert after another.

The arrays of both forms: x [B, T, D]; chosen int32 [B, T, k], the selected experts from 1, and 0 for none;
weight float32 [B, T, k]; gate_proj (None for experts without a gate) and up_proj [E, D, F]; down_proj [E, F, D].
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lsm_jax.feedforward.moe_order import (
    permute,
    places_by_expert,
    rows_of_tokens,
    sum_by_token,
    take_rows,
)
from lsm_jax.mixers.layers import matmul_precision, project, recomputed
from lsm_jax.ops.core.saved import saved
from lsm_jax.ops.experts.grouped_product import grouped_product, row_multiple
from lsm_jax.ops.experts.grouped_swiglu import grouped_swiglu, weighted_swiglu
from lsm_jax.ops.experts.narrow import grouped_product_fp8, grouped_swiglu_fp8
from lsm_jax.parallel import (
    alone,
    mesh_axes,
    over_mesh,
    over_tokens,
    place_on,
    room_for,
    sum_over,
    to_owners,
)

_TOKENS = ("batch", "sequence")
_AXES = {
    "x": _TOKENS,
    "chosen": _TOKENS,
    "weight": _TOKENS,
    "gate_proj": ("expert", None, "mlp"),
    "up_proj": ("expert", None, "mlp"),
    "down_proj": ("expert", "mlp"),
}


def dense(arrays: dict[str, jax.Array], kernels: dict[str, jax.Array]) -> jax.Array:
    """Return the output y [B, T, D] of a mixture of experts by the dense form, which applies every expert to
    every token; the tokens and experts are divided over the mesh's devices.

    Args:
        arrays: by name, x [B, T, D], the tokens; chosen int32 [B, T, k], the selected experts of each token,
            numbered from 1, and 0 for none; weight float32 [B, T, k], their weights.
        kernels: the experts' matrices by name: gate_proj and up_proj [E, D, F], and down_proj [E, F, D].
    """
    return over_tokens(_dense, arrays, kernels)


def grouped(
    config: Any, arrays: dict[str, jax.Array], kernels: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the output y [B, T, D] of a mixture of experts by the grouped form, in which each expert
    multiplies the tokens that chose it; the tokens and experts are divided over the mesh's devices.

    The second result is int32 [B, T], the number of each token's experts to which it could not be sent
    because a buffer between devices was full; y of these tokens is NaN.

    Args:
        config: a `MoEConfig`.
        arrays: by name, x [B, T, D], the tokens; chosen int32 [B, T, k], the selected experts of each token,
            numbered from 1, and 0 for none; weight float32 [B, T, k], their weights.
        kernels: the experts' matrices by name: gate_proj and up_proj [E, D, F], and down_proj [E, F, D].
    """
    return over_mesh(
        _grouped,
        arrays,
        kernels,
        arrays["x"].shape[0],
        config,
        axes={name: _AXES[name] for name in (*arrays, *kernels)},
        out_axes=(_TOKENS, _TOKENS),
        in_sequence=alone,
    )


def _dense(x, chosen, weight, up_proj, down_proj, gate_proj=None):
    def add_expert(total, expert):
        index, gate, up, down = expert
        selected = chosen == index
        inner = project(x, up)
        inner = _relu2(inner) if gate is None else jax.nn.silu(project(x, gate)) * inner
        y = project(inner, down)
        expert_weight = jnp.sum(jnp.where(selected, weight, 0), axis=-1, keepdims=True)
        return total + jnp.where(selected.any(axis=-1, keepdims=True), expert_weight * y, 0), None

    start = jnp.zeros(x.shape, weight.dtype)
    experts = 1 + jnp.arange(up_proj.shape[0]), gate_proj, up_proj, down_proj
    return jax.lax.scan(add_expert, start, experts)[0].astype(x.dtype)


def _grouped(global_batch, config, x, chosen, weight, up_proj, down_proj, gate_proj=None):
    """Return, on one device of a mesh, the output [B, T, D] of the grouped form of a mixture of experts for
    the device's rows, and the number [B, T] of each token's experts to which it could not be sent. The device
    has some of the experts, or a part of each expert's width.
    """
    num_local = up_proj.shape[0]
    expert = chosen.reshape(-1) - 1
    expert = jnp.where(expert < 0, config.num_experts, expert)
    overflow = jnp.zeros(x.shape[:2], jnp.int32)
    experts_sharded = num_local < config.num_experts
    rows_sharded = x.shape[0] < global_batch
    kernels = gate_proj, up_proj, down_proj
    if experts_sharded and rows_sharded:
        y, overflow = _by_exchange(config, x, expert, weight, kernels)
    else:
        if experts_sharded:  # every device has all rows, and computes the results of its experts
            expert = expert - num_local * place_on("expert")
            expert = jnp.where((expert < 0) | (expert >= num_local), num_local, expert)
        y = _by_local_experts(x, expert, weight, kernels, config.matmul)
    if up_proj.shape[-1] < config.expert_size:
        y = sum_over("mlp", y)
    if experts_sharded and not rows_sharded:
        y = sum_over("expert", y)
    return y.astype(x.dtype), overflow


def _by_local_experts(x, expert, weight, kernels, matmul):
    """Return what the experts of this device add to the output y [B, T, D] of a mixture of experts, in float32;
    `expert` is int32 [B T k], the chosen experts, or E for experts of other devices.
    """
    if expert.size <= kernels[1].shape[0] and matmul == "default":
        return _by_copied_matrices(x, expert, weight, kernels)
    top_k, block = weight.shape[-1], row_multiple(x)
    place, source, sizes = map(saved, places_by_expert(expert, kernels[1].shape[0], block))
    rows = rows_of_tokens(top_k, x.reshape(-1, x.shape[-1]), source, place)
    row_weight = permute(weight.reshape(-1, 1), source, place)
    y = _experts(matmul, rows, sizes, block, row_weight, *kernels)
    return sum_by_token(top_k, y, source, place).reshape(x.shape)


def _by_copied_matrices(x, expert, weight, kernels):
    """Return what `_by_local_experts` returns, for few choices: each is multiplied by a copy of its expert's matrices."""
    gate_proj, up_proj, down_proj = kernels
    here = expert < up_proj.shape[0]
    matrix = jnp.where(here, expert, 0)
    rows = jnp.repeat(x.reshape(-1, x.shape[-1]), weight.shape[-1], axis=0)

    def product(rows, kernels):
        precision = matmul_precision(rows.dtype)
        return jnp.einsum("nd,ndf->nf", rows, kernels[matrix], precision=precision)

    row_weight = weight.reshape(-1, 1)
    if gate_proj is None:
        inner = _weighted_relu2(product(rows, up_proj), row_weight)
    else:
        into = jnp.concatenate([product(rows, gate_proj), product(rows, up_proj)], axis=-1)
        inner = weighted_swiglu(into, row_weight)
    y = _wide(jnp.where(here[:, None], product(inner, down_proj), 0))
    return jnp.sum(y.reshape(*weight.shape, -1), axis=-2).reshape(x.shape)


def _by_exchange(config, x, expert, weight, kernels):
    """Return the output of a mixture of experts whose rows and experts are both divided over devices: send
    each row to the device that has its expert, compute the received rows, and send the results back.

    Args:
        config: a `MoEConfig`.
        x: [B, T, D], this device's tokens.
        expert: int32 [B T k], the selected experts of each token, numbered over all devices from 0;
            `num_experts` for none.
        weight: float32 [B, T, k], the weights of the selected experts.
        kernels: gate_proj, up_proj and down_proj of this device's experts.

    Returns:
        y [B, T, D] in float32, and int32 [B, T], the number of each token's experts to which it could not be
        sent because a buffer was full.
    """
    top_k, num_local = weight.shape[-1], kernels[1].shape[0]
    place, source, _ = places_by_expert(expert, config.num_experts, 1)
    rows = rows_of_tokens(top_k, x.reshape(-1, x.shape[-1]), source, place)
    devices = config.num_experts // num_local
    most = expert.size // top_k * min(top_k, num_local)
    capacity = room_for(expert.size, config.expert_buffer, devices, most)
    sorted_expert = take_rows(expert, source, config.num_experts)
    received, ids, send_back, overflows = to_owners(
        rows,
        sorted_expert % num_local,
        sorted_expert // num_local,
        num_local,
        room=capacity,
        exchange=config.exchange,
    )
    block = row_multiple(x)
    local_place, local_source, sizes = places_by_expert(ids, num_local, block)
    local_rows = permute(received, local_source, local_place)
    y = _experts(config.matmul, local_rows, sizes, block, None, *kernels)
    row_weight = permute(weight.reshape(-1, 1), source, place)
    y = row_weight * send_back(permute(y, local_place, local_source))
    overflow = jnp.sum(
        take_rows(overflows, place, False).reshape(weight.shape), axis=-1, dtype=jnp.int32
    )
    return sum_by_token(top_k, y, source, place).reshape(x.shape), overflow


def _experts(matmul, rows, sizes, block, row_weight, gate_proj, up_proj, down_proj):
    """Return the outputs [M, D] of the experts, SwiGLU layers or without a gate, for `rows` [M, D] sorted by expert;
    they are multiplied by `row_weight` [M, 1] unless it is None.

    The rows are in the order of `places_by_expert`, which also returns `sizes` [E], the number of places of
    each expert; results after the last expert's rows are undefined. The experts' inner width is padded to a
    multiple of `block`. With `matmul="fp8"` products are of 8-bit floats, whose scales are those of this device's rows and experts.
    """
    into = [up_proj] if gate_proj is None else [gate_proj, up_proj]
    if padding := -up_proj.shape[-1] % block:
        into = [jnp.pad(p, ((0, 0), (0, 0), (0, padding))) for p in into]
        down_proj = jnp.pad(down_proj, ((0, 0), (0, padding), (0, 0)))
    joined = jnp.concatenate(into, axis=-1)
    # Casts to 16 bits are half as large as what the backward pass would cast again, but not shared by devices.
    # In FP8 the 8-bit matrices are saved instead.
    saves, narrow = not _gathered_parameters(), matmul == "fp8"
    if rows.dtype.itemsize < 4 and saves and not narrow:
        joined, down_proj = saved(joined), saved(down_proj)
    swiglu, product = grouped_swiglu, grouped_product
    if narrow:
        swiglu = functools.partial(grouped_swiglu_fp8, save_matrices=saves)
        product = functools.partial(grouped_product_fp8, save_matrices=saves)
    if gate_proj is not None:
        return swiglu(rows, joined, down_proj, sizes, row_weight, multiple=block)
    inner = _weighted_relu2(saved(product(rows, joined, sizes, multiple=block)), row_weight)
    return product(inner, down_proj, sizes, multiple=block)


def _gathered_parameters() -> bool:
    """Return whether devices gather parts of the experts' matrices, which each of them has whole during its computation."""
    shape = jax.sharding.get_abstract_mesh().shape
    return any(shape.get(axis, 1) > 1 for axis in mesh_axes("embed"))


def _relu2(x):
    return jnp.square(jax.nn.relu(x))


@recomputed
def _weighted_relu2(up, row_weight):
    """Return `relu(up)²` [M, F], the inner values of experts without a gate, times `row_weight` [M, 1] unless it is None."""
    y = _relu2(_wide(up))
    return (y if row_weight is None else y * row_weight).astype(up.dtype)


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
