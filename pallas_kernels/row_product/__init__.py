"""Products of a few tokens with a matrix, as in generation, together with what stands in front of them (norm or gated norm) and
behind them (a gate or the residual sum).
"""

from pallas_kernels.row_product.api import GatedNorm, Norm, row_product, unsupported

__all__ = ["GatedNorm", "Norm", "row_product", "unsupported"]
