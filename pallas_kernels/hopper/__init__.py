"""What kernels for NVIDIA Hopper share."""
