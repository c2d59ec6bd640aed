"""Compare the numbers that this checkout computes with those of a released commit: `python -m
scripts.compare_release`.
"""
