"""Fused forms of the hot ops. Knows arrays only and imports nothing of lsm_jax.

No kernel is in this version: `implementation=None` of every op picks XLA.
"""
