"""Selective scans on Mosaic GPU (Hopper)."""
