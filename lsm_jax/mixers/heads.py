"""Sizes and numbers of heads by a model's width, for the configs' `for_width`."""


def head_size(hidden_size: int, largest: int) -> int:
    """Return the channels of a head in a model of width `hidden_size`: `largest`, halved until three heads fit into the width.

    So widths of 3 · 2^n have heads of a power of two too, which fused kernels require. A quarter of a width that such a size
    does not divide, at most `largest`.
    """
    size = largest
    while size > 1 and 3 * size > hidden_size:
        size //= 2
    return size if hidden_size % size == 0 else min(largest, hidden_size // 4)


def three_or_four(hidden_size: int) -> int:
    """Return the number of heads of methods that have four at any width: three where the width is 3 · 2^n and a quarter of it no multiple of
    256, so that the size of a head is a power of two, which fused kernels require."""
    third, rest = divmod(hidden_size, 3)
    powers = rest == 0 and third & (third - 1) == 0
    return 3 if powers and hidden_size // 4 % 256 else 4
