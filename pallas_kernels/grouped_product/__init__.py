"""Fused kernels for products in which each group of consecutive rows, such as the tokens of one expert, is
multiplied by a matrix of its own.
"""

from pallas_kernels.grouped_product.api import (
    gated_gradients,
    gated_product,
    grouped_product,
    grouped_sums,
    unsupported,
)

__all__ = ["gated_gradients", "gated_product", "grouped_product", "grouped_sums", "unsupported"]
