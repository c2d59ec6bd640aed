"""Code that the kernels of several ops for NVIDIA Hopper share: the halving of decays, scans, matrix products and launches."""
