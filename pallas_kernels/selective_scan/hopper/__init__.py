"""Selective scans, in which each channel has a memory of its own (as in Mamba), as kernels for Hopper GPUs
(Mosaic GPU).
"""
