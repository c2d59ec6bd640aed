"""Memories with a diagonal-plus-low-rank transition (RWKV7, arXiv 2503.14456).

`S_t = diag(e^{g_t}) S_{t-1} + b_tᵀ (a_t S_{t-1}) + k_tᵀ v_t`, `o_t = scale q_t S_t`, where S_t [K, V] is the
memory after token t, g_t its log decay per key channel, q_t, k_t and v_t its query, key and value, and a_t
and b_t [K] the vectors of the low-rank part.
"""

from __future__ import annotations

from typing import Any

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

_OP = "dplr"


def unsupported(implementation: str, q, k, v, a, b, log_decay) -> str | None:
    """Return the first requirement of a backend of diagonal-plus-low-rank memories that these arguments do
    not meet, in words; None if the backend supports them.

    The arguments are those of `dplr`, as arrays or as their shapes and dtypes.
    """
    backend = backend_module(_OP, implementation, "channel_decay")
    return first_unmet(backend.REQUIREMENTS, MemoryCall(q, k, v, log_decay, a=a, b=b))


def dplr(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T G V"],
    a: Float[Array, "B T Ha K"],
    b: Float[Array, "B T Hb K"],
    log_decay: Float[Array, "B T G K"],
    *,
    initial: Float[Array, "R G K V"],
    run: Int[Array, "B T"] | None = None,
    scale: float,
    save_memories: bool = False,
    implementation: str = "mosaic_gpu",
    interpret: Any = False,
) -> tuple[Float[Array, "B T max(H,G) V"], Float[Array, "R G K V"]]:
    """Decay memories, add `bᵀ (a S) + kᵀ v` to them, where S is the memory before the decay, and read them with `q`.

    RWKV7, arXiv 2503.14456. Reverse-mode differentiable, once.

    Args:
        q: [B, T, H, K] queries; H is a multiple or a divisor of G.
        k: [B, T, Hk, K] keys; Hk divides G.
        v: [B, T, G, V] values, one memory for each of the G heads.
        a: [B, T, Ha, K], with which a token reads the memory before the decay; Ha divides G.
        b: [B, T, Hb, K], with which it writes back what a has read; Hb divides G.
        log_decay: [B, T, G, K] float32, natural logarithm, at most 0.
        initial: [B, G, K, V] float32, the memory before the first token; or [B * S, G, K, V] with S memories
            per row.
        run: [B, T], the number of documents that have begun up to and with each token, never decreasing. A
            token with a larger number than the token before it reads an empty memory; number 0 continues
            `initial`. None is one document. With S memories per row, `run` has every number from 0 to S - 1,
            each begins at a multiple of 64 tokens, or 128 ("mosaic_tpu"), continues the memory
            of its number, and ends with a final memory of its own.
        scale: the factor by which the queries q are multiplied.
        save_memories: whether the forward pass of a derivative stores the memories before all chunks, in bfloat16, for the
            backward pass, which otherwise computes them again; "mosaic_gpu" only, others compute them again.
        implementation: "mosaic_gpu" (Hopper), "mosaic_tpu" or "triton" (NVIDIA cards of compute capability
            8.0 or more); see `unsupported` for the requirements of each.
        interpret: parameters of the backend's interpreter, to run on a CPU.

    Returns:
        The output in v's dtype, and the final memories in float32, in the shape of `initial`.

    Raises:
        NotImplementedError: the implementation does not support these arguments; the message gives the
            requirement.
        ValueError: there is no such implementation.
    """
    call = MemoryCall(q, k, v, log_decay, a=a, b=b)
    backend = supported_backend(_OP, implementation, "channel_decay", call)
    length, multiple = q.shape[1], backend.length_multiple(q, k, v)
    run, q, k, v, a, b, log_decay = pad_to_multiple(multiple, run, q, k, v, a, b, log_decay)
    arrays = q, k, v, a, b, log_decay, run, initial
    output, final = call_backend(
        Options(backend, scale, interpret, save_memories=save_memories), arrays, None
    )
    return output[:, :length], final
