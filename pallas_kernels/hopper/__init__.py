"""Code that the kernels for NVIDIA Hopper share."""
