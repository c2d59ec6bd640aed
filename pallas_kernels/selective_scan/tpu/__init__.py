"""Selective scans, in which each channel has a memory of its own (as in Mamba), as kernels for TPUs (Mosaic
TPU).
"""
