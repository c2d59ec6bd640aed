"""The arrays that the kernels of selective scans read, on GPUs and TPUs."""

from __future__ import annotations

from typing import Any, NamedTuple


class RealInputs(NamedTuple):
    """The inputs of the kernels of `selective_scan`, whose memories h are real: `h_t = exp(delta_t a) h_{t-1}
    + delta_t u_t b_t`, `y_t = Σ_n c_t h_t + d u_t`. All are float32 except for u.

    Attributes:
        u: [B, T, D] bfloat16, the input of each channel; on TPUs also float32.
        delta: [B, T, D], the step sizes.
        a: [D, N], the rates of decay.
        b: [B, T, N], the factors of the writes.
        c: [B, T, N], the factors of the reads.
        d: [D], the factor of u in the output.
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
    """The inputs of the kernels of `complex_scan`, whose memories h are one complex number per channel: `h_t
    = a_t h_{t-1} + u_t`, `y_t = c_t Re h_t`. All are [B, T, D].

    Attributes:
        u: the numbers added to the memories, bfloat16; on TPUs also float32.
        c: the factors of the outputs, in u's dtype.
        real: the real part of the decay a, float32.
        imag: the imaginary part of the decay a, float32.
    """

    u: Any
    c: Any
    real: Any
    imag: Any
