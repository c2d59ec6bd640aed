"""The delta rule in Triton, for NVIDIA cards of compute capability 8.0 or more."""
