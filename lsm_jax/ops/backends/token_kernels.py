"""The packages of kernels that `lsm_jax.models.token_step` composes for one token, imported when a token passes: they require Mosaic GPU."""

from __future__ import annotations

from types import ModuleType


def row_products() -> ModuleType:
    """Return the package of products of a few tokens, `pallas_kernels.row_product`."""
    from pallas_kernels import row_product

    return row_product


def decode_steps() -> ModuleType:
    """Return the package of a memory's step of one token, `pallas_kernels.decode_step`."""
    from pallas_kernels import decode_step

    return decode_step
