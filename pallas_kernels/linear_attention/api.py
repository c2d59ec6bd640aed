"""Linear attention, `S_t = e^{g_t} S_{t-1} + k_tᵀ v_t`, `o_t = scale q_t S_t`, as fused kernels.

The decay g is absent, a scalar per head, or one value per key channel or per value channel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.memory_calls import (
    MemoryCall,
    Options,
    backend_module,
    call_backend,
    pad_to_multiple,
    supported_backend,
)
from pallas_kernels.requirements import first_unmet
from pallas_kernels.residuals import KEPT

_OP = "linear_attention"
_ONE_ROW = "rank=1, or implementation='mosaic_gpu', log_decay [B, T, G] or None, no log_write and a rank that divides 64"
_NO_WRITES = "no log_write and skip, or implementation='mosaic_gpu' and log_decay [B, T, G]"


def variant_of(log_decay: Any, value_log_decay: Any) -> str:
    """Return the name of the backend module that computes linear attention with these log decays (arrays, their shapes, or None).

    It is "value_decay" with `value_log_decay`, one per value channel; "channel_decay" with `log_decay` [B, T, G, K], one per key
    channel; and else "scalar_decay", for one per token or none.
    """
    if value_log_decay is not None:
        return "value_decay"
    by_channel = log_decay is not None and len(log_decay.shape) == 4
    return "channel_decay" if by_channel else "scalar_decay"


def unsupported(
    implementation: str, q, k, v, log_decay=None, *, bonus=None, value_log_decay=None, log_write=None,
    rank: int = 1,
) -> str | None:  # fmt: skip
    """Return the first requirement of a backend of linear attention that these arguments do not meet, in words; None if it supports
    them.

    The arguments are those of `linear_attention`, as arrays or as their shapes and dtypes.
    """
    variant = variant_of(log_decay, value_log_decay)
    backend = backend_module(_OP, implementation, variant)
    call = MemoryCall(q, k, v, log_decay, value_log_decay, bonus)
    if log_write is not None and (implementation, variant) != ("mosaic_gpu", "scalar_decay"):
        return _NO_WRITES
    if log_write is not None and log_decay is None:
        return _NO_WRITES
    if rank != 1 and (
        (implementation, variant) != ("mosaic_gpu", "scalar_decay") or log_write is not None or 64 % rank
    ):  # fmt: skip
        return _ONE_ROW
    return first_unmet(backend.REQUIREMENTS, call)


def linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    log_decay: Float[Array, "B T G"] | Float[Array, "B T G K"] | None = None,
    *,
    initial: Float[Array, "R G K V"] | None = None,
    run: Int[Array, "B T"] | None = None,
    bonus: Float[Array, "G K"] | None = None,
    value_log_decay: Float[Array, "B T G V"] | None = None,
    log_write: Float[Array, "B T G"] | None = None,
    skip: Float[Array, " G"] | None = None,
    rank: int = 1,
    scale: float,
    exact: bool = False,
    save_memories: bool = False,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B T max(H,G) V"], Float[Array, "R G K V"]]:
    """Write `kᵀ v` into decaying memories and read them with `q`; differentiable once, in reverse.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values, one memory for each of the G heads.
        log_decay: [B, T, G] or [B, T, G, K] float32, the natural logarithm of each memory's decay or of each of its key channels'
            decay, at most 0; None is no decay.
        initial: [B, G, K, V] float32, the memory before the first token; or [B * S, G, K, V] with S memories per row. None is an empty
            memory for each row.
        run: [B, T], the number of documents that have begun up to and with each token, never decreasing. A token with a larger
            number than the token before it reads an empty memory; number 0 continues `initial`. None is one document. With S > 1
            memories per row: every number from 0 to S - 1, each starting at a multiple of 64 ("mosaic_gpu", "triton") or
            128 ("mosaic_tpu") tokens; number s continues memory s of `initial` and ends in final memory s.
        bonus: [G, K] float32. If given, a token reads before its decay and its write, and its own write enters the read as
            `q diag(bonus) kᵀ v`.
        value_log_decay: [B, T, G, V] float32, the log decay of value channels, in place of `log_decay`.
        log_write: [B, T, G] float32, the natural logarithm of a factor of each token's write; requires `skip`, "mosaic_gpu" and
            `log_decay` [B, T, G].
        skip: [G] float32, a factor of each token's v, which is added to its output; requires `log_write`.
        rank: number R of consecutive rows (T is a multiple) that are one token, and of one document: each reads after all of them are
            written, and `log_decay` must be 0 but at the first. More than 1 requires "mosaic_gpu", `log_decay` [B, T, G] or None, no
            `log_write`, and that R divides 64.
        scale: the factor by which the queries q are multiplied.
        exact: whether the output is float32. With `value_log_decay` on "mosaic_gpu" and "triton" it is then never rounded, and v may
            be float32, which is rounded only where it is written to the memory.
        save_memories: whether the forward pass of a derivative stores the memories before all chunks for the backward pass,
            which otherwise computes them again; only "mosaic_gpu" with `log_decay` [B, T, G, K], others compute them again.
        implementation: "mosaic_gpu" (Hopper), "mosaic_tpu" or "triton" (NVIDIA cards of compute capability 8.0 or more);
            `unsupported` says what each requires.
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output in v's dtype (float32 if `exact`), and the final memories in float32, as `initial` ([B, G, K, V] without).

    Raises:
        NotImplementedError: the backend that `implementation` names does not support these arguments; the message says which
        requirement they do not meet.
        ValueError: `implementation` is not the name of a backend of `linear_attention`.
    """
    variant = variant_of(log_decay, value_log_decay)
    value = v
    if exact and variant == "value_decay" and implementation in ("mosaic_gpu", "triton"):
        value = jax.ShapeDtypeStruct(v.shape, q.dtype)
    given = dict(log_write=log_write, skip=skip)
    if len({x is None for x in given.values()}) > 1:
        raise ValueError("linear_attention: log_write and skip: accepted are both or neither")
    if log_write is not None or rank != 1:
        shapes = q, k, v, log_decay
        reason = unsupported(
            implementation, *shapes, bonus=bonus, value_log_decay=value_log_decay, log_write=log_write, rank=rank,
        )  # fmt: skip
        if reason is not None:
            raise NotImplementedError(
                f"linear_attention: implementation={implementation!r} requires {reason}"
            )
        variant = "scalar_writes" if log_write is not None else variant
    call = MemoryCall(q, k, value, log_decay, value_log_decay, bonus)
    backend = supported_backend(_OP, implementation, variant, call)
    log_decay = log_decay if value_log_decay is None else value_log_decay
    if initial is None and not getattr(backend, "FROM_ZERO", False):
        batch, _, memories, width = v.shape
        initial = jnp.zeros((batch, memories, k.shape[-1], width), jnp.float32)
    length = q.shape[1]
    if log_write is not None:
        run, q, k, v, log_write, log_decay = pad_to_multiple(
            backend.CHUNK, run, q, k, v, log_write, log_decay
        )
        arrays = q, k, v, log_write, skip, log_decay, run, initial
        output, final = call_backend(Options(backend, scale, interpret, exact), arrays)
        return output[:, :length], final
    run, q, k, v, log_decay = pad_to_multiple(backend.CHUNK, run, q, k, v, log_decay)
    options = Options(backend, scale, interpret, exact, save_memories=save_memories, rank=rank)
    keys, values = _slices(implementation, variant, q, k, v, exact)
    if len(keys) == len(values) == 1:
        output, final = call_backend(options, (q, k, v, log_decay, run, initial), bonus)
        return output[:, :length], final
    # The outputs of slices of key channels are added; slices of value channels do not interact.
    outputs, finals = [], []
    for key in keys:
        q_slice, k_slice = (_kept(x[..., key]) if len(keys) > 1 else x for x in (q, k))
        results = []
        for value in values:
            decayed: Any = log_decay
            decay = decayed[..., value if variant == "value_decay" else key]
            slice_bonus = None if bonus is None else bonus[:, key]
            start = None if initial is None else initial[..., key, value]
            arrays = q_slice, k_slice, v[..., value], decay, run, start
            results.append(call_backend(options, arrays, slice_bonus))
        output, final = (jnp.concatenate(x, axis=-1) for x in zip(*results, strict=True))
        outputs.append(output)
        finals.append(final)
    output = functools.reduce(jnp.add, (x.astype(jnp.float32) for x in outputs))
    output = output if exact else output.astype(v.dtype)
    output = _kept(output) if len(keys) > 1 else output
    return output[:, :length], jnp.concatenate(finals, axis=-2)


def _kept(x: jax.Array) -> jax.Array:
    """Return x, slices of queries or keys or the sum of slices' outputs, named such that a rematerialization policy saves it instead of
    the queries or keys, or of all outputs."""
    return checkpoint_name(x, KEPT)


def _slices(
    implementation: str, variant: str, q, k, v, exact: bool
) -> tuple[list[slice], list[slice]]:
    """Return the slices of key channels and those of value channels for which a backend's kernel is called one after the other.

    Hopper's kernels with a decay per channel compute slices of 128 key channels, and of 128 value channels. With a decay per key
    channel they split values themselves if no queries share a memory, and keys if no heads share anything, the sum of the slices'
    outputs is rounded, and the slices of values are one or an even number, whose gradients one thread block computes.
    """
    sliced = implementation == "mosaic_gpu" and variant != "scalar_decay"
    shared = q.shape[2] > v.shape[2]
    odd = v.shape[3] > 128 and v.shape[3] % 256 != 0
    apart = variant == "value_decay" or exact or odd or not q.shape[2] == k.shape[2] == v.shape[2]

    def slices(size: int, split: bool) -> list[slice]:
        width = 128 if split and size % 128 == 0 else size
        return [slice(n, n + width) for n in range(0, size, width)]

    return slices(q.shape[3], sliced and apart), slices(
        v.shape[3], sliced and (variant == "value_decay" or shared)
    )
