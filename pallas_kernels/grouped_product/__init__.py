"""Products of groups of rows with one matrix each, as fused kernels."""

from pallas_kernels.grouped_product.api import grouped_product, grouped_sums, unsupported

__all__ = ["grouped_product", "grouped_sums", "unsupported"]
