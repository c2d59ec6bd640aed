"""Names arrays that rematerialisation saves."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.residuals import KEPT


def saved(x: jax.Array) -> jax.Array:
    """Return x, which a layer's backward pass does not compute again where it does not run kernels again (`remat="dots"`)."""
    return checkpoint_name(x, KEPT)
