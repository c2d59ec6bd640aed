"""The delta rule `S_t = (I - β_t k_tᵀ k_t) e^{g_t} S_{t-1} + β_t k_tᵀ v_t`, `o_t = scale q_t S_t`.

S_t [K, V] is the memory after token t, β_t its write strength, g_t the log decay: 0, a scalar per memory, or
a value per key channel (KDA). DeltaNet, arXiv 2406.06484; Gated DeltaNet, arXiv 2412.06464.
With `erase="undecayed"`, `S_t = e^{g_t} S_{t-1} - β_t k_tᵀ (k_t S_{t-1}) + β_t k_tᵀ v_t` (Comba, arXiv 2506.02475).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
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

_OP = "delta_rule"
# The most value channels of a memory that a kernel scans, where more are computed in parts of `_PART` channels.
_MOST_VALUES = {("mosaic_gpu", "scalar_decay"): 512, ("mosaic_tpu", "scalar_decay"): 256, ("mosaic_tpu", "channel_decay"): 256}  # fmt: skip
_PART = 256


def variant_of(log_decay: Any) -> str:
    """Return the name of the backend module that computes the delta rule with this log decay (an array, its shape, or None).

    It is "channel_decay" with a log decay per key channel, else "scalar_decay".
    """
    return "channel_decay" if jnp.ndim(log_decay) == 4 else "scalar_decay"


def unsupported(implementation: str, q, k, v, log_decay=None, erase: str = "decayed") -> str | None:
    """Return the first requirement of a backend of the delta rule that these arguments do not meet, in words; None if it supports
    them.

    The arguments are those of `delta_rule`, as arrays or as their shapes and dtypes.
    """
    backend = backend_module(_OP, implementation, variant_of(log_decay))
    parts = _parts(implementation, q, v, log_decay)
    if parts > 1:
        batch, length, heads, channels = v.shape
        v = jax.ShapeDtypeStruct((batch, length, heads * parts, channels // parts), v.dtype)
    return first_unmet(backend.REQUIREMENTS, MemoryCall(q, k, v, log_decay, erase=erase))


def _parts(implementation: str, q: Any, v: Any, log_decay: Any) -> int:
    """Return the number of parts in which the values of a memory are computed, each as a memory of its own with the same keys.

    The channels of a value do not depend on each other.
    """
    most = _MOST_VALUES.get((implementation, variant_of(log_decay)), v.shape[3])
    divisible = v.shape[3] % _PART == 0 and q.shape[2] <= v.shape[2]
    return v.shape[3] // _PART if v.shape[3] > most and divisible else 1


def delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    beta: Float[Array, "B T G"],
    log_decay: Float[Array, "B T G"] | Float[Array, "B T G K"] | None = None,
    *,
    initial: Float[Array, "R G K V"] | None = None,
    run: Int[Array, "B T"] | None = None,
    scale: float,
    erase: str = "decayed",
    save_memories: bool = False,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B T max(H,G) V"], Float[Array, "R G K V"]]:
    """Decay memories, move what they return for the keys `k` towards the values `v`, and read them with the queries `q`.

    Reverse-mode differentiable, once.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys, of norm at most 1; Hk divides G.
        v: [B, T, G, V] values, one memory for each of the G heads.
        beta: [B, T, G] float32, from 0 to 2: how far what a memory returns for the key moves towards the value.
        log_decay: [B, T, G], or [B, T, G, K] with one per key channel; float32, natural logarithm, at most 0;
            None is no decay.
        initial: [B, G, K, V] float32, the memory before the first token; or [B * S, G, K, V] with S memories
            per row. None is an empty memory for each row.
        run: [B, T], the number of documents that have begun up to and with each token, never decreasing. A
            token with a larger number than the token before it reads an empty memory; number 0 continues
            `initial`. None is one document. With S memories per row, `run` has every number from 0 to S - 1,
            each begins at a multiple of 64 tokens, or 128 ("mosaic_tpu"), continues the memory
            of its number, and ends with a final memory of its own.
        scale: the factor by which the queries q are multiplied.
        erase: which memory the keys read to erase: "decayed", after their token's decay, or "undecayed", before it.
        save_memories: whether the forward pass of a derivative stores the memories before all chunks, in bfloat16, for the
            backward pass, which otherwise computes them again; "mosaic_gpu" only, others compute them again.
        implementation: "mosaic_gpu" (Hopper), "mosaic_tpu" or "triton" (NVIDIA cards of compute capability
            8.0 or more); see `unsupported` for the requirements of each.
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output in v's dtype, and the final memories in float32, in the shape of `initial` ([B, G, K, V] without).

    Raises:
        NotImplementedError: the implementation does not support these arguments; the message gives the
            requirement.
        ValueError: there is no such implementation or `erase`.
    """
    if erase not in ("decayed", "undecayed"):
        raise ValueError(f"{_OP}: erase={erase!r}; accepted are 'decayed' and 'undecayed'")
    if (parts := _parts(implementation, q, v, log_decay)) > 1:
        heads, channels = v.shape[2:]
        beta = jnp.repeat(beta, parts, axis=2)
        log_decay = None if log_decay is None else jnp.repeat(log_decay, parts, axis=2)
        output, final = delta_rule(
            q, k, v.reshape(*v.shape[:2], heads * parts, channels // parts), beta, log_decay,
            initial=None if initial is None else _divided(initial, parts), run=run, scale=scale, erase=erase,
            save_memories=save_memories, implementation=implementation, interpret=interpret,
        )  # fmt: skip
        return output.reshape(*output.shape[:2], heads, channels), _joined(final, parts)
    call = MemoryCall(q, k, v, log_decay, erase=erase)
    backend = supported_backend(_OP, implementation, variant_of(log_decay), call)
    if initial is None and not getattr(backend, "FROM_ZERO", False):
        initial = jnp.zeros((len(v), v.shape[2], k.shape[-1], v.shape[-1]), jnp.float32)
    length, multiple = q.shape[1], backend.length_multiple(q, k, v)
    run, q, k, v, beta, log_decay = pad_to_multiple(multiple, run, q, k, v, beta, log_decay)
    arrays = q, k, v, beta, log_decay, run, initial
    erase = "decayed" if log_decay is None else erase
    options = Options(backend, scale, interpret, erase=erase, save_memories=save_memories)
    output, final = call_backend(options, arrays, None)
    return output[:, :length], final


def _divided(memory: jax.Array, parts: int) -> jax.Array:
    """Return memories [R, G, K, V] as [R, G parts, K, V / parts]: the value channels of each as several memories."""
    rows, heads, keys, values = memory.shape
    memory = memory.reshape(rows, heads, keys, parts, values // parts).swapaxes(2, 3)
    return memory.reshape(rows, heads * parts, keys, values // parts)


def _joined(memory: jax.Array, parts: int) -> jax.Array:
    """Return memories [R, G parts, K, V / parts] as [R, G, K, V], the inverse of `_divided`."""
    rows, heads, keys, values = memory.shape
    memory = memory.reshape(rows, heads // parts, parts, keys, values).swapaxes(2, 3)
    return memory.reshape(rows, heads // parts, keys, parts * values)
