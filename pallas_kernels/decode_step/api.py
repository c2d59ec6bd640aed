"""The fused update and read of matrix memories M by one token: `M ← decay ⊙ M + kᵀ v`, with the correction of
the delta rule or of RWKV7, and the output `o = scale q M`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_step import hopper, triton

_BACKENDS = {"mosaic_gpu": hopper, "triton": triton}


class Call(NamedTuple):
    """The arguments of a call of `decode_step` by which the backend decides whether it supports the call:
    queries q, values v and the memory (arrays, or their shapes and dtypes).
    """

    q: Any
    v: Any
    memory: Any


class Gate(NamedTuple):
    """Key channels' decays as what they are computed from: `log decay = log sigmoid(down up + bias) / temperature`.

    Attributes:
        down: [B, R], the inner channels of a low-rank gate, or [B, G K], the gate without its bias.
        up: [R, G K], or None.
        bias: [G K].
        temperature: divides the logarithm.
    """

    down: Float[Array, "B _"]
    up: Float[Array, "R C"] | None
    bias: Float[Array, " C"]
    temperature: float


def unsupported(q, v, memory, implementation: str = "mosaic_gpu") -> str | None:
    """Return the first requirement that a call of `decode_step` with these queries q, values v and memory
    (arrays, or their shapes and dtypes) does not meet, or None if the kernel supports it.
    """
    return _BACKENDS[implementation].unsupported(Call(q, v, memory))


def decode_step(
    memory: Float[Array, "... B G K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B G V"],
    *,
    beta: Float[Array, "B G"] | None = None,
    log_decay: Float[Array, "B G"] | Float[Array, "B G K"] | None = None,
    value_log_decay: Float[Array, "B G V"] | None = None,
    a: Float[Array, "B Ha K"] | None = None,
    b: Float[Array, "B Hb K"] | None = None,
    bonus: Float[Array, "G K"] | None = None,
    emptied: Bool[Array, " B"] | None = None,
    layer: Int[Array, ""] | None = None,
    gate: Gate | None = None,
    columns: tuple[int, int, int] | None = None,
    scale: float,
    erase: str = "decayed",
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B max(H,G) V"], Float[Array, "... B G K V"]]:
    """Apply one token of each row to each of its matrix memories M: decay M, write to it, and read the
    token's output from it. Neither differentiation nor `jax.vmap` is supported.

    Args:
        memory: [B, G, K, V] float32, the memories, or [L, B, G, K, V], those of all layers, with `layer`.
            Updated in place where its buffer may be reused.
        q: [B, H, K] queries; H is a multiple or a divisor of G.
        k: [B, Hk, K] keys; Hk divides G.
        v: [B, G, V] values.
        beta: [B, G], the strength of the delta rule's writes; if given, the write is `beta (v - k M)`; see
            `erase`.
        log_decay: [B, G] or [B, G, K], the natural logarithm of the decay, at most 0; None is no decay.
        value_log_decay: [B, G, V], the natural logarithm of a decay of the value channels, applied in
            addition to `log_decay`.
        a: [B, Ha, K], the vectors by which RWKV7 reads the memory M before its decay; if given, `bᵀ (a M)` is
            written in addition. Ha divides G.
        b: [B, Hb, K], the vectors by which RWKV7 writes what `a` has read; given with `a`. Hb divides G.
        bonus: [G, K], RWKV6's weight of the token's own key and value; if given, the output is `scale q (M +
            diag(bonus) kᵀ v)` with M before decay and write.
        emptied: [B], True where the memory is replaced by 0 before the token.
        layer: int32 scalar, index of the memory to update; the other L - 1 do not change.
        gate: the decay of the key channels, instead of `log_decay`, as its gate; with "mosaic_gpu" only.
        columns: the first columns of queries, keys and values if q, k and v are arrays [B, C], each with G heads side by side from there on,
            such as the result of one product; with "mosaic_gpu" only.
        scale: the factor by which the queries q are multiplied.
        erase: with beta, whether M in its write is "decayed", or "undecayed" as before the token.
        implementation: "mosaic_gpu" (Hopper) or "triton" (NVIDIA cards of compute capability 8.0 or more);
            `REQUIREMENTS` of `hopper` and of `triton` list what each requires.
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output [B, max(H, G), V] in v's dtype, and `memory` after the token.

    Raises:
        NotImplementedError: the arrays given to `decode_step` do not meet a requirement of the kernel's
        backend; the message says which.
        ValueError: `implementation` is not the name of a backend of `decode_step`, or `erase` not one of its words, or `gate` is given with
            `log_decay`, or `gate` or `columns` with another backend.
    """
    if implementation not in _BACKENDS:
        accepted = tuple(_BACKENDS)
        raise ValueError(f"decode_step: implementation={implementation!r}; accepted are {accepted}")
    if erase not in ("decayed", "undecayed"):
        raise ValueError(f"decode_step: erase={erase!r}; accepted are 'decayed' and 'undecayed'")
    if gate is not None and log_decay is not None:
        raise ValueError("decode_step: gate is accepted without log_decay")
    if implementation != "mosaic_gpu" and not (gate is None and columns is None):
        raise ValueError(
            "decode_step: gate and columns are accepted with implementation='mosaic_gpu'"
        )
    queries, values = q, v
    if columns is not None:
        (*rows, key_dim, value_dim) = memory.shape[-4:]
        queries = jax.ShapeDtypeStruct((*rows, key_dim), q.dtype)
        values = jax.ShapeDtypeStruct((*rows, value_dim), v.dtype)
    if (requirement := unsupported(queries, values, memory, implementation)) is not None:
        raise NotImplementedError(
            f"decode_step: implementation={implementation!r} requires {requirement}"
        )
    optional = dict(
        beta=_float32(beta),
        decay=decay_factor(log_decay),
        value_decay=decay_factor(value_log_decay),
        a=a,
        b=b,
        bonus=_float32(bonus),
        emptied=None if emptied is None else emptied.astype(jnp.int32),
        layer=None if layer is None else jnp.reshape(layer, 1).astype(jnp.int32),
    )
    options: dict[str, Any] = dict(scale=scale, erase=erase, interpret=interpret)
    if columns is not None:
        options["columns"] = columns
    if gate is not None:
        *arrays, options["temperature"] = gate
        optional |= zip(("gate_down", "gate_up", "gate_bias"), arrays, strict=True)
    return _BACKENDS[implementation].step(memory, q, k, v, optional, **options)


def _float32(x) -> Any:
    return None if x is None else x.astype(jnp.float32)


def decay_factor(log_decay) -> Any:
    """Return the decay `exp(log_decay)` encoded as one float32 number that loses no digits, also near 1; None
    for None.

    The number is `exp(log_decay) - 1`, at most 0, where `log_decay > -0.5`: for slow decays `exp(log_decay)`
    would be rounded near 1. Elsewhere it is `exp(log_decay)`, above 0.
    """
    if log_decay is None:
        return None
    log_decay = jnp.minimum(log_decay.astype(jnp.float32), 0)  # rounding in a mixer may exceed 0
    remaining = jnp.maximum(jnp.exp(log_decay), jnp.finfo(jnp.float32).tiny)
    return jnp.where(log_decay > -0.5, jnp.expm1(log_decay), remaining)
