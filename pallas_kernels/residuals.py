"""Functions that name the residuals of kernels, so that a rematerialization policy can save them instead of running a kernel again."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

KEPT = "kernel_residuals"
"""The name of all residuals of kernels for `jax.checkpoint`: with `jax.checkpoint_policies.save_only_these_names(KEPT)` the backward pass
runs no forward kernel again."""


def name_residuals(tree: Any) -> Any:
    """Return a pytree of a kernel's residuals with each array behind an optimization barrier (`behind_barrier`) and named `KEPT`, so that
    a rematerialization policy can save it.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), behind_barrier(tree))


def behind_barrier(tree: Any) -> Any:
    """Return a pytree with each array behind an optimization barrier, so that XLA does not run the kernel that computes it twice; for the
    results of a forward kernel.

    Without the barrier XLA runs a kernel twice if a scan stacks its result: once to write into the stack, and once for the other uses of
    the result (its dynamic-slice fusions copy a custom call with all its users; jaxlib 0.11.2).
    """
    return jax.tree.map(lax.optimization_barrier, tree)
