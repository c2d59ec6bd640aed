"""Fused kernels for the ops that take most of the time. This package works on arrays alone and imports
nothing from lsm_jax.
"""
