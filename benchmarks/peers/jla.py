"""The operations of the peer jax-linear-attention, called with the same arguments as this library's ops."""

from __future__ import annotations

from collections.abc import Callable

_NAMES = {
    "scalar decay": ("simple_gla", "g"),
    "key decay": ("gla", "g"),
    "delta rule": ("deltanet", "beta"),
    "gated delta rule": ("gated_deltanet", "beta", "g"),
    "kda": ("kda", "beta", "g"),
}
"""For each of our operations its name there, and the names of the gates."""


def jla(op: str) -> Callable | None:
    """Return jax-linear-attention's function for the benchmarked op called `op`, as a function of q, k, v and
    the gates; None if that library does not have the op.
    """
    from jla import ops as peer  # pyrefly: ignore[missing-import]

    if op not in _NAMES:
        return None
    kind, *names = _NAMES[op]

    def call(q, k, v, *gates):
        gates = dict(zip(names, gates, strict=True))
        return peer.linear_attention(kind, q, k, v, impl="mosaic_gpu", **gates)[0]

    return call
