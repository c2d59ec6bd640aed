"""Code that the kernels for TPU share."""
