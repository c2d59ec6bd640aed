"""Selective scans on Mosaic TPU."""
