"""The kernel that applies one token to a matrix memory, in Triton: the memory is loaded once and stored once, in place, on NVIDIA cards of
compute capability 8.0 or more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.compat import PROCESSORS
from pallas_kernels.requirements import Requirement, first_unmet
from pallas_kernels.triton import launch

__all__ = ["REQUIREMENTS", "step", "unsupported"]

_F32 = jnp.float32
_DTYPES = ("bfloat16", "float16", "float32")
_ENTRIES = 8192  # of a program's memory, at most
_COLUMNS = (64, 32, 16)  # value channels of a program
_MAX_QUERIES = 16  # query heads that read one memory, at most


def columns(programs: int, key_dim: int, value_dim: int) -> int | None:
    """Return the number of value channels that a program computes, or None if none is possible.

    Args:
        programs: the number of memories of all rows, B G.
        key_dim: K, the number of key channels.
        value_dim: V, the number of value channels.
    """
    sizes = [n for n in _COLUMNS if value_dim % n == 0 and key_dim <= 256 and key_dim * n <= _ENTRIES]  # fmt: skip
    enough = [n for n in sizes if programs * (value_dim // n) >= 2 * PROCESSORS]
    return (enough or sizes[-1:] or [None])[0]


REQUIREMENTS = (
    Requirement(
        f"q and v in {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}",
        lambda c: {jnp.dtype(x.dtype).name for x in (c.q, c.v)} <= set(_DTYPES),
        lambda c: " and ".join(jnp.dtype(x.dtype).name for x in (c.q, c.v)),
    ),
    Requirement(
        "memory in float32",
        lambda c: c.memory.dtype == _F32,
        lambda c: jnp.dtype(c.memory.dtype).name,
    ),
    Requirement(
        "K up to 256 and V a multiple of 16",
        lambda c: columns(1, *c.memory.shape[-2:]) is not None,
        lambda c: f"K {c.memory.shape[-2]} and V {c.memory.shape[-1]}",
    ),
    Requirement(
        f"at most {_MAX_QUERIES} query heads for each memory",
        lambda c: c.q.shape[1] <= _MAX_QUERIES * c.v.shape[1],
        lambda c: f"{c.q.shape[1]} query heads for {c.v.shape[1]} memories",
    ),
    launch.INSTALLED,
)


def unsupported(call) -> str | None:
    """Return the first requirement of the Triton kernel that a call of `decode_step` does not meet, or None if the kernel supports it."""
    return first_unmet(REQUIREMENTS, call)


def step(
    memory, q, k, v, optional: dict[str, Any], *, scale: float, erase: str, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Apply one token of each row to its memories; return the token's output [B, max(H, G), V] in v's dtype, and the memories after the token.

    Args:
        memory: the memories, [B, G, K, V] float32, or [L, B, G, K, V], those of all layers, with `layer`.
        q: [B, H, K] queries.
        k: [B, Hk, K] keys.
        v: [B, G, V] values.
        optional: the optional arguments of `decode_step`, each an array or None, by name: beta, decay and value_decay (as
            `api.decay_factor` encodes them), a, b, bonus, emptied [B] int32, and layer [1] int32.
        scale: the factor by which the queries q are multiplied.
        erase: "decayed" or "undecayed", the memory M in the delta rule's write `beta (v - k M)`.
        interpret: not used.
    """
    from pallas_kernels.decode_step.triton import bodies

    del interpret
    (batch, memories, value_dim), (heads, key_dim) = v.shape, q.shape[1:]
    names = ("beta", "decay", "value_decay", "a", "b", "bonus", "emptied", "layer")
    decay, a, b = (optional[n] for n in ("decay", "a", "b"))
    width = columns(batch * memories, key_dim, value_dim)
    assert width is not None
    results = launch.call(
        bodies.one_token,
        (memory, q, k, v, *(optional[n] for n in names), float(scale)),
        dict(output=jax.ShapeDtypeStruct((batch, max(heads, memories), value_dim), v.dtype)),
        programs=batch * memories * (value_dim // width),
        warps=4,
        stages=1,
        in_place="memory",
        captured=True,
        **dict(
            BATCH=batch, G=memories, H=heads, K_HEADS=k.shape[1], A_HEADS=1 if a is None else a.shape[1],
            B_HEADS=1 if b is None else b.shape[1], K=key_dim, KEYS=1 << (key_dim - 1).bit_length(), V=value_dim, BV=width,
            BETA=optional["beta"] is not None, UNDECAYED=erase == "undecayed", DECAY=0 if decay is None else decay.ndim - 1,
            VALUE_DECAY=optional["value_decay"] is not None, LOW_RANK=a is not None, BONUS=optional["bonus"] is not None,
            EMPTIED=optional["emptied"] is not None, LAYER=optional["layer"] is not None,
        ),
    )  # fmt: skip
    return results["output"], results["memory"]
