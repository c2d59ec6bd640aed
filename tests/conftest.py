"""Tests run on the CPU and spend their time in the compiler: leave out the optimisations that small arrays don't need."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_disable_most_optimizations", True)
