"""Products of a few tokens with a matrix, as in generation, together with what stands in front of them (norm or gated norm) and
behind them (a gate or the residual sum).
"""

from pallas_kernels.row_product.api import GatedNorm, Norm, row_product, unsupported
from pallas_kernels.row_product.tiles import Tiling, tile_product, tile_unsupported

__all__ = [
    "GatedNorm",
    "Norm",
    "Tiling",
    "row_product",
    "tile_product",
    "tile_unsupported",
    "unsupported",
]
