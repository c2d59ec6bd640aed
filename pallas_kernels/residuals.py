"""What a kernel's forward leaves for its backward, by a name that a rematerialization policy can keep."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

KEPT = "kernel_residuals"
"""`jax.checkpoint_policies.save_only_these_names(KEPT)` runs no forward kernel again in the backward pass."""


def name_residuals(tree: Any) -> Any:
    """Name all arrays of a tree, `behind_barrier`."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), behind_barrier(tree))


def behind_barrier(tree: Any) -> Any:
    """The same arrays, each behind a barrier, for what a kernel's forward hands out.

    Of a kernel whose result a scan stacks XLA makes two: one writes into the stack, the other for whoever reads the result (its
    dynamic-slice fusions copy a custom call with all its users; jaxlib 0.11.2).
    """
    return jax.tree.map(lax.optimization_barrier, tree)
