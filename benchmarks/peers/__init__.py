"""Other libraries whose kernels and models are timed in the same run."""
