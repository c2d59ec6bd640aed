"""A small kernel in Triton, by which the order of a call's arguments is tested."""

import triton
import triton.language as tl


@triton.jit
def scale_and_add(changed, x, factor, unused, total, scaled, SIZE: tl.constexpr):
    """Store changed + factor x in `total`, factor x in `scaled`, and the total in `changed`, all [SIZE]; `unused` is not read."""
    at = tl.arange(0, SIZE)
    product = tl.load(x + at) * factor
    result = tl.load(changed + at) + product
    tl.store(total + at, result)
    tl.store(scaled + at, product)
    tl.store(changed + at, result)
