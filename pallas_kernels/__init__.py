"""Fused forms of the hot ops. Knows arrays only and imports nothing of lsm_jax."""
