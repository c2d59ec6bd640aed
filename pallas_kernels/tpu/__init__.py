"""What kernels for TPU share."""
