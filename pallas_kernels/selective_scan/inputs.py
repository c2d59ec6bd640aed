"""The arrays that the kernels of selective scans read, on all backends."""

from __future__ import annotations

from typing import Any, NamedTuple


class RealInputs(NamedTuple):
    """The inputs of the kernels of real memories, in float32 except for u.

    Attributes:
        u: [B, T, D] bfloat16; on TPUs also float32.
        delta: [B, T, D].
        a: [D, N].
        b: [B, T, N].
        c: [B, T, N].
        d: [D].
        continues: [B, T], 0 at the first token of a document and 1 elsewhere, or None.
    """

    u: Any
    delta: Any
    a: Any
    b: Any
    c: Any
    d: Any
    continues: Any


class ComplexInputs(NamedTuple):
    """The inputs of the kernels of complex memories, [B, T, D].

    Attributes:
        u: bfloat16; on TPUs also float32.
        c: in u's dtype.
        real: the real part of a, float32.
        imag: the imaginary part of a, float32.
    """

    u: Any
    c: Any
    real: Any
    imag: Any
